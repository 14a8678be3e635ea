"""Measure the quality, bytes and speed of compressed caches: the protocol of `compress kv bench`.

At each context length, for each recipe: the loss of perplexity and the divergence from the uncompressed cache through
the cache (cache_scores.py), recall of what lies far back, the error of attention's output (cache_layers.py), bytes and
speed (cache_speed.py). Quality is measured in `dtype`, bytes and speed in the type that the checkpoint is stored in.

Recipes of different size are compared at equal measured bytes, too: the smaller ones once more, each with so many more
exact tokens that the cache of this context takes as many bytes as that of the largest recipe, or a flush less.

Scores are of the tokens whose past is at least four flushes longer than what stays exact (at most half of the context
is left out); those before are mostly untouched, whatever the recipe. `kl_all` is of all tokens. Where a recipe evicts
tokens, the scores of all recipes are of the last tokens of each window, and that recipe is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calib.documents import source_name
from compress.errors import CalibrationError
from compress.evaluate import cache_needles, scores
from compress.evaluate.cache_candidates import candidates_of, fitting
from compress.evaluate.cache_layers import output_errors
from compress.evaluate.cache_needles import NeedleScore
from compress.evaluate.cache_scores import (
    BATCH_TOKENS,
    Recall,
    compare,
    exact_tokens,
    first_scored,
    policies,
    recall,
    windows_at_a_time,
)
from compress.evaluate.cache_speed import CacheSpeed, MeasuredCacheBytes, sizes, speeds
from compress.evaluate.intervals import interval
from compress.evaluate.reader import Candidate, Execution, Readings, load_model, readings
from compress.evaluate.scores import TextWindows
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.model.architectures import max_positions
from compress.progress import Progress, make_counter, silent

CONTEXTS = (512, 2048, 8192)
ERROR_WINDOWS = 8
MAX_RECALL_TOKENS = 16384  # the windows that needles are planted in have at most so many


@dataclass(frozen=True)
class CacheRow:
    """One recipe at one context length."""

    recipe: str
    context: int
    extra: int  # exact tokens beyond the recipe's, to be as large as the largest recipe
    tokens: int  # scored
    exact_nll: float  # nats a token
    delta_nll: float  # through the cache, above exact_nll
    delta_interval: tuple[float, float] | None  # 95%, over windows
    kl: float  # nats a token, mean
    kl_all: float  # of all tokens of the windows
    same_top1: float
    error_p50: float  # of attention's output, mean over layers of the median over queries
    error_p95: float
    recalled: float | None  # share of what the needles are worth; None where there is no room for them
    recall_gain: float | None  # nats a token that they are worth through the exact cache
    size: MeasuredCacheBytes
    speed: CacheSpeed | None
    needles: NeedleScore | None = None  # None where they were not asked for, or there is no room for them


@dataclass(frozen=True)
class Bench:
    """What was measured of caches, and how."""

    text: str
    dtype: str  # of the scores
    stored_dtype: str  # of bytes and speed
    device: str
    threads: int
    rows: list[CacheRow]
    readings: dict[str, Readings]  # by recipe
    begins_with: str  # what each window begins with, by the tokenizer's name of it; "" for nothing


@dataclass(frozen=True)
class BenchRequest:
    """The caches to measure and the text to measure them on."""

    recipes: dict[str, CacheSettings]  # by name; none: the checkpoint's own cache
    text: str | Path
    calib: str | None = None  # text for recipes that are calibrated
    contexts: tuple[int, ...] = ()  # none: three that the model can take
    max_tokens: int = 16384  # of the text, for each context
    equal_bytes: bool = True
    speed: bool = True
    needles: int = 0  # contexts with needles, for each length
    # is told, in a line, of recipes that do not fit the model; None: such are an error
    left_out: Callable[[str], None] | None = None


def bench(directory: Path, asked: BenchRequest, execution: Execution, progress: Progress = silent) -> Bench:
    """Measure all caches. Raises CalibrationError for contexts and texts that do not fit, RecipeError for caches.

    Nothing is loaded before it is known which caches the model can use.
    """
    config = lm.load_config(directory)
    recipes = fitting(config, asked.recipes, asked.left_out)
    limit = max_positions(config)
    contexts = asked.contexts or default_contexts(limit)
    texts = {
        n: scores.text_windows([directory], asked.text, n, max(asked.max_tokens, 2 * n), execution.bos)
        for n in contexts
    }
    for length, cut in texts.items():
        if len(cut.tokens) < 2:
            raise CalibrationError(f"a context of {length} tokens needs two windows of text or more; give more text")
    model = load_model(directory, execution)
    candidates = candidates_of(model, directory, recipes, asked.calib, progress, execution.bos)
    read = {candidate.name: readings(model, candidate) for candidate in candidates}
    stored = load_model(directory, Execution("auto", execution.device)) if execution.dtype != "auto" else model
    rows = []
    for cut in texts.values():
        caches, nbytes = _with_equal_bytes(stored, cut.tokens[:1], candidates, asked.equal_bytes, progress)
        timed = _time(stored, cut.tokens[:1], candidates, progress) if asked.speed else [None] * len(candidates)
        needles = cache_needles.measure_text(model, directory, cut, candidates, asked.needles, progress)
        scored_rows = _context(model, cut, caches, nbytes, progress)
        rows += [
            replace(row, speed=timed[i], needles=needles[i]) if i < len(candidates) else row
            for i, row in enumerate(scored_rows)
        ]
    scored, kept = (str(each.dtype).removeprefix("torch.") for each in (model, stored))
    begun = next(iter(texts.values())).prefix.text
    return Bench(source_name(asked.text), scored, kept, execution.device, torch.get_num_threads(), rows, read, begun)


def _with_equal_bytes(
    model: Any, tokens: Tensor, candidates: Sequence[Candidate], equal_bytes: bool, progress: Progress
) -> tuple[list[Candidate], list[MeasuredCacheBytes]]:
    """Return the caches with their bytes, and behind them, where wanted, the smaller ones at the bytes of the largest.

    tokens int64 [1, seq_len].
    """
    progress(f"measuring bytes at {tokens.shape[1]} tokens", 0, 0)
    nbytes = sizes(model, tokens, candidates, lambda done: None)
    if not equal_bytes:
        return list(candidates), nbytes
    longer = _lengthen(model, candidates, nbytes, tokens.shape[1])
    slopes = {each.name: (size.slope, size.bits_per_element) for each, size in zip(candidates, nbytes, strict=True)}
    for candidate, size in zip(longer, sizes(model, tokens, longer, lambda done: None), strict=True):
        slope, bits = slopes[candidate.name]  # half of the context may lie within so many exact tokens
        nbytes.append(replace(size, slope=slope, bits_per_element=bits))
    return [*candidates, *longer], nbytes


def _time(model: Any, tokens: Tensor, candidates: Sequence[Candidate], progress: Progress) -> list[CacheSpeed | None]:
    """Return the speed of each cache, None for those that evict, whose layers have other parts."""
    progress(f"timing at {tokens.shape[1]} tokens", 0, 0)
    places = [i for i, each in enumerate(candidates) if each.settings.evict is None]
    timed: list[CacheSpeed | None] = [None] * len(candidates)
    for i, speed in zip(places, speeds(model, tokens, [candidates[i] for i in places], lambda done: None), strict=True):
        timed[i] = speed
    return timed


def default_contexts(limit: int | None) -> tuple[int, ...]:
    """Return three context lengths within the model's limit."""
    fitting = tuple(n for n in CONTEXTS if limit is None or n <= limit)
    if len(fitting) == len(CONTEXTS) or limit is None:
        return fitting
    return limit // 4, limit // 2, limit


