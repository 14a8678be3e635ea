"""Hold tensors and packed weights that are trained: where they began, how far they moved, and the best place so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress import formats
from compress.formats import lowrank, transforms
from compress.tune import turned
from compress.types import IN_SCALE, PackedWeight

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
        """Begin with all stored floating-point numbers as trained ones, but for the scale of inputs."""
        self.packed = packed
        floats = {name: t for name, t in packed.tensors.items() if t.dtype in FLOATS and name != IN_SCALE}
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

    def changed(self) -> float | None:
        """Return the share of codes that moved; None where codes stay."""
        return None

    def rounded(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        raise NotImplementedError

    def _rounded(self, changed: Mapping[str, Tensor]) -> PackedWeight:
        """Return the weight with what is trained in its stored types, and these tensors."""
        tensors = {**self.packed.tensors, **changed}
        for name, each in self.trained.items():
            if name in self.packed.tensors and name not in changed:
                tensors[name] = each.value().detach().to(tensors[name].dtype)
        return PackedWeight(self.packed.stored, {n: t.contiguous() for n, t in tensors.items()}, self.packed.shape)


def around(matrix: Tensor, packed: PackedWeight, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the weight [out, in] of a stored matrix, as `formats.decode` adds what is beside and around it."""
    stored = packed.stored
    if stored.lowrank is not None:
        a, b = lowrank.part_factors(tensors, stored.lowrank, packed.shape, torch.float32)
        matrix = torch.addmm(matrix, b.T, a)
    return turned.effective(matrix, stored.ops, tensors) if stored.ops else matrix


@torch.no_grad()
def within(weight: Tensor, packed: PackedWeight) -> Tensor | None:
    """Return the matrix [out, in], float32, that would have to be stored for `weight`; the inverse of `around`.

    None where a transform around it is not orthogonal.
    """
    stored, matrix = packed.stored, weight.float()
    sides = (*stored.ops.input, *stored.ops.output)
    if any(not getattr(transforms.find(name), "is_orthogonal", False) for name in sides):
        return None
    if stored.ops:
        matrix = transforms.rotate(matrix, stored.ops, packed.tensors)
    if stored.lowrank is not None:
        a, b = lowrank.part_factors(packed.tensors, stored.lowrank, packed.shape, torch.float32)
        matrix = matrix - b.T @ a
    return matrix


def decoded(packed: PackedWeight, changed: Mapping[str, Tensor]) -> Tensor:
    """Return the weight [out, in], float32, with some of its stored tensors replaced."""
    tensors = {**packed.tensors, **changed}
    matrix = formats.decode_stored(PackedWeight(packed.stored, tensors, packed.shape), torch.float32)
    return around(matrix, packed, tensors)
