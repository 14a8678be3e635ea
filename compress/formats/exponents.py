"""Store bfloat16 weights without any loss: 8 bits of each as they are, the exponent in fewer bits than its own 8.

The exponents of a trained weight take few values, mostly the same ones: about 2.6 bits of information each (DFloat11,
arXiv 2504.11651). Sign and mantissa have as many bits as they take. All 65,536 patterns come back bit for bit, NaN with
its payload, infinities and subnormal numbers among them.

`coding`:
- "huffman": exponents by Huffman codes of at most 12 bits (compress/numerics/huffman.py), 10.6 to 10.9 bits a weight.
  Each row is a stream of its own, which is decoded apart from the others.
- "ranked": a code of 4 bits, 0 for an exponent of 0, else its distance to `base`: 12 bits a weight, of fixed width,
  from which kernels multiply. Weights with other exponents (about 1 of 3,000) are escapes, stored whole beside.

Stored tensors, for a weight [out, in]:
- `fractions` uint8 [out, in]: the sign << 7 | 7 bits of the mantissa;
- huffman: `lengths` uint8 [256], bits of each exponent's code; `sizes` int16 or, for long rows, int32 [out], the bytes
  of a row; `stream` uint8 [`stream`], the rows behind each other;
- ranked: `codes` uint8 [out, ceil(in / 2)], an even column in the low 4 bits; `escapes` int32 [`escapes`], places
  row * in + column, ascending; `escaped` int16 [`escapes`], their bits. In `fractions` and `codes` an escape is 0.

How many bytes that is depends on the weight: `stream` and `escapes` are counted as it is packed. Before that a plan has
what is usual (`ESTIMATED`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.numerics import checks, huffman

ESTIMATED = True  # the bytes that `estimate` has before a weight is packed may be others
USUAL_BITS = 2.75  # bits of an exponent in a stream
USUAL_ESCAPES = 1 / 3000
RANKS = 15  # exponents behind `base` that have a code
LARGEST_BASE = 255 - RANKS
Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Params:
    coding: Literal["huffman", "ranked"] = "huffman"  # of the exponents
    stream: int = 0  # [bytes] of all rows, huffman
    base: int = 0  # the exponent before the first one with a code, ranked
    escapes: int = 0  # weights that are stored whole, ranked

    def __post_init__(self) -> None:
        if self.coding not in ("huffman", "ranked"):
            raise ValueError(f"coding {self.coding!r} is not huffman or ranked")
        if self.stream < 0 or self.escapes < 0:
            raise ValueError(f"stream {self.stream} or escapes {self.escapes} is negative")
        if not 0 <= self.base <= LARGEST_BASE:
            raise ValueError(f"base {self.base} is not between 0 and {LARGEST_BASE}")


def estimate(coding: Literal["huffman", "ranked"], shape: tuple[int, int]) -> Params:
    """Return the parameters that a weight [out, in] usually has, before it is packed."""
    numel = shape[0] * shape[1]
    if coding == "huffman":
        return Params(coding, stream=math.ceil(USUAL_BITS * numel / 8))
    return Params(coding, escapes=math.ceil(USUAL_ESCAPES * numel))


def is_unpacked(params: Params) -> bool:
    """Return whether no kernel multiplies a weight as it is stored."""
    return params.coding == "huffman"


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    rows, columns = shape
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"fractions": (shape, torch.uint8)}
    if params.coding == "huffman":
        stored["lengths"] = ((huffman.SYMBOLS,), torch.uint8)
        stored["sizes"] = ((rows,), size_type(columns))
        stored["stream"] = ((params.stream,), torch.uint8)
        return stored
    stored["codes"] = ((rows, code_bytes(columns)), torch.uint8)
    if params.escapes:
        stored["escapes"] = ((params.escapes,), torch.int32)
        stored["escaped"] = ((params.escapes,), torch.int16)
    return stored


def size_type(columns: int) -> torch.dtype:
    """Return the type of the bytes of a row: the one that holds the longest row."""
    return torch.int16 if columns * huffman.LIMIT <= 8 * torch.iinfo(torch.int16).max else torch.int32


def row_bytes(columns: int) -> tuple[int, int]:
    """Return the fewest and the most bytes of a row, huffman: each of its codes has 1 to 12 bits."""
    return -(-columns // 8), -(-columns * huffman.LIMIT // 8)


def code_bytes(columns: int) -> int:
    """Return the bytes of the codes of a row, ranked."""
    return (columns + 1) // 2


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Check that codes can be told apart, that rows fill the stream, and that escapes are in the weight; ValueError."""
    if params.coding == "huffman":
        huffman.check_lengths("lengths", tensors["lengths"].cpu())
        sizes = tensors["sizes"]
        checks.within("sizes", sizes, *row_bytes(shape[1]))
        if int(sizes.sum(dtype=torch.int64)) != params.stream:
            raise ValueError(f"sizes do not add up to the {params.stream} bytes of stream")
    elif params.escapes:
        checks.distinct("escapes", tensors["escapes"], shape[0] * shape[1])
        checks.ascending("escapes", tensors["escapes"])


