"""Choose for each piece its level, or its text, by bandwidth and deadline; simulate that on a trace of bandwidths.

The rule of CacheGen (arXiv 2310.07240): with the bandwidth of what was fetched last, and the time that is left until
the first token is due,

    the text, if the model computes all pieces that are left in that time: nothing more is lost then;
    else the finest level at which all pieces that are left arrive in that time;
    else the coarsest.

The choice holds for one piece, and is made anew for the next. Decoding goes on beside the network, so that only what
is left of it behind the last piece counts; `MachineSpeeds` says how long decoding, computing and the question take.
What it does not do: look at a network before the piece that is on its way, or guess that it will change; take a level
that is late, but less so than others, for what it loses. What that costs: docs/results/kv_streaming.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

TEXT = "text"


@dataclass(frozen=True)
class PieceSizes:
    """Bytes and tokens of what can be sent."""

    tokens: Sequence[int]  # of each piece
    pieces: Mapping[str, Sequence[int]]  # level -> bytes of each piece, the finest level first
    heads: Mapping[str, int]  # level -> bytes that are sent before its first piece
    common: int  # bytes that are sent before all


@dataclass(frozen=True)
class MachineSpeeds:
    """How fast a machine works on the cache."""

    computed: float  # tokens a second, from text
    decoded: float  # tokens a second, from a piece of any level
    question: float = 0.0  # seconds from the whole cache to the first token

    def __post_init__(self) -> None:
        if not (self.computed > 0 and self.decoded > 0 and self.question >= 0):
            raise ValueError("computed and decoded are above 0 tokens a second, question is 0 seconds or more")


@dataclass(frozen=True)
class StreamState:
    """What is known when the next piece is chosen."""

    piece: int  # the next one
    bandwidth: float  # bytes a second of what was fetched last
    left: float  # seconds until the first token is due
    sent: frozenset[str] = frozenset()  # levels whose heads were sent
    computing: float = 0.0  # seconds of work that waits on this machine


Policy = Callable[[PieceSizes, MachineSpeeds, StreamState], str]


def choose(sizes: PieceSizes, speeds: MachineSpeeds, now: StreamState) -> str:
    """Return the level of the next piece, or TEXT: the rule above."""
    rest = sum(sizes.tokens[now.piece :])
    left = now.left - speeds.question
    if now.computing + rest / speeds.computed <= left:
        return TEXT
    last = sizes.tokens[-1] / speeds.decoded
    for level, nbytes in sizes.pieces.items():
        need = sum(nbytes[now.piece :]) + (0 if level in now.sent else sizes.heads[level])
        decoding = now.computing + rest / speeds.decoded
        if max(need / max(now.bandwidth, 1e-9) + last, decoding) <= left:
            return level
    return [*sizes.pieces][-1]


def always(level: str) -> Policy:
    """Return the policy that takes one level, or TEXT, for all pieces."""
    return lambda sizes, speeds, now: level


@dataclass(frozen=True)
class Trace:
    """Bytes a second of a network, for one span of time after the other; the last goes on."""

    rates: Sequence[float]
    span: float = 1.0  # seconds of each

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) < 0 or not self.span > 0:
            raise ValueError("rates are at least one number, each 0 or more, and span is above 0")

    def arrival(self, start: float, nbytes: float) -> float:
        """Return when bytes have arrived that are sent from `start` on, in seconds; infinity: never."""
        if nbytes <= 0:
            return start
        now = start
        for at in count(int(start / self.span)):
            end = (at + 1) * self.span
            rate = self.rates[min(at, len(self.rates) - 1)]
            is_last = at >= len(self.rates) - 1
            if rate > 0 and (is_last or now + nbytes / rate <= end):
                return now + nbytes / rate
            if is_last:
                return float("inf")
            nbytes -= rate * (end - now)
            now = end
        raise AssertionError


@dataclass(frozen=True)
class Timeline:
    """What a simulation gave."""

    choices: tuple[str, ...]  # of each piece: a level, or TEXT
    first_token: float  # seconds from the start
    nbytes: int  # that were sent


def simulate(
    sizes: PieceSizes, speeds: MachineSpeeds, trace: Trace, deadline: float, policy: Policy = choose
) -> Timeline:
    """Return what a policy does on a network; the first bandwidth is that of what all levels share.

    The network sends one piece after the other without waiting; one processor decodes and computes in their order.
    """
    network = trace.arrival(0.0, sizes.common)
    bandwidth = sizes.common / max(network, 1e-9)
    busy, total, sent, choices = network, sizes.common, frozenset[str](), list[str]()
    for piece, tokens in enumerate(sizes.tokens):
        level = policy(sizes, speeds, StreamState(piece, bandwidth, deadline - network, sent, max(0.0, busy - network)))
        choices.append(level)
        if level == TEXT:
            nbytes, work = 0, tokens / speeds.computed  # the tokens are among what all levels share
        else:
            nbytes = sizes.pieces[level][piece] + (0 if level in sent else sizes.heads[level])
            work, sent = tokens / speeds.decoded, sent | {level}
        arrived = trace.arrival(network, nbytes)
        if nbytes:
            bandwidth = nbytes / max(arrived - network, 1e-9)
        network, total = arrived, total + nbytes
        busy = max(busy, arrived) + work
    return Timeline(tuple(choices), busy + speeds.question, total)
