"""Fetch, decode and compute pieces of a cache at the same time, into a cache that `generate` takes.

    source = LevelledCache(fetch_from(folder), model)       # or any function from a name to bytes
    cache, report = stream_cache(source, MachineSpeeds(computed=150, decoded=3000), deadline=3.0)
    model.generate(torch.cat((source.token_ids, question), 1), past_key_values=cache)

One thread fetches, in the order of the text; this one decodes what has arrived, or computes it from its tokens with the
cache of all before it. `load_choices` does the same for choices that are made already, as those of a simulation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread

import torch
from transformers.cache_utils import DynamicCache

from compress.papers.streaming.controller import TEXT, MachineSpeeds, Policy, StreamState, choose
from compress.papers.streaming.levels import LevelledCache, States

MAX_WAITING_PIECES = 2  # arrived and not decoded: a bound of memory


@dataclass(frozen=True)
class Report:
    """How a cache was streamed."""

    choices: tuple[str, ...]  # of each piece
    seconds: float  # until the cache was whole


class _Filling:
    """A cache that is filled piece by piece."""

    def __init__(self, source: LevelledCache) -> None:
        self.source, self.cache = source, DynamicCache(config=source.model.config)
        self.device = next(source.model.parameters()).device
        self.ids = source.token_ids.to(self.device)
        self.append(source.sinks())

    def append(self, states: States) -> None:
        for index, (keys, values) in enumerate(states):
            self.cache.update(keys.to(self.device), values.to(self.device), index)

    @torch.no_grad()
    def add(self, piece: int, level: str, content: bytes) -> None:
        """Decode a piece, or compute it from its tokens."""
        if level != TEXT:
            self.append(self.source.decode(level, piece, content))
            return
        start, stop = self.source.span(piece)
        self.source.model(
            input_ids=self.ids[:, start:stop], past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )


def load_choices(source: LevelledCache, choices: Sequence[str]) -> DynamicCache:
    """Return the cache with the level, or TEXT, that is chosen for each piece."""
    filling = _Filling(source)
    for piece, level in enumerate(choices):
        filling.add(piece, level, b"" if level == TEXT else source.fetch(f"{level}.{piece}"))
    return filling.cache


def stream_cache(
    source: LevelledCache, speeds: MachineSpeeds, deadline: float, policy: Policy = choose
) -> tuple[DynamicCache, Report]:
    """Return the cache, and what was chosen; deadline: seconds until the first token is due.

    Raises what `fetch` raises, and CheckpointError for pieces that are damaged.
    """
    started = time.monotonic()
    sizes, stopped = source.sizes, Event()
    waiting = Queue[tuple[int, str, bytes] | BaseException](MAX_WAITING_PIECES)
    filling = _Filling(source)
    before = max(time.monotonic() - started, 1e-9)

    def fetch_all() -> None:
        bandwidth, sent, work = sizes.common / before, frozenset[str](), list[float]()
        try:
            for piece, tokens in enumerate(sizes.tokens):
                if stopped.is_set():
                    return
                left = deadline - (time.monotonic() - started)
                queued = sum(work[len(work) - waiting.qsize() :])
                level, content = policy(sizes, speeds, StreamState(piece, bandwidth, left, sent, queued)), b""
                if level != TEXT:
                    begun = time.monotonic()
                    source.head(level)
                    content = source.fetch(f"{level}.{piece}")
                    nbytes = len(content) + (0 if level in sent else sizes.heads[level])
                    bandwidth, sent = nbytes / max(time.monotonic() - begun, 1e-9), sent | {level}
                work.append(tokens / (speeds.computed if level == TEXT else speeds.decoded))
                waiting.put((piece, level, content))
        except BaseException as error:  # noqa: BLE001  # it is raised where pieces are taken
            waiting.put(error)

    thread, choices = Thread(target=fetch_all, name="fetch pieces", daemon=True), list[str]()
    thread.start()
    try:
        for _ in range(source.pieces):
            arrived = waiting.get()
            if isinstance(arrived, BaseException):
                raise arrived
            filling.add(*arrived)
            choices.append(arrived[1])
    finally:
        stopped.set()
        while thread.is_alive():
            with suppress(Empty):
                waiting.get(timeout=0.05)
    return filling.cache, Report(tuple(choices), time.monotonic() - started)
