"""Apply transforms to the inputs and outputs of a stored matrix, by their names.

    signs                a diagonal of +-1, stored as the uint8 bitmap [ceil(n / 8)], lowest bit first, 1 for -1
    hadamard             the transform H of compress/numerics/hadamard.py; nothing is stored
    hadamard_transposed  its transpose, which is its inverse; nothing is stored
    head_mix/D           H over the heads of D channels each, channel by channel; nothing is stored
    block_hadamard/N     H of each N consecutive channels; nothing is stored
    reflection           x - 2 v v^T x with the unit vector v, stored as float32 [n]; v = 0 for none
    channel_scale        a diagonal, stored as float32 [n]
    channel_scale16      a diagonal, stored as float16 [n]
    channel_scale8       a diagonal, stored as uint8 [n]: in the top bit the sign, below it e, 3 bits, and m, 4 bits, of
                         the magnitude (1 + m / 16) 2^(e - 4): 1/16 to 15.5, in steps of 1/16 to 1/32 of it

All but the last three are orthogonal. The tensor of a transform is named after its side, `in_signs` or `out_signs`. A
new transform is one entry of `TRANSFORMS`; one with a number in its name is found by `find`. config.json lists them
under the key "ops".

A table of embeddings M may have input transforms, too. With In their product, the row e of M that is looked up becomes
In^T e. Where the table is also that of the output head, which computes M In x, its channel_scale is the head's alone: a
row that is looked up passes the others (`of_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.numerics import hadamard
from compress.numerics.hadamard import CHUNK
from compress.types import WeightTransforms

Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Transform:
    """A matrix T [n, n]; `forward` and `transpose` take vectors [..., n] and keep their type."""

    spec: Callable[[int], Spec | None]  # what is stored for size n; ValueError if the size cannot be
    forward: Callable[[Tensor, Tensor | None], Tensor]  # (x, stored tensor) -> T x
    transpose: Callable[[Tensor, Tensor | None], Tensor]  # -> T^T x
    is_orthogonal: bool = True


def pack_signs(negative: Tensor) -> Tensor:
    """Return the bitmap, uint8 [ceil(n / 8)], of `negative`, [n] bool, true for -1."""
    bits = torch.nn.functional.pad(negative.to(torch.uint8), (0, -negative.shape[0] % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack_signs(bitmap: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return the signs of a bitmap, [n] of +-1."""
    return _byte_signs(dtype, bitmap.device).index_select(0, bitmap.int()).flatten()[:n]


@lru_cache(maxsize=64)
def _byte_signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the eight signs of each byte, [256, 8]: a table, because every forward pass unpacks signs."""
    with torch.inference_mode(False), torch.no_grad():  # kept: tensors of inference mode cannot be trained through
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        return (1 - 2 * bits).to(dtype)


def _flip(x: Tensor, bitmap: Tensor | None) -> Tensor:
    assert bitmap is not None
    return x * unpack_signs(bitmap, x.shape[-1], x.dtype)


def _hadamard_spec(n: int) -> None:
    hadamard.order(n)


def _vector_spec(n: int) -> Spec:
    return (n,), torch.float32


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reflect(x: Tensor, normal: Tensor | None) -> Tensor:
    assert normal is not None
    wide, normal = _wide(x), normal.to(_wide(x))
    return (wide - 2 * (wide @ normal)[..., None] * normal).to(x.dtype)


def _scale(x: Tensor, factors: Tensor | None) -> Tensor:
    assert factors is not None
    return (_wide(x) * factors.to(_wide(x).dtype)).to(x.dtype)


def _scale_by_bytes(x: Tensor, codes: Tensor | None) -> Tensor:
    assert codes is not None
    return _scale(x, _byte_scales(codes.device).index_select(0, codes.int()))


# A code's magnitude m is the float32 with the bits (m << SCALE8_SHIFT) + SCALE8_BIAS.
SCALE8_SHIFT, SCALE8_BIAS = 19, 123 << 23


@lru_cache(maxsize=16)
def _byte_scales(device: torch.device) -> Tensor:
    """Return what each byte of a channel_scale8 stands for, float32 [256]."""
    with torch.inference_mode(False), torch.no_grad():
        magnitudes = (torch.arange(128, dtype=torch.int32) << SCALE8_SHIFT).add_(SCALE8_BIAS).view(torch.float32)
        return torch.cat((magnitudes, -magnitudes)).to(device)


TRANSFORMS: dict[str, Transform] = {
    "signs": Transform(lambda n: ((-(-n // 8),), torch.uint8), _flip, _flip),
    "hadamard": Transform(_hadamard_spec, lambda x, _: hadamard.transform(x), lambda x, _: hadamard.transpose(x)),
    "hadamard_transposed": Transform(
        _hadamard_spec, lambda x, _: hadamard.transpose(x), lambda x, _: hadamard.transform(x)
    ),
    "reflection": Transform(_vector_spec, _reflect, _reflect),
    "channel_scale": Transform(_vector_spec, _scale, _scale, is_orthogonal=False),
    "channel_scale16": Transform(lambda n: ((n,), torch.float16), _scale, _scale, is_orthogonal=False),
    "channel_scale8": Transform(lambda n: ((n,), torch.uint8), _scale_by_bytes, _scale_by_bytes, is_orthogonal=False),
}

DIAGONAL = ("signs", "channel_scale", "channel_scale16", "channel_scale8")
FLOATING = ("channel_scale", "channel_scale16")  # diagonals stored as floating-point numbers, which can be trained
SMALLEST_SCALE16, LARGEST_SCALE16 = 2.0**-14, 2.0**15  # magnitudes that `pack_diagonal` gives a channel_scale16


class Diagonal(NamedTuple):
    """What is stored of a diagonal transform of this name."""

    name: str
    stored: Tensor

    def times(self, x: Tensor) -> Tensor:
        """Return the products with x [..., n], of the same type."""
        return _get(self.name).forward(x, self.stored)

    def values(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return the diagonal, [n] of a floating type; gradients reach what is stored in floating point."""
        if self.name == "signs":
            return unpack_signs(self.stored, n, dtype)
        if self.name == "channel_scale8":
            return _byte_scales(self.stored.device).index_select(0, self.stored.int()).to(dtype)
        return self.stored.to(dtype)


