"""Store weights of three values, or of two, with a scale for each group of columns of each row.

    w[i, j] = scale[g(j), i] * t[i, j], with t in {-1, 0, 1}, or in {-1, 1}

`packing` says how t lies in bytes:
- `base3`: five in a byte, 1.6 bits each. The byte is a signed number b, the fraction b / 256 in balanced base 3:
  b = round(256 / 243 * sum over k of t[k] 3^(4 - k)). Digits come back without a division or a table: t[k] is 1 where
  b > 42, -1 where b < -42, and the next digit is that of 3 b modulo 256, again a signed byte. 243 bytes are used;
- `planar`: four in a byte, fields of 2 bits that hold t + 1, lowest first, for speed;
- `binary`: eight in a byte, of t in {-1, 1} alone, a bit that holds (t + 1) / 2, lowest first.

Stored tensors (N = out_features padded to a multiple of 16, U = in_features over the columns of a unit, rounded up):
- `codes` uint8 [N / 16, U, 64], units of sixteen rows. Byte 4 r + c of a unit belongs to row r; its digit k belongs to
  column 4 k + c of the unit, which has 4 columns for each digit of a byte: 20, 16 or 32;
- `scales` float16, bfloat16 or float32 [G, N] for G groups of `group_size` columns (one for -1: the whole row), or
  [1, 1] with `tensor_scale`, as in BitNet.

So four neighbouring bytes of a vector hold four neighbouring columns of one row: what instructions that sum products of
bytes take in, with no sums across rows, and a word of a row on a GPU. Rows can be cut anywhere, columns at groups and
at parts of groups that are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from compress.formats import planar

BASE3, PLANAR, BINARY = "base3", "planar", "binary"
BYTE_DIGITS = {BASE3: 5, PLANAR: 4, BINARY: 8}
FIELD_BITS = {PLANAR: 2, BINARY: 1}
ROW_MULTIPLE = 16
TOGETHER = 4  # neighbouring columns of neighbouring bytes
LARGEST_ZERO = 42  # the largest signed byte whose first digit is 0
SCALE_DTYPES = ("float16", "bfloat16", "float32")
DECODE_CHUNK = 1 << 22  # weights decoded at a time: bounds the temporaries to a few tens of MB


@dataclass(frozen=True)
class Params:
    packing: str  # base3, planar or binary
    group_size: int  # [columns] that share a scale; -1: the whole row
    scale_dtype: str = "float16"  # of the scales
    tensor_scale: bool = False  # one scale for the whole weight

    def __post_init__(self) -> None:
        if self.packing not in BYTE_DIGITS:
            raise ValueError(f"packing {self.packing!r} is not one of {', '.join(BYTE_DIGITS)}")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither positive nor -1 (the whole row)")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype {self.scale_dtype!r} is not one of {', '.join(SCALE_DTYPES)}")
        if self.tensor_scale and self.group_size != -1:
            raise ValueError(f"tensor_scale needs group_size -1, not {self.group_size}")

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        return TOGETHER * BYTE_DIGITS[self.packing]

    def group(self, in_features: int) -> int:
        """Columns of a group, the whole row if group_size is -1."""
        return in_features if self.group_size == -1 else self.group_size

    def groups(self, in_features: int) -> int:
        """Scales of a row."""
        return -(-in_features // self.group(in_features))


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what is stored for a weight [out, in]."""
    blocks = -(-shape[0] // ROW_MULTIPLE)
    scales = (1, 1) if params.tensor_scale else (params.groups(shape[1]), ROW_MULTIPLE * blocks)
    return {
        "codes": ((blocks, -(-shape[1] // params.unit), ROW_MULTIPLE * TOGETHER), torch.uint8),
        "scales": (scales, getattr(torch, params.scale_dtype)),
    }


def pack(trits: Tensor, scales: Tensor, params: Params) -> dict[str, Tensor]:
    """Return stored tensors of trits [out, in] int8 and scales [out, groups], or [1, 1] with `tensor_scale`.

    Scales must already be representable in `scale_dtype`: trits that were chosen for other scales would be wrong.
    """
    rows, columns = trits.shape
    stored = scales.to(getattr(torch, params.scale_dtype))
    assert torch.equal(stored.to(scales.dtype), scales), "scales were not rounded to their storage type"
    more = -rows % ROW_MULTIPLE
    digits = torch.nn.functional.pad(trits, (0, -columns % params.unit, 0, more), value=-1)
    # block, row, unit, digit, column -> block, unit, row, column, digit
    units = digits.unflatten(0, (-1, ROW_MULTIPLE)).unflatten(2, (-1, BYTE_DIGITS[params.packing], TOGETHER))
    octets = _to_bytes(units.permute(0, 2, 1, 4, 3), params.packing).flatten(2)
    if not params.tensor_scale:
        stored = torch.nn.functional.pad(stored.T, (0, more))
    return {"codes": octets.contiguous(), "scales": stored.contiguous()}


def unpack(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Inverse of `pack` without the padding: trits [out, in] int8, scales [out, groups] or [1, 1]."""
    trits = _to_trits(tensors["codes"], params.packing)[: shape[0], : shape[1]]
    return trits, tensors["scales"] if params.tensor_scale else tensors["scales"].T[: shape[0]]


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in]; computed in float32, rounded once to `dtype`."""
    codes = tensors["codes"]
    weight = torch.empty(shape, dtype=dtype, device=codes.device)
    step = max(1, DECODE_CHUNK // (ROW_MULTIPLE * max(1, shape[1])))
    for block in range(0, len(codes), step):
        rows = slice(ROW_MULTIPLE * block, min(ROW_MULTIPLE * (block + step), shape[0]))
        trits = _to_trits(codes[block : block + step], params.packing)[: rows.stop - rows.start, : shape[1]]
        scales = tensors["scales"] if params.tensor_scale else tensors["scales"][:, rows].T
        weight[rows] = trits * _widen(scales, params, shape[1])
    return weight


def has_rows(params: Params) -> bool:
    """Return whether each row has all that it is made of to itself."""
    return not params.tensor_scale


def decode_rows(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return rows [n] int64 of the weight, [n, in]; `has_rows` must hold."""
    by_row = tensors["codes"].unflatten(2, (ROW_MULTIPLE, TOGETHER))
    codes = by_row[rows // ROW_MULTIPLE, :, rows % ROW_MULTIPLE]  # [n, units, 4]: blocks of one row
    trits = _to_trits(codes, params.packing)[:, : shape[1]]
    return (trits * _widen(tensors["scales"][:, rows].T, params, shape[1])).to(dtype)


def join_rows(parts: Sequence[Mapping[str, Tensor]], params: Params) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows, in order; all parts but the last have 16 n rows."""
    return {
        name: torch.cat([part[name] for part in parts], dim=0 if name == "codes" else 1) for name in ("codes", "scales")
    }


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Refuse bytes that no packing writes: the spare ones of base 3, and fields of 2 bits that hold 3."""
    codes = tensors["codes"]
    if params.packing == PLANAR:
        wrong = codes & codes >> 1 & 0x55
    elif params.packing == BASE3:
        wrong = _spare_bytes().to(codes.device)[codes.int()]
    else:
        return
    if bool(wrong.any()):
        raise ValueError(f"codes holds {int(codes[wrong.bool()][0])}, which is no byte of packing {params.packing}")


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract.

    Where the columns do not begin with a group, groups become smaller, down to LEAST_GROUP columns.
    """
    group = planar.group_from(params.group_size, columns.start)
    chosen = Params(params.packing, group, params.scale_dtype, params.tensor_scale)
    blocks = slice(rows.start // ROW_MULTIPLE, -(-rows.stop // ROW_MULTIPLE))
    first = rows.start % ROW_MULTIPLE
    trits = _to_trits(tensors["codes"][blocks], params.packing)
    part = trits[first : first + len(rows), columns.start : columns.stop]
    scales = tensors["scales"]
    if not params.tensor_scale:
        starts = torch.arange(columns.start, columns.stop, chosen.group(len(columns)), device="cpu")
        owner = (starts // params.group(shape[1])).to(scales.device)
        scales = scales[:, rows.start : rows.stop].T[:, owner]
    return chosen, pack(part, scales, chosen)


def _widen(scales: Tensor, params: Params, columns: int) -> Tensor:
    """Return float32 scales [rows, columns] of scales [rows, groups], or [rows or 1, 1] if columns share one."""
    wide = scales.float()
    return wide if wide.shape[1] == 1 else wide.repeat_interleave(params.group(columns), 1)[:, :columns]


def _to_bytes(digits: Tensor, packing: str) -> Tensor:
    """Return the bytes of digits [..., digits of a byte] int8, uint8 [...]."""
    if packing == BASE3:
        powers = torch.tensor([81, 27, 9, 3, 1], dtype=torch.int16, device=digits.device)
        return _base3_bytes().to(digits.device)[(digits * powers).sum(-1).int() + 121]
    bits = FIELD_BITS[packing]
    codes = (digits + 1).to(torch.uint8) if bits == 2 else (digits > 0).to(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=digits.device)
    return (codes << shifts).sum(-1, dtype=torch.uint8)


def _to_trits(codes: Tensor, packing: str) -> Tensor:
    """Return all trits of codes [blocks, units, 4 rows of a block], int8 [rows, columns] with the padding."""
    count = BYTE_DIGITS[packing]
    rows = codes.shape[2] // TOGETHER
    out = torch.empty(len(codes), rows, codes.shape[1], count, TOGETHER, dtype=torch.int8, device=codes.device)
    octets = codes.unflatten(2, (rows, TOGETHER)).transpose(1, 2)
    signed = octets.view(torch.int8) if packing == BASE3 else octets
    for k in range(count):
        if packing == BASE3:
            out[:, :, :, k] = (signed > LARGEST_ZERO).to(torch.int8) - (signed < -LARGEST_ZERO).to(torch.int8)
            signed = signed * 3  # modulo 256
        elif packing == PLANAR:
            out[:, :, :, k] = ((octets >> 2 * k) & 3).to(torch.int8) - 1
        else:
            out[:, :, :, k] = 2 * ((octets >> k) & 1).to(torch.int8) - 1
    return out.flatten(2).flatten(0, 1)


@cache
def _base3_bytes() -> Tensor:
    """Return the byte of each number from -121 to 121 of five digits, uint8 [243]."""
    with torch.inference_mode(False):
        numbers = torch.arange(-121, 122, dtype=torch.float64, device="cpu")
        return (numbers * 256 / 243).round().to(torch.int8).view(torch.uint8)


@cache
def _spare_bytes() -> Tensor:
    """Return which bytes stand for no number of five digits, bool [256]."""
    with torch.inference_mode(False):
        spare = torch.ones(256, dtype=torch.bool, device="cpu")
        spare[_base3_bytes().int()] = False
        return spare
