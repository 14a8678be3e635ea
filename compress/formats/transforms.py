"""Operations on the inputs and outputs of a stored matrix, by name; each stands for an orthogonal matrix.

    signs       a diagonal of +-1, stored as the uint8 bitmap [ceil(n / 8)], lowest bit first, 1 for -1
    hadamard    the transform of compress/numerics/hadamard.py; nothing is stored
    head_mix/D  that transform over the heads of D channels each, channel by channel; nothing is stored

The tensor of an operation is named after its side, `in_signs` or `out_signs`. A new operation is one entry of `OPS`;
one with a number in its name is found by `find`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.numerics import hadamard
from compress.numerics.hadamard import CHUNK
from compress.types import Ops

Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Op:
    """An orthogonal matrix T [n, n]; `forward` and `transpose` take vectors [..., n] and keep their type."""

    spec: Callable[[int], Spec | None]  # what is stored for size n; ValueError if the size cannot be
    forward: Callable[[Tensor, Tensor | None], Tensor]  # (x, stored tensor) -> T x
    transpose: Callable[[Tensor, Tensor | None], Tensor]  # -> T^T x


def pack_signs(negative: Tensor) -> Tensor:
    """[n] bool, true for -1 -> the bitmap, uint8 [ceil(n / 8)]."""
    bits = torch.nn.functional.pad(negative.to(torch.uint8), (0, -negative.shape[0] % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack_signs(bitmap: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The bitmap -> [n] of +-1."""
    return _byte_signs(dtype, bitmap.device).index_select(0, bitmap.int()).flatten()[:n]


@lru_cache(maxsize=64)
def _byte_signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The eight signs of each byte, [256, 8]; looked up, because a layer unpacks its signs in every forward pass."""
    with torch.inference_mode(False), torch.no_grad():  # kept: tensors of inference mode cannot be trained through
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        return (1 - 2 * bits).to(dtype)


def _flip(x: Tensor, bitmap: Tensor | None) -> Tensor:
    assert bitmap is not None
    return x * unpack_signs(bitmap, x.shape[-1], x.dtype)


def _hadamard_spec(n: int) -> None:
    hadamard.order(n)


OPS: dict[str, Op] = {
    "signs": Op(lambda n: ((-(-n // 8),), torch.uint8), _flip, _flip),
    "hadamard": Op(_hadamard_spec, lambda x, _: hadamard.transform(x), lambda x, _: hadamard.transpose(x)),
}


def find(name: str) -> Op | None:
    """The operation of this name, None if there is none."""
    kind, _, argument = name.partition("/")
    if kind != "head_mix":
        return OPS.get(name)
    return _head_mix(int(argument)) if argument.isdecimal() and int(argument) > 0 else None


@lru_cache(maxsize=16)
def _head_mix(head_dim: int) -> Op:
    def spec(n: int) -> None:
        if n % head_dim:
            raise ValueError(f"head_mix/{head_dim}: {n} channels are no heads of {head_dim}")
        hadamard.order(n // head_dim)

    def mixed(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(x.unflatten(-1, (-1, head_dim)).transpose(-1, -2)).transpose(-1, -2).flatten(-2)

    return Op(spec, lambda x, _: mixed(x, hadamard.transform), lambda x, _: mixed(x, hadamard.transpose))


def _get(name: str) -> Op:
    op = find(name)
    assert op is not None, f"no operation {name}"
    return op


def specs(ops: Ops, shape: tuple[int, int]) -> dict[str, Spec]:
    """Stored tensors of the operations around a matrix [out, in]; ValueError if one cannot have that size."""
    found = {}
    for side, names, size in (("out", ops.output, shape[0]), ("in", ops.input, shape[1])):
        for name in names:
            spec = _get(name).spec(size)
            if spec is not None:
                found[f"{side}_{name}"] = spec
    return found


def from_dict(values: Any, where: str) -> Ops:
    """`Ops` from what config.json stores, {"input": [...], "output": [...]}; CheckpointError if it cannot be."""
    sides = dict(values) if isinstance(values, Mapping) else {}
    lists = [sides.pop(side, []) for side in ("input", "output")]
    if not isinstance(values, Mapping) or sides or not all(isinstance(names, list | tuple) for names in lists):
        raise CheckpointError(f"{where}: ops needs the lists 'input' and 'output', and nothing else")
    for names in lists:
        if unknown := [name for name in names if not isinstance(name, str) or find(name) is None]:
            raise CheckpointError(f"{where}: operation {unknown[0]!r} is unknown to this version; upgrade compress")
        if len(set(names)) != len(names):
            raise CheckpointError(f"{where}: ops lists {names}, an operation twice; write the checkpoint again")
    return Ops(tuple(lists[0]), tuple(lists[1]))


def describe(ops: Ops) -> str:
    """The operations in a word or two; signs alone say little and go without saying."""
    return " ".join(dict.fromkeys(name for name in (*ops.input, *ops.output) if name != "signs"))


def apply_input(x: Tensor, ops: Ops, tensors: Mapping[str, Tensor]) -> Tensor:
    """x [..., in] of any floating type -> what the stored matrix is multiplied by, of the same type."""
    return _forward(x, "in", ops.input, tensors)


def apply_output(y: Tensor, ops: Ops, tensors: Mapping[str, Tensor]) -> Tensor:
    """Products with the stored matrix [..., out] -> outputs of the layer, before its bias."""
    return _forward(y, "out", ops.output, tensors)


def effective(matrix: Tensor, ops: Ops, tensors: Mapping[str, Tensor]) -> Tensor:
    """The stored matrix [out, in] -> the weight Out M In, float32 (float64 stays), a new tensor."""
    return _around(
        matrix,
        lambda row: _transpose(row, "in", ops.input, tensors),  # a row r of M becomes r In
        lambda column: _forward(column, "out", ops.output, tensors),
    )


def rotate(weight: Tensor, ops: Ops, tensors: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `effective`: a weight [out, in] -> Out^T W In^T, float32 (float64 stays), a new tensor."""
    return _around(
        weight,
        lambda row: _forward(row, "in", ops.input, tensors),
        lambda column: _transpose(column, "out", ops.output, tensors),
    )


