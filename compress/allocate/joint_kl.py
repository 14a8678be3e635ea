"""How far candidate models are from the original: joint, measured, many at a time.

    source = partial(build, arguments)       # -> (skeleton, levels); a function of a module if there are processes
    with Candidates(source, tokens, folder, Means(max_memory=8 << 30)) as candidates:
        candidates.divergence([{"model.layers.0.mlp.up_proj": "2 bits"}, {}], samples=range(16))   # nats a token

An assignment gives linears a level: whatever `levels.weight(name, level, original)` understands; linears that are not
named, or at None, keep their original weights. The result is the mean over all positions of the samples of
KL(original || candidate), against predictions that are kept in a file of the folder (reference_logprobs.py).

Candidates go through the model block by block, and what they share at the front is computed once (prefix_tree.py).
Results are the same to the bit whatever else is asked in the same call, in which order, with how much memory and in how
many processes: sums are exact, everything runs on one thread of each process, and a sample is never batched with
others unless `batch` is raised (then the set of the samples decides on batches, too). Processes share out the samples,
and candidates only where there are fewer batches than processes.

`forwards` counts what is computed, in tokens through the whole model: block passes / blocks, whatever is shared counted
once; the original's own pass and output heads are not counted. It does not depend on the number of processes.

Everything computes in float32 unless asked otherwise. In bfloat16 any change, however small, moves the roundings of all
that follows: on a model of 8M parameters that alone is a KL of up to 8e-5, more than the error of a whole linear in 4
bits.

Inputs are not quantized here, and not counted is what a linear without a weight of its own would do.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from compress import process_memory
from compress.allocate import prefix_tree, reference_logprobs
from compress.allocate.prefix_tree import Batch, Evaluator, Level, Levels, Path, Room, Setting, Source
from compress.errors import BudgetError

__all__ = ["Candidates", "Level", "Levels", "Means", "Room", "Source"]

DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
Assignment = Mapping[str, Level]


@dataclass(frozen=True)
class Means:
    """What the work is done with."""

    device: str = "cpu"
    processes: int = 1  # 1: this one
    batch: int = 1  # samples in a forward pass
    top_k: int = reference_logprobs.TOP_K  # log-probabilities that are kept of each position of the original
    max_memory: int | None = None  # bytes of all processes for weights and hidden states; None: 80% of what is free
    room: Room | None = None  # of each process, in place of what max_memory gives
    dtype: str = "float32"  # that blocks compute in, or "auto": as stored

    def __post_init__(self) -> None:
        for name in ("processes", "batch", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is less than 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")


class Candidates:
    """Divergences of assignments on tokens [samples, seq_len] int64. Files: the teacher's, and some until `close`."""

    def __init__(
        self,
        source: Source,
        tokens: Tensor,
        folder: File,
        means: Means | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`source` gives (skeleton, levels), and is called once in each process; it must be picklable for several."""
        self.source, self.tokens, self.folder, self.means, self.say = source, tokens, folder, means or Means(), say
        self.samples, self.seq_len = tokens.shape
        self.forwards = 0.0  # tokens through the whole model so far
        self.work = File(tempfile.mkdtemp(prefix="candidates-", dir=folder))
        allowed = self.means.max_memory if self.means.max_memory is not None else int(0.8 * process_memory.available())
        room = self.means.room or allowed // self.means.processes
        dtype = None if self.means.dtype == "auto" else getattr(torch, self.means.dtype)
        self.setting = Setting(self.means.batch, room, torch.device(self.means.device), dtype)
        try:
            self.own = Evaluator(source, tokens, self.work, self.setting)
        except BaseException:
            self.work.rmdir()
            raise
        self.pool: ProcessPoolExecutor | None = None
        self.reference: reference_logprobs.Teacher | None = None

    def __enter__(self) -> Candidates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End processes, free memory, remove files; the teacher's stays."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None
        self.own.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def divergence(self, assignments: Sequence[Assignment], samples: Sequence[int]) -> list[float]:
        """KL(original || candidate) of each assignment, the mean over these samples, nats a token."""
        return [math.fsum(row) / len(row) for row in self.per_sample(assignments, samples).tolist()]

    def per_sample(self, assignments: Sequence[Assignment], samples: Sequence[int]) -> Tensor:
        """The same of each sample: float64 [assignments, samples]. Equal assignments are computed once."""
        ordered = sorted(samples)
        if not ordered or len(set(ordered)) < len(ordered) or not 0 <= ordered[0] <= ordered[-1] < self.samples:
            raise ValueError(f"samples are some of 0 to {self.samples - 1}, each once, not {list(samples)}")
        asked = [prefix_tree.path(self.own.skeleton, assignment) for assignment in assignments]
        paths = in_order(asked)
        found = torch.empty(len(paths), len(ordered), dtype=torch.float64)
        for candidates, columns, task in self._tasks(paths, batches_of(ordered, self.means.batch)):
            found[candidates, columns] = torch.tensor(task, dtype=torch.float64)
        self.forwards += prefix_tree.passes(paths) * len(ordered) * self.seq_len / len(self.own.skeleton.blocks)
        rows = {one: row for row, one in enumerate(paths)}
        columns_of = {sample: column for column, sample in enumerate(ordered)}
        return found[[rows[one] for one in asked]][:, [columns_of[sample] for sample in samples]]

    def _tasks(self, paths: list[Path], batches: list[Batch]) -> Iterator[tuple[slice, slice, list[list[float]]]]:
        """(paths, samples, their divergences) of parts that together are everything."""
        if self.reference is None:
            with one_thread():
                self.reference = reference_logprobs.load(
                    self.own.skeleton, self.tokens, self.folder, self.means.top_k, self.means.device, self.say
                )
        if self.means.processes == 1:
            with one_thread():
                yield slice(None), slice(None), self.own.per_sample(paths, batches, self.reference)
            return
        if self.pool is None:
            given = (self.source, self.tokens.numpy(), self.work, self.setting, self.reference)
            self.pool = ProcessPoolExecutor(
                self.means.processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=given
            )
        parts = shares(len(paths), len(batches), self.means.processes)
        ends = [0, *itertools.accumulate(map(len, batches))]  # samples before each batch
        try:
            tasks = [
                (rows, slice(ends[some.start], ends[some.stop]), self.pool.submit(_task, paths[rows], batches[some]))
                for rows, some in parts
            ]
            done = [(rows, columns, task.result()) for rows, columns, task in tasks]
        except BrokenProcessPool as error:
            self.pool = None
            raise BudgetError(
                "a process that compares variants of the model has ended, most likely for want of memory; use fewer "
                "processes, or raise the memory limit"
            ) from error
        yield from done


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for sums, so that they are taken in the same order everywhere; the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(paths: Sequence[Path]) -> list[Path]:
    """The different ones among these, those that begin alike beside each other."""
    numbers: dict[prefix_tree.Part, int] = {}
    for one in paths:
        for part in one:
            numbers.setdefault(part, len(numbers))
    return sorted(dict.fromkeys(paths), key=lambda one: [numbers[part] for part in one])


def batches_of(samples: Sequence[int], size: int) -> list[Batch]:
    """Whole batches, and what is left over one by one: blocks are called with no other number of samples."""
    whole = len(samples) // size * size
    batches: list[Batch] = [samples[start : start + size] for start in range(0, whole, size)]
    return batches + [[sample] for sample in samples[whole:]]


def shares(paths: int, batches: int, processes: int) -> list[tuple[slice, slice]]:
    """(paths, batches) of each process: batches are shared out, paths only where there are too few batches."""
    columns = _cut(batches, min(batches, processes))
    rows = _cut(paths, min(paths, -(-processes // len(columns))))
    return list(itertools.product(rows, columns))


def _cut(count: int, parts: int) -> list[slice]:
    """0 .. count in contiguous parts of about one size."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


_setup: dict[str, Any] = {}  # of a worker process


def _start(source: Source, tokens: Any, folder: File, setting: Setting, reference: reference_logprobs.Teacher) -> None:
    """Note what a worker process needs; errors are raised by its first task, where they are passed on."""
    torch.set_num_threads(1)
    _setup.update(make=lambda: Evaluator(source, torch.from_numpy(tokens), folder, setting), reference=reference)


def _task(paths: list[Path], batches: list[Batch]) -> list[list[float]]:
    if "evaluator" not in _setup:
        _setup["evaluator"] = _setup["make"]()
    result: list[list[float]] = _setup["evaluator"].per_sample(paths, batches, _setup["reference"])
    return result
