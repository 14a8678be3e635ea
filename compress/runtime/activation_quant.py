"""Quantize the inputs of a linear, as `Activations` (compress/types) says.

    q = round(clamp(x / s, -Q, Q))        x ~ s q

Q is 2^(bits - 1) - 1, or 448 with numbers of fp8 in place of integers. s is clip max|x| / Q of each token, so that a
token's q depend on nothing but the token, or the stored `in_scale`, float32 [1], for which `LargestInput` runs over the
calibration data. A token that holds a NaN or an infinity has the scale NaN: so have its outputs, and no others.

In the types of tensor cores, blocks of consecutive inputs have a scale b of their own:

    x ~ s b p        q = b p

| type | block | p | b | s |
|---|---|---|---|---|
| nvfp4 | 16 | e2m1 | e4m3(max|x| / 6 / s) | max|x| / (6 448) of the token, or as calibrated |
| mxfp4 | 32 | e2m1 | 2^(floor(log2 max|x|) - 2) | 1 |
| mxfp8 | 32 | e4m3 | 2^(floor(log2 max|x|) - 8) | 1 |
| fp8-block | 128 | e4m3 | max|x| / 448 in float32 | 1 |

Numbers are rounded to the nearest point of e2m1 or e4m3, of two to the even one,
what is larger than the largest becomes that. The scale of an nvfp4 block that e4m3 rounds to 0 makes it zeros. The last
block of a token may be shorter.

Other types are files of compress/papers/inputs, which round a token as a whole in floating point, by `round_inputs`.

Exponents follow the OCP's specification of MX, so that the largest of a block may be one that saturates. Engines differ
in them: some take the next one where max|x| is 1.75 powers of two or more, some wherever max|x| would saturate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compress import plugins
from compress.errors import NumericalError
from compress.formats import grid
from compress.types import INPUT_BLOCKS, Activations

FP8 = torch.float8_e4m3fn
FP8_LARGEST, FP4_LARGEST = grid.LARGEST[grid.E4M3], grid.LARGEST[grid.E2M1]
FP8_HALF_STEP, FP4_HALF_STEP = 16.0, 1.0  # half the distance of the two largest numbers
E8M0_LEAST = -127  # exponent
NUMBERS = {"nvfp4": grid.E2M1, "mxfp4": grid.E2M1, "mxfp8": grid.E4M3, "fp8-block": grid.E4M3}  # type -> its points
KEPT = {grid.E2M1: FP4_LARGEST + FP4_HALF_STEP, grid.E4M3: FP8_LARGEST + FP8_HALF_STEP}  # the most that rounds to it
POINT_EXPONENT = {grid.E2M1: 2, grid.E4M3: 8}  # exponent of the largest point
TINY = torch.finfo(torch.float32).tiny  # the scale of a token of zeros
LARGEST = {"fp8": FP8_LARGEST, "nvfp4": FP4_LARGEST * FP8_LARGEST}  # Q, of types that have s
SPLIT_POWERS = {"fp8": 256.0, "nvfp4": 2048.0}  # factor that `split` takes off


def largest(activations: Activations) -> float:
    """Return Q, the largest magnitude of a quantized input; 1 for types that have scales of blocks alone."""
    if activations.dtype == "int":
        return 2.0 ** (activations.bits - 1) - 1
    return LARGEST.get(activations.dtype, 1.0)


def quantize(x: Tensor, activations: Activations, in_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [..., n] of any floating type: q float32 [..., n], always finite, and s float32 [..., 1].

    `in_scale` is needed where the scale is static.
    """
    wide = x.detach().float()
    scale = _token_scale(wide, activations, in_scale)
    return _round(wide, scale, activations)[0], scale


