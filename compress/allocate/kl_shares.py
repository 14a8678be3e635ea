"""Attribute the divergence of the whole model to its units: by one gradient of a choice, or by noise on weights.

The share of a linear is <g, Q - W>: W its original weight, Q that of the choice, g the gradient of the model's KL to
the original where all weights are half way between both. These are Aumann-Shapley values by the midpoint rule: the
integral of the gradient along the line from the original to the choice, so that all shares add up to the choice's
divergence, exactly where that is quadratic. A share so counts what a linear does in the company of all others, where
damages of one unit at a time count what it does to a model that is whole. Cost: a forward and a backward pass.

The linearity theorem (HIGGS, arXiv 2411.17525): small errors of relative size t^2 = |dW|^2 / |W|^2, spread evenly,
raise the model's loss by alpha t^2, summed over layers, with an alpha of each layer that no quantizer has a part in.
alpha is the slope of KL(original || noisy) over t^2, where the paper takes perplexity: KL starts from 0 exactly, and
needs fewer tokens. How well the line fits is returned, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.allocate.joint_kl import JointKL
from compress.allocate.prefix_tree import ModelSource, Variant
from compress.allocate.variant_source import NOISE
from compress.calib import fisher, reference_logprobs
from compress.calib.reference_logprobs import ReferenceLogprobs
from compress.model import blockwise
from compress.model.skeleton import Skeleton

MIDPOINT = 0.5  # the original is at 0, the choice at 1
T2 = (0.001, 0.003, 0.01, 0.03)  # relative sizes t^2 of the noise: about those of 6 to 3 bits


def shares(
    source: ModelSource,
    tokens: Tensor,
    folder: Path,
    assignment: Mapping[str, Variant],
    device: torch.device | str = "cpu",
    top_k: int = reference_logprobs.TOP_K,
) -> dict[str, float]:
    """Return linear -> its share of KL(original || model at `assignment`), nats a token; it may be negative.

    tokens [samples, seq_len]; the original's predictions are kept in `folder`. Computes in float32.
    """
    skeleton, variants = source()
    end = blockwise.computing_in(skeleton, torch.float32)
    try:
        reference = reference_logprobs.load(skeleton, tokens, folder, top_k, device)
        choice = _Choice(skeleton, variants, assignment)
        by_linear = {}
        loss = _Divergence(reference, tokens.shape[1], torch.device(device))
        for index, gradients in fisher.gradients(
            skeleton, tokens, folder / "stream", device, loss, lambda index, block: choice.apply(index, block, MIDPOINT)
        ):
            for name, change in choice.changes(index, torch.device(device)).items():
                product = gradients[name].total * change
                by_linear[name] = product.sum(dtype=torch.float64).item() / len(tokens)
        return by_linear
    finally:
        end()


class _Divergence:
    """KL(original || model) (`Loss` of calib/fisher.py)."""

    def __init__(self, reference: ReferenceLogprobs, positions: int, device: torch.device) -> None:
        self.reference, self.positions, self.device = reference, positions, device

    def __call__(self, sample: int, part: slice, logits: Tensor) -> Tensor:
        row = self.reference.row(sample, self.device)
        return reference_logprobs.loss(row, part, logits)


class _Choice:
    """The changes that a choice makes to the weights of blocks."""

    def __init__(self, skeleton: Skeleton, variants: Any, assignment: Mapping[str, Variant]) -> None:
        self.skeleton, self.variants = skeleton, variants
        self.prepare = getattr(variants, "prepare", None)
        self.names: list[list[str]] = [[] for _ in skeleton.blocks]
        for spec in skeleton.linears()[0]:
            if assignment.get(spec.name) is not None:
                self.names[spec.block].append(spec.name)
        self.assignment = assignment

    def apply(self, index: int, block: nn.Module, way: float) -> None:
        """Take the weights of a loaded block this share of the way."""
        if self.prepare is not None:
            self.prepare(index, block)
        for name, change in self._changes(block, index).items():
            self.skeleton.linear(block, name).weight.data.add_(change, alpha=way)

    def changes(self, index: int, device: torch.device) -> dict[str, Tensor]:
        """Return linear -> Q - W [out, in] float32 of a block that is not loaded."""
        block = self.skeleton.load_block(index, device)
        if self.prepare is not None:
            self.prepare(index, block)
        changes = self._changes(block, index)
        self.skeleton.free()
        return changes

    @torch.no_grad()
    def _changes(self, block: nn.Module, index: int) -> dict[str, Tensor]:
        originals = {name: self.skeleton.linear(block, name).weight.data for name in self.names[index]}
        return {
            name: self.variants.weight(name, self.assignment[name], weight).to(weight.device) - weight
            for name, weight in originals.items()
        }


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
    requests = [(unit, t2, {name: (NOISE, math.sqrt(t2)) for name in units[unit]}) for unit in units for t2 in sizes]
    kls = joint_kl.divergence([noisy for _, _, noisy in requests], samples)
    measured: dict[str, dict[float, float]] = {unit: {} for unit in units}
    for (unit, t2, _), kl in zip(requests, kls, strict=True):
        measured[unit][t2] = kl
    return {unit: slope(points) for unit, points in measured.items()}
