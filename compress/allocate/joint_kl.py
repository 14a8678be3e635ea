"""Measure how far variants of a model are from the original, jointly and many at a time.

    source = partial(build, arguments)   # -> (skeleton, weights of variants); a function of a module for processes
    with JointKL(source, tokens, folder, Resources(max_memory=8 << 30)) as joint_kl:
        joint_kl.divergence([{"model.layers.0.mlp.up_proj": "2 bits"}, {}], samples=range(16))   # nats a token

An assignment gives linears a variant: whatever `weights.weight(name, variant, original)` understands. Linears that are
not named, or at None, keep their original weights. The result is the mean over all positions of the samples of
KL(original || variant), against predictions that are kept in a file of the folder (calib/reference_logprobs.py).

Variants go through the model block by block, and what they share at the front is computed once (prefix_tree.py).
Results are the same to the bit whatever else is asked in the same call, in which order, with how much memory and in how
many processes: sums are exact, everything runs on one thread of each process, and a sample is never batched with
others. Processes share out the samples, and variants only where there are fewer samples than processes.

`forwards` counts what is computed, in tokens through the whole model: block passes / blocks, whatever is shared counted
once. The original's own pass and output heads are not counted. It does not depend on the number of processes.

Everything computes in float32 unless asked otherwise. In bfloat16 any change, however small, moves the roundings of all
that follows: on a model of 8M parameters that alone is a KL of up to 8e-5, more than the error of a whole linear in 4
bits. Inputs are not quantized.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from compress import process_memory, ranks
from compress.allocate import prefix_tree
from compress.allocate.prefix_tree import ModelSource, PathEvaluator, Resources, Variant, VariantPath
from compress.calib import reference_logprobs
from compress.calib.reference_logprobs import divergence, predictions
from compress.errors import BudgetError
from compress.model import blockwise, lm_head
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.ranks import children
from compress.storage.checkpoint import Checkpoint

Assignment = Mapping[str, Variant]
T = TypeVar("T")


class JointKL:
    """A joint KL evaluator of variants of a model on tokens [samples, seq_len] int64."""

    def __init__(
        self,
        source: ModelSource,
        tokens: Tensor,
        folder: Path,
        resources: Resources | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`source` is called once in each process and must be picklable for several; `close` removes the files."""
        self.source, self.tokens, self.folder, self.say = source, tokens, folder, say
        self.samples, self.seq_len = tokens.shape
        self.forwards = 0.0  # tokens through the whole model so far
        self.work = Path(tempfile.mkdtemp(prefix="candidates-", dir=folder))
        self.resources = resources or Resources()
        if self.resources.max_memory is None:
            self.resources = replace(self.resources, max_memory=int(0.8 * process_memory.available()))
        try:
            self.evaluator = PathEvaluator(source, tokens, self.work, self.resources)
        except BaseException:
            self.work.rmdir()
            raise
        self.pool: ProcessPoolExecutor | None = None
        self.reference: reference_logprobs.ReferenceLogprobs | None = None

    def __enter__(self) -> JointKL:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End processes, free memory, remove files but that of the reference log-probabilities."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None
        self.evaluator.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def divergence(self, assignments: Sequence[Assignment], samples: Sequence[int]) -> list[float]:
        """Return KL(original || variant) of each assignment, the mean over these samples, nats a token."""
        return [math.fsum(row) / len(row) for row in self.per_sample(assignments, samples).tolist()]

    def per_sample(self, assignments: Sequence[Assignment], samples: Sequence[int]) -> Tensor:
        """Return the same of each sample, float64 [assignments, samples]. Equal assignments are computed once."""
        ordered = sorted(samples)
        if not ordered or len(set(ordered)) < len(ordered) or not 0 <= ordered[0] <= ordered[-1] < self.samples:
            raise ValueError(f"samples are some of 0 to {self.samples - 1}, each once, not {list(samples)}")
        all_paths = [prefix_tree.path(self.evaluator.skeleton, assignment) for assignment in assignments]
        paths = in_order(all_paths)
        kls = torch.empty(len(paths), len(ordered), dtype=torch.float64)
        for rows, columns, task in self._tasks(paths, ordered):
            kls[rows, columns] = torch.tensor(task, dtype=torch.float64)
        self.forwards += prefix_tree.passes(paths) * len(ordered) * self.seq_len / len(self.evaluator.skeleton.blocks)
        row_of = {one: row for row, one in enumerate(paths)}
        column_of = {sample: column for column, sample in enumerate(ordered)}
        return kls[[row_of[one] for one in all_paths]][:, [column_of[sample] for sample in samples]]

    def _tasks(self, paths: list[VariantPath], samples: list[int]) -> Iterator[tuple[slice, slice, list[list[float]]]]:
        """Yield (paths, samples, their divergences) of parts that together are everything."""
        if self.reference is None:
            with one_thread():
                self.reference = reference_logprobs.load(
                    self.evaluator.skeleton,
                    self.tokens,
                    self.folder,
                    self.resources.top_k,
                    self.resources.device,
                    self.say,
                )
        if ranks.current().size > 1:
            yield from self._shared_out(paths, samples)
            return
        if self.resources.processes == 1:
            with one_thread():
                yield slice(None), slice(None), self.evaluator.per_sample(paths, samples, self.reference)
            return
        if self.pool is None:
            given = (self.source, self.tokens.numpy(), self.work, self.resources, self.reference)
            self.pool = children.pool(self.resources.processes, _start, given)
        parts = shares(len(paths), len(samples), self.resources.processes)
        try:
            with children.starting():
                tasks = [(r, c, self.pool.submit(_task, paths[r], samples[c])) for r, c in parts]
            done = [(rows, columns, task.result()) for rows, columns, task in tasks]
        except BrokenProcessPool as error:
            self.pool = None
            raise BudgetError(
                "a process that compares variants of the model has ended, most likely for want of memory; use fewer "
                "processes, or raise the memory limit"
            ) from error
        except BaseException:
            children.end(self.pool)
            self.pool = None
            raise
        yield from done

    def _shared_out(
        self, paths: list[VariantPath], samples: list[int]
    ) -> Iterator[tuple[slice, slice, list[list[float]]]]:
        """Do the same in all processes of the run, which `serve`."""
        task = _SharedTask(self.tokens, self.folder, self.resources, paths, samples)
        ranks.current().share(task)
        with one_thread():
            assert self.reference is not None, "_tasks has made it"
            done = ranks.current().gather(task.compute_own_share(self.evaluator, self.reference))
        yield from (part for parts in done for part in parts)


