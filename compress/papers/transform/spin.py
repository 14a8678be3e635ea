"""SpinQuant: rotate a model as `rotate` does, by the best of several random rotations or a learned one.

arXiv 2405.16406. Which random rotation is drawn matters. `seeds` draws several and keeps the one whose roughly
quantized model is closest to the original (rotation_search.py). `learn` goes on from there by gradient descent
(learned_rotation.py, which says what differs from the paper). The decision is kept in the run's working directory, so
that a resumed run has the same.

Not in the core because nothing was gained: w4a4kv4 on 8.4M weights, rotations drawn, the best of four and learned ones,
have KL 0.0162, 0.0164 and 0.0163; on 135M weights the best of eight is no better than the first, at seven times the CPU
seconds (docs/results/transforms.md). These keys were those of `rotate`, whose older recipes are read as this method.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.errors import CalibrationError, UnsupportedModelError
from compress.model import edits
from compress.model.graph import Graph
from compress.model.skeleton import Skeleton
from compress.papers.transform import learned_rotation, rotation_search
from compress.storage.checkpoint import read_header, write_shard
from compress.transform import rotate
from compress.transform.bases import Orthogonal
from compress.types import WeightTransforms

SCOPE = "model"
ROTATES_INPUTS = True  # what linears read is about normal: no activation sparsity behind it


@dataclass(frozen=True)
class Config(rotate.Config):
    seeds: int = 1  # [rotations] drawn at random and tried; each is one pass of `search_samples` through the blocks
    search_samples: int = 8  # [samples] of calibration on which rotations are tried
    learn: int = 0  # [steps] of learning the rotation, each about ten times a pass of 2048 tokens, with the whole model
    # in memory (learned_rotation.py)

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        for key, least in (("seeds", 1), ("search_samples", 1), ("learn", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} {getattr(self, key)} is less than {least}")
        for key, default in (("seeds", 1), ("learn", 0)):
            if getattr(self, key) > default and not (self.residual or self.values):
                raise ValueError(f"{key} {getattr(self, key)} without residual and values: nothing is drawn")

    @property
    def tokens_factor(self) -> float:
        """Times the tokens of calibration that a Hessian takes (calib/enough.py); a learned rotation fits to few."""
        return 4.0 if self.learn else 1.0


def apply(skeleton: Skeleton, config: Config, seed: int) -> ChosenRotation:
    """Return the rotation of this model; no weight is read. Raises UnsupportedModelError where there is none."""
    settled, graph, says = rotate.settle(skeleton, config)
    if says and not config.values and (config.seeds > 1 or config.learn):
        raise UnsupportedModelError(
            f"{says[0]}, so that nothing is left to draw; set `seeds: 1` and `learn: 0`, or `values: true` for spin"
        )
    return ChosenRotation(skeleton, settled, graph, says, seed)


class ChosenRotation(rotate.Rotation):
    """A rotation that is chosen among random ones, or learned, before a weight is quantized."""

    config: Config

    def __init__(self, skeleton: Skeleton, config: Config, graph: Graph, says: tuple[str, ...], seed: int) -> None:
        super().__init__(skeleton, config, graph, says, seed)
        self.samples = config.learn + (config.search_samples if config.seeds > 1 or config.learn else 0)

    def use_identity(self) -> None:
        """Only move the norms' weights into their readers."""
        self.use(Orthogonal() if self.basis is not None else None, {})

    def choose(self, bench: edits.EditContext) -> list[str]:
        """Decide on a rotation by the recipe's `seeds` and `learn`, or as the run that is resumed; the report's notes.

        Raises BudgetError, CalibrationError or RecipeError where learning is asked for and cannot be.
        """
        config, kept = self.config, bench.folder / "rotation"
        if config.seeds == 1 and not config.learn:
            return list(self.says)
        if kept.is_file():
            return [*self.says, *self._restore(kept)]
        if config.learn and bench.tokens is None:
            raise CalibrationError("spin: nothing can be learned without a calibration text; set `learn: 0`")
        self.begin(bench.device)
        best, notes = rotation_search.choose(self, bench)
        self.draw(best)
        matrices: dict[str, Tensor] = {}
        if config.learn:
            matrices, note = learned_rotation.learn(self, bench)
            notes.append(note)
        text = torch.frombuffer(bytearray(json.dumps(notes).encode()), dtype=torch.uint8)
        write_shard(kept, {"number": torch.tensor([best]), "notes": text, **matrices})
        return [*self.says, *self._restore(kept)]

    def _restore(self, path: Path) -> list[str]:
        stored = {name: tensor.read() for name, tensor in read_header(path).items()}
        self.draw(int(stored.pop("number")))
        notes: list[str] = json.loads(stored.pop("notes").numpy().tobytes())
        if stored:
            values = {int(name): Orthogonal(matrix) for name, matrix in stored.items() if name != "residual"}
            self.use(Orthogonal(stored["residual"]) if self.basis is not None else None, values)
        return notes

    def table_ops(self) -> WeightTransforms | str:
        """Return the operations of a table, or why there are none: those of `rotate` for a rotation that is drawn."""
        if self.config.learn:
            return "a learned rotation is a matrix, and no fast transform"
        return super().table_ops()
