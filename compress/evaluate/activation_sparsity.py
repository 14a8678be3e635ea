"""Measure how sparse a model's activations are: the PPL-p% sparsity of the Sparsing Law (arXiv 2411.02335).

It is the largest share of the inputs of the last linears of MLPs, their neurons, that can be left out while perplexity
rises by at most p%. A neuron's output is its activation times its column of the linear. Of a token those are left out
whose output is shorter than a threshold of the layer. Thresholds follow one number for all layers: the length of the
sum of what is left out, relative to the length of what the MLP gives, mean over tokens (cumulative errors of tail
truncation). That number is bisected. Zeros of activations count as left out, so that models of ReLU show as sparse.

Thresholds are found on the first windows of the text that is scored, the shares and perplexity are of all windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.evaluate import scores
from compress.evaluate.reader import Execution, Reader
from compress.model import load
from compress.run.linear_inputs import ScoreCounts
from compress.runtime.linear import PackedModule

SAMPLED_TOKENS = 512  # tokens on which thresholds are found
SHARES = torch.linspace(0, 0.98, 50, device="cpu").tolist()  # points of the error of a layer, lines between them
STEPS = 8  # the bisection halves the interval so often


@dataclass(frozen=True)
class ActivationSparsity:
    """The largest sparsity of activations at which perplexity rises by at most so much."""

    percent: float  # by which perplexity may rise
    share: float  # of neurons left out, mean over layers
    error: float  # length of what is left out, relative to what an MLP gives
    perplexity: float
    dense_perplexity: float
    layers: int
    tokens: int  # scored


class Neurons:
    """The neurons of one MLP: the inputs of its last linear [hidden, neurons]."""

    def __init__(self, linear: nn.Module, inputs: Tensor) -> None:
        """inputs: of some tokens, [tokens, neurons]."""
        if isinstance(linear, PackedModule):
            weight = linear.dequantize(torch.float32)
        else:
            weight = linear.get_parameter("weight").detach()
        self.norms = weight.float().norm(dim=0)
        self.counts = ScoreCounts(self.norms, inputs.device)
        self.counts.add(inputs)
        sizes, whole = inputs.float().abs() * self.norms, inputs.float() @ weight.float().T
        length = whole.norm(dim=1).clamp(min=1e-30)
        self.thresholds = [self.counts.threshold(share)[0] for share in SHARES]
        self.errors = [
            float(((inputs.float() * (sizes < edge)) @ weight.float().T).norm(dim=1).div(length).mean())
            for edge in self.thresholds
        ]

    def threshold(self, error: float) -> float:
        """Return the length of an output below which a neuron is left out, at this relative error."""
        above = next((i for i, each in enumerate(self.errors) if each > error), len(self.errors))
        if not 0 < above < len(self.errors):
            return self.thresholds[min(above, len(self.errors) - 1)]
        low, high = self.errors[above - 1 : above + 1]
        part = (error - low) / (high - low)
        return self.thresholds[above - 1] + part * (self.thresholds[above] - self.thresholds[above - 1])


def last_linears(model: Any) -> dict[str, nn.Module]:
    """Return the last linear of each MLP, by name: the only one of its module with the MLP's width as inputs.

    Linears beside it, one or two, have that many outputs, or twice as many. Experts are none of them. Raises
    UnsupportedModelError where there is no such linear.
    """
    config = model.config.get_text_config()
    hidden, width = config.hidden_size, getattr(config, "intermediate_size", 0)
    last: dict[str, nn.Module] = {}
    for parent, module in model.named_modules():
        linears = {name: each for name, each in module.named_children() if hasattr(each, "in_features")}
        shapes = {name: (each.in_features, each.out_features) for name, each in linears.items()}
        ends = [name for name, shape in shapes.items() if shape == (width, hidden)]
        others = [shape for name, shape in shapes.items() if name not in ends]
        if (
            len(ends) == 1
            and 0 < len(others) < 3
            and all(each in ((hidden, width), (hidden, 2 * width)) for each in others)
        ):
            last[f"{parent}.{ends[0]}"] = linears[ends[0]]
    if not last:
        raise UnsupportedModelError("no MLP of the model has its neurons in front of a linear of its own")
    return last


def measure(
    directory: Path,
    text: str | Path,
    percent: float,
    lengths: tuple[int, int] = (512, 131_072),
    execution: Execution = scores.DEFAULT,
) -> ActivationSparsity:
    """Return the PPL-p% sparsity of a checkpoint on a text; lengths: tokens of a window, and of the text at most."""
    cut = scores.text_windows([directory], text, *lengths, execution.bos)
    reader = Reader(load.load_model(directory, execution.dtype, execution.device), name=directory.name)
    linears = last_linears(reader.model)
    neurons = {name: Neurons(linears[name], x) for name, x in _sample_inputs(reader, linears, cut.tokens).items()}

    def score(thresholds: Mapping[str, float]) -> tuple[float, float, int]:
        """Return the mean NLL, the share of neurons left out, and the tokens."""
        with _left_out(linears, neurons, thresholds) as shares:
            batch = execution.batch or scores.windows_at_a_time([reader], lengths[0])
            columns = [scores.positions([reader], part) for part in cut.tokens.split(batch)]
        figures = torch.cat(columns, 1).view(1, len(cut.tokens), -1)[..., cut.prefix.unscored :]
        mean = sum(small / seen for small, seen in shares.values()) / len(shares) if shares else 0.0
        return float(figures.mean()), mean, figures.numel()

    dense, _, tokens = score({})
    low, high, best = 0.0, 1.0, (dense, 0.0, 0.0)
    for _ in range(STEPS):
        error = (low + high) / 2
        nll, share, _ = score({name: each.threshold(error) for name, each in neurons.items()})
        if nll <= dense + math.log1p(percent / 100):
            low, best = error, (nll, share, error)
        else:
            high = error
    nll, share, error = best
    return ActivationSparsity(percent, share, error, math.exp(nll), math.exp(dense), len(neurons), tokens)


def _sample_inputs(reader: Reader, linears: Mapping[str, nn.Module], windows: Tensor) -> dict[str, Tensor]:
    """Return the last SAMPLED_TOKENS inputs [tokens, in] of linears on the first windows."""
    seen: dict[str, list[Tensor]] = {name: [] for name in linears}
    handles = [
        linear.register_forward_pre_hook(lambda _, args, own=seen[name]: own.append(args[0].detach().flatten(0, -2)))
        for name, linear in linears.items()
    ]
    try:
        reader.predictions(windows[: -(-SAMPLED_TOKENS // windows.shape[1])])
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts)[-SAMPLED_TOKENS:] for name, parts in seen.items()}


@contextmanager
def _left_out(
    linears: Mapping[str, nn.Module], neurons: Mapping[str, Neurons], thresholds: Mapping[str, float]
) -> Iterator[dict[str, tuple[int, int]]]:
    """While active, neurons below thresholds are left out; yields linear -> (inputs left out, inputs in all) so far."""
    totals: dict[str, tuple[int, int]] = {}

    def leave_out(name: str, x: Tensor) -> tuple[Tensor]:
        small = x.abs() * neurons[name].norms.to(x.dtype) < thresholds[name]
        before = totals.get(name, (0, 0))
        totals[name] = before[0] + int(small.sum()), before[1] + small.numel()
        return (x.masked_fill(small, 0),)

    handles = [
        linears[name].register_forward_pre_hook(lambda _, args, name=name: leave_out(name, args[0]))
        for name in thresholds
    ]
    try:
        yield totals
    finally:
        for handle in handles:
            handle.remove()
