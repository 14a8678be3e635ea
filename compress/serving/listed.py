"""List what a checkpoint packs, by the names that an engine's modules have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compress.formats import stored
from compress.runtime import hf
from compress.serving import names
from compress.serving.parts import Totals
from compress.types import Pruning, Stored


class Listed:
    """The linears, experts and tables of a checkpoint, and what an engine's process holds of them."""

    def __init__(self, config: hf.CompressConfig) -> None:
        """Read the lists of `quantization_config`; CheckpointError if they cannot be meant."""
        self.stored: dict[str, Stored] = {name: hf.scheme(config, name) for name in config.modules}
        self.pruning: dict[str, Pruning] = {
            name: stored.from_table(Pruning, values, f"quantization_config: experts: {name}")
            for name, values in config.experts.items()
        }
        self.renamed: dict[str, str] = {}  # expressions of names in the checkpoint -> what the engine looks for
        self.totals = Totals()

    def rename(self, mapper: Any) -> None:
        """Rename what is listed as an engine (its `WeightsMapper`) renames the checkpoint's modules."""
        self.stored = mapper.apply_dict(self.stored)
        self.pruning = mapper.apply_dict(self.pruning)

    def linears(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> dict[str, Stored | None] | None:
        """Return how the linears of a layer are stored, None for one that is not packed; None if that is all of them.

        prefix: the layer's name; fused: last name of a layer -> those of the linears that the engine fuses in it.
        """
        own = {name: self.stored.get(name) for name in names.linears(prefix, self.stored, fused)}
        return own if any(own.values()) else None

    def experts(self, prefix: str, projections: Sequence[str]) -> str | None:
        """Return the module of the packed experts of a layer, and note how the engine's loader renames their tensors.

        projections: the engine's names of gate, up and down.
        """
        module = names.experts(prefix, self.stored)
        if module is not None:
            self.renamed.update(names.renamed_experts(module, prefix, projections))
        return module

    def below(self, module: str) -> dict[str, Stored]:
        """Return what is listed below a module."""
        return {name: each for name, each in self.stored.items() if name.startswith(f"{module}.")}

    def patterns(self) -> dict[re.Pattern[str], str]:
        """Return how stored names are changed before the engine's loader sees them."""
        return {re.compile(old): new for old, new in self.renamed.items()}
