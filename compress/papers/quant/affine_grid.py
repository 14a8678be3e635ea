"""Share what methods of the format `affine` have in common: settings, parameters, groups, and numbers as stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.papers.formats import affine
from compress.types import PackedWeight, Stored

WEIGHTS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class AffineConfig:
    """Recipe keys that every method of this format has."""

    bits: int = 4  # [bits] of one code: 2 to 8
    group_size: int = 64  # [columns] that share a scale and a minimum; -1: the whole row

    def __post_init__(self) -> None:
        affine.Params(self.bits, self.group_size, affine.TILE_WORDS[0])


def params(
    config: AffineConfig, shape: tuple[int, int], scale_dtype: str = "float16", column_scales: bool = False
) -> affine.Params:
    """Return the format's parameters for a weight [out, in]; a group longer than the row is the whole row."""
    group = -1 if config.group_size >= shape[1] else config.group_size
    return affine.Params(config.bits, group, affine.tile_words(config.bits, shape[1]), scale_dtype, column_scales)


def scale_dtype(weight: Tensor, bits: int) -> str:
    """Return the type for scales and minima of a weight [out, in]: float16 unless they leave its normal range."""
    largest = weight.abs().amax(1)
    if largest.numel() and largest.max() > int_format.FP16_MAX / 2:
        return "bfloat16"
    return int_format.scale_dtype(largest, bits)


def storable(scales: Tensor, minima: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Round scales and minima to what is stored, float32; scales of 0 become 1."""
    kind = getattr(torch, dtype)
    limit = torch.finfo(kind).max
    rounded = scales.clamp(-limit, limit).to(kind).float()
    return torch.where(rounded == 0, 1.0, rounded), minima.clamp(-limit, limit).to(kind).float()


def fit_groups(weight: Tensor, group: int, fit: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return scales and minima [out, G] of a weight [out, in] by a function of groups [rows, groups, columns]."""
    whole = weight.shape[1] - weight.shape[1] % group
    fitted = []
    for rows in weight.split(max(1, WEIGHTS_AT_A_TIME // weight.shape[1])):
        parts = [rows[:, :whole].unflatten(1, (-1, group))] if whole else []
        if whole < weight.shape[1]:
            parts.append(rows[:, whole:].unsqueeze(1))  # a shorter group
        fitted.append([torch.cat(numbers, 1) for numbers in zip(*map(fit, parts), strict=True)])
    scales, minima = (torch.cat(numbers) for numbers in zip(*fitted, strict=True))
    return scales, minima


def nearest(weight: Tensor, scales: Tensor, minima: Tensor, params: affine.Params) -> Tensor:
    """Return the codes [out, in] uint8 nearest to a weight on grids [out, G]."""
    owner = torch.arange(weight.shape[1], device=weight.device) // params.group(weight.shape[1])
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    step = max(1, WEIGHTS_AT_A_TIME // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        units = (weight[rows] - minima[rows][:, owner]) / scales[rows][:, owner]
        codes[rows] = units.round_().clamp_(0, 2**params.bits - 1)
    return codes


def pack(
    codes: Tensor, scales: Tensor, minima: Tensor, params: affine.Params, column_scales: Tensor | None = None
) -> PackedWeight:
    """Return the packed weight of codes [out, in]."""
    tensors = affine.pack(codes, scales, minima, params, column_scales)
    return PackedWeight(Stored("affine", params), tensors, (codes.shape[0], codes.shape[1]))
