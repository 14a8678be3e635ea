"""Trellis-coded weights: each weight is computed from a window of `state_bits` bits of its column's bit stream.

    w[r, c] = scale * row_scale[r] * code(state[r, c])

A column is cut into tiles of `tile_rows` rows. The bits of a tile form a circular stream, bits * tile_rows long, and
the state of a weight is the window of it that ends with the weight's own bits, so that every weight decodes without
its neighbours and takes exactly `bits` bits (bitshift trellis of QTIP, arXiv 2406.11235, with windows as EXL3 has
them). With halves and quarters of a bit, the first i rows of a tile have i * bits bits, rounded down: rows take one and
two bits in turn at 1.5 bits, as in EXL3, and one row in four takes two at 1.25. Only `mul1` has these. The stream runs
along the rows, not through a square of 16 x 16 as there: the column loop can then feed back the error of every single
column, and a kernel meets the same shift for all columns of a row. Codes of a state s:

- `mul1`: the sum of the four bytes of s * 0x83DCD12D mod 2^32, less 510, over 147.7: near Gaussian, integer until the
  division, so that an int8 dot product can sum it;
- `1mad`: the same with s * 34038481 + 76625530 and 147.8005;
- `3inst`, `mcg`: the two halves of (s * 89226354 + 64248484) or (s * 0xCBAC1FED), masked with 0x8FFF8FFF and xored with
  0x3B603B60, added as float16;
- `hyb`: two rows at a time, from a stored table [512, 2] float16 by bits 6..14 of s * (s + 1); bit 15 is the sign of
  the first of the two.

Stored tensors (N = out_features padded to whole tiles):
- `words` int16 [N * bits / 16, in_features]: the stream of a tile from its first row on, first bit highest, 16 bits a
  word; the words of one column lie below each other, so that consecutive columns are contiguous;
- `scale` float32 [1]; `row_scales` float16 [N] where `row_scales` is set; `table` float16 [512, 2] for `hyb`.
Rows can be cut at multiples of `tile_rows`, columns anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

DECODE_CHUNK = 1 << 21  # weights decoded at a time: bounds the int64 temporaries to some tens of MB
ROW_MULTIPLE = 16  # tile_rows is one: the stream of a tile is whole words for every whole number of bits
PARTS = 4  # into which a bit is divided
PARTIAL_BITS = tuple(n / PARTS for n in range(PARTS, 4 * PARTS) if n % PARTS)
PARTIAL_CODE = "mul1"  # the code that has them
MAX_TILE_ROWS = 256
MAX_STATE_BITS = 16
HYB_ENTRIES, HYB_LOW_BIT = 512, 6
BYTE_SUMS = {"mul1": (0x83DCD12D, 0, 147.7), "1mad": (34038481, 76625530, 147.8005)}  # factor, addend, divisor
BYTE_SUM_CENTRE = 510  # half of the largest sum of four bytes
HALVES = {"3inst": (89226354, 64248484), "mcg": (0xCBAC1FED, 0)}  # factor, addend
CODES = (*BYTE_SUMS, *HALVES, "hyb")
ROW_FACTORS = ("scale", "row_scales")


@dataclass(frozen=True)
class Params:
    bits: int | float  # [bits] of one weight: 1 to 8, or one of PARTIAL_BITS
    state_bits: int  # [bits] of the window that decodes to a weight
    tile_rows: int  # [rows] of one circular stream
    code: str = "mul1"  # how a window becomes a number: one of CODES
    row_scales: bool = False  # a scale for each row, beside that of the tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole(self.bits))
        if self.bits not in (*range(1, 9), *PARTIAL_BITS):
            raise ValueError(f"bits {self.bits} is not one of 1..8, nor a multiple of 0.25 between 1 and 4")
        if self.code not in CODES:
            raise ValueError(f"code {self.code!r} is not one of {', '.join(CODES)}")
        if self.bits in PARTIAL_BITS and self.code != PARTIAL_CODE:
            raise ValueError(f"code {self.code!r} has no parts of a bit; set code: {PARTIAL_CODE}, or whole bits")
        if not 2 * self.symbol_bits <= self.state_bits <= MAX_STATE_BITS:
            low = math.ceil(2 * self.symbol_bits)
            asked = f"code {self.code!r} at {self.bits} bits"
            if low > MAX_STATE_BITS:
                raise ValueError(f"bits {self.bits} is too many for code {self.code!r}")
            raise ValueError(f"state_bits {self.state_bits} is not one of {low}..{MAX_STATE_BITS}, which {asked} needs")
        unit = row_multiple(self.bits)
        if self.tile_rows % unit or not 0 < self.tile_rows <= MAX_TILE_ROWS:
            raise ValueError(f"tile_rows {self.tile_rows} is not a multiple of {unit} up to {MAX_TILE_ROWS}")
        if self.tile_rows * self.bits < self.state_bits:
            raise ValueError(f"tile_rows {self.tile_rows} has fewer bits than state_bits {self.state_bits}")

    @property
    def vector_dim(self) -> int:
        """Rows that one state gives."""
        return 2 if self.code == "hyb" else 1

    @property
    def symbol_bits(self) -> int | float:
        """Bits from one state to the next; with parts of a bit, the mean of two or four steps."""
        return self.bits * self.vector_dim

    @property
    def tile_words(self) -> int:
        """Words of one circular stream."""
        return count_words(self, self.tile_rows)


def whole(bits: float) -> int | float:
    """Return a whole number as an integer, so that 2.0 is stored and fingerprinted like 2."""
    return int(bits) if isinstance(bits, float) and bits.is_integer() else bits


def row_multiple(bits: float) -> int:
    """Return the rows whose bits are whole words at this number of bits a weight."""
    return ROW_MULTIPLE * len(step_bits(bits))


def step_bits(symbol_bits: float) -> tuple[int, ...]:
    """Return the new bits of the steps of a path, which take turns; their mean is `symbol_bits`.

    There are as many as make whole bits, and those with a bit more come last: 1.5 gives (1, 2), 1.75 (1, 2, 2, 2).
    """
    count, turns = float(symbol_bits).as_integer_ratio()
    return tuple((i + 1) * count // turns - i * count // turns for i in range(turns))


def count_words(params: Params, rows: int) -> int:
    """Return the words of a column's rows, of which there are whole tiles."""
    return int(rows * params.bits) // 16