def rotate_hessian(hessian: Tensor, ops: Ops, tensors: Mapping[str, Tensor]) -> Tensor:
    """sum x x^T [in, in] of the inputs -> that of the rotated inputs, In H In^T; symmetric to the bit, a new tensor."""

    def forward(x: Tensor) -> Tensor:
        return _forward(x, "in", ops.input, tensors)

    rotated = _around(hessian, forward, forward)
    step = max(1, CHUNK // rotated.shape[0])
    for start in range(0, rotated.shape[0], step):  # a panel of rows and the same columns, from the diagonal on
        rows, columns = rotated[start : start + step, start:], rotated[start:, start : start + step]
        mean = (rows + columns.T).mul_(0.5)
        rows.copy_(mean)
        columns.copy_(mean.T)
    return rotated


def _around(
    matrix: Tensor, change_rows: Callable[[Tensor], Tensor], change_columns: Callable[[Tensor], Tensor]
) -> Tensor:
    """A float32 (float64 stays) copy with every row changed, and then every column; some at a time."""
    wide = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    out = torch.empty(matrix.shape, dtype=wide, device=matrix.device)
    step = max(1, CHUNK // matrix.shape[1])
    for rows, target in zip(matrix.split(step), out.split(step), strict=True):
        target.copy_(change_rows(rows.to(wide)))
    for columns in out.split(max(1, CHUNK // matrix.shape[0]), dim=1):
        columns.copy_(change_columns(columns.T).T)
    return out


def _forward(x: Tensor, side: str, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    for name in names:
        stored = tensors.get(f"{side}_{name}")
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        x = multiply(x, stored, name, False) if traced else _get(name).forward(x, stored)
    return x


def _transpose(x: Tensor, side: str, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    for name in reversed(names):
        x = _get(name).transpose(x, tensors.get(f"{side}_{name}"))
    return x


# For torch.compile: one operator, opaque to the compiler.


@torch.library.custom_op("compress::multiply", mutates_args=())
def multiply(x: Tensor, stored: Tensor | None, name: str, transposed: bool) -> Tensor:
    """x [..., n] -> T x of the operation of that name, T^T x if transposed."""
    op = _get(name)
    return (op.transpose if transposed else op.forward)(x, stored).clone(memory_format=torch.contiguous_format)


@multiply.register_fake
def _(x: Tensor, stored: Tensor | None, name: str, transposed: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor | None, str, bool], output: Tensor) -> None:
    _, stored, ctx.name, ctx.transposed = inputs
    ctx.save_for_backward(stored)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (stored,) = ctx.saved_tensors
    return multiply(gradient, stored, ctx.name, not ctx.transposed), None, None, None


multiply.register_autograd(_backward, setup_context=_keep)
