"""Hold tensors and packed weights that are trained: where they began, how far they moved, and the best place so far.

Describe what tuning of a whole packed model is given, and what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import formats
from compress.formats import lowrank, transforms
from compress.storage.checkpoint import Checkpoint
from compress.tune.stored_linear import turned_effective
from compress.types import PackedWeight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Trained:
    """A tensor that is trained: it begins as it is, and moves in units of its root mean square."""

    def __init__(self, start: Tensor, share: float = 1.0, unit: float | None = None) -> None:
        """share: what a step is of the root mean square, times the rate. unit: of a step, instead of that."""
        self.start = start.detach().float()
        self.unit = unit if unit is not None else share * (float(self.start.square().mean().sqrt()) or 1.0)
        self.moved = nn.Parameter(torch.zeros_like(self.start))
        self.best = torch.zeros_like(self.start)

    def value(self) -> Tensor:
        """Return the tensor as it is now, float32."""
        return torch.add(self.start, self.moved, alpha=self.unit)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember this place as the best."""
        self.best.copy_(self.moved)

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the best place."""
        self.moved.copy_(self.best)


@dataclass(frozen=True)
class Rates:
    """How a packed weight is trained."""

    steps: int  # [steps] of the stage
    rate: float  # of AdamW, in units of a `Trained`
    codes_rate: float  # [steps of the grid] that a number behind a code travels in the stage, at most
    start: str  # "codes" or "weights": compress/tune/codes/latent.py

    @property
    def travel(self) -> float:
        """Return the unit with which a `Trained` number travels `codes_rate` in the stage, at most."""
        return 2 * self.codes_rate / (self.steps * self.rate)  # the mean of the rate over steps is half of it


class TrainedWeight:
    """One packed weight that is trained; the numbers in `trained` are moved by AdamW."""

    def __init__(self, packed: PackedWeight) -> None:
        """Begin with all stored floating-point numbers as trained ones, but for those that linears share."""
        self.packed = packed
        fixed = formats.fixed_tensors(packed.stored)
        floats = {name: t for name, t in packed.tensors.items() if t.dtype in FLOATS and name not in fixed}
        self.trained = {name: Trained(t) for name, t in floats.items()}

    def weight(self) -> Tensor:
        """Return the dense weight [out, in] as it is now, float32; gradients reach what is trained."""
        raise NotImplementedError

    def behind(self, step: int) -> None:
        """Do what is to be done behind a step of AdamW; gradients of the step are there."""

    def parts(self) -> list[Trained]:
        """Return all that moves, by AdamW or not."""
        return list(self.trained.values())

    def keep(self) -> None:
        """Remember the present state as the best."""
        for each in self.parts():
            each.keep()

    def restore(self) -> None:
        """Return to the best state."""
        for each in self.parts():
            each.restore()

    def changed_share(self) -> float | None:
        """Return the share of codes that moved; None where codes stay."""
        return None

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        raise NotImplementedError

    def _pack_with(self, changed: Mapping[str, Tensor]) -> PackedWeight:
        """Return the weight with what is trained in its stored types, and these tensors."""
        tensors = {**self.packed.tensors, **changed}
        for name, each in self.trained.items():
            if name in self.packed.tensors and name not in changed:
                tensors[name] = each.value().detach().to(tensors[name].dtype)
        return PackedWeight(self.packed.stored, {n: t.contiguous() for n, t in tensors.items()}, self.packed.shape)


def add_surroundings(matrix: Tensor, packed: PackedWeight, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the weight [out, in] of a stored matrix, as `formats.decode` adds what is beside and around it."""
    stored = packed.stored
    if stored.lowrank is not None:
        a, b = lowrank.part_factors(tensors, stored.lowrank, packed.shape, torch.float32)
        matrix = torch.addmm(matrix, b.T, a)
    return turned_effective(matrix, stored.ops, tensors) if stored.ops else matrix


@torch.no_grad()
def strip_surroundings(weight: Tensor, packed: PackedWeight) -> Tensor | None:
    """Return the matrix [out, in], float32, that would have to be stored for `weight`: undo `add_surroundings`.

    None where a diagonal around it has a zero.
    """
    stored, matrix = packed.stored, weight.float()
    sides = [("in", name) for name in stored.ops.input] + [("out", name) for name in stored.ops.output]
    if any(name in transforms.FLOATING and bool((packed.tensors[f"{side}_{name}"] == 0).any()) for side, name in sides):
        return None
    if stored.ops:
        matrix = transforms.rotate(matrix, stored.ops, packed.tensors)
    if stored.lowrank is not None:
        a, b = lowrank.part_factors(packed.tensors, stored.lowrank, packed.shape, torch.float32)
        matrix = matrix - b.T @ a
    return matrix


def decode_with(packed: PackedWeight, changed: Mapping[str, Tensor]) -> Tensor:
    """Return the weight [out, in], float32, with some of its stored tensors replaced."""
    tensors = {**packed.tensors, **changed}
    matrix = formats.decode_stored(PackedWeight(packed.stored, tensors, packed.shape), torch.float32)
    return add_surroundings(matrix, packed, tensors)


class TuningWork(NamedTuple):
    """A packed checkpoint, and what it is tuned with."""

    directory: Path
    original: Checkpoint
    tokens: Tensor  # [samples, seq_len] int64, on the CPU
    device: torch.device
    batch: int  # samples that go through a block together; changes no more than the order of sums
    folder: Path  # for the file of the original's predictions, and for hidden states where they spill
    is_spilled: bool  # hidden states go to files, and packed weights are read again whenever they are needed
    say: Callable[[str], None]


class TuningResult(NamedTuple):
    """What has come of tuning."""

    note: str
    tensors: dict[str, Tensor]  # by their names on disk, as they are stored; none if nothing is better


class WholeModelSizes(NamedTuple):
    """Numbers of elements, and bytes, that the memory of tuning depends on."""

    rest: int  # parameters outside of the blocks
    tables: int  # bytes of those that are packed
    block: int  # parameters of the largest block
    linear: int  # of the largest linear
    packed: tuple[int, ...]  # bytes of each block as it is stored
    trained: int  # numbers
    hidden: int  # of a token
    vocabulary: int
    states: int  # of a token in a block: what linears read and write, and the residual stream
    tokens: int  # of the text
    seq_len: int
    low_rank: int = 0  # of the trained numbers, those of low-rank parts


class DiskSizes(NamedTuple):
    """What the files that tuning leaves in its folder depend on."""

    samples: int  # of the text
    seq_len: int
    hidden: int  # numbers of a token between blocks
    vocabulary: int
    trained: int  # numbers, of packed weights
