"""Make the joint KL evaluators of a measurement folder: on the calibration text, or on another one."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import Tensor

from compress import process_memory
from compress.allocate.joint_kl import JointKL, Resources
from compress.allocate.prepare_options import Options
from compress.allocate.variant_source import build
from compress.calib.data import Calibration, token_windows
from compress.errors import CalibrationError
from compress.model import load
from compress.progress import Progress
from compress.run import prepare


class Evaluators:
    """The joint KL evaluators of one folder; each is made when it is first asked for."""

    def __init__(self, opened: Options, folder: Path, calibration: Calibration, progress: Progress) -> None:
        self.opened, self.folder, self.calibration, self.progress = opened, folder, calibration, progress
        self.source = functools.partial(build, prepare.resolve(opened.asked.model), opened.asked, folder)
        self._open: dict[str, JointKL] = {}  # by the text that they are on

    def close(self) -> None:
        """Free the memory and remove the working files of all evaluators."""
        while self._open:
            self._open.popitem()[1].close()

    def on_calibration(self, samples: int) -> JointKL:
        """Return the evaluator on the first `samples` calibration sequences."""
        if "calibration" not in self._open:
            self._open["calibration"] = self._on(self.calibration.tokens[:samples], self.folder)
        return self._open["calibration"]

    def on_text(self, text: str, tokens: int) -> JointKL:
        """Return an evaluator on the first `tokens` tokens of a text other than the calibration's.

        Raises CalibrationError for a text that is shorter than one window.
        """
        skeleton, seq_len = self.opened.prepared.skeleton, self.opened.prepared.seq_len
        vocabulary = skeleton.config.get_text_config().vocab_size
        tokenizer = load.load_tokenizer(skeleton.checkpoint.directory)
        windows, available = token_windows(text, tokenizer, seq_len, vocabulary, document_tokens=max(tokens, seq_len))
        if not len(windows):
            raise CalibrationError(f"{text} has only {available} tokens, one window needs {seq_len}; give more text")
        folder = self.folder / "text"
        folder.mkdir(exist_ok=True)
        self.close()  # each takes all the memory there is
        self._open["text"] = self._on(windows[: max(1, tokens // seq_len)], folder)
        return self._open["text"]

    def _on(self, tokens: Tensor, folder: Path) -> JointKL:
        """Return an evaluator on tokens [samples, seq_len]; the reference log-probabilities are kept in the folder."""
        job = self.opened.asked
        limit = job.max_memory  # each process has the program itself in memory, too
        if limit is not None:
            limit = max(0, limit - job.processes * process_memory.resident())
        resources = Resources(job.device, job.processes, max_memory=limit)
        return JointKL(self.source, tokens, folder, resources, lambda text: self.progress(text, 0, 0))
