"""Compute a packed linear around its stored matrix while what is stored is trained: y = Out(rows * (M In x)) + bias.

The dense weight Out M In would have to be made in every step, and its gradient [out, in] turned back to M. Here
- channel scales in front of all other transforms of the inputs, or behind all of the outputs, multiply activations;
- where codes stay and the format says that its other numbers only multiply rows (`ROW_FACTORS`), these multiply the
  outputs of M, which is decoded with ones in their place: no gradient of a matrix is made at all;
- where nothing of a matrix is trained but the 16-bit factors of a low-rank part beside it, activations are multiplied
  by these factors (LoRA), and no gradient of a matrix is made either;
- the other transforms turn the activations or the matrix, whichever is less work for the tokens of a step. Numbers
  that are trained between transforms leave no choice: the activations are turned.

Hadamard transforms of activations on a CPU are those of compress/kernels/cpu/hadamard.py, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from compress import formats
from compress.formats import lowrank, transforms
from compress.kernels import dispatch
from compress.kernels.cpu import hadamard
from compress.types import PackedWeight, Stored, WeightTransforms

HADAMARD_TRANSFORMS = {
    "hadamard": False,
    "hadamard_transposed": True,
}  # name -> whether it is the transpose of `hadamard.transform`
FAST_TRANSFORMS = (*transforms.DIAGONAL, *HADAMARD_TRANSFORMS)  # those that turning has a fast way for
Names = tuple[str, ...]


class StoredLinear(nn.Module):
    """A linear of a packed weight without numbers: `functional_call` gives those of `numbers`, under its path.

    `direct`: the trained tensors that `forward` reads, so that gradients reach them there; those of the others go
    through `matrix`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, stored: Stored, shape: tuple[int, int], bias: bool, trained: Iterable[str]) -> None:
        """shape: [out, in]; trained: names of the stored tensors that are trained."""
        super().__init__()
        self.stored, self.shape, trained = stored, shape, tuple(trained)
        specs = formats.specs(stored, shape)
        of_transforms = transforms.specs(stored.ops, shape)
        self.first, self.inner, self.last = cut_scales(stored.ops)
        of_matrix = {name for name in trained if name not in of_transforms}
        factors = row_factors(stored)
        self.is_fixed = stored.lowrank is None and of_matrix <= set(factors)
        self.factors: Names = factors if self.is_fixed else ()
        self.adapter: Names = adapter_factors(stored, of_matrix)
        within_forward = {*of_transforms, *self.factors, *self.adapter}
        self.direct: Names = tuple(name for name in trained if name in within_forward)
        has_rows = any(math.prod(specs[name][0]) > 1 for name in self.factors)
        within = transforms.specs(self.inner, shape)
        has_adapter = bool(self.adapter) and bool(self.inner)
        self.must_turn = has_adapter or (has_rows and bool(self.inner.output)) or any(x in within for x in trained)
        self.turns_activations = self.must_turn
        self.extra: Names = (*of_transforms, *self.factors, *self.adapter)
        for name in ("weight", *self.extra, *(["bias"] if bias else [])):
            self.register_parameter(name, nn.Parameter(torch.empty(0, device="meta"), requires_grad=False))
        if not bias:
            self.bias = None

    def numbers(self, packed: PackedWeight, tokens: int) -> dict[str, Tensor]:
        """Return what `forward` reads, but the bias: `weight` [out, in] float32, and stored tensors by their names.

        packed: with the trained tensors in float32. tokens: that `forward` is given with them; they decide what is
        turned.
        """
        self.turns_activations = self.must_turn or turning_is_cheaper(self.inner, self.shape, tokens)
        return {"weight": self.matrix(packed), **{name: packed.tensors[name] for name in self.extra}}

    def matrix(self, packed: PackedWeight) -> Tensor:
        """Return what activations are multiplied by, [out, in] float32; gradients reach what is not `direct`."""
        matrix = decode_codes(packed) if self.is_fixed else formats.decode_stored(packed, torch.float32)
        if (part := self.stored.lowrank) is not None and not self.adapter:
            a, b = lowrank.part_factors(packed.tensors, part, self.shape, torch.float32)
            matrix = torch.addmm(matrix, b.T, a)
        return matrix if self.turns_activations else turned_effective(matrix, self.inner, packed.tensors)

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., out] of x [..., in], float32."""
        own = {name: getattr(self, name) for name in self.extra}
        x = transforms.apply_input(x, WeightTransforms(input=self.first), own)
        if self.turns_activations:
            x = turn_rows(x, "in", self.inner.input, own)
        y = nn.functional.linear(x, self.weight)
        if self.adapter:
            a, b = (own[name].float() for name in self.adapter)
            y = y + x @ a.T @ b.T
        if self.factors:
            y = y * math.prod((own[name][: self.shape[0]] for name in self.factors), start=1)
        if self.turns_activations:
            y = turn_rows(y, "out", self.inner.output, own)
        y = transforms.apply_output(y, WeightTransforms(output=self.last), own)
        return y if self.bias is None else y + self.bias


def row_factors(stored: Stored) -> Names:
    """Return the stored tensors that only multiply rows of the matrix; none where a low-rank part is beside it."""
    format = formats.get(stored.format)
    names = getattr(format, "ROW_FACTORS", ())
    if not names or stored.lowrank is not None:
        return ()
    has = format.specs(stored.params, (1, 1))
    return tuple(name for name in names if name in has)


def adapter_factors(stored: Stored, trained: set[str]) -> Names:
    """Return the factors A and B of a low-rank part if they have 16 bits and nothing else of a matrix is trained."""
    names = (lowrank.PREFIX + "a", lowrank.PREFIX + "b")
    is_adapter = stored.lowrank is not None and stored.lowrank.bits == 16 and bool(trained) and trained <= set(names)
    return names if is_adapter else ()


def decode_codes(packed: PackedWeight) -> Tensor:
    """Return the stored matrix [out, in], float32, with ones in the place of what multiplies its rows."""
    format, params, shape = packed.format, packed.params, packed.shape
    specs = formats.get(format).specs(params, shape)
    tensors = {name: packed.tensors[name] for name in specs}
    for name in row_factors(packed.stored):
        tensors[name] = torch.ones(specs[name][0], dtype=specs[name][1], device=tensors[name].device)
    example = next(iter(tensors.values()), None)  # None: a weight that was dropped
    kernel = None
    if example is not None and example.is_cpu:
        kernel = dispatch.prepare(example, tensors, format, params, shape)
    if kernel is not None:
        return kernel.decode(torch.float32)
    return formats.decode_stored(PackedWeight(packed.stored, tensors, shape), torch.float32)


def cut_scales(ops: WeightTransforms) -> tuple[Names, WeightTransforms, Names]:
    """Return the scales of channels in front of all transforms of the inputs, what is between, and those at the end."""
    first = _leading_scales(ops.input)
    last = _leading_scales(ops.output[::-1])[::-1]
    inner = WeightTransforms(ops.input[len(first) :], ops.output[: len(ops.output) - len(last)])
    return first, inner, last


def _leading_scales(names: Names) -> Names:
    count = next((i for i, name in enumerate(names) if not is_scale(name)), len(names))
    return names[:count]


def is_scale(name: str) -> bool:
    """Return whether a transform multiplies each channel by a real number."""
    transform = transforms.find(name)
    return name in transforms.DIAGONAL and transform is not None and not transform.is_orthogonal


def turning_is_cheaper(ops: WeightTransforms, shape: tuple[int, int], tokens: int) -> bool:
    """Return whether turning the activations of so many tokens is less work than turning a matrix [out, in]."""
    rows, columns = shape
    of_inputs, of_outputs = (_work(names, n) for names, n in ((ops.input, columns), (ops.output, rows)))
    return tokens * (of_inputs + of_outputs) < rows * of_inputs + columns * of_outputs


def _work(names: Names, n: int) -> float:
    """Return the additions that the transforms of a vector [n] take, about."""
    return sum(n * math.log2(max(2, n)) for name in names if name != "signs")


def turned_effective(matrix: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return what `transforms.effective` does, float32 [out, in], of a matrix of the same type and size.

    Gradients reach the matrix, and diagonals that are stored in floating point.
    """
    inner, around = _split_outermost(ops, tensors)
    own = {name: tensors[name] for name in transforms.specs(inner, (matrix.shape[0], matrix.shape[1]))}
    if not _is_fast(matrix, (*inner.input, *inner.output), own):
        return transforms.effective(matrix, ops, tensors)
    turned: Tensor = _TurnedMatrix.apply(matrix, inner, own) if inner else matrix
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


