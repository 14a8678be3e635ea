"""Hold tensors and packed weights that are trained: where they began, how far they moved, and the best place so far.

Describe what tuning of a whole packed model is given, and what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from compress import formats
from compress.formats import lowrank, transforms
from compress.kernels.cpu import hadamard
from compress.storage.checkpoint import Checkpoint
from compress.types import IN_SCALE, PackedWeight, WeightTransforms

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HADAMARD_TRANSFORMS = {
    "hadamard": False,
    "hadamard_transposed": True,
}  # name -> whether it is the transpose of `hadamard.transform`
FAST_TRANSFORMS = (*transforms.DIAGONAL, *HADAMARD_TRANSFORMS)  # those that `turned_effective` has a fast way for


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


def turned_effective(matrix: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return what `transforms.effective` does, float32 [out, in], of a matrix of the same type and size.

    Gradients reach the matrix, and diagonals that are stored in floating point.
    """
    inner, around = _split_outermost(ops, tensors)
    own = {name: tensors[name] for name in transforms.specs(inner, (matrix.shape[0], matrix.shape[1]))}
    is_fast = {*inner.input, *inner.output} <= set(FAST_TRANSFORMS) and not any(t.requires_grad for t in own.values())
    if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or not is_fast:
        return transforms.effective(matrix, ops, tensors)
    turned: Tensor = _Turned.apply(matrix, inner, own) if inner else matrix
    if around["in"] is not None:
        turned = turned * around["in"].float()
    return turned if around["out"] is None else turned * around["out"].float()[:, None]


def _split_outermost(
    ops: WeightTransforms, tensors: Mapping[str, Tensor]
) -> tuple[WeightTransforms, dict[str, Tensor | None]]:
    """Return the transforms inside of diagonals that are trained and come first and last, and these, None for none."""
    inner, around = {"in": list(ops.input), "out": list(ops.output)}, dict[str, Tensor | None]()
    for side, place in (("in", 0), ("out", -1)):
        name = inner[side][place] if inner[side] else ""
        stored = tensors[f"{side}_{name}"] if name in transforms.FLOATING else None
        around[side] = stored if stored is not None and stored.requires_grad else None
        if around[side] is not None:
            del inner[side][place]
    return WeightTransforms(tuple(inner["in"]), tuple(inner["out"])), around


class _Turned(torch.autograd.Function):
    """M -> Out M In; its gradient G -> Out^T G In^T.

    In every step of tuning the dense weight Out M In is made of the stored matrix M, and its gradient is taken back to
    M. Transforms with nothing to train need nothing kept for that. On a CPU the Hadamard transforms are
    those of compress/kernels/cpu/hadamard.py: PyTorch's own products of small matrices are several times as slow, most
    of all where the columns of a matrix are transformed (1536 x 576, one thread: 2 ms in place of 8).
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
        ctx.ops, ctx.tensors = ops, tensors
        rows = _turn(matrix, "in", ops.input, tensors, is_transposed=True)  # a row r becomes r In
        return _turn(rows.T, "out", ops.output, tensors, is_transposed=False).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = _turn(gradient, "in", ctx.ops.input, ctx.tensors, is_transposed=False)
        return _turn(rows.T, "out", ctx.ops.output, ctx.tensors, is_transposed=True).T, None, None


def _turn(x: Tensor, side: str, names: Sequence[str], tensors: Mapping[str, Tensor], *, is_transposed: bool) -> Tensor:
    """Apply transforms to each row of x [rows, n], or their transposes in the other order."""
    for name in reversed(names) if is_transposed else names:
        if name in transforms.DIAGONAL:
            x = x * transforms.Diagonal(name, tensors[f"{side}_{name}"]).values(x.shape[-1], x.dtype)
        else:
            x = hadamard.transform(x, is_transposed=HADAMARD_TRANSFORMS[name] != is_transposed)
    return x


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


class DiskSizes(NamedTuple):
    """What the files that tuning leaves in its folder depend on."""

    samples: int  # of the text
    seq_len: int
    hidden: int  # numbers of a token between blocks
    vocabulary: int
    trained: int  # numbers, of packed weights
