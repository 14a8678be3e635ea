"""Make the joint KL evaluators of a measurement folder: on the calibration text, or on another one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from compress import process_memory, ranks
from compress.allocate import joint_kl, kl_shares, memory_split, prepare_options, table
from compress.allocate.joint_kl import JointKL, Resources
from compress.allocate.memory_split import MemorySplit
from compress.allocate.prepare_options import Options
from compress.allocate.variant_source import open_variants
from compress.calib.data import Calibration, token_windows
from compress.errors import BudgetError, CalibrationError
from compress.model import load
from compress.progress import Progress
from compress.run import source
from compress.storage.files import make_folder

T = TypeVar("T")

GROWTH = 32 << 20  # bytes that a process comes to hold beside weights and states: pages of libraries, small objects
FLOAT32 = 4  # bytes of a number, as variants are compared


def check_memory(opened: Options) -> None:
    """Raise BudgetError if variants cannot be compared within the job's memory, before anything is measured."""
    if (limit := opened.job.max_memory) is None:
        return
    program = max(process_memory.resident(), opened.prepared.arrangement.program_nbytes)
    least = opened.job.processes * (program + GROWTH + _sizes(opened).least)
    if least > limit:
        raise BudgetError(
            f"this run needs at least {-(-least >> 20)} MiB, to compare variants of the model, more than --max-memory "
            f"{process_memory.show(limit)}; raise it, or use shorter calibration samples"
        )


def _room_beside_programs(opened: Options, limit: int) -> int:
    """Return the bytes that a limit leaves beside the programs: each process has it in memory."""
    return max(0, limit - opened.job.processes * (process_memory.resident() + GROWTH))


def _sizes(opened: Options) -> memory_split.ComparisonSizes:
    prepared = opened.prepared
    return memory_split.sizes(prepared.skeleton, prepared.seq_len, Resources().top_k, FLOAT32, _largest_table(opened))


def _largest_table(opened: Options) -> int:
    """Return the weights of the largest table outside of the blocks that has options."""
    return max((table.spec.numel for table in opened.tables), default=0)


def _predicted_peak(opened: Options, samples: int, allowed: int) -> int:
    """Return the peak of trying every unit at every option on so many samples, of all processes together."""
    needed, processes, skeleton = _sizes(opened), opened.job.processes, opened.prepared.skeleton
    split = MemorySplit.within(needed, allowed // processes)
    linears = [layer for options in opened.levels.values() for layer in options.values()]
    paths = [0] * len(skeleton.blocks)
    for group in table.open_groups(opened):
        paths[group.members[0].block] += len(prepare_options.options_of(opened, group.members))
    stream = samples * opened.prepared.seq_len * skeleton.config.get_text_config().hidden_size * FLOAT32
    decoded = min(split.decoded, FLOAT32 * sum(layer.spec.numel for layer in linears))
    states = min(split.states, max(paths) * stream) + (stream if stream <= split.states // 2 else 0)
    program = process_memory.resident() + GROWTH
    return processes * (program + (needed.all_loaded if split.keeps else needed.least) + decoded + states)


class Evaluators:
    """The joint KL evaluators of one folder; each is made when it is first needed."""

    def __init__(self, opened: Options, folder: Path, calibration: Calibration, progress: Progress) -> None:
        self.opened, self.folder, self.calibration, self.progress = opened, folder, calibration, progress
        self.source = functools.partial(open_variants, source.of(opened.job), opened.job, folder)
        self._open: dict[str, JointKL] = {}  # by the text that they are on
        self.predicted_peak = 0  # bytes, of those that were made

    def run_with_peers(self, work: Callable[[], T]) -> T:
        """Return what `work` gives in the main process; meanwhile the others take part in its comparisons."""
        if ranks.current().is_main:
            return joint_kl.end_of_tasks(work())
        result: T = joint_kl.serve(self.source)
        return result

    def close(self) -> None:
        """Free the memory and remove the working files of all evaluators."""
        while self._open:
            self._open.popitem()[1].close()

    def on_calibration(self, samples: int) -> JointKL:
        """Return the evaluator on the first `samples` calibration sequences."""
        if "calibration" not in self._open:
            self._open["calibration"] = self._on(self.calibration.tokens[:samples], self.folder)
        return self._open["calibration"]

    def shares(self, assignment: Mapping[str, str], samples: int) -> dict[str, float]:
        """Return linear -> its share of an assignment's KL on the first `samples` calibration sequences."""
        process_memory.trim()
        tokens = self.calibration.tokens[:samples]
        return kl_shares.shares(self.source, tokens, self.folder, assignment, self.opened.job.device)

    def on_text(self, text: str, tokens: int) -> JointKL:
        """Return an evaluator on the first `tokens` tokens of a text other than the calibration's.

        Raises CalibrationError for a text that is shorter than one window.
        """
        skeleton, seq_len = self.opened.prepared.skeleton, self.opened.prepared.seq_len
        vocabulary = skeleton.config.get_text_config().vocab_size
        tokenizer = load.load_tokenizer(skeleton.checkpoint.directory)
        bos = self.opened.job.recipe.calibration.bos
        windows, available = token_windows(text, tokenizer, seq_len, vocabulary, max(tokens, seq_len), bos)
        if not len(windows):
            raise CalibrationError(f"{text} has only {available} tokens, one window needs {seq_len}; give more text")
        folder = self.folder / "text"
        make_folder(folder)
        self.close()  # each takes all the memory there is
        self._open["text"] = self._on(windows[: max(1, tokens // seq_len)], folder)
        return self._open["text"]

    def _on(self, tokens: Tensor, folder: Path) -> JointKL:
        """Return an evaluator on tokens [samples, seq_len]; the reference log-probabilities are kept in the folder."""
        job = self.opened.job
        process_memory.trim()
        limit = job.max_memory
        allowed = int(0.8 * process_memory.available() / ranks.current().local)
        if limit is not None:  # the least was checked before anything was measured
            allowed = max(_room_beside_programs(self.opened, limit), job.processes * _sizes(self.opened).least)
        self.predicted_peak = max(self.predicted_peak, _predicted_peak(self.opened, len(tokens), allowed))
        resources = Resources(job.device, job.processes, max_memory=allowed, table=_largest_table(self.opened))
        return JointKL(self.source, tokens, folder, resources, lambda text: self.progress(text, 0, 0))
