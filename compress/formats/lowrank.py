"""Store a product of two thin matrices: as a weight of its own, and as a part beside a weight of any other format.

    W = B^T A        A [rank, in_features], B [rank, out_features]

Entries are 16-bit floating numbers, or integers of 8 or 4 bits times a scale for each group of consecutive entries of a
row. Integers use the whole signed range, and scales may be negative, as in the format `int`.

Stored tensors (G groups of a row; the last may be shorter):
- 16 bits: `a` [rank, in_features], `b` [out_features, rank], float16 or bfloat16, as two linear layers have them: one
  token times a B that lies the other way takes a CPU four times as long;
- 8 bits: `a` [rank, in_features], `b` [rank, out_features], int8; 4 bits: uint8 [rank, ceil(n / 2)], two's complement,
  the lower half first;
- `a_scales`, `b_scales` float16 or bfloat16 [rank, G], with integers only.
Beside another weight their names begin with `lowrank_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.types import LowRank

PREFIX = "lowrank_"
SCALE_RATIOS = tuple(1 - step / 32 for step in range(13))  # scales that are tried: these times the min-max scale
FP16_MAX = 65504.0
FP16_TINY = 2.0**-14  # smallest normal float16

Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Params(LowRank):
    """As a weight of its own."""


def specs(params: LowRank, shape: tuple[int, int]) -> dict[str, Spec]:
    """ValueError if the rank is above what the shape can have."""
    if params.rank > min(shape):
        raise ValueError(f"rank {params.rank} is above {min(shape)}, the smaller side of the weight")
    dtype = getattr(torch, params.dtype)
    found: dict[str, Spec] = {}
    for name, size in (("a", shape[1]), ("b", shape[0])):
        if params.bits == 16:
            found[name] = ((params.rank, size) if name == "a" else (size, params.rank), dtype)
            continue
        width, kind = (size, torch.int8) if params.bits == 8 else (-(-size // 2), torch.uint8)
        found[name] = ((params.rank, width), kind)
        found[f"{name}_scales"] = ((params.rank, -(-size // _group(params, size))), dtype)
    return found


def pack(a: Tensor, b: Tensor, params: LowRank) -> dict[str, Tensor]:
    """A [rank, in], B [rank, out] of any floating type -> stored tensors, each entry rounded to nearest."""
    return {**pack_factor("a", a, params), **pack_factor("b", b, params)}


def pack_factor(name: str, factor: Tensor, params: LowRank) -> dict[str, Tensor]:
    """One factor [rank, n] as it is stored under `name`, each entry rounded to nearest."""
    if params.bits == 16:
        return {name: (factor if name == "a" else factor.T).to(getattr(torch, params.dtype)).contiguous()}
    size, half = factor.shape[1], 2 ** (params.bits - 1)
    scales = _scales(factor, params)
    steps = _repeat_scales(scales.float(), params, size)
    codes = (factor.float() / torch.where(steps == 0, 1.0, steps)).round_().clamp_(-half, half - 1).to(torch.int8)
    if params.bits == 4:
        codes = torch.nn.functional.pad(codes, (0, size % 2)).view(torch.uint8) & 15
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return {name: codes.contiguous(), f"{name}_scales": scales}


def factors(
    tensors: Mapping[str, Tensor], params: LowRank, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [rank, out] in `dtype`, computed in float32."""
    return factor("a", tensors, params, shape[1], dtype), factor("b", tensors, params, shape[0], dtype)


def factor(name: str, tensors: Mapping[str, Tensor], params: LowRank, size: int, dtype: torch.dtype) -> Tensor:
    """One factor [rank, size]."""
    stored = tensors[name]
    if params.bits == 16:
        return (stored if name == "a" else stored.T).to(dtype)
    if params.bits == 4:
        pairs = torch.stack((stored << 4, stored & 240), -1).view(torch.int8)  # each in the upper half, with its sign
        stored = pairs.flatten(1)[:, :size] >> 4
    return (stored.float() * _repeat_scales(tensors[f"{name}_scales"].float(), params, size)).to(dtype)