def _lengthen(
    model: Any, candidates: Sequence[Candidate], measured: Sequence[MeasuredCacheBytes], length: int
) -> list[Candidate]:
    """Return the smaller caches, each with as many more exact tokens as bring it to the bytes of the largest.

    At most the whole context becomes exact; a cache in which all of it is exact already is left out.
    """
    target = max(size.bytes_per_token for size in measured)
    longer = []
    for candidate, size in zip(candidates, measured, strict=True):
        flush = max(policy.flush for policy in policies(candidate.codings(model.config)))
        nbytes_more = size.exact_per_token - size.slope  # of a token that is exact
        tokens = (target - size.bytes_per_token) * length / nbytes_more if nbytes_more > 0 else 0
        if (extra := int(min(tokens, length)) // flush * flush) > 0:
            longer.append(replace(candidate, extra=extra))
    return longer


def _context(
    model: Any,
    cut: TextWindows,
    candidates: Sequence[Candidate],
    nbytes: Sequence[MeasuredCacheBytes],
    progress: Progress,
) -> list[CacheRow]:
    """Return the rows of one context length, without speed and needles."""
    windows, (count, length) = cut.tokens, cut.tokens.shape
    batch = windows_at_a_time(model, candidates, length)
    say = make_counter(progress, f"scoring at {length} tokens", count)
    positions = compare(model, windows, candidates, batch, say)
    makes = [lambda c=candidate: c.cache(model.config) for candidate in candidates]
    errors = output_errors(model, windows[:ERROR_WINDOWS], makes, max(1, min(4, BATCH_TOKENS // length)))
    planted = windows[: 2 * max(1, min(count // 2, MAX_RECALL_TOKENS // length))]
    begun = len(cut.prefix.tokens)
    recalled = recall(model, planted, candidates, batch, lambda done: None, begun)
    recalled = recalled or Recall(0.0, [0.0] * len(candidates), 0, 0)
    base = [candidate for candidate in candidates if not candidate.extra]
    start = min(length // 2, max(exact_tokens(c.codings(model.config)) for c in base))
    start = max(start, first_scored(cut, candidates))
    rows = []
    for i, candidate in enumerate(candidates):
        nll, exact_nll, kl, top1 = positions[i][:, :, start:]
        difference = (nll - exact_nll).mean(1)
        rows.append(
            CacheRow(
                candidate.name,
                length,
                candidate.extra,
                nll.numel(),
                float(exact_nll.mean()),
                float(difference.mean()),
                interval(difference),
                float(kl.mean()),
                float(positions[i][2, :, cut.prefix.unscored :].mean()),
                float(top1.mean()),
                float(errors[i].p50.mean()),
                float(errors[i].p95.mean()),
                recalled.kept[i] if recalled.samples else None,
                recalled.gain if recalled.samples else None,
                nbytes[i],
                None,
            )
        )
    return rows
