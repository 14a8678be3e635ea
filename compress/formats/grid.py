"""Store points of a table of values, with a scale for each block: the data types of FP4 and FP8 hardware, NF4, FP4.

    w[i, j] = VALUES[code[i, j]] * (scale[i // block_rows, j // block_columns] * tensor_scale)

The product of the scales is taken first, in float32. `values` names the table:
- `e2m1`: +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, bit 3 the sign: FP4 of the OCP (MXFP4, NVFP4);
- `e4m3`: float8_e4m3fn, up to 448 (FP8, MXFP8);
- `nf4`: NF4 of QLoRA (arXiv 2305.14314), quantiles of a normal distribution in [-1, 1];
- `fp4`: FP4 of bitsandbytes, another table than e2m1, in [-1, 1];
- `dynamic8`: dynamic 8-bit numbers (arXiv 2110.02861), in [-1, 1];
- `iq4_nl`: 16 integers from -127 to 113, those of llama.cpp's IQ4_NL and IQ4_XS; scales may be negative.

`scale_type` is that of the scales: `e8m0` (powers of two, MX), `e4m3` (NVFP4), float16, bfloat16, float32, or `nested`:
scales coded in turn, as double quantization of QLoRA, scale = mean + DYNAMIC8[code] * size[k // 256] for the k-th scale
counted row by row.

Named types: MXFP4 is e2m1, blocks of 32, e8m0; MXFP8 e4m3, 32, e8m0; NVFP4 e2m1, 16, e4m3 with a tensor scale; IQ4_NL
iq4_nl, 32, float16; FP8 e4m3 with a float32 scale for the tensor, for each row, or for 128 x 128 weights. bits per
weight = 4 or 8, plus about the bits of a scale / (block_rows block_columns).

Stored tensors (R = ceil(out / block_rows), C = ceil(in / block_columns)):
- `codes` uint8 [out, ceil(in / 2)] of 4 bits, the even column in the low half of a byte, as engines read it;
  [out, in] of 8 bits: float8_e4m3fn for e4m3, else uint8;
- `scales` [R, C] of the scale's type: float8_e4m3fn for e4m3; uint8 for e8m0 (2^(byte - 127)) and for nested;
- `tensor_scale` float32 [1], only with `tensor_scale`;
- `scale_sizes` float32 [ceil(R C / 256)] and `scale_mean` float32 [1], nested only.

Rows can be cut at whole blocks of rows, columns at whole blocks of columns; a weight with nested scales cannot be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

E2M1, E4M3, NF4, FP4, DYNAMIC8, IQ4_NL = "e2m1", "e4m3", "nf4", "fp4", "dynamic8", "iq4_nl"
VALUE_BITS = {E2M1: 4, NF4: 4, FP4: 4, IQ4_NL: 4, E4M3: 8, DYNAMIC8: 8}
E8M0, NESTED, TENSOR_SCALE = "e8m0", "nested", "tensor_scale"
SCALE_DTYPES = {
    **{E8M0: torch.uint8, E4M3: torch.float8_e4m3fn, NESTED: torch.uint8},
    **{"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32},
}
SCALES_PER_SIZE = 256  # nested scales that share a size
E8M0_BIAS = 127
E8M0_LARGEST = 246  # exponents above it make numbers that float32 does not hold, and 255 is NaN
DECODE_CHUNK = 1 << 22  # weights decoded at a time: bounds the float32 temporaries to a few tens of MB
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = {E2M1: 6.0, E4M3: 448.0, NF4: 1.0, FP4: 1.0, DYNAMIC8: 1.0, IQ4_NL: 127.0}  # point of each table
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


@dataclass(frozen=True)
class Params:
    values: str  # the table of values: e2m1, e4m3, nf4, fp4, dynamic8 or iq4_nl
    block_columns: int  # [columns] that share a scale; -1: the whole row
    scale_type: str  # of the scales: e8m0, e4m3, nested, float16, bfloat16 or float32
    block_rows: int = 1  # [rows] that share a scale; -1: all
    tensor_scale: bool = False  # a float32 factor of all scales is stored

    def __post_init__(self) -> None:
        if self.values not in VALUE_BITS:
            raise ValueError(f"values {self.values!r} is not one of {', '.join(VALUE_BITS)}")
        if self.scale_type not in SCALE_DTYPES:
            raise ValueError(f"scale_type {self.scale_type!r} is not one of {', '.join(SCALE_DTYPES)}")
        for name, size in (("block_columns", self.block_columns), ("block_rows", self.block_rows)):
            if size != -1 and size < 1:
                raise ValueError(f"{name} {size} is neither positive nor -1 (all)")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return VALUE_BITS[self.values]

    @property
    def is_whole(self) -> bool:
        """Whether all weights share a scale."""
        return self.block_rows == self.block_columns == -1

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share a scale in a weight [out, in]."""
        rows, columns = shape
        return (
            rows if self.block_rows == -1 else self.block_rows,
            columns if self.block_columns == -1 else self.block_columns,
        )

    def blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return how many blocks lie above and beside each other: the shape of the scales."""
        rows, columns = self.block(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)


@cache
def value_table(values: str) -> Tensor:
    """Return the value of each code, float32 [16] or [256]; those of e4m3 that are NaN are NaN."""
    with torch.inference_mode(False):
        if values == E4M3:
            return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        if values in (NF4, IQ4_NL):
            return torch.tensor(NF4_LEVELS if values == NF4 else IQ4_LEVELS, dtype=torch.float32)
        if values == DYNAMIC8:
            return _dynamic_table()
        magnitudes = torch.tensor(E2M1_MAGNITUDES) if values == E2M1 else torch.tensor(FP4_TWELFTHS) / 12
        return torch.cat((magnitudes, -magnitudes))


def nearest_floats(units: Tensor, values: str) -> Tensor:
    """Return the points of e2m1 or e4m3 nearest to float32 of any shape, float32; beyond the largest that one.

    Of two points that are as near it is the one with the even mantissa, as hardware rounds.
    """
    top = LARGEST[values]
    if values == E4M3:
        return units.clamp(-top, top).to(torch.float8_e4m3fn).float()
    size = units.abs()  # steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return units.div(step).round_().mul_(step).clamp_(-top, top)


def _dynamic_table() -> Tensor:
    """Return the 256 signed dynamic numbers, ascending: +-10^(i - 6) times midpoints of 2^i parts of [0.1, 1]."""
    positive = []
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        positive.append(10.0 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2)
    magnitudes = torch.cat(positive)
    return torch.cat((magnitudes, -magnitudes, torch.tensor([0.0, 1.0]))).sort().values


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what is stored for a weight [out, in]."""
    blocks = params.blocks(shape)
    columns = -(-shape[1] * params.bits // 8)
    code_dtype = torch.float8_e4m3fn if params.values == E4M3 else torch.uint8
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]]
    stored = {"codes": ((shape[0], columns), code_dtype), "scales": (blocks, SCALE_DTYPES[params.scale_type])}
    if params.tensor_scale:
        stored[TENSOR_SCALE] = ((1,), torch.float32)
    if params.scale_type == NESTED:
        stored["scale_sizes"] = ((-(-blocks[0] * blocks[1] // SCALES_PER_SIZE),), torch.float32)
        stored["scale_mean"] = ((1,), torch.float32)
    return stored


def pack(codes: Tensor, scales: Mapping[str, Tensor], params: Params) -> dict[str, Tensor]:
    """Return stored tensors of codes [out, in] uint8 and of `scales`, all other stored tensors by name."""
    if params.bits == 4:
        even, odd = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(2)
        stored = even | odd << 4
    else:
        stored = codes.contiguous()
    return {"codes": stored.view(torch.float8_e4m3fn) if params.values == E4M3 else stored, **scales}


def unpack_codes(stored: Tensor, params: Params, columns: int) -> Tensor:
    """Return the codes [rows, columns] uint8 of some rows of `codes`."""
    octets = stored.view(torch.uint8)
    if params.bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), 2).flatten(1)[:, :columns]


def factors(tensors: Mapping[str, Tensor], params: Params) -> Tensor:
    """Return the factor of each block, float32 [R, C]: its scale as stored, times the tensor's."""
    scales = tensors["scales"]
    if params.scale_type == E8M0:
        wide = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - E8M0_BIAS)
    elif params.scale_type == NESTED:
        sizes = tensors["scale_sizes"].repeat_interleave(SCALES_PER_SIZE)[: scales.numel()].view(scales.shape)
        wide = value_table(DYNAMIC8).to(scales.device)[scales.int()] * sizes + tensors["scale_mean"]
    else:
        wide = scales.float()
    return wide * tensors["tensor_scale"] if params.tensor_scale else wide


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in]; computed in float32, rounded once to `dtype`."""
    codes, scales = tensors["codes"], factors(tensors, params)
    rows, columns = params.block(shape)
    table = value_table(params.values).to(codes.device)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    step = max(1, DECODE_CHUNK // max(1, shape[1]))
    for start in range(0, shape[0], step):
        part = slice(start, min(start + step, shape[0]))
        owner = torch.arange(part.start, part.stop, device=codes.device) // rows
        wide = scales[owner].repeat_interleave(columns, 1)[:, : shape[1]]
        out[part] = table[unpack_codes(codes[part], params, shape[1]).int()].mul_(wide)
    return out


def has_rows(params: Params) -> bool:
    """Return whether each row has all that it is made of to itself, but for the scale of the tensor."""
    return params.block_rows == 1 and params.scale_type != NESTED


def decode_rows(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return rows [n] int64 of the weight, [n, in]; `has_rows` must hold."""
    part = {
        name: tensor if name == TENSOR_SCALE else tensor.view(torch.uint8)[rows].view(tensor.dtype)
        for name, tensor in tensors.items()
    }
    return decode(part, params, (len(rows), shape[1]), dtype)


