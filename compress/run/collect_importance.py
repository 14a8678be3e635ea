"""Take the importance matrix of a model: pass calibration text through its blocks, and sum up squares of inputs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from compress import ranks
from compress.calib.stats import undo_shrinking
from compress.model import gguf_names
from compress.numerics.linalg import full_float32
from compress.progress import Progress
from compress.recipe import Recipe
from compress.run import calibration_text, importance_matrix, predict, prepare
from compress.run.importance_matrix import ImportanceMatrix, InputSquares
from compress.run.job import Job
from compress.run.loop import BlockLoop
from compress.run.quantize_linear import LinearTask
from compress.types import PackedWeight, Quantized, Scheme, Stored

NO_WEIGHT = PackedWeight(Stored("dense", None), {}, (0, 0))  # stands for a weight that is not quantized


def collect(job: Job, progress: Progress) -> ImportanceMatrix:
    """Return the importance matrix of a model on the job's calibration text; of the recipe only its amount counts."""
    gguf_names.architectures()  # is the package there?
    calibration = dataclasses.replace(job.recipe.calibration, target_correction=0.0, importance="none")
    recipe = Recipe(job.recipe.name, "", calibration, Scheme(job.recipe.quantize.method, job.recipe.quantize.config))
    job = dataclasses.replace(job, recipe=recipe, allow_partial=True)
    with full_float32(), ranks.joined(job.device), tempfile.TemporaryDirectory() as folder:
        prepared = prepare.prepare_all(job, [recipe], every=True)[0]
        text = calibration_text.calibration(job, prepared, progress)
        assert text is not None
        prepared = dataclasses.replace(prepared, samples=len(text.tokens))
        options = predict.one_option_each(prepared)
        loop = BlockLoop(job, prepared, options, text.tokens, Path(folder), progress, every=True)
        blocks = _Inputs()
        loop.quantize = lambda task, _: Quantized(NO_WEIGHT)
        loop.run(blocks)
    named: dict[str, dict[int, InputSquares]] = {}
    unnamed = []
    for linear, squares in blocks.squares.items():
        place = gguf_names.place_of(prepared.skeleton, linear)
        if place is None:
            unnamed.append(linear)
        else:
            named.setdefault(place[0], {})[place[1]] = squares
    source = str(job.calib or "written by the model itself")
    return ImportanceMatrix(named, source, len(text.tokens), prepared.seq_len, tuple(unnamed))


def write(job: Job, progress: Progress) -> ImportanceMatrix:
    """Return the importance matrix as `collect`, and write it as the file `job.out`."""
    matrix = collect(job, progress)
    importance_matrix.write(matrix, job.out)
    return matrix


class _Inputs:
    """The blocks of a model whose inputs are looked at (`BlockConsumer`); the original goes on."""

    finished = 0

    def __init__(self) -> None:
        self.squares: dict[str, InputSquares] = {}

    def start(self, notes: dict[str, list[str]]) -> None:
        """Leave the notes."""

    def begin(self, index: int, block: nn.Module) -> None:
        """Leave the block as it is."""

    def weights(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights as they are."""
        return own

    def add(self, task: LinearTask, result: Quantized, seconds: float) -> None:
        """Keep the sums of squares of a linear's input."""
        stats = task.statistics.stats
        assert stats is not None
        self.squares[task.layer.spec.name] = InputSquares(undo_shrinking(stats).cpu(), stats.count)

    def finish(self, index: int, block: nn.Module, notes: list[str]) -> None:
        """Store nothing."""

    def restore(self, index: int, block: nn.Module) -> nn.Module:
        """Return the block: none was finished before."""
        return block