def padded_rows(params: Params, out_features: int) -> int:
    return -(-out_features // params.tile_rows) * params.tile_rows


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    rows = padded_rows(params, shape[0])
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "words": ((count_words(params, rows), shape[1]), torch.int16),
        "scale": ((1,), torch.float32),
    }
    if params.row_scales:
        stored["row_scales"] = ((rows,), torch.float16)
    if params.code == "hyb":
        stored["table"] = ((HYB_ENTRIES, 2), torch.float16)
    return stored


def states_table(params: Params, table: Tensor | None = None) -> Tensor:
    """What each state emits, [2^state_bits, vector_dim] float32; `table` is the stored one of `hyb`."""
    if table is None:
        return _compute_table(params.code, params.state_bits)
    state = torch.arange(1 << params.state_bits, device=table.device)
    hashed = state * (state + 1)
    values = table.float()[(hashed >> HYB_LOW_BIT) & (HYB_ENTRIES - 1)]
    values[:, 0] *= 1 - 2 * ((hashed >> 15) & 1)
    return values


@cache
def _compute_table(code: str, state_bits: int) -> Tensor:
    state = torch.arange(1 << state_bits, device="cpu")  # loading may have made meta the default device
    if code in BYTE_SUMS:
        factor, addend, divisor = BYTE_SUMS[code]
        word = (state * factor + addend) & 0xFFFFFFFF
        total = torch.stack([(word >> shift) & 0xFF for shift in (0, 8, 16, 24)]).sum(0)
        return ((total - BYTE_SUM_CENTRE).double() / divisor).float()[:, None]
    factor, addend = HALVES[code]
    word = ((state * factor + addend) & 0x8FFF8FFF) ^ 0x3B603B60
    halves = torch.stack([word & 0xFFFF, word >> 16]).to(torch.int32).to(torch.int16).view(torch.float16)
    return (halves[0].float() + halves[1].float()).half().float()[:, None]


