"""Find the temperature T' at which a compressed model samples most like its base does at temperature T.

T' minimizes the mean of KL(p_T || q_T') over the positions of a text, where p and q are the unfiltered predictions of
the base and of the compressed model. With b = 1 / T' and z the logits of the compressed model,

    KL = sum p log p - b E_p[z] + log sum exp(b z),

which is convex in b: its slope, E_q[z] - E_p[z], rises. One pass over the text keeps the mean of E_p[z] for each T, and
of log sum exp(b z) with its first two derivatives at some b (the nodes). Between nodes it is the polynomial of degree 5
that has these values, which differs from the function by less than 1e-6 of it, and the slope's root is found by
bisection.

The interval of T' is a bootstrap over windows of the text (Efron 1979): windows are drawn with replacement, and T' is
found again. Its quantiles are taken further out than 2.5% and 97.5% as Hesterberg (2015, arXiv 1411.5279, expanded
percentile interval) does, because few windows give intervals that are too narrow. Where the interval holds T, there is
nothing to recommend.

What this does not do: it knows no filters (top-p of the compressed model keeps other tokens), and it looks at one token
after text of the file, not after text that the model has written.

It can be written into a checkpoint's generation_config.json. The temperature of the original is the one in its own
generation_config.json, or 1. The file is changed only where the recommendation leaves no doubt (its interval leaves out
the original's temperature) and takes MIN_GAIN of the divergence or more, and only where the checkpoint samples: a
temperature beside do_sample false is an error to transformers. The manifest of a packed checkpoint holds the hash and
the size of the file; both are brought up to date.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError, shown
from compress.evaluate import intervals
from compress.storage.checkpoint import MANIFEST, read_json, sha256, write_text

RANGE = 2.0  # T' is searched from the lowest T / RANGE to the highest T * RANGE
STEP = 1.2  # largest ratio of neighbouring nodes
RESAMPLINGS = 2000
MIN_WINDOWS = 5  # fewer give no interval
HALVINGS = 60
GENERATION_CONFIG = "generation_config.json"
KEY = "temperature"
TEMPERATURE_DIGITS = 3
MIN_GAIN = 0.01  # share of the divergence


@dataclass(frozen=True)
class TemperatureAdvice:
    """The best temperature of a compressed model where its base has another one."""

    temperature: float  # T of the base
    best: float  # T'
    low: float | None  # of the 95% interval of T'; None: too few windows
    high: float | None
    kl: float  # KL(p_T || q_T), nats a token
    kl_best: float  # KL(p_T || q_T')
    at_limit: bool  # T' lies at an end of what was searched, or beyond
    change: bool  # whether the interval leaves T out


def nodes(temperatures: Sequence[float]) -> Tensor:
    """Return the values of 1 / T' at which sums are kept, ascending, float64; 1 / T of each temperature is one."""
    fixed = sorted({1 / t for t in temperatures} | {RANGE / min(temperatures), 1 / (RANGE * max(temperatures))})
    betas = [fixed[0]]
    for low, high in zip(fixed, fixed[1:], strict=False):
        count = max(1, math.ceil(math.log(high / low) / math.log(STEP) - 1e-9))
        betas += [low * (high / low) ** (i / count) for i in range(1, count)] + [high]
    return torch.tensor(betas, dtype=torch.float64)


def sums(base: Tensor, model: Tensor, temperatures: Sequence[float], betas: Tensor) -> Tensor:
    """Return what KL needs at each position: float64 [2 * temperatures + 3 * nodes, positions].

    base, model: logits float64 [positions, vocabulary]. The rows: sum p log p and E_p[z] for each temperature, then log
    sum exp(b z), its slope and its curvature for each node.
    """
    z = model - model.amax(-1, keepdim=True)
    rows = []
    for temperature in temperatures:
        log_p = (base / temperature).log_softmax(-1)
        p = log_p.exp()
        rows += [torch.where(p > 0, p * log_p, 0.0).sum(-1), (p * z).sum(-1)]
    for beta in betas.tolist():
        weights = (z * beta).exp_()
        total = weights.sum(-1)
        weighted = weights.mul_(z)
        mean = weighted.sum(-1) / total
        rows += [total.log(), mean, weighted.mul_(z).sum(-1) / total - mean**2]
    return torch.stack(rows)


def recommend(means: Tensor, temperatures: Sequence[float], betas: Tensor, seed: int = 0) -> list[TemperatureAdvice]:
    """Return the best temperature for each of the base's.

    means: `sums`, averaged over each window, float64 [rows, windows]; windows of equal length.
    """
    windows = means.shape[1]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(windows, (RESAMPLINGS, windows), generator=generator)
    samples = torch.cat([means.mean(1)[None], means.T[drawn].mean(1)])  # the first is all windows as they are
    curves = samples[:, 2 * len(temperatures) :].view(len(samples), len(betas), 3)
    advice = []
    for i, temperature in enumerate(temperatures):
        constant, slope = samples[:, 2 * i], samples[:, 2 * i + 1]
        beta = _root(curves, slope, betas)
        best = 1 / beta
        low, high = _interval(best[1:], windows) if windows >= MIN_WINDOWS else (None, None)
        change = low is not None and high is not None and not low <= temperature <= high
        ends = (float(betas[0]), float(betas[-1]))
        at_limit = float(beta[0]) in ends
        kl = [
            float(constant[0] - b * slope[0] + _value(curves[:1], betas, torch.tensor([b], dtype=torch.float64))[0])
            for b in (1 / temperature, float(beta[0]))
        ]
        advice.append(TemperatureAdvice(temperature, float(best[0]), low, high, kl[0], kl[1], at_limit, change))
    return advice