@dataclass(frozen=True)
class _SharedTask:
    """A comparison in which all processes of a run take part."""

    tokens: Tensor
    folder: Path
    resources: Resources
    paths: list[VariantPath]
    samples: list[int]

    def compute_own_share(
        self, evaluator: PathEvaluator, reference: reference_logprobs.ReferenceLogprobs
    ) -> list[tuple[slice, slice, list[list[float]]]]:
        """Return (paths, samples, their divergences) of the parts that are this process's."""
        processes = ranks.current()
        parts = shares(len(self.paths), len(self.samples), processes.size)[processes.rank :: processes.size]
        return [(r, c, evaluator.per_sample(self.paths[r], self.samples[c], reference)) for r, c in parts]

    def is_on(self, other: _SharedTask | None) -> bool:
        """Return whether another comparison is on the same text."""
        return other is not None and self.folder == other.folder and torch.equal(self.tokens, other.tokens)


@dataclass(frozen=True)
class _End:
    result: Any


def end_of_tasks(result: T) -> T:
    """End the `serve` of the other processes, which returns the result there."""
    return ranks.current().share(_End(result)).result


def serve(source: ModelSource) -> Any:
    """Take part in the comparisons of the main process until it ends this; return what it gives then."""
    former: _SharedTask | None = None
    with ExitStack() as opened:
        while not isinstance(task := ranks.current().share(cast(Any, None)), _End):
            with one_thread():
                if not task.is_on(former):
                    opened.close()
                    folder = Path(
                        opened.enter_context(tempfile.TemporaryDirectory(prefix="candidates-", dir=task.folder))
                    )
                    evaluator = PathEvaluator(source, task.tokens, folder, task.resources)
                    opened.callback(evaluator.close)
                    settings = (task.folder, task.resources.top_k, task.resources.device)
                    reference = reference_logprobs.load(evaluator.skeleton, task.tokens, *settings)
                    former = task
                ranks.current().gather(task.compute_own_share(evaluator, reference))
    return task.result


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums are taken in the same order everywhere; restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(paths: Sequence[VariantPath]) -> list[VariantPath]:
    """Return the different ones among these, those that begin alike beside each other."""
    numbers: dict[prefix_tree.BlockVariants, int] = {}
    for one in paths:
        for variants in one:
            numbers.setdefault(variants, len(numbers))
    return sorted(dict.fromkeys(paths), key=lambda one: [numbers[variants] for variants in one])