def pack(
    states: Tensor, scale: float, params: Params, row_scales: Tensor | None, table: Tensor | None
) -> dict[str, Tensor]:
    """states [padded rows / vector_dim, in] of closed paths, any integer type -> stored tensors.

    row_scales [padded rows] float16 and table [512, 2] float16 where the parameters ask for them.
    """
    tile, columns = params.tile_rows // params.vector_dim, states.shape[1]
    step = tile * max(1, DECODE_CHUNK // int(tile * columns * params.symbol_bits))
    stored = {
        "words": torch.cat([_words(part, params) for part in states.split(step)]),
        "scale": torch.tensor([scale], dtype=torch.float32, device=states.device),
    }
    if row_scales is not None:
        stored["row_scales"] = row_scales
    if table is not None:
        stored["table"] = table
    return stored


def _words(states: Tensor, params: Params) -> Tensor:
    """int16 [words, columns] of whole tiles: the new bits of every step, first bit highest."""
    turns = step_bits(params.symbol_bits)
    bits = sum(turns)
    kept = states[:: len(turns)] & ((1 << turns[0]) - 1)
    for i, new in enumerate(turns[1:], 1):
        kept = kept << new | states[i :: len(turns)] & ((1 << new) - 1)
    if 16 % bits:  # symbols lie across words
        shifts = torch.arange(bits - 1, -1, -1, device=states.device)
        kept, bits = ((kept[:, None] >> shifts[:, None]) & 1).reshape(-1, states.shape[1]), 1  # tiles follow each other
    parts = kept.reshape(-1, 16 // bits, states.shape[1])
    words = torch.zeros_like(parts[:, 0], dtype=torch.int32)
    for part in parts.unbind(1):
        words = (words << bits) | part
    return (words - ((words & 0x8000) << 1)).to(torch.int16)


def unpack(words: Tensor, params: Params) -> Tensor:
    """States [padded rows / vector_dim, in] int64 from whole tiles of words."""
    steps = params.tile_rows // params.vector_dim
    tiles = words.view(-1, params.tile_words, words.shape[1]).long() & 0xFFFF
    pairs = tiles.roll(1, 1) << 16 | tiles  # tile, word: the word before it, and itself
    ends = torch.arange(1, steps + 1, device=words.device) * int(PARTS * params.symbol_bits) // PARTS
    index = (ends - 1) // 16  # the word with a window's last bit
    states = (pairs[:, index] >> ((index + 1) * 16 - ends)[:, None]) & ((1 << params.state_bits) - 1)
    return states.view(-1, words.shape[1])


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    out_features, in_features = shape
    words = tensors["words"]
    table = states_table(params, tensors.get("table")).to(words.device) * tensors["scale"]
    rows = tensors["row_scales"].float() if params.row_scales else None
    weight = torch.empty(out_features, in_features, dtype=dtype, device=words.device)
    tile_words = params.tile_words
    step = max(1, DECODE_CHUNK // (in_features * params.tile_rows))  # tiles
    for first in range(0, words.shape[0] // tile_words, step):
        states = unpack(words[first * tile_words : (first + step) * tile_words], params)
        values = table[states].transpose(1, 2).reshape(-1, in_features)
        start = first * params.tile_rows
        values = values[: out_features - start]
        if rows is not None:
            values *= rows[start : start + len(values), None]
        weight[start : start + len(values)] = values
    return weight


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    tile = params.tile_rows
    if rows.start % tile or (rows.stop % tile and rows.stop != shape[0]):
        raise ValueError(f"rows {rows.start} to {rows.stop} are not whole tiles of {tile} rows")
    stored = slice(rows.start, padded_rows(params, rows.stop))
    words = slice(count_words(params, stored.start), count_words(params, stored.stop))
    part = {**tensors, "words": tensors["words"][words, columns.start : columns.stop]}
    if params.row_scales:
        part["row_scales"] = tensors["row_scales"][stored]
    return params, {name: tensor.contiguous() for name, tensor in part.items()}