def pack(weight: Tensor, coding: str, encode: Encode = huffman.encode) -> tuple[Params, dict[str, Tensor]]:
    """Return a weight [out, in] bfloat16, any bits, as it is stored. encode: another form of that of huffman.

    Raises ValueError for a weight of 2^31 elements or more, ranked.
    """
    bits = weight.contiguous().view(torch.int16)
    exponents = ((bits >> 7) & 0xFF).to(torch.uint8)
    fractions = ((bits >> 8) & 0x80 | bits & 0x7F).to(torch.uint8)
    counts = torch.bincount(exponents.flatten().int(), minlength=huffman.SYMBOLS).cpu()
    if coding == "huffman":
        lengths = huffman.code_lengths(counts)
        stream, sizes = encode(exponents.cpu(), lengths)
        kept = {"lengths": lengths, "sizes": sizes.to(size_type(weight.shape[1])), "stream": stream}
        tensors = {name: tensor.to(weight.device) for name, tensor in kept.items()}
        return Params("huffman", stream=len(stream)), {"fractions": fractions, **tensors}
    return _pack_ranked(bits, exponents, fractions, _best_base(counts))


def _best_base(counts: Tensor) -> int:
    """Return the base by which most of the counted exponents have codes."""
    sums = torch.cat((counts.new_zeros(1), counts[1:].cumsum(0)))  # [e]: those from 1 to e
    return int((sums[RANKS:] - sums[:-RANKS]).argmax())


def _pack_ranked(bits: Tensor, exponents: Tensor, fractions: Tensor, base: int) -> tuple[Params, dict[str, Tensor]]:
    columns = bits.shape[1]
    if bits.numel() > torch.iinfo(torch.int32).max:
        raise ValueError(f"a weight of {bits.numel()} elements has places beyond int32; set coding: huffman")
    ranks = exponents.to(torch.int16) - base
    is_escape = ((ranks < 1) | (ranks > RANKS)) & (exponents != 0)
    codes = torch.where(is_escape | (exponents == 0), 0, ranks).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, columns % 2))
    tensors = {"fractions": fractions * ~is_escape, "codes": codes[:, ::2] | codes[:, 1::2] << 4}
    places = is_escape.flatten().nonzero()[:, 0]
    if len(places):
        tensors |= {"escapes": places.to(torch.int32), "escaped": bits.flatten()[places]}
    return Params("ranked", base=base, escapes=len(places)), tensors


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`; CheckpointError for a stream that is seen to be damaged."""
    if params.coding == "huffman":
        exponents = _decode_stream(tensors["stream"], tensors["sizes"], tensors["lengths"], shape[1])
        return join(tensors["fractions"], exponents).to(dtype)
    weight = _decode_codes(tensors["fractions"], tensors["codes"], params)
    if params.escapes:
        weight.view(torch.int16).view(-1)[tensors["escapes"].long()] = tensors["escaped"]
    return weight.to(dtype)


def _decode_stream(stream: Tensor, sizes: Tensor, lengths: Tensor, columns: int) -> Tensor:
    """Return the exponents of rows, uint8 [rows, columns]."""
    try:
        return huffman.decode(stream, sizes, lengths, columns)
    except ValueError as error:
        raise CheckpointError(f"{error}; download or write the checkpoint again") from error


def join(fractions: Tensor, exponents: Tensor) -> Tensor:
    """Return bfloat16 numbers of these bytes and exponents, uint8 of the same shape."""
    low, high = fractions.to(torch.int16), exponents.to(torch.int16)
    return ((low & 0x80) << 8 | high << 7 | low & 0x7F).view(torch.bfloat16)


def _decode_codes(fractions: Tensor, codes: Tensor, params: Params) -> Tensor:
    """Return rows bfloat16 [n, in], escapes 0."""
    ranks = torch.stack((codes & 0xF, codes >> 4), -1).flatten(1)[:, : fractions.shape[1]]
    return join(fractions, torch.where(ranks == 0, 0, ranks + params.base).to(torch.uint8))


def decode_rows(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the rows [n] int64 of the weight, [n, in]; nothing else is decoded."""
    fractions = tensors["fractions"][rows]
    if params.coding == "huffman":
        sizes = tensors["sizes"].long()
        own, ends = sizes[rows], sizes.cumsum(0)[rows]
        owner = torch.arange(len(rows), device=rows.device).repeat_interleave(own)
        places = torch.arange(len(owner), device=rows.device) + (ends - own.cumsum(0))[owner]
        exponents = _decode_stream(tensors["stream"][places], own, tensors["lengths"], shape[1])
        return join(fractions, exponents).to(dtype)
    weight = _decode_codes(fractions, tensors["codes"][rows], params)
    if params.escapes:
        own, places = find_escapes(tensors["escapes"], rows, shape[1])
        weight.view(torch.int16)[own, tensors["escapes"][places].long() % shape[1]] = tensors["escaped"][places]
    return weight.to(dtype)


def find_escapes(escapes: Tensor, rows: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return for each escape in these rows [n] int64 which of them it is in, and its number, both int64."""
    first = torch.searchsorted(escapes, (rows * columns).to(torch.int32))
    counts = torch.searchsorted(escapes, (rows * columns + (columns - 1)).to(torch.int32), right=True) - first
    own = torch.arange(len(rows), device=rows.device).repeat_interleave(counts)
    return own, torch.arange(len(own), device=rows.device) + (first - (counts.cumsum(0) - counts))[own]


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    some = torch.arange(rows.start, rows.stop, device=tensors["fractions"].device)
    weight = decode_rows(tensors, params, shape, some, torch.bfloat16)
    return pack(weight[:, columns.start : columns.stop], params.coding)