def split(x: Tensor, activations: Activations, in_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize as `quantize`, but q is scaled down to less than 2 and of the type of x, and s scaled up in return.

    Exact in any type: an integer of 8 bits, a number of fp8, and one of nvfp4 times the scale of its block are numbers
    of bfloat16 and of float16. q of the other types with blocks is of the size of x: exact where scales are powers of
    two, rounded for fp8-block.

    Gradients pass straight through the rounding, not through what is clipped; scales have none.
    """
    if activations.dtype == "int":
        power = 2.0 ** (activations.bits - 2)
    else:
        power = SPLIT_POWERS.get(activations.dtype, 1.0)
    wide = x.float()
    scale = _token_scale(wide.detach(), activations, in_scale)
    q, limit = _round(wide.detach(), scale, activations)
    if x.requires_grad and torch.is_grad_enabled():
        unit = wide / scale
        unit = torch.where(unit.abs() <= limit, unit, 0)  # a largest input that rounds beyond Q is not clipped
        q = q + (unit - unit.detach())
    return (q / power).to(x.dtype), scale * power


def fake_quantize(x: Tensor, activations: Activations, in_scale: Tensor | None = None) -> Tensor:
    """Return s q for x [..., n], rounded to the type of x once; gradients as `split`."""
    q, scale = split(x, activations, in_scale)
    return (q * scale).to(x.dtype)


def quantize_blocks(x: Tensor, activations: Activations, in_scale: Tensor | None = None) -> tuple[InputBlocks, Tensor]:
    """Quantize x [..., n] in blocks: the numbers and scales of blocks, and s float32 [..., 1]."""
    wide = x.detach().float()
    scale = _token_scale(wide, activations, in_scale)
    return _round_blocks(wide, scale, activations.dtype), scale


def _token_scale(wide: Tensor, activations: Activations, in_scale: Tensor | None) -> Tensor:
    """Return s float32 [..., 1] of x [..., n]; NaN for tokens that are not finite."""
    top = wide.abs().amax(-1, keepdim=True)  # ten times as fast as vector_norm
    if activations.scale == "tensor":
        assert in_scale is not None, "static scales are stored: the caller has them"
        scale = in_scale.float().expand_as(top)
    elif activations.has_token_scale:
        scale = (activations.clip * top / largest(activations)).clamp_min(TINY)
    else:
        scale = torch.ones_like(top)
    return torch.where(top.isfinite(), scale, torch.nan)


def _round(wide: Tensor, scale: Tensor, activations: Activations) -> tuple[Tensor, Tensor | float]:
    """Return q of x [..., n] without gradient, 0 for NaN, and up to which |x / s| it is rounded and not clipped."""
    dtype, columns = activations.dtype, wide.shape[-1]
    if activations.is_coded:
        sound = torch.where(scale.isfinite(), wide, 0.0)
        return plugins.load("inputs", dtype).round_inputs(sound, activations), torch.inf
    if activations.block:
        parts = _round_blocks(wide, scale, dtype)
        return _join(parts, columns), _limits(parts, dtype, columns)
    top = largest(activations)
    clamped = (wide / scale).clamp_(-top, top).nan_to_num_(0.0)
    if dtype == "fp8":
        return clamped.to(FP8).float(), top + FP8_HALF_STEP
    return clamped.round_(), top + 0.5


class InputBlocks(NamedTuple):
    """Quantized inputs [..., C, block], filled up with zeros, before the scale s."""

    numbers: Tensor  # p, float32 [..., C, block], points of the type, always finite
    scales: Tensor  # b, float32 [..., C, 1], finite and not negative


def _round_blocks(x: Tensor, scale: Tensor, dtype: str) -> InputBlocks:
    """Quantize x [..., n] of any floating type; scale: s [..., 1] float32, NaN for tokens that become zeros."""
    size = INPUT_BLOCKS[dtype]
    finite = torch.where(scale.isfinite(), x.float(), 0.0)
    blocks = F.pad(finite, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    inverse = 1 / scale.nan_to_num(1.0)[..., None]  # which engines store for nvfp4
    scales = _scales_of(blocks.abs().amax(-1, keepdim=True), inverse, dtype)
    factor = scales / inverse
    units = torch.where(factor > 0, blocks / factor, 0.0)
    return InputBlocks(grid.nearest_floats(units, NUMBERS[dtype]), scales)


def _scales_of(top: Tensor, inverse: Tensor, dtype: str) -> Tensor:
    """Return the scales of blocks with the largest magnitudes `top` [..., C, 1], as their type holds them; 1 / s."""
    numbers = NUMBERS[dtype]
    if dtype == "nvfp4":
        return (top / FP4_LARGEST * inverse).clamp_max(FP8_LARGEST).to(FP8).float()
    if dtype == "fp8-block":
        return top / FP8_LARGEST
    exponent = torch.frexp(top).exponent - 1 - POINT_EXPONENT[numbers]
    return torch.ldexp(torch.ones_like(top), torch.where(top > 0, exponent, E8M0_LEAST).clamp_min(E8M0_LEAST))


def _join(blocks: InputBlocks, columns: int) -> Tensor:
    """Return b p, float32 [..., columns]."""
    return (blocks.numbers * blocks.scales).flatten(-2)[..., :columns]


def _limits(blocks: InputBlocks, dtype: str, columns: int) -> Tensor:
    """Return the magnitudes of x / s up to which an input is rounded and not clipped, float32 [..., columns]."""
    limit = torch.where(blocks.scales > 0, blocks.scales * KEPT[NUMBERS[dtype]], torch.inf)
    return limit.expand_as(blocks.numbers).flatten(-2)[..., :columns]


class LargestInput:
    """The largest magnitude of all inputs that were added, for a static scale."""

    def __init__(self) -> None:
        self.top: Tensor | None = None  # float32, on the device of the inputs: nothing waits for it

    def add(self, x: Tensor) -> None:
        """Add x [..., n] of any floating type; no tokens are no harm."""
        if x.numel():
            top = x.detach().abs().amax().float()
            self.top = top if self.top is None else torch.maximum(self.top, top.to(self.top.device))

    def in_scale(self, activations: Activations, where: str) -> Tensor:
        """Return `in_scale`, float32 [1] on the CPU, 1 if all inputs were zeros.

        Raises NumericalError without inputs, or for inputs that are not finite.
        """
        if self.top is None:
            raise NumericalError(f"{where}: no calibration token reached it, so it has no scale; use scale: token")
        top = float(self.top)
        if not math.isfinite(top):
            raise NumericalError(
                f"{where}: its inputs are not finite; quantize with --dtype float32, or check the weights"
            )
        scale = activations.clip * top / largest(activations)
        return torch.tensor([scale if scale > TINY else 1.0], dtype=torch.float32)


def describe(activations: Activations) -> str:
    """Return the settings in a word or two, such as "int8 inputs" or "static fp8 inputs"."""
    dtype = activations.dtype
    if dtype == "int" or activations.is_coded:
        dtype += str(activations.bits)
    return f"{'static ' if activations.scale == 'tensor' else ''}{dtype} inputs"
