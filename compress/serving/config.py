"""List what a checkpoint packs by the names of an engine's modules, and answer an engine's questions about it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from compress.formats import stored
from compress.runtime import hf, levels
from compress.runtime.expert_layouts import PROJECTIONS
from compress.serving.parts import Totals
from compress.types import Pruning, Stored

LEVEL = "level"  # a key of `quantization_config`: a directory is then that level of the weights in its files


class PackedModules:
    """The linears, experts and tables of a checkpoint, and what an engine's process holds of them."""

    def __init__(self, packed: Mapping[str, Any]) -> None:
        """Read the lists of `quantization_config`; CheckpointError if they cannot be meant.

        What is stored beyond a `level` is listed, too: an engine's loader must know where its tensors belong.
        """
        config = hf.CompressConfig.read({key: value for key, value in packed.items() if key != LEVEL})
        self.stored: dict[str, Stored] = {name: hf.scheme(config, name) for name in config.modules}
        self.pruning: dict[str, Pruning] = {
            name: stored.from_table(Pruning, values, f"quantization_config: experts: {name}")
            for name, values in config.experts.items()
        }
        self.level: int | None = packed.get(LEVEL)  # that is computed with; None: whole weights
        if self.level is not None:
            levels.check_level(self.level, levels.levels_of(self.stored.values()), "this checkpoint")
        self.kv_cache = config.kv_cache
        self.drafts: dict[str, Any] = dict(config.draft_heads)  # those that are in draft heads, a model of their own
        self.renamed: dict[str, str] = {}  # expressions of names in the checkpoint -> what the engine looks for
        self.totals = Totals()

    def rename(self, mapper: Any) -> None:
        """Rename what is listed as an engine (its `WeightsMapper`) renames the checkpoint's modules."""
        self.stored, self.drafts = mapper.apply_dict(self.stored), mapper.apply_dict(self.drafts)
        self.pruning = mapper.apply_dict(self.pruning)

    def linears(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> dict[str, Stored | None] | None:
        """Return how the linears of a layer are stored, None for one that is not packed; None if that is all of them.

        prefix: the layer's name; fused: last name of a layer -> those of the linears that the engine fuses in it.
        """
        stored = {name: self.stored.get(name) for name in names_of_linears(prefix, self.stored, fused)}
        return stored if any(stored.values()) else None

    def experts(self, prefix: str, projections: Sequence[str]) -> str | None:
        """Return the module of the packed experts of a layer, and note how the engine's loader renames their tensors.

        projections: the engine's names of gate, up and down.
        """
        module = module_of_experts(prefix, self.stored)
        if module is not None:
            self.renamed.update(expert_name_patterns(module, prefix, projections))
        return module

    def below(self, module: str) -> dict[str, Stored]:
        """Return what is listed below a module."""
        return {name: each for name, each in self.stored.items() if name.startswith(f"{module}.")}

    def patterns(self) -> dict[re.Pattern[str], str]:
        """Return how stored names are changed before the engine's loader sees them."""
        return {re.compile(old): new for old, new in self.renamed.items()}


def names_of_linears(prefix: str, listed: Collection[str], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the linears of the checkpoint that the layer `prefix` of an engine holds, in its order.

    fused: last name of a layer -> those of the linears that the engine fuses in it. A layer that is listed itself was
    stored fused.
    """
    parent, _, last = prefix.rpartition(".")
    if prefix in listed or last not in fused:
        return [prefix]
    return [f"{parent}.{name}" if parent else name for name in fused[last]]


def module_of_experts(prefix: str, listed: Collection[str]) -> str | None:
    """Return the module of listed experts that the layer `prefix` of an engine computes; None: they are not packed.

    transformers has them at `mlp.experts` of a decoder block, whatever the model's own files, and with them the
    engine, call the module.
    """
    layer = prefix.removesuffix(".routed_experts")
    for name in (layer, f"{layer.rsplit('.', 2)[0]}.mlp.experts"):
        if any(each.startswith(f"{name}.") for each in listed):
            return name
    return None


def expert_name_patterns(module: str, prefix: str, projections: Sequence[str]) -> dict[str, str]:
    """Return regular expressions of stored names -> what the engine's loader looks for.

    module: that of the checkpoint; prefix: the engine's; projections: its names of gate, up and down. Empty if equal.
    """
    layer = prefix.removesuffix(".routed_experts")
    if module == layer and tuple(projections) == PROJECTIONS:
        return {}
    return {
        rf"^{re.escape(module)}\.(\d+)\.{ours}\.": rf"{layer}.\1.{theirs}."
        for ours, theirs in zip(PROJECTIONS, projections, strict=True)
    }


def names_of_tables(listed: Collection[str]) -> list[str]:
    """Return the listed modules outside of all decoder blocks: a table of embeddings, an output head."""
    return [name for name in listed if not any(word.isdecimal() for word in name.split("."))]


class PackedConfig:
    """`quantization_config` of config.json, with the names that an engine's modules have; the base of its own class."""

    def __init__(self, packed: Mapping[str, Any]) -> None:
        """Read the lists; the engine's own class does what it can with `kv_cache`."""
        super().__init__()
        self.listed = PackedModules(packed)
        self.kv_cache = self.listed.kv_cache

    def get_name(self) -> str:
        """Return the name of the method in config.json."""
        return hf.METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the types of activations that layers take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return what the kernels need of a GPU of NVIDIA: compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: all is in config.json."""
        return []
