"""The steps of a path through a trellis, as the compiled search (viterbi.py) counts and stores them."""

from __future__ import annotations

from typing import NamedTuple

from compress.formats.trellis import step_bits


class Kind(NamedTuple):
    """The steps of a path that shift in the same number of bits."""

    bits: int  # that are shifted in
    oldest_bits: int  # that the next step shifts out
    rest: int  # what both leave of a state

    @property
    def symbols(self) -> int:
        return 1 << self.bits

    @property
    def decisions_per_byte(self) -> int:
        """Decisions that one byte holds: those of nodes that differ in the newest symbol alone."""
        return min(self.symbols, max(1, 8 // self.oldest_bits))

    @property
    def rows(self) -> int:
        """Bytes of the decisions for each of the remaining bits."""
        return self.symbols // self.decisions_per_byte


def kinds_of_steps(state_bits: int, symbol_bits: float) -> list[Kind]:
    """Return the kinds of steps, which take turns; some can be alike."""
    bits = step_bits(symbol_bits)
    pairs = zip(bits, (*bits[1:], bits[0]), strict=True)
    return [Kind(new, oldest, 1 << (state_bits - new - oldest)) for new, oldest in pairs]


def most_decisions(kinds: list[Kind]) -> int:
    """Return the bytes of the decisions of a step in one lane."""
    return max(kind.rest * kind.rows for kind in kinds)
