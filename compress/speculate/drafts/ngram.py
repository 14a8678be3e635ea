"""Drafts what followed the last few tokens where they stood before (prompt look-up; CopySpec, arXiv 2502.08923).

Texts that quote their prompt, edit code or fill in lists repeat long runs. The longest run of tokens that ends the text
and that also stands earlier in it is looked for, from `longest` tokens down to `shortest`, and what followed it last is
the draft. It costs a look into a table: for each length the place behind each run of that length, by the run itself,
which takes the place of CopySpec's rolling hash (a Python tuple's hash, and no false matches). CopySpec has one length,
and the published prompt look-up scans the text each time.

Where a run of a length was followed by other tokens than the target's before, drafts from runs of that length become
shorter, or cease: each length has an acceptance of its own.

It does not: draft from other texts than this one, build a tree, or join several continuations.
"""

from __future__ import annotations

from dataclasses import dataclass

from compress.speculate.drafting import Draft, Proposal
from compress.speculate.session import Session

PART = "draft"


@dataclass(frozen=True)
class Config:
    """Lengths of the runs, in tokens."""

    shortest: int = 2
    longest: int = 6

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest {self.shortest} is not from 1 to longest, {self.longest}")


class NgramDraft(Draft):
    """Tables of one text."""

    def __init__(self, config: Config) -> None:
        self.sizes = range(config.longest, config.shortest - 1, -1)
        self._behind: dict[tuple[int, ...], int] = {}  # a run -> the place behind it, where it stood last
        self._place = 0
        self._known = 0  # places whose runs are in the table: every run that ends before them

    def situation(self, session: Session) -> int | None:
        """Return the tokens of the longest run that ends the text and stood earlier, too; None where it is new."""
        tokens = session.tokens
        self._learn(tokens)
        for size in self.sizes:
            place = self._behind.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if place is not None:
                self._place = place
                return size
        return None

    def propose(self, session: Session, count: int) -> Proposal:
        """Return what followed the run that `situation` has found."""
        return Proposal(_copied(session.tokens, self._place, count))

    def _learn(self, tokens: list[int]) -> None:
        """Add the runs that end before the last token."""
        for end in range(max(1, self._known), len(tokens)):
            for size in self.sizes:
                if size <= end:
                    self._behind[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)


def _copied(tokens: list[int], place: int, count: int) -> list[int]:
    """Return the tokens from a place on; a copy that reaches the end goes on with what it has copied."""
    period = len(tokens) - place
    return [tokens[place + i % period] for i in range(count)]


def build(config: Config, session: Session) -> Draft:
    """Return the draft of a session's text."""
    return NgramDraft(config)
