"""Score blocks by LIM and ZD, and units by the slope of the divergence in noise on their weights.

LIM and ZD (arXiv 2406.17415) rank whole blocks: LIM by how far a block turns the hidden states, ZD, without data, by
how many weights lie far above the mean. The paper leaves open over what the cosine is averaged; here it is tokens.

The linearity theorem (HIGGS, arXiv 2411.17525): small errors of relative size t^2 = |dW|^2 / |W|^2, spread evenly,
raise the model's loss by alpha t^2, summed over layers, with an alpha of each layer that no quantizer has a part in.
alpha is the slope of KL(original || noisy) over t^2, where the paper takes perplexity: KL starts from 0 exactly, and
needs fewer tokens. How well the line fits is returned, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from compress.allocate.joint_kl import JointKL
from compress.allocate.prefix_tree import Variant, VariantWeights
from compress.model import blockwise
from compress.model.skeleton import Skeleton
from compress.quant.incoherence import derived_seed

NOISE = "noise"  # a variant of a linear (NOISE, t)
T2 = (0.001, 0.003, 0.01, 0.03)  # relative sizes t^2 of the noise: about those of 6 to 3 bits


# ---------------------------------------------------------------- scores of blocks


@torch.no_grad()
def lim(
    skeleton: Skeleton, tokens: Tensor, file: Path | None = None, device: torch.device | str = "cpu"
) -> list[float]:
    """Return -mean over tokens of cos(input, output) of each block; the larger, the more the block matters."""
    device, scores = torch.device(device), []
    stream = blockwise.HiddenStates(tokens.shape[0], file)
    try:
        calls = blockwise.record_inputs(skeleton, tokens, 1, stream, device)
        for index in range(len(skeleton.blocks)):
            block, name = skeleton.load_block(index, device), skeleton.block_prefix(index).rstrip(".")
            similar = 0.0
            for sample in range(stream.samples):
                before = stream.read(sample, 1).to(device)
                after = blockwise.run_block(block, calls[index][1], before, name)
                similar += nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).double().sum().item()
                stream.write(sample, after)
            scores.append(-similar / tokens.numel())
            skeleton.free()
        return scores
    finally:
        skeleton.free()
        stream.close()


def zd(weights: Iterable[Tensor]) -> float:
    """Return the share of a block's weights that lie more than one standard deviation above their mean.

    The smaller, the more the block matters.
    """
    flat = [weight.detach().flatten() for weight in weights]
    count = sum(part.numel() for part in flat)
    mean = sum(part.sum(dtype=torch.float64).item() for part in flat) / count
    variance = sum((part.double() - mean).square().sum().item() for part in flat) / count
    return sum(int((part.double() - mean > math.sqrt(variance)).sum()) for part in flat) / count


# ---------------------------------------------------------------- the answer to noise


@dataclass(frozen=True)
class Noise:
    """Variants ("noise", t): W + t |W| G / sqrt(numel), G standard normal, of each linear its own by seed and name.

    Other variants are those of `inner`.
    """

    seed: int = 0
    inner: VariantWeights | None = None

    def weight(self, name: str, variant: Variant, original: Tensor) -> Tensor:
        if not (isinstance(variant, tuple) and len(variant) == 2 and variant[0] == NOISE):
            if self.inner is None:
                raise ValueError(f"{name}: {variant!r} is no noise, and there are no other variants")
            return self.inner.weight(name, variant, original)
        generator = torch.Generator().manual_seed(derived_seed(self.seed, NOISE, name))
        noise = torch.randn(original.shape, generator=generator).to(original.device)
        wide = original.float()
        scale = cast(float, variant[1]) * wide.norm() / math.sqrt(original.numel())
        return (wide + scale * noise).to(original.dtype)

    def prepare(self, index: int, block: nn.Module) -> None:
        prepare: Any = getattr(self.inner, "prepare", None)
        if prepare is not None:
            prepare(index, block)


class Slope(NamedTuple):
    """A line through the origin: KL = alpha t^2."""

    alpha: float
    r2: float  # 1 - sum of squared residuals / sum of squared KL: 1 where all lies on the line
    measured: tuple[tuple[float, float], ...] = ()  # (t^2, KL)


def slope(measured: Mapping[float, float]) -> Slope:
    """Fit the least-squares line through the origin for t^2 -> KL."""
    points = tuple(sorted(measured.items()))
    squares = math.fsum(t2 * t2 for t2, _ in points)
    if squares == 0:
        raise ValueError("a slope needs a measurement at a t^2 above 0")
    alpha = math.fsum(t2 * kl for t2, kl in points) / squares
    total = math.fsum(kl * kl for _, kl in points)
    residual = math.fsum((kl - alpha * t2) ** 2 for t2, kl in points)
    return Slope(alpha, 1 - residual / total if total else 1.0, points)


def slopes(
    joint_kl: JointKL, units: Mapping[str, Sequence[str]], samples: Sequence[int], sizes: Sequence[float] = T2
) -> dict[str, Slope]:
    """Return unit -> its slope, with noise of the same t^2 on all its linears; the evaluator's variants are `Noise`.

    For one slope of a whole block, its linears are given as one unit. Units that are later in the model are cheaper:
    what is in front of them is the original, computed once. Cost at most len(units) * len(sizes) times the samples.
    """
    asked = [(unit, t2, {name: (NOISE, math.sqrt(t2)) for name in units[unit]}) for unit in units for t2 in sizes]
    found = joint_kl.divergence([noisy for _, _, noisy in asked], samples)
    measured: dict[str, dict[float, float]] = {unit: {} for unit in units}
    for (unit, t2, _), kl in zip(asked, found, strict=True):
        measured[unit][t2] = kl
    return {unit: slope(points) for unit, points in measured.items()}
