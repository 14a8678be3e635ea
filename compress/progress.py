"""Progress of a run: one callback, and a meter whose fraction is measured, not guessed."""

from __future__ import annotations

import time
from typing import Protocol


class Progress(Protocol):
    """Called often: what is being done, and how much of it (total 0: not known)."""

    def __call__(self, text: str, done: float, total: float) -> None: ...


def silent(text: str, done: float, total: float) -> None:
    """Shows nothing."""


class Meter:
    """Counts blocks; the fraction of the present one is taken from the times of the same steps in the one before."""

    def __init__(self, progress: Progress, blocks: int) -> None:
        self.progress, self.blocks = progress, blocks
        self.index, self.total_steps = 0, 1
        self.text = ""
        self.started = time.monotonic()
        self.marks: list[float] = []  # seconds from the block's start to the end of each step
        self.previous: list[float] = []  # marks of the last finished block, its whole duration at the end

    def begin(self, index: int, steps: int) -> None:
        """Block `index` begins; it will take about `steps` steps."""
        self.index, self.total_steps = index, max(1, steps)
        self.started, self.marks = time.monotonic(), []

    def say(self, text: str) -> None:
        """Name what is being done; nothing has advanced."""
        self.text = text
        self._show()

    def step(self) -> None:
        self.marks.append(time.monotonic() - self.started)
        self._show()

    def end(self) -> None:
        self.previous = [*self.marks, time.monotonic() - self.started]
        self.marks = []
        self.index += 1
        self._show()

    def _show(self) -> None:
        done = len(self.marks)
        if done and done < len(self.previous):
            fraction = self.previous[done - 1] / self.previous[-1]
        else:
            fraction = min(done / self.total_steps, 1.0)
        shown = min(self.index + 1, self.blocks)
        self.progress(f"block {shown}/{self.blocks}: {self.text}", self.index + fraction, self.blocks)
