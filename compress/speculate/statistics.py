"""Count what a call of generate with drafts has done: rounds, drafted and accepted tokens, seconds, the gain."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LEAST_TIMED_TOKENS, LEAST_PLAIN_STEPS = 64, 8  # fewer say little of a speed-up: programs are made meanwhile


@dataclass
class Statistics:
    """Counts of one call of generate, or of several that are added up."""

    tokens: int = 0  # written
    plain_steps: int = 0  # passes of the target without a draft
    rounds: int = 0  # passes of the target that checked a draft
    drafted: int = 0
    accepted: int = 0
    complete: int = 0  # rounds whose drafted tokens were all accepted
    lengths: Counter[int] = field(default_factory=Counter)  # accepted tokens of a round -> rounds
    draft_seconds: float = 0.0
    check_seconds: float = 0.0
    seconds: float = 0.0  # in all behind the prompt
    timed_tokens: int = 0  # without the first pass of each kind, which makes programs
    timed_seconds: float = 0.0
    plain_seconds: float = 0.0  # of a plain step, the median
    reason: str = ""  # why nothing was drafted
    notes: list[str] = field(default_factory=list)  # what drafts have to say

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a checked draft brings, its correction or bonus token included."""
        return 0.0 if not self.rounds else 1 + self.accepted / self.rounds

    @property
    def judged_tokens(self) -> int:
        """Drafted tokens that the target has judged: all but those behind a rejected one."""
        return self.accepted + self.rounds - self.complete

    @property
    def acceptance(self) -> float:
        """Accepted tokens among those that were judged."""
        return self.accepted / self.judged_tokens if self.judged_tokens else 0.0

    @property
    def speedup(self) -> float:
        """Estimated: seconds of as many plain steps, over the seconds taken; 0 if too little was timed to say."""
        if self.timed_tokens < LEAST_TIMED_TOKENS or self.plain_steps < LEAST_PLAIN_STEPS:
            return 0.0
        return self.timed_tokens * self.plain_seconds / self.timed_seconds

    def add_round(self, drafted: int, accepted: int) -> None:
        """Take note of a pass of the target."""
        if not drafted:
            self.plain_steps += 1
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.lengths[accepted] += 1
        self.complete += drafted == accepted

    def plain(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "tokens": self.tokens,
            "plain_steps": self.plain_steps,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": round(self.acceptance, 4),
            "tokens_per_round": round(self.tokens_per_round, 3),
            "accepted_lengths": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "draft_seconds": round(self.draft_seconds, 4),
            "check_seconds": round(self.check_seconds, 4),
            "seconds": round(self.seconds, 4),
            "speedup": round(self.speedup, 3),
            **({"reason": self.reason} if self.reason else {}),
            **({"notes": self.notes} if self.notes else {}),
        }

    def text(self) -> str:
        """Return the figures in one line."""
        notes = "".join(f"; {note}" for note in self.notes)
        if not self.rounds:
            return f"no token was drafted{f': {self.reason}' if self.reason else ''}{notes}"
        share = f"{self.accepted} of {self.drafted} drafted tokens accepted in {self.rounds} rounds"
        gain = f", about {self.speedup:.2f} times as fast as plain steps" if self.speedup else ""
        return f"{share} ({self.tokens_per_round:.2f} tokens a round), {self.plain_steps} plain steps{gain}{notes}"
