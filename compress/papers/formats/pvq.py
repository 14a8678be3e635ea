"""Pyramid vector quantization: the direction of a vector of columns is an integer point y with sum |y| = K.

    w[i, D*v : D*v + D] = scale[i] * level[gain[i, v]] * y / ||y||

`rank` numbers the points of S(D, K) = {y integer, sum |y| = K}, so that no codebook is stored and the bits per weight
may be any fraction. `level[0]` = 0 is for vectors that are all zero.

Numbering. S(d, k) is cut in half again and again: a point is (pulses j of its first half, rank of that half in
S(d/2, j), rank of the second half in S(d/2, k-j)), down to single coordinates, whose rank is the sign:

    rank = offset(d, k, j) + rank_first * size(d/2, k-j) + rank_second

All nodes of a depth are worked on at once, log2(D) steps in all, where a coordinate by coordinate numbering needs D.
Ranks are up to 500 bits, held in limbs of LIMB bits in int64. So that no long division is needed, sizes are rounded up
to a mantissa of LIMB bits and offsets to PREFIX leading bits; that costs a code less than 1e-6 bits, so that the field
keeps the width ceil(log2 |S(D, K)|).

Stored tensors, rows of the weight first:
- `codes` uint8 [out, bytes of a row]: a little-endian bit stream; each vector is `gain_bits` of gain, then its rank;
- `scales` float16 or bfloat16 [out]; `levels` float16 [2**gain_bits].
Columns are padded to whole vectors. Rows can be cut anywhere, columns at whole vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

VECTOR_DIMS = (8, 16, 32, 64, 128)
MAX_PULSES = 1023
MAX_GAIN_BITS = 8
LIMB = 30  # bits of a limb, so that the product of two fits int64
MASK = (1 << LIMB) - 1
PREFIX = 50  # leading bits of a rank that decide between offsets; with the pulses (10 bits) they fit int64
KEY = PREFIX + 2  # position of the pulses in a search key; rounding adds less than two bits to a prefix
DECODE_CHUNK = 1 << 18  # weights coded or decoded at a time: bounds the int64 temporaries to about 100 MB


@dataclass(frozen=True)
class Params:
    vector_dim: int  # [columns] of a vector, D
    pulses: int  # [pulses] in a vector, K: the sum of |y|
    gain_bits: int  # [bits] of the length of a vector
    scale_dtype: str = "float16"  # of the scales of rows

    def __post_init__(self) -> None:
        if self.vector_dim not in VECTOR_DIMS:
            raise ValueError(f"vector_dim {self.vector_dim} is not one of {VECTOR_DIMS}")
        if not 1 <= self.pulses <= MAX_PULSES:
            raise ValueError(f"pulses {self.pulses} is not in 1..{MAX_PULSES}")
        if not 1 <= self.gain_bits <= MAX_GAIN_BITS:
            raise ValueError(f"gain_bits {self.gain_bits} is not in 1..{MAX_GAIN_BITS}")
        if self.scale_dtype not in ("float16", "bfloat16"):
            raise ValueError(f"scale_dtype {self.scale_dtype!r} is not float16 or bfloat16")


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    vectors = -(-shape[1] // params.vector_dim)
    field = params.gain_bits + rank_bits(params.vector_dim, params.pulses)
    return {
        "codes": ((shape[0], -(-vectors * field // 8)), torch.uint8),
        "scales": ((shape[0],), getattr(torch, params.scale_dtype)),
        "levels": ((2**params.gain_bits,), torch.float16),
    }


def pack(points: Tensor, gains: Tensor, scales: Tensor, levels: Tensor, params: Params) -> dict[str, Tensor]:
    """points [out, vectors, D] int, sum |y| = K; gains [out, vectors] int; scales [out]; levels -> stored tensors.

    Scales and levels must already be representable in their storage types.
    """
    stored = scales.to(getattr(torch, params.scale_dtype))
    table = levels.to(torch.float16)
    assert torch.equal(stored.to(scales.dtype), scales), "scales were not rounded to their storage type"
    assert torch.equal(table.to(levels.dtype), levels), "levels were not rounded to their storage type"
    step = _rows(points.shape[1] * params.vector_dim)
    parts = zip(points.split(step), gains.split(step), strict=True)
    return {"codes": torch.cat([_streams(y, gain, params) for y, gain in parts]), "scales": stored, "levels": table}


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    rows, columns = shape
    scales, levels = tensors["scales"].float(), tensors["levels"].float()
    weight = torch.empty(rows, columns, dtype=dtype, device=scales.device)
    step = _rows(columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        points, gains = _points(tensors["codes"][part], params, -(-columns // params.vector_dim))
        values = vectors(points, levels[gains] * scales[part, None])
        weight[part] = values.flatten(1)[:, :columns]
    return weight


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    if columns.start % params.vector_dim:
        raise ValueError(f"column {columns.start} lies within a vector of {params.vector_dim} columns")
    field = params.gain_bits + rank_bits(params.vector_dim, params.pulses)
    first, last = (field * -(-edge // params.vector_dim) for edge in (columns.start, columns.stop))  # bits of a row
    streams = tensors["codes"][rows.start : rows.stop, first // 8 : -(-last // 8)]
    codes = _drop_bits(streams, first % 8, -(-(last - first) // 8))
    if (spare := -(last - first) % 8) > 0:
        codes[:, -1] &= 0xFF >> spare
    scales = tensors["scales"][rows.start : rows.stop].contiguous()
    return params, {"codes": codes, "scales": scales, "levels": tensors["levels"]}


def _drop_bits(streams: Tensor, bits: int, count: int) -> Tensor:
    """Return streams [rows, bytes] without their first 0..7 bits, `count` bytes of each row, a new tensor."""
    ahead = torch.nn.functional.pad(streams, (0, 1))[:, 1 : count + 1]
    low = streams[:, :count] >> bits
    return low | ahead << 8 - bits if bits else low.clone()


def vectors(points: Tensor, lengths: Tensor) -> Tensor:
    """Float32 vectors of these lengths [...] in the directions of points [..., D], as decoding computes them."""
    squares = points.square().sum(-1)  # exact: integers
    return points.float() * (lengths / squares.float().sqrt()).unsqueeze(-1)


# The bit stream of a row.


def _rows(columns: int) -> int:
    """Rows coded or decoded at a time."""
    return max(1, DECODE_CHUNK // columns)


def _streams(points: Tensor, gains: Tensor, params: Params) -> Tensor:
    """points [rows, vectors, D], gains [rows, vectors] -> uint8 [rows, bytes]."""
    width = rank_bits(params.vector_dim, params.pulses)
    limbs = rank(points, params.pulses).movedim(0, -1)  # row, vector, limb
    ranks = _bits(limbs, LIMB).flatten(-2)[..., :width]
    bits = torch.cat([_bits(gains, params.gain_bits), ranks], -1).flatten(1)
    octets = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    return (octets << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def _bits(values: Tensor, width: int) -> Tensor:
    """The lowest bits of values [...], lowest first: uint8 [..., width]."""
    return (values.long().unsqueeze(-1) >> torch.arange(width, device=values.device)).bitwise_and_(1).to(torch.uint8)


def _points(codes: Tensor, params: Params, count: int) -> tuple[Tensor, Tensor]:
    """Streams [rows, bytes] -> points [rows, count, D] and gains [rows, count], int64."""
    width = rank_bits(params.vector_dim, params.pulses)
    starts = torch.arange(count, device=codes.device) * (params.gain_bits + width)
    padded = torch.nn.functional.pad(codes, (0, 8))
    limbs = [_fields(padded, starts + params.gain_bits + low, min(LIMB, width - low)) for low in range(0, width, LIMB)]
    points = unrank(torch.stack(limbs), params.vector_dim, params.pulses)
    return points, _fields(padded, starts, params.gain_bits)


def _fields(codes: Tensor, starts: Tensor, width: int) -> Tensor:
    """Bits [start, start + width) of each row, width <= 30: int64 [rows, starts]."""
    first = starts // 8
    word = codes[:, first].long()
    for i in range(1, 5):  # 7 bits of offset and 30 of field reach into five bytes
        word |= codes[:, first + i].long() << (8 * i)
    return (word >> starts % 8) & ((1 << width) - 1)


# Sizes and offsets of the numbering, exact and the same everywhere: Python integers.


class _Node(NamedTuple):
    """S(d, k) cut in two."""

    shift: int  # offsets are multiples of 2**shift
    offsets: tuple[int, ...]  # [k + 1]: offset of j pulses in the first half, over 2**shift
    total: int  # ranks are below this
    mantissa: int  # the size that a parent counts with is mantissa * 2**exponent >= total
    exponent: int


@lru_cache(maxsize=16384)
def _node(d: int, k: int) -> _Node:
    if d == 1:
        count = 2 if k else 1
        return _Node(0, (), count, count, 0)
    halves = [_node(d // 2, j) for j in range(k + 1)]
    sizes = [half.mantissa << half.exponent for half in halves]
    counts = [a * b for a, b in zip(sizes, reversed(sizes), strict=True)]
    shift = max(sum(counts).bit_length() - PREFIX, 0)
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + -(-count >> shift))
    total = offsets.pop() << shift
    exponent = max(total.bit_length() - LIMB + 1, 0)  # one bit short: rounding up may carry
    return _Node(shift, tuple(offsets), total, -(-total >> exponent), exponent)


def rank_bits(d: int, k: int) -> int:
    """Bits of the rank of a point of S(d, k), d a power of two."""
    return (_node(d, k).total - 1).bit_length()


class _Level(NamedTuple):
    """The nodes (d, 0..k) of a depth as tables on one device."""

    keys: Tensor  # all offsets with their pulses above bit KEY, ascending
    offsets: Tensor  # [(k + 1) * (k + 2) / 2], those of a node together
    shift: Tensor  # [k + 1]
    mantissa: Tensor  # [k + 1] of the halves
    exponent: Tensor
    limbs: int  # of a rank of the halves


@lru_cache(maxsize=64)
def _level(d: int, k: int, device: torch.device) -> _Level:
    nodes, halves = [_node(d, j) for j in range(k + 1)], [_node(d // 2, j) for j in range(k + 1)]
    # The device is always stated: loading a model sets another default.
    offsets, pulses, shift, mantissa, exponent = (
        torch.tensor(column, device=device)
        for column in (
            [offset for node in nodes for offset in node.offsets],
            [j for j in range(k + 1) for _ in range(j + 1)],
            [node.shift for node in nodes],
            [half.mantissa for half in halves],
            [half.exponent for half in halves],
        )
    )
    limbs = -(-max(half.total.bit_length() for half in halves) // LIMB)
    return _Level(offsets + (pulses << KEY), offsets, shift, mantissa, exponent, limbs)


# Points <-> ranks. A rank is limbs [L, ...] int64, lowest first.


def rank(points: Tensor, pulses: int) -> Tensor:
    """points [..., D] int with sum |y| = pulses, D a power of two -> rank limbs [L, ...] int64."""
    k = points.abs().long()
    ranks = (points < 0).long().unsqueeze(0)
    d = 1
    while d < points.shape[-1]:
        d *= 2
        level = _level(d, pulses, points.device)
        first, second = k[..., 0::2], k[..., 1::2]
        k = first + second
        limbs = -(-(_node(d, pulses).total - 1).bit_length() // LIMB)
        product = _shift_left(_times(ranks[..., 0::2], level.mantissa[second]), level.exponent[second], limbs)
        offset = level.offsets[_triangle(k) + first].unsqueeze(0)
        offset = torch.cat([offset & MASK, offset >> LIMB])
        ranks = _carry(product + _resize(ranks[..., 1::2], limbs) + _shift_left(offset, level.shift[k], limbs))
    assert bool((k == pulses).all()), "points do not have the stated number of pulses"
    return ranks[..., 0]


def unrank(limbs: Tensor, dim: int, pulses: int) -> Tensor:
    """Inverse of `rank`: points [..., dim] int64. Any bits give some point: files may be damaged."""
    ranks = limbs.unsqueeze(-1)  # limb, ..., node
    k = torch.full(ranks.shape[1:], pulses, device=limbs.device)
    d = dim
    while d > 2:
        level = _level(d, pulses, limbs.device)
        shift = level.shift[k]
        prefix = _shift_right(ranks, shift, 2)
        key = (prefix[0] | (prefix[1] << LIMB)).clamp_(max=(1 << KEY) - 1) + (k << KEY)
        found = torch.searchsorted(level.keys, key, right=True) - 1
        first = found - _triangle(k)
        second = k - first
        offset = level.offsets[found].unsqueeze(0)
        ranks = _carry(ranks - _shift_left(torch.cat([offset & MASK, offset >> LIMB]), shift, len(ranks)))
        mantissa, exponent = level.mantissa[second], level.exponent[second]
        high = _shift_right(ranks, exponent, len(ranks))
        low = ranks - _shift_left(high, exponent, len(ranks))
        quotient, rest = _divide(high, mantissa)
        remainder = _carry(low + _shift_left(rest.unsqueeze(0), exponent, len(ranks)))
        ranks = torch.stack([_resize(quotient, level.limbs), _resize(remainder, level.limbs)], -1).flatten(-2)
        k = torch.stack([first, second], -1).flatten(-2)
        d //= 2
    return _pairs(ranks[0], k)


def _pairs(ranks: Tensor, k: Tensor) -> Tensor:
    """Points [..., 2n] of ranks [..., n] in S(2, k): as `unrank`, in closed form, since most nodes are pairs."""
    first = torch.minimum((ranks + 2) >> 2, k)  # 2 points have no pulse in front, 4 any other number, 2 all of them
    second = k - first
    low = (ranks & 1) == 1
    front = torch.where(second == 0, low, ((ranks + 2) & 2) == 2)
    return torch.stack([torch.where(front, -first, first), torch.where(low, -second, second)], -1).flatten(-2)


def _triangle(k: Tensor) -> Tensor:
    """Where the offsets of k pulses begin."""
    return k * (k + 1) // 2


def _resize(limbs: Tensor, count: int) -> Tensor:
    """With `count` limbs; what is cut off is zero."""
    if len(limbs) >= count:
        return limbs[:count]
    return torch.cat([limbs, limbs.new_zeros(count - len(limbs), *limbs.shape[1:])])


def _carry(limbs: Tensor) -> Tensor:
    """Limbs brought to 0..MASK; they may hold sums or differences."""
    limbs = limbs.clone()
    for i in range(len(limbs) - 1):
        limbs[i + 1] += limbs[i] >> LIMB  # rounds down: a negative limb borrows
        limbs[i] &= MASK
    limbs[-1] &= MASK
    return limbs


def _times(limbs: Tensor, factor: Tensor) -> Tensor:
    """Limbs [L, ...] times factor [...] < 2**LIMB: [L + 1, ...]."""
    product = limbs * factor
    return torch.cat([product & MASK, torch.zeros_like(product[:1])]) + torch.cat(
        [torch.zeros_like(product[:1]), product >> LIMB]
    )


def _divide(limbs: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Quotient [L, ...] and remainder [...] by divisor [...] < 2**LIMB."""
    quotient, rest = torch.empty_like(limbs), torch.zeros_like(divisor)
    for i in range(len(limbs) - 1, -1, -1):
        value = (rest << LIMB) + limbs[i]
        quotient[i] = value // divisor
        rest = value - quotient[i] * divisor
    return quotient, rest