def shares(paths: int, samples: int, processes: int) -> list[tuple[slice, slice]]:
    """Return (paths, samples) of each process: samples are shared out, paths only where there are too few samples."""
    columns = _cut(samples, min(samples, processes))
    rows = _cut(paths, min(paths, -(-processes // len(columns))))
    return list(itertools.product(rows, columns))


def _cut(count: int, parts: int) -> list[slice]:
    """Cut 0 .. count into contiguous parts of about one size."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


class TokenPasses(NamedTuple):
    """What a measurement computes, in tokens: through one block, on average, and through the output head."""

    block_tokens: float
    head_tokens: float


class TokenSeconds(NamedTuple):
    """Seconds of one token: through one block, and through the output head."""

    block: float
    head: float

    def seconds(self, work: TokenPasses, processes: int = 1) -> float:
        """Return the seconds of so much work, shared out among processes."""
        return (self.block * work.block_tokens + self.head * work.head_tokens) / processes


@torch.no_grad()
def time_passes(checkpoint: Checkpoint, seq_len: int, seed: int, device_name: str) -> TokenSeconds:
    """Time the first block and the head, in float32 on one thread, on one sample of random tokens."""
    skeleton, device = Skeleton(checkpoint), torch.device(device_name)
    end = blockwise.computing_in(skeleton, torch.float32)
    stream = blockwise.HiddenStates(1, None)
    tokens = torch.randint(skeleton.vocab_size, (1, seq_len), generator=torch.Generator().manual_seed(seed))
    try:
        with one_thread():
            calls = blockwise.record_inputs(skeleton, tokens, 1, stream, device)
            block, hidden = skeleton.load_block(0, device), stream.read(0, 1).to(device)
            forward = _seconds_of(lambda: blockwise.run_block(block, calls[0][1], hidden, "the first block"))
            skeleton.free()
            positions = kl.slices(seq_len, skeleton.vocab_size)[0]
            lm_head.load(skeleton, device)
            rows = hidden[:, positions]
            reference = predictions(lm_head.logits(skeleton, rows)[0], reference_logprobs.TOP_K)
            head = _seconds_of(lambda: divergence(reference, slice(None), lm_head.logits(skeleton, rows)[0]))
            return TokenSeconds(forward / seq_len, head / rows.shape[1])
    finally:
        stream.close()
        end()


def _seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of the second of two calls: the first one also makes what is kept."""
    call()
    started = time.monotonic()
    call()
    return time.monotonic() - started


_setup: dict[str, Any] = {}  # of a worker process


def _start(
    source: ModelSource,
    tokens: Any,
    folder: Path,
    resources: Resources,
    reference: reference_logprobs.ReferenceLogprobs,
) -> None:
    """Note what a worker process needs; errors are raised by its first task, where they are passed on."""
    children.prepare_worker()
    torch.set_num_threads(1)
    _setup.update(make=lambda: PathEvaluator(source, torch.from_numpy(tokens), folder, resources), reference=reference)


def _task(paths: list[VariantPath], samples: list[int]) -> list[list[float]]:
    if "evaluator" not in _setup:
        _setup["evaluator"] = _setup["make"]()
    result: list[list[float]] = _setup["evaluator"].per_sample(paths, samples, _setup["reference"])
    return result
