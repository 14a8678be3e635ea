"""Multiply quantized inputs with weights of the `grid` format as they are stored, by the tensor cores of NVIDIA GPUs.

    y[m, n] = s[m] * sum over blocks of b[m, block] factor[n, block] sum over the block of p[m, k] point[n, k]

The weight has the type of the inputs: float8 with one scale for the weight or each row, NVFP4, MXFP4, MXFP8, or float8
in blocks of 128 x 128. torch.nn.functional.scaled_mm multiplies, for which the scales of blocks are put in the order of
cuBLAS. Only bfloat16 activations whose numbers divide as `WIDTHS` says are multiplied so.

Before it is taken, each type multiplies small matrices once on each device. Where torch cannot, or finds other numbers,
products are computed from dequantized numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import grid
from compress.formats.grid import Params
from compress.kernels.processors import Processor
from compress.runtime import activation_quant as inputs
from compress.types import Activations

FP8_BLOCK = "fp8-block"
WEIGHTS = {  # type of the inputs -> that of a weight: values, columns and rows of a block, type of the scales
    "nvfp4": ("e2m1", 16, 1, grid.E4M3),
    "mxfp4": ("e2m1", 32, 1, grid.E8M0),
    "mxfp8": ("e4m3", 32, 1, grid.E8M0),
    FP8_BLOCK: ("e4m3", 128, 128, "float32"),
}
WIDTHS = {"fp8": (1, 1), FP8_BLOCK: (128, 128)}  # what outputs and inputs are multiples of
OTHER_WIDTHS = (16, 128)
MIN_CAPABILITY = {"fp8": (8, 9), "nvfp4": (10, 0), "mxfp4": (10, 0), "mxfp8": (10, 0), FP8_BLOCK: (9, 0)}
HOPPER = 9  # the only one whose blocks of 128 x 128 torch multiplies
TOKENS = 16  # tokens are padded to it
SWIZZLED = (128, 4)  # rows and blocks of a tile of scales, in which four times 32 rows lie beside each other
CLOSE = 1e-2  # share of the norm by which a trial may be off: results are rounded to bfloat16


def obstacle(params: Params, shape: tuple[int, int], activations: Activations, on: Processor) -> str:
    """Return why a product has to be computed from dequantized numbers; empty if it has not."""
    kind = activations.dtype
    if kind not in MIN_CAPABILITY or not _has_type(params, shape, kind):
        return f"the weight is not of the type of {inputs.describe(activations)}"
    multiples = WIDTHS.get(kind, OTHER_WIDTHS)
    if any(size % multiple for size, multiple in zip(shape, multiples, strict=True)):
        return f"{shape[0]} x {shape[1]} weights are no multiples of {multiples[0]} x {multiples[1]}"
    return _missing(kind, on)


def _has_type(params: Params, shape: tuple[int, int], kind: str) -> bool:
    rows, columns = params.block(shape)
    if kind == "fp8":
        is_wide = columns >= shape[1] and (rows == 1 or rows >= shape[0])
        return params.values == grid.E4M3 and is_wide and params.scale_type not in (grid.E8M0, grid.NESTED)
    return (params.values, params.block_columns, params.block_rows, params.scale_type) == WEIGHTS[kind]


def _missing(kind: str, on: Processor) -> str:
    """Return what the processor lacks."""
    if on.capability is None or torch.version.hip is not None:
        return f"no {kind} matrix multiplication on {on.type}"
    if on.capability < MIN_CAPABILITY[kind] or (kind == FP8_BLOCK and on.capability[0] != HOPPER):
        return f"the GPU has no {kind} matrix multiplication"
    if kind != "fp8" and not hasattr(F, "scaled_mm"):
        return f"this torch has no {kind} matrix multiplication"
    return ""


@cache
def failure(kind: str, device: torch.device) -> str:
    """Return why products of this type cannot be taken on a device, which a small one tells once; empty if they can."""
    values, columns, rows, scale_type = WEIGHTS[kind]
    params, shape = Params(values, columns, scale_type, rows), (256, 512)
    activations = Activations(4 if values == grid.E2M1 else 8, dtype=kind)
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, shape[1], generator=generator).to(device, torch.bfloat16)
        weight = torch.randn(shape, generator=generator).to(device)
        tensors = _of_the_same_type(weight, activations)
        q, scale = inputs.quantize(x, activations)
        expected = (q @ grid.decode(tensors, params, shape, torch.float32).T) * scale
        try:
            y = multiply(x, operands(tensors, params, shape, activations), activations, None)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            return f"torch does not multiply {kind} here ({str(error).splitlines()[0]})"
    is_close = bool((y.float() - expected).norm() <= CLOSE * expected.norm())
    return "" if is_close else f"torch multiplies {kind} with other results here"


def _of_the_same_type(weight: Tensor, activations: Activations) -> dict[str, Tensor]:
    """Return stored tensors of a weight of whole blocks, each of whose rows is quantized as a token is."""
    parts, _ = inputs.quantize_blocks(weight, activations)
    scales = parts.scales.squeeze(-1)
    if activations.dtype == FP8_BLOCK:
        scales = scales[::128].contiguous()  # any scales will do
    numbers = parts.numbers.flatten(-2)
    codes = _nibbles(numbers) if activations.bits == 4 else numbers.to(inputs.FP8)
    stored = _exponents(scales) if activations.dtype.startswith("mx") else scales
    return {"codes": codes, "scales": stored.to(inputs.FP8) if activations.dtype == "nvfp4" else stored}


def operands(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], activations: Activations
) -> tuple[Tensor, ...]:
    """Return what `multiply` needs: codes as they are stored, scales in the order of cuBLAS, and a factor of all.

    For fp8: scales float32 [1, out] and codes [out, in].
    """
    codes, kind = tensors["codes"], activations.dtype
    if kind == "fp8":
        return grid.factors(tensors, params).expand(shape[0], 1).T.contiguous(), codes
    if kind == FP8_BLOCK:
        padding = -tensors["scales"].shape[1] % 4
        scales = F.pad(grid.factors(tensors, params), (0, padding)).t()
    else:
        scales = swizzle(tensors["scales"].view(_scale_type(kind)))
    one = torch.ones(1, dtype=torch.float32, device=codes.device)
    return _as_float4(codes) if activations.bits == 4 else codes, scales, tensors.get("tensor_scale", one)


def multiply(x: Tensor, held: tuple[Tensor, ...], activations: Activations, in_scale: Tensor | None) -> Tensor:
    """Return x [tokens, in] bfloat16 times the weight whose `operands` are held, [tokens, out]; not for fp8."""
    codes, weight_scales, factor = held
    count, kind = len(x), activations.dtype
    padding = -count % TOKENS if count else TOKENS  # an expert may have no tokens
    parts, scale = inputs.quantize_blocks(F.pad(x, (0, 0, 0, padding)), activations, in_scale)
    numbers, block_scales = parts.numbers.flatten(-2), parts.scales.squeeze(-1)
    q = _as_float4(_nibbles(numbers)) if activations.bits == 4 else numbers.to(inputs.FP8)
    recipes, orders = _recipes(kind)
    if kind == FP8_BLOCK:
        scales = block_scales.t().contiguous().t()
    else:
        scales = swizzle(_exponents(block_scales) if kind.startswith("mx") else block_scales.to(inputs.FP8))
    y = F.scaled_mm(
        q, codes.t(), scales.view(_scale_type(kind)) if kind != FP8_BLOCK else scales, recipes[0], weight_scales,
        recipes[1], orders, orders, output_dtype=torch.float32 if kind == "nvfp4" else torch.bfloat16,
    )  # fmt: skip
    return (y[:count] * (scale[:count] * factor)).to(x.dtype)


def _recipes(kind: str) -> tuple[tuple[F.ScalingType, F.ScalingType], F.SwizzleType]:
    """Return how inputs and weight are scaled, and the order of the scales."""
    recipe = F.ScalingType
    if kind == FP8_BLOCK:
        return (recipe.BlockWise1x128, recipe.BlockWise128x128), F.SwizzleType.NO_SWIZZLE
    one = recipe.BlockWise1x16 if kind == "nvfp4" else recipe.BlockWise1x32
    return (one, one), F.SwizzleType.SWIZZLE_32_4_4


def _scale_type(kind: str) -> torch.dtype:
    return torch.float8_e4m3fn if kind == "nvfp4" else torch.float8_e8m0fnu


def swizzle(scales: Tensor) -> Tensor:
    """Return scales [rows, blocks] of one byte in the order that cuBLAS reads: tiles of 128 x 4, filled with zeros.

    Row r and block c of a tile are at byte 16 (r mod 32) + 4 (r div 32) + c.
    """
    rows, blocks = scales.shape
    high, wide = SWIZZLED
    padded = F.pad(scales.view(torch.uint8), (0, -blocks % wide, 0, -rows % high))
    tiles = padded.view(-1, 4, high // 4, padded.shape[1] // wide, wide)  # tile, quarter, row, tile, block
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def _exponents(scales: Tensor) -> Tensor:
    """Return powers of two float32 as bytes of e8m0."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def _nibbles(numbers: Tensor) -> Tensor:
    """Return points of e2m1 [rows, columns] as bytes of two codes, the even column in the low half."""
    magnitude = numbers.abs()
    wide = torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4)
    codes = torch.where(magnitude < 2, 2 * magnitude, wide).to(torch.uint8)
    codes = codes | (numbers.signbit().to(torch.uint8) << 3)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _as_float4(codes: Tensor) -> Tensor:
    return codes.view(torch.float4_e2m1fn_x2)