def pack_diagonal(name: str, values: Tensor) -> Tensor:
    """Return what is stored of a diagonal [n] that is nearest to `values`, on their device.

    Magnitudes that cannot be stored become the least or the greatest that can; of `signs` nothing but the sign is left.
    """
    if name == "signs":
        return pack_signs(values < 0)
    if name == "channel_scale":
        return values.float()
    if name == "channel_scale16":
        return values.abs().clamp(SMALLEST_SCALE16, LARGEST_SCALE16).copysign(values).half()
    bits = values.abs().clamp(2.0**-5, 2.0**5).float().view(torch.int32)
    codes = ((bits - SCALE8_BIAS + (1 << SCALE8_SHIFT - 1)) >> SCALE8_SHIFT).clamp(0, 127)
    return (codes + 128 * (values < 0)).to(torch.uint8)


def find(name: str) -> Transform | None:
    """Return the transform of this name, None if there is none."""
    base, _, argument = name.partition("/")
    if base not in NUMBERED:
        return TRANSFORMS.get(name)
    return NUMBERED[base](int(argument)) if argument.isdecimal() and int(argument) > 0 else None


@lru_cache(maxsize=16)
def _head_mix(head_dim: int) -> Transform:
    def spec(n: int) -> None:
        if n % head_dim:
            raise ValueError(f"head_mix/{head_dim}: {n} channels are no heads of {head_dim}")
        hadamard.order(n // head_dim)

    def mix_heads(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(x.unflatten(-1, (-1, head_dim)).transpose(-1, -2)).transpose(-1, -2).flatten(-2)

    return Transform(spec, lambda x, _: mix_heads(x, hadamard.transform), lambda x, _: mix_heads(x, hadamard.transpose))


@lru_cache(maxsize=16)
def _block_hadamard(size: int) -> Transform:
    def spec(n: int) -> None:
        if n % size:
            raise ValueError(f"block_hadamard/{size}: {n} channels are no blocks of {size}")
        hadamard.order(size)

    def mix_blocks(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(x.unflatten(-1, (-1, size))).flatten(-2)

    return Transform(
        spec, lambda x, _: mix_blocks(x, hadamard.transform), lambda x, _: mix_blocks(x, hadamard.transpose)
    )


NUMBERED = {"head_mix": _head_mix, "block_hadamard": _block_hadamard}  # base of a name -> the transform of a number


def _get(name: str) -> Transform:
    transform = find(name)
    assert transform is not None, f"no transform {name}"
    return transform


def specs(transforms: WeightTransforms, shape: tuple[int, int]) -> dict[str, Spec]:
    """Return the stored tensors of the transforms around a matrix [out, in]; ValueError if a size cannot be."""
    stored = {}
    for side, names, size in (("out", transforms.output, shape[0]), ("in", transforms.input, shape[1])):
        for name in names:
            spec = _get(name).spec(size)
            if spec is not None:
                stored[f"{side}_{name}"] = spec
    return stored


def cut(name: str, stored: Tensor | None, part: range) -> Tensor:
    """Return what is stored of a transform for some of its channels; ValueError if it is not diagonal."""
    if stored is None or name not in DIAGONAL:
        raise ValueError(f"{name.partition('/')[0]} mixes all channels")
    if name == "signs":
        return pack_signs(unpack_signs(stored, part.stop, torch.float32)[part.start :] < 0)
    return stored[part.start : part.stop].clone()


def from_dict(values: Any, where: str) -> WeightTransforms:
    """Return the transforms of {"input": [...], "output": [...]}; CheckpointError at `where` if they cannot be."""
    sides = dict(values) if isinstance(values, Mapping) else {}
    lists = [sides.pop(side, []) for side in ("input", "output")]
    if not isinstance(values, Mapping) or sides or not all(isinstance(names, list | tuple) for names in lists):
        raise CheckpointError(f"{where}: ops needs the lists 'input' and 'output', and nothing else")
    for names in lists:
        if unknown := [name for name in names if not isinstance(name, str) or find(name) is None]:
            raise CheckpointError(f"{where}: transform {unknown[0]!r} is unknown to this version; upgrade compress")
        if len(set(names)) != len(names):
            raise CheckpointError(f"{where}: ops lists {names}, a transform twice; write the checkpoint again")
    return WeightTransforms(tuple(lists[0]), tuple(lists[1]))


def describe(transforms: WeightTransforms) -> str:
    """Return the transforms in a word or two, without signs, which alone say little."""
    return " ".join(dict.fromkeys(name for name in (*transforms.input, *transforms.output) if name != "signs"))


def apply_input(x: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return what the stored matrix is multiplied by for inputs x [..., in], of the same floating type."""
    return _forward(x, "in", transforms.input, tensors)


def undo_input(x: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the inputs [..., in] of which `apply_input` gives x, of the same floating type."""
    for name in reversed(transforms.input):
        x = _undo(x, name, tensors.get(f"in_{name}"), is_transposed=False)
    return x


def _undo(x: Tensor, name: str, stored: Tensor | None, *, is_transposed: bool) -> Tensor:
    """Return T^-1 x, or T^-T x, of x [..., n]."""
    transform = _get(name)
    if transform.is_orthogonal:
        return (transform.forward if is_transposed else transform.transpose)(x, stored)
    assert stored is not None and name in DIAGONAL, "others are orthogonal"
    wide = _wide(x)
    return (wide / Diagonal(name, stored).values(x.shape[-1], wide.dtype)).to(x.dtype)


def apply_output(y: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs of the layer before its bias, from products y [..., out] with the stored matrix."""
    return _forward(y, "out", transforms.output, tensors)


def transpose_output(gradients: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the gradients [..., out] at products with the stored matrix, from those at the layer's outputs."""
    return _transpose(gradients, "out", transforms.output, tensors)


def of_rows(transforms: WeightTransforms) -> WeightTransforms:
    """Return the transforms that a row passes where it is looked up: the orthogonal ones of the inputs."""
    return WeightTransforms(input=tuple(name for name in transforms.input if _get(name).is_orthogonal))


def apply_rows(rows: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return rows [..., in] of a stored table of embeddings as they are looked up, of the same floating type."""
    return _transpose(rows, "in", of_rows(transforms).input, tensors)


def effective(matrix: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the weight Out M In of a stored matrix M [out, in], float32 (float64 stays), a new tensor."""

    def change_rows(rows: Tensor) -> Tensor:  # a row r of M becomes r In
        return _transpose(rows, "in", transforms.input, tensors)

    def change_columns(columns: Tensor) -> Tensor:
        return _forward(columns, "out", transforms.output, tensors)

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (matrix, *tensors.values())):
        return change_columns(change_rows(_wide(matrix)).T).T  # at once: gradients know nothing of parts in place
    return _around(matrix, change_rows, change_columns)


def rotate(weight: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return Out^-1 W In^-1 of a weight W [out, in], the inverse of `effective`: float32 or float64, a new tensor."""

    def change_rows(rows: Tensor) -> Tensor:  # a row r of W becomes r In^-1
        for name in transforms.input:
            rows = _undo(rows, name, tensors.get(f"in_{name}"), is_transposed=True)
        return rows

    def change_columns(columns: Tensor) -> Tensor:
        for name in reversed(transforms.output):
            columns = _undo(columns, name, tensors.get(f"out_{name}"), is_transposed=False)
        return columns

    return _around(weight, change_rows, change_columns)


def rotate_hessian(hessian: Tensor, transforms: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return In H In^T, the Hessian [in, in] of the rotated inputs; symmetric to the bit, a new tensor."""

    def forward(x: Tensor) -> Tensor:
        return _forward(x, "in", transforms.input, tensors)

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
    """Return a float32 (float64 stays) copy with every row changed, and then every column; some at a time."""
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
        x = multiply(x, stored, name, False) if _is_opaque(name) else _get(name).forward(x, stored)
    return x


def _transpose(x: Tensor, side: str, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    for name in reversed(names):
        stored = tensors.get(f"{side}_{name}")
        x = multiply(x, stored, name, True) if _is_opaque(name) else _get(name).transpose(x, stored)
    return x


def _is_opaque(name: str) -> bool:
    """Return whether a transform is one operator: where it is traced. Products with stored floats are plain ones."""
    return name not in FLOATING and (torch.compiler.is_compiling() or torch.jit.is_tracing())


# For torch.compile: one operator, opaque to the compiler.


@torch.library.custom_op("compress::multiply", mutates_args=())
def multiply(x: Tensor, stored: Tensor | None, name: str, transposed: bool) -> Tensor:
    """Return T x, or T^T x if transposed, of x [..., n] and the transform of that name."""
    transform = _get(name)
    return (transform.transpose if transposed else transform.forward)(x, stored).clone(
        memory_format=torch.contiguous_format
    )


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