def decode(tensors: Mapping[str, Tensor], params: LowRank, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The product [out, in]; computed in float32, rounded once to `dtype`."""
    a, b = factors(tensors, params, shape, torch.float32)
    return (b.T @ a).to(dtype)


def fits_float16(a: Tensor, b: Tensor) -> bool:
    """Whether these factors, or their scales, are in the normal range of float16."""
    sizes = torch.stack((a.abs().amax(), b.abs().amax()))
    return not ((sizes > FP16_MAX / 2).any() or ((sizes > 0) & (sizes < 256 * FP16_TINY)).any())


def cut(
    tensors: Mapping[str, Tensor], params: LowRank, shape: tuple[int, int], rows: range, columns: range
) -> tuple[LowRank, dict[str, Tensor]]:
    """Return some rows and columns of a product; compress/formats/__init__.py has the contract.

    A takes the columns and B the rows. Integers are cut at groups.
    """
    kept = {**_cut_factor("a", tensors, params, shape[1], columns), **_cut_factor("b", tensors, params, shape[0], rows)}
    specs(params, (len(rows), len(columns)))  # ValueError where the rank is more than what is left
    return params, kept


def _cut_factor(name: str, tensors: Mapping[str, Tensor], params: LowRank, size: int, part: range) -> dict[str, Tensor]:
    """Return the entries `part` of each row of a factor [rank, size] as they are stored."""
    stored = tensors[name]
    if params.bits == 16:
        return {name: (stored[:, part.start : part.stop] if name == "a" else stored[part.start : part.stop]).clone()}
    group, per_byte = _group(params, size), 8 // params.bits
    if part.start % per_byte or (part.start % group and group < size):
        raise ValueError(f"entry {part.start} of a low-rank factor lies within a group of {group}")
    kept = stored[:, part.start // per_byte : -(-part.stop // per_byte)].clone()
    scales = tensors[f"{name}_scales"][:, part.start // group : -(-part.stop // group)].clone()
    return {name: kept, f"{name}_scales": scales}


def part_specs(params: LowRank, shape: tuple[int, int]) -> dict[str, Spec]:
    """As `specs`, beside another weight."""
    return {PREFIX + name: spec for name, spec in specs(params, shape).items()}


def cut_part(
    tensors: Mapping[str, Tensor], params: LowRank, shape: tuple[int, int], rows: range, columns: range
) -> tuple[LowRank, dict[str, Tensor]]:
    """As `cut`, of the part beside another weight whose tensors these are."""
    chosen, kept = cut(_own(tensors), params, shape, rows, columns)
    return chosen, {PREFIX + name: tensor for name, tensor in kept.items()}


def part_factors(
    tensors: Mapping[str, Tensor], params: LowRank, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `factors`, from the tensors of a weight that it lies beside."""
    return factors(_own(tensors), params, shape, dtype)


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def describe(params: LowRank) -> str:
    """In a word or two, such as "+ rank 16" or "+ rank 16 in 4 bits"."""
    return f"+ rank {params.rank}" + ("" if params.bits == 16 else f" in {params.bits} bits")


def _scales(factor: Tensor, params: LowRank) -> Tensor:
    """Scales [rank, G] of a factor [rank, n] as they are stored, searched for the least squared error."""
    dtype, size = getattr(torch, params.dtype), factor.shape[1]
    group, half = _group(params, size), 2 ** (params.bits - 1)
    grouped = torch.nn.functional.pad(factor.float(), (0, -size % group)).unflatten(1, (-1, group))
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))  # signed: the level -half is the outermost one
    best, scales = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
    for shrink in SCALE_RATIOS:
        scale = (largest * (-shrink / half)).to(dtype).float()
        code = (grouped / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-half, half - 1)
        error = (code * scale - grouped).square_().sum(2, keepdim=True)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
    return scales.squeeze(2).to(dtype).contiguous()


def _repeat_scales(scales: Tensor, params: LowRank, size: int) -> Tensor:
    """Scales [rank, G] -> that of each entry [rank, size]."""
    return scales.repeat_interleave(_group(params, size), 1)[:, :size]


def _group(params: LowRank, size: int) -> int:
    return size if params.group_size == -1 else min(params.group_size, size)
