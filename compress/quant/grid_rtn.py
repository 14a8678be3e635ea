"""Round to the nearest point of a hardware data type or of a fixed table: NVFP4, MXFP4, FP8, NF4 and others.

The scale of each block is that by which its largest weight meets the largest point of the table.

Not done: any use of activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats import grid
from compress.quant import grid_types
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "grid"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False
WEIGHT_STEPS = 30
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Config(grid_types.TypeConfig):
    """Settings of round-to-nearest to a data type; see TypeConfig."""


plan_params = grid_types.params


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight: float32 copies, indices of 8 bytes, codes."""
    return shape[0] * shape[1] * (3 * 4 + 8 + 2)


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes."""
    return Work(0, WEIGHT_STEPS * shape[0] * shape[1])


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite. `stats` and `seed` are unused."""
    shape = (weight.shape[0], weight.shape[1])
    params, target = plan_params(config, shape), weight.float()
    scales = _scales(_block_largest(target, params), params)
    rows, columns = params.block(shape)
    wide = grid.factors(scales, params).repeat_interleave(rows, 0)[: shape[0]]
    wide = wide.repeat_interleave(columns, 1)[:, : shape[1]]
    codes = grid_types.nearest(target / torch.where(wide == 0, 1.0, wide), params.values)
    return Quantized(PackedWeight(Stored(FORMAT, params), grid.pack(codes, scales, params), shape))


def _block_largest(target: Tensor, params: grid.Params) -> Tensor:
    """Return the largest magnitude of each block [R, C]."""
    shape = (target.shape[0], target.shape[1])
    (rows, columns), (down, across) = params.block(shape), params.blocks(shape)
    padded = torch.nn.functional.pad(target.abs(), (0, across * columns - shape[1], 0, down * rows - shape[0]))
    return padded.view(down, rows, across, columns).amax((1, 3))


def _scales(largest: Tensor, params: grid.Params) -> dict[str, Tensor]:
    """Return stored scales of blocks whose largest magnitudes [R, C] are these."""
    top = float(grid.value_table(params.values).nan_to_num().max())
    wanted = largest / top
    if params.scale_type == grid.E8M0:
        _, exponent = torch.frexp(wanted)  # 2^exponent is above it, or twice it
        stored = (exponent + grid.E8M0_BIAS).clamp(0, grid.E8M0_LARGEST).to(torch.uint8)
        return {"scales": torch.where(wanted == 0, grid.E8M0_BIAS, stored).to(torch.uint8)}
    if params.scale_type == grid.NESTED:
        return _nested_scales(wanted)
    if params.tensor_scale:
        whole = wanted.amax() / E4M3_LARGEST
        whole = torch.where(whole == 0, 1.0, whole)
        return {**_plain_scales(wanted / whole, params), "tensor_scale": whole.reshape(1)}
    return _plain_scales(wanted, params)


def _plain_scales(wanted: Tensor, params: grid.Params) -> dict[str, Tensor]:
    scales = wanted.to(grid.SCALE_DTYPES[params.scale_type])
    return {"scales": torch.where(scales.float() == 0, 1.0, scales.float()).to(scales.dtype)}


def _nested_scales(wanted: Tensor) -> dict[str, Tensor]:
    """Return scales [R, C] coded by dynamic 8-bit numbers, less their mean."""
    flat, mean = wanted.flatten(), wanted.mean()
    deviations = torch.nn.functional.pad(flat - mean, (0, -len(flat) % grid.SCALES_PER_SIZE))
    grouped = deviations.view(-1, grid.SCALES_PER_SIZE)
    sizes = grouped.abs().amax(1)
    codes = grid_types.nearest(grouped / torch.where(sizes == 0, 1.0, sizes)[:, None], grid.DYNAMIC8)
    return {
        "scales": codes.flatten()[: len(flat)].clone().view(wanted.shape),
        "scale_sizes": sizes,
        "scale_mean": mean[None],
    }