def _interval(samples: Tensor, windows: int) -> tuple[float, float]:
    width = math.sqrt(windows / (windows - 1)) * intervals.student(windows - 1)
    share = math.erfc(width / math.sqrt(2)) / 2  # of the normal distribution, further out than that
    low, high = torch.quantile(samples, torch.tensor([share, 1 - share], dtype=samples.dtype)).tolist()
    return low, high


def _root(curves: Tensor, slope: Tensor, betas: Tensor) -> Tensor:
    """Return where the slopes of the curves [samples, nodes, 3] are those given [samples], within the nodes."""
    at_nodes = curves[:, :, 1] - slope[:, None]
    left = ((at_nodes < 0).sum(1) - 1).clamp(0, len(betas) - 2)
    low = betas[left].where(at_nodes[:, -1] > 0, betas[-1])
    high = betas[left + 1].where(at_nodes[:, 0] < 0, betas[0])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_below = _slope(curves, betas, left, middle) < slope
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return high


def _quintic(curves: Tensor, betas: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coefficients [samples, 6] of the polynomials between nodes `left` and the next, and the widths.

    They are in u = (b - betas[left]) / width.
    """
    rows = torch.arange(len(curves))
    width = betas[left + 1] - betas[left]
    scale = torch.stack([torch.ones_like(width), width, width**2], 1)
    (f0, d0, c0), (f1, d1, c1) = ((curves[rows, at] * scale).unbind(1) for at in (left, left + 1))
    value, rise, bend = f1 - f0 - d0 - c0 / 2, d1 - d0 - c0, c1 - c0
    high = [10 * value - 4 * rise + bend / 2, -15 * value + 7 * rise - bend, 6 * value - 3 * rise + bend / 2]
    return torch.stack([f0, d0, c0 / 2, *high], 1), width


def _slope(curves: Tensor, betas: Tensor, left: Tensor, at: Tensor) -> Tensor:
    coefficients, width = _quintic(curves, betas, left)
    u = (at - betas[left]) / width
    return sum((k * coefficients[:, k] * u ** (k - 1) for k in range(1, 6)), torch.zeros_like(u)) / width


def _value(curves: Tensor, betas: Tensor, at: Tensor) -> Tensor:
    left = (torch.searchsorted(betas, at, right=True) - 1).clamp(0, len(betas) - 2)
    coefficients, width = _quintic(curves, betas, left)
    u = (at - betas[left]) / width
    return sum((coefficients[:, k] * u**k for k in range(6)), torch.zeros_like(u))


def own_temperature(directory: Path) -> float:
    """Return the temperature that a checkpoint is made to sample at; CheckpointError for one that is none."""
    value = _read(directory).get(KEY)
    value = 1.0 if value is None else value
    if type(value) not in (int, float) or not value > 0:
        raise CheckpointError(f"{directory / GENERATION_CONFIG}: {KEY} {shown(value)} is not positive; correct it")
    return float(value)


def check_writable(directory: Path) -> None:
    """Raise CheckpointError for a checkpoint whose settings have no use for a temperature."""
    if _read(directory).get("do_sample") is not True:
        raise CheckpointError(
            f"{directory / GENERATION_CONFIG} does not sample (do_sample is not true), so a temperature in it has no "
            "effect; set do_sample there, or leave out --write and give generate() the temperature"
        )


def write(directory: Path, recommended: Sequence[TemperatureAdvice], base: float) -> str:
    """Write the best temperature for that of the base, and say what was done."""
    file = directory / GENERATION_CONFIG
    (advice,) = [each for each in recommended if each.temperature == base]
    if not advice.change or advice.at_limit:
        return f"{file} stays as it is: nothing to recommend at the original's temperature {base:g}"
    if advice.kl_best > (1 - MIN_GAIN) * advice.kl:
        return (
            f"{file} stays as it is: at {advice.best:.{TEMPERATURE_DIGITS}g} in place of the original's "
            f"temperature {base:g} the divergence is less than {MIN_GAIN:.0%} smaller"
        )
    values = _read(directory)
    values[KEY] = round(advice.best, TEMPERATURE_DIGITS)
    write_text(directory / GENERATION_CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
    _relist(directory)
    return f"{directory / GENERATION_CONFIG}: temperature {values[KEY]:g} where the original has {base:g}"


def _read(directory: Path) -> dict[str, Any]:
    return read_json(directory / GENERATION_CONFIG) if (directory / GENERATION_CONFIG).is_file() else {}


def _relist(directory: Path) -> None:
    """Bring the manifest's entry of the file up to date."""
    path = directory / MANIFEST
    if not path.is_file():
        return
    values = read_json(path)
    if isinstance(values.get("files"), dict) and GENERATION_CONFIG in values["files"]:
        values["files"][GENERATION_CONFIG] = sha256(directory / GENERATION_CONFIG)
        if isinstance(values.get("sizes"), dict):
            values["sizes"][GENERATION_CONFIG] = (directory / GENERATION_CONFIG).stat().st_size
        write_text(path, json.dumps(values, indent=2) + "\n")
