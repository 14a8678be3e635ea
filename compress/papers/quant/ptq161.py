"""PTQ1.61: the columns with the largest inputs in 4 bits, all other weights in one bit (arXiv 2502.13179).

The mask is structured: a fifth of the input channels, those whose largest magnitude over the calibration text is
greatest, so that it costs one bit a column. They are rounded to 4 bits between the least and the largest weight of each
row. Every other weight is a sign around the mean of its row, times the row's mean magnitude. Behind that
compress/papers/tune/ptq161.py learns the scales of rows and columns, block by block, which is where the method's
quality comes from.

Bits of a weight: 0.2 * 4 + 0.8 = 1.60, one bit for each column, 56 for each row, 16 for each column that is not
salient: 1.62 at 4096 x 4096. The paper's count of 1.61 leaves some of them out.

Differences: vectors are bfloat16 instead of float16, and zero points bytes, to hold weights of any size. Without the
largest magnitudes (a rotated basis), the root mean squares of inputs choose the columns, and a note says so. Not done:
the paper's preprocessing, which trains a low-rank correction of the weights on 20,000 batches and merges it before.

Not in the core: KL 0.2115 on the bundled model at 1.820 bits (65,408 tokens; vectors of rows weigh more on small
matrices), where trellis codes have 0.0317 at 1.759 bits and 0.1749 at 1.009.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.papers.formats import salient as salient_format
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "salient"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False

LEVELS = 2**salient_format.BITS - 1


@dataclass(frozen=True)
class Config:
    """Settings of PTQ1.61."""

    salient: float = 0.2  # [fraction] of the columns that have 4 bits

    def __post_init__(self) -> None:
        if not 0 <= self.salient < 1:
            raise ValueError(f"salient {self.salient} is not at least 0 and below 1")


def plan_params(config: Config, shape: tuple[int, int]) -> salient_format.Params:
    """Return the format's parameters for a weight [out, in]."""
    return salient_format.Params(int(config.salient * shape[1]))


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight: six copies in float32."""
    return 24 * shape[0] * shape[1] + 64 * sum(shape)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite; `seed` is unused."""
    assert stats is not None
    shape = weight.shape[0], weight.shape[1]
    params = plan_params(config, shape)
    sizes, notes = _input_sizes(stats)
    mask = torch.zeros(shape[1], dtype=torch.bool, device=weight.device)
    mask[sizes.argsort(descending=True, stable=True)[: params.salient]] = True
    target = weight.float()
    others = target[:, ~mask]
    alphas, means = others.abs().mean(1).bfloat16(), others.mean(1).bfloat16()
    vectors = {"alphas": alphas, "means": means, "column_scales": torch.ones_like(others[0]).bfloat16()}
    signs = (others >= means.float()[:, None]).to(torch.uint8)  # 0 counts as +1
    codes = signs[:, :0]
    if params.salient:
        codes, vectors["scales"], vectors["zeros"] = _round_salient(target[:, mask])
    tensors = salient_format.pack(salient_format.Fields(mask, signs, codes), vectors)
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, shape), notes)


def _input_sizes(stats: Stats) -> tuple[Tensor, tuple[str, ...]]:
    """Return how large each input is [in], and a note where that is not its largest magnitude."""
    if stats.count == 0:
        return torch.zeros_like(stats.hessian[0]), (
            "no calibration token reached this input: the first columns chosen",
        )
    if stats.largest_inputs is not None:
        return stats.largest_inputs, ()
    return stats.hessian.diagonal(), ("columns chosen by the mean squares of inputs, not by their largest magnitudes",)


def _round_salient(columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, salient], scales and zero points [out] between the least and largest weight of each row."""
    low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
    scales = ((high - low) / LEVELS).bfloat16()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    steps = scales.float()[:, None]
    zeros = (-low[:, None] / steps).round().clamp(0, LEVELS)
    codes = ((columns / steps).round() + zeros).clamp(0, LEVELS)
    return codes.to(torch.uint8), scales, zeros[:, 0].to(torch.uint8)