def turn_rows(x: Tensor, side: str, names: Names, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return what the transforms of a side, `in` or `out`, make of each vector of x [..., n]; gradients pass them."""
    own = {key: tensors[key] for name in names if (key := f"{side}_{name}") in tensors}
    if not _is_fast(x, names, own):
        ops = WeightTransforms(names, ()) if side == "in" else WeightTransforms((), names)
        return (transforms.apply_input if side == "in" else transforms.apply_output)(x, ops, own)
    turned: Tensor = _TurnedRows.apply(x, side, names, own) if names else x
    return turned


def _is_fast(x: Tensor, names: Names, own: Mapping[str, Tensor]) -> bool:
    """Return whether transforms have a fast way for x, which takes no gradients by what they store."""
    is_trained = any(stored.requires_grad for stored in own.values())
    return x.device.type == "cpu" and x.dtype == torch.float32 and set(names) <= set(FAST_TRANSFORMS) and not is_trained


class _TurnedMatrix(torch.autograd.Function):
    """M -> Out M In; its gradient G -> Out^T G In^T.

    Transforms with nothing to train need nothing kept for that. On a CPU the Hadamard transforms are
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


class _TurnedRows(torch.autograd.Function):
    """x -> T x for each vector of x; its gradient g -> T^T g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: str, names: Names, tensors: Mapping[str, Tensor]) -> Tensor:
        ctx.side, ctx.names, ctx.tensors = side, names, tensors
        return _turn(x, side, names, tensors, is_transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _turn(gradient, ctx.side, ctx.names, ctx.tensors, is_transposed=True), None, None, None


def _turn(x: Tensor, side: str, names: Sequence[str], tensors: Mapping[str, Tensor], *, is_transposed: bool) -> Tensor:
    """Apply transforms to each vector of x [..., n], or their transposes in the other order; signs in the same pass."""
    left = list(reversed(names) if is_transposed else names)
    while left:
        before = _take_bytes(left, side, tensors)
        if left and left[0] in HADAMARD_TRANSFORMS:
            is_other_way = HADAMARD_TRANSFORMS[left.pop(0)] != is_transposed
            x = hadamard.transform(x, before, _take_bytes(left, side, tensors), is_other_way)
        elif before is not None:
            x = before.times(x)
        elif left:
            name = left.pop(0)
            x = x * transforms.Diagonal(name, tensors[f"{side}_{name}"]).values(x.shape[-1], x.dtype)
    return x


def _take_bytes(left: list[str], side: str, tensors: Mapping[str, Tensor]) -> transforms.Diagonal | None:
    """Return the diagonal that comes next if it is stored in bytes, and take it off; others may be float32 here."""
    if not left or left[0] not in transforms.DIAGONAL or tensors[f"{side}_{left[0]}"].is_floating_point():
        return None
    return transforms.Diagonal(left[0], tensors[f"{side}_{left.pop(0)}"])