def _shift_left(limbs: Tensor, bits: Tensor, count: int) -> Tensor:
    """Limbs [L, ...] times 2**bits [...], as `count` limbs; limbs may have up to 33 bits."""
    whole, part = bits // LIMB, bits % LIMB
    padded = torch.nn.functional.pad(limbs.movedim(0, -1), (1, 1)).movedim(-1, 0)  # a zero below and above
    moved = padded << part
    shape = (count, *limbs.shape[1:])
    index = torch.arange(count, device=limbs.device).view(-1, *(1,) * bits.dim()) - whole + 1
    inside = index.clamp(0, len(limbs) + 1).expand(shape)
    below = (index - 1).clamp(0, len(limbs) + 1).expand(shape)
    return (moved & MASK).gather(0, inside) + (moved >> LIMB).gather(0, below)


def _shift_right(limbs: Tensor, bits: Tensor, count: int) -> Tensor:
    """Limbs [L, ...] over 2**bits [...], rounded down, the lowest `count` limbs."""
    whole, part = bits // LIMB, bits % LIMB
    padded = torch.nn.functional.pad(limbs.movedim(0, -1), (0, 1)).movedim(-1, 0)
    shape = (count, *limbs.shape[1:])
    index = torch.arange(count, device=limbs.device).view(-1, *(1,) * bits.dim()) + whole
    here = padded.gather(0, index.clamp(max=len(limbs)).expand(shape))
    above = padded.gather(0, (index + 1).clamp(max=len(limbs)).expand(shape))
    return (here >> part) | ((above << (LIMB - part)) & MASK)
