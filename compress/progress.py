"""Report the progress of a run: one callback, and a meter that takes its fraction from the times of the last block.

What a user should know of a run while it goes on is a line in the log `NOTES`; the command line prints it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Protocol

NOTES = logging.getLogger("compress.notes")


TRUST = 10  # a tenth of the blocks tells the time of the others as well as a prediction can


class Progress(Protocol):
    """Receive what is being done and how much of it is done; called often. Total 0: not known."""

    def __call__(self, text: str, done: float, total: float) -> None: ...


def silent(text: str, done: float, total: float) -> None:
    """Show nothing."""


def note(text: str) -> None:
    """Tell the user that something is otherwise than asked for, in one line."""
    NOTES.warning("%s", text)


def duration(seconds: float) -> str:
    """Format a duration for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration: 90s, 20min (or 20m), 2h. Raises ValueError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(s|min|m|h)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no duration such as 90s, 20min or 2h")
    return float(match[1]) * {"s": 1, "min": 60, "m": 60, "h": 3600}[match[2]]


class Meter:
    """Count blocks; the fraction of the present one is that of the same steps in the block before.

    before, expected: seconds that are predicted until the first block begins, and of all blocks, from which the time
    that is left is shown; 0: not known. What has been measured takes the place of the prediction as blocks are done.
    """

    def __init__(self, progress: Progress, blocks: int, before: float = 0.0, expected: float = 0.0) -> None:
        self.before, self.expected, self.created = before, expected, time.monotonic()
        self.first: tuple[float, int] | None = None  # when the first block began, and its number
        self.progress, self.blocks = progress, blocks
        self.index, self.total_steps = 0, 1
        self.text = ""
        self.started = time.monotonic()
        self.marks: list[float] = []  # seconds from the block's start to the end of each step
        self.previous: list[float] = []  # marks of the last finished block, its whole duration at the end

    def begin(self, index: int, steps: int) -> None:
        """Begin block `index`, of about `steps` steps."""
        self.index, self.total_steps = index, max(1, steps)
        self.started, self.marks = time.monotonic(), []
        self.first = self.first or (self.started, index)

    def say(self, text: str) -> None:
        """Name what is being done; nothing has advanced."""
        self.text = text
        self._show()

    def step(self) -> None:
        """End a step."""
        self.marks.append(time.monotonic() - self.started)
        self._show()

    def end(self) -> None:
        """End the block."""
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
        left = self.seconds_left(self.index + fraction)
        text = f"block {shown}/{self.blocks}: {self.text}" + (f", about {duration(left)} left" if left else "")
        self.progress(text, self.index + fraction, self.blocks)

    def seconds_left(self, done: float) -> float:
        """Return the seconds that are left when so many blocks are done; 0: not known."""
        now = time.monotonic()
        if self.first is None:
            return max(self.before - (now - self.created), 0.0) + self.expected if self.expected else 0.0
        begun, index = self.first
        share = (done - index) / max(1, self.blocks - index)
        trust = min(1.0, TRUST * share)
        predicted = self.expected * (self.blocks - index) / max(1, self.blocks)
        if not self.expected:
            trust = 1.0
        measured = (now - begun) / share if share > 0 else 0.0
        return (1 - share) * (trust * measured + (1 - trust) * predicted)


def make_counter(progress: Progress, text: str, total: int) -> Callable[[int], None]:
    """Return a function that adds to what is done and shows it."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(text, done, total)

    return add