def fixed_tensors(params: Params) -> tuple[str, ...]:
    """Return the stored tensors that are those of other linears, too: no training may change them."""
    return (TENSOR_SCALE,) if params.tensor_scale else ("scales",) if params.is_whole else ()


def join_rows(parts: Sequence[Mapping[str, Tensor]], params: Params) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows; `has_rows` must hold, and tensor scales be equal."""
    shared = {name: tensor for name, tensor in parts[0].items() if name == TENSOR_SCALE}
    assert all(torch.equal(part[name], tensor) for part in parts for name, tensor in shared.items())
    octets = {
        name: torch.cat([part[name].view(torch.uint8) for part in parts]) for name in parts[0] if name not in shared
    }
    return {name: tensor.view(parts[0][name].dtype) for name, tensor in octets.items()} | shared


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Refuse exponents that are NaN or too large, and a tensor scale that is not above 0."""
    if params.scale_type == E8M0 and bool((tensors["scales"] > E8M0_LARGEST).any()):
        raise ValueError("scales holds an exponent above what float32 can multiply")
    if params.tensor_scale and not float(tensors["tensor_scale"]) > 0:
        raise ValueError(f"tensor_scale is {float(tensors['tensor_scale']):g}, which is not above 0")


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    size = params.block(shape)
    for name, part, one, whole in (("row", rows, size[0], shape[0]), ("column", columns, size[1], shape[1])):
        if part.start % one or (part.stop % one and part.stop != whole):
            at = part.start if part.start % one else part.stop
            raise ValueError(f"{name} {at} lies within a block of {one} {name}s")
    if params.scale_type == NESTED and (len(rows), len(columns)) != shape:
        raise ValueError("nested scales are shared across the weight")
    codes = unpack_codes(tensors["codes"][rows.start : rows.stop], params, shape[1])
    down, across = (slice(x.start // one, -(-x.stop // one)) for x, one in zip((rows, columns), size, strict=True))
    scales = tensors["scales"][down, across]
    others = {name: tensor for name, tensor in tensors.items() if name not in ("codes", "scales")}
    kept = codes[:, columns.start : columns.stop].contiguous()
    return params, pack(kept, {"scales": scales.contiguous(), **others}, params)
