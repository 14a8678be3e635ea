"""Predict what quantizing every linear at every option takes, and refuse what does not fit into --budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from compress.allocate.prepare_options import Options
from compress.allocate.variants import Database
from compress.errors import BudgetError
from compress.progress import duration, silent
from compress.run import demands, report
from compress.run.loop import BlockLoop
from compress.run.quantize_linear import LinearTask
from compress.types import Quantized

QUANTIZING = 0.75  # of --budget: what a suggestion leaves to quantizing, beside the estimator
FEWEST = 8  # samples that a suggestion may come down to: on less text, fewer options are the better answer


class QuantizingTime(NamedTuple):
    """Seconds of all blocks at all options."""

    first: float  # with one batch of calibration text
    batch: float  # that each further batch takes
    samples: int  # of a batch

    def seconds(self, samples: int) -> float:
        """Return the seconds with so much calibration text."""
        return self.first + (-(-samples // self.samples) - 1) * self.batch

    def most_samples(self, seconds: float) -> int:
        """Return the most samples that take at most `seconds`; 0 where a batch takes longer."""
        if seconds < self.first:
            return 0
        return self.samples * (1 + int((seconds - self.first) / max(self.batch, 1e-9)))


def predict(opened: Options) -> QuantizingTime:
    """Time the largest block at all options, with one batch of random tokens.

    Tables outside of the blocks are taken to cost what as many weights of the blocks do.
    """
    prepared = opened.prepared
    batch = min(prepared.arrangement.batch, prepared.samples)
    arrangement = dataclasses.replace(prepared.arrangement, spill=False)
    trial = dataclasses.replace(prepared, samples=batch, arrangement=arrangement)
    tokens = demands.random_tokens(opened.asked, trial)
    folder = opened.asked.measurements or opened.asked.out
    loop = BlockLoop(opened.asked, trial, opened.levels, tokens, folder, silent, every=True)
    inner = sum(layer.spec.numel for options in opened.levels.values() for layer in options.values())
    outer = sum(layer.spec.numel for layer in opened.table_layers.values())
    first = loop.predict_seconds(_TimedBlocks(), 1) * (1 + outer / inner)
    return QuantizingTime(first, len(prepared.skeleton.blocks) * loop.stream.seconds, batch)


def check(opened: Options, folder: Path) -> None:
    """Raise BudgetError where quantizing alone takes more than --budget. Not where the folder has finished blocks."""
    if opened.asked.budget is None or Database(folder).finished():
        return
    if refused := refusal(opened, predict(opened)):
        raise BudgetError(refused)


def refusal(opened: Options, known: QuantizingTime) -> str:
    """Say that quantizing at all options, and once more at the choice, takes more than --budget; "" where it fits."""
    budget, again = opened.asked.budget, 1 + 1 / len(opened.names)
    seconds = again * known.seconds(opened.prepared.samples)
    if budget is None or seconds <= budget:
        return ""
    samples = known.most_samples(QUANTIZING * budget / again)
    less = f", or use less calibration text: --set calibration.num_samples={samples}" if samples >= FEWEST else ""
    return (
        f"quantizing at all {len(opened.names)} options, and once more at what is chosen, takes about "
        f"{duration(seconds)}, more than --budget {duration(budget)}; raise it, offer fewer options{less}"
    )


class _TimedBlocks:
    """Blocks that are quantized to time it (`BlockConsumer`)."""

    finished = 0

    def start(self, notes: list[str]) -> None:
        """Leave the notes."""

    def begin(self, index: int, block: nn.Module) -> None:
        """Leave the block as it is."""

    def weights(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights as they are."""
        return own

    def add(self, task: LinearTask, result: Quantized, seconds: float) -> None:
        """Measure a linear at an option."""
        report.errors(task.weight, result.weight, task.statistics.stats)

    def finish(self, index: int, block: nn.Module, notes: list[str]) -> None:
        """Store nothing."""

    def restore(self, index: int, block: nn.Module) -> nn.Module:
        """Return the block: none was finished before."""
        return block
