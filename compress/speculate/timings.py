"""Time passes: medians of the newest ones, by their number of tokens, and of each draft's steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable

SAMPLES = 15  # newest ones that count
# The first passes of each kind do not count: programs are made, kernels compiled.
FIRST_PASSES = 1


class Times:
    """Seconds of one kind of pass."""

    def __init__(self) -> None:
        self.seen, self.median = 0, 0.0
        self._newest: deque[float] = deque(maxlen=SAMPLES)

    def add(self, seconds: float) -> bool:
        """Take note of a pass; return whether it counts."""
        self.seen += 1
        if self.seen <= FIRST_PASSES:
            return False
        self._newest.append(seconds)
        self.median = statistics.median(self._newest)
        return True


class Timings:
    """Seconds of passes of a model on one cache."""

    def __init__(self) -> None:
        self.drafts: dict[Hashable, dict[int, Times]] = {}  # of a drafted token, by the tokens of its draft
        self.checks: dict[int, Times] = {}  # by rows; 1: a plain step

    def add_draft(self, draft: Hashable, count: int, seconds: float) -> bool:
        """Take note of the seconds of a draft of `count` tokens; return whether they count."""
        return self.drafts.setdefault(draft, {}).setdefault(count, Times()).add(seconds / count)

    def add_check(self, rows: int, seconds: float) -> bool:
        """Take note of a pass of the target; return whether it counts."""
        return self.checks.setdefault(rows, Times()).add(seconds)

    def draft(self, draft: Hashable, count: int) -> float:
        """Return the seconds of a drafted token where `count` are drafted, 0 if they are not known.

        Those of drafts of the nearest number that was seen: in short ones a token costs more, as changing the model to
        the draft's costs the same for any number.
        """
        known = {seen: times.median for seen, times in self.drafts.get(draft, {}).items() if times.median}
        return known[min(known, key=lambda seen: (abs(seen - count), seen))] if known else 0.0

    def check(self, rows: int) -> float:
        """Return the seconds of a pass of so many rows, interpolated between those that were seen; 0 if none was."""
        known = sorted((count, times.median) for count, times in list(self.checks.items()) if times.median)
        if not known:
            return 0.0
        below = [each for each in known if each[0] <= rows]
        above = [each for each in known if each[0] >= rows]
        if below and above:
            (low, a), (high, b) = below[-1], above[0]
            return a if low == high else a + (b - a) * (rows - low) / (high - low)
        if not below:
            return known[0][1]
        (first, a), (last, b) = known[0], known[-1]
        slope = max(0.0, (b - a) / (last - first)) if last > first else 0.0
        return b + slope * (rows - last)
