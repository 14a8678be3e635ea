"""Measure the quality, bytes and speed of compressed caches: the protocol of `compress kv-bench`.

At each context length, for each recipe: the loss of perplexity and the divergence from the uncompressed cache through
the cache (cache_scores.py), recall of what lies far back, the error of attention's output (cache_error.py), bytes and
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
from transformers import PreTrainedModel

from compress.calib.documents import source_name
from compress.errors import CalibrationError
from compress.evaluate import cache_needles, scores
from compress.evaluate.cache_candidates import candidates, fitting, load_model, with_cache
from compress.evaluate.cache_error import output_errors
from compress.evaluate.cache_needles import NeedleScore
from compress.evaluate.cache_reading import Readings, readings
from compress.evaluate.cache_scores import (
    Candidate,
    Recall,
    chunks_of,
    compare,
    exact_tokens,
    policies,
    recall,
    some_evict,
)
from compress.evaluate.cache_speed import CacheBytes, CacheSpeed, sizes, speeds
from compress.evaluate.generation import Written, continued
from compress.evaluate.intervals import interval
from compress.evaluate.scores import Comparison, Execution, TextWindows
from compress.evaluate.tokenizers import encode_with
from compress.kv.evict.kept_tokens import prompt_of
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.model.positions import max_positions
from compress.progress import Progress, make_counter, silent

CONTEXTS = (512, 2048, 8192)
BATCH_TOKENS = 8192  # of the windows that go through a model at a time
ERROR_WINDOWS = 8
RECALL_TOKENS = 16384  # of the windows that needles are planted in, at most


@dataclass(frozen=True)
class Row:
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
    size: CacheBytes
    speed: CacheSpeed | None
    needles: NeedleScore | None = None  # None where they were not asked for, or there is no room for them


@dataclass(frozen=True)
class Bench:
    text: str
    dtype: str  # of the scores
    stored_dtype: str  # of bytes and speed
    device: str
    threads: int
    rows: list[Row]
    readings: dict[str, Readings]  # by recipe
    begins_with: str  # what each window begins with, by the tokenizer's name of it; "" for nothing


@dataclass(frozen=True)
class Request:
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


def bench(directory: Path, asked: Request, execution: Execution, progress: Progress = silent) -> Bench:
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
    found = candidates(model, directory, recipes, asked.calib, progress, execution.bos)
    read = {candidate.name: readings(model, candidate) for candidate in found}
    stored = load_model(directory, Execution("auto", execution.device)) if execution.dtype != "auto" else model
    rows = []
    for length, cut in texts.items():
        windows = cut.tokens
        progress(f"measuring bytes at {length} tokens", 0, 0)
        own = list(found)
        measured = sizes(stored, windows[:1], own, lambda done: None)
        if asked.equal_bytes:
            longer = _equalized(stored, own, measured, length)
            slopes = {
                candidate.name: (s.slope, s.bits_per_element) for candidate, s in zip(found, measured, strict=True)
            }
            for candidate, size in zip(longer, sizes(stored, windows[:1], longer, lambda done: None), strict=True):
                slope, bits = slopes[candidate.name]  # half of the context may lie within so many exact tokens
                measured.append(replace(size, slope=slope, bits_per_element=bits))
            own += longer
        timed: list[CacheSpeed | None] = [None] * len(own)
        if asked.speed:
            progress(f"timing at {length} tokens", 0, 0)
            whole = [
                i for i, each in enumerate(found) if each.settings.evict is None
            ]  # others have layers of other parts
            for i, speed in zip(
                whole, speeds(stored, windows[:1], [found[i] for i in whole], lambda done: None), strict=True
            ):
                timed[i] = speed
        found_needles = _needles(model, directory, cut, found, asked.needles, progress)
        scored_rows = _context(model, cut, own, (measured, timed), progress)
        rows += [
            replace(row, needles=found_needles[i] if i < len(found) else None) for i, row in enumerate(scored_rows)
        ]
    scored, kept = (str(each.dtype).removeprefix("torch.") for each in (model, stored))
    begun = next(iter(texts.values())).prefix.text
    return Bench(source_name(asked.text), scored, kept, execution.device, torch.get_num_threads(), rows, read, begun)


def default_contexts(limit: int | None) -> tuple[int, ...]:
    """Return three context lengths within the model's limit."""
    fitting = tuple(n for n in CONTEXTS if limit is None or n <= limit)
    if len(fitting) == len(CONTEXTS) or limit is None:
        return fitting
    return limit // 4, limit // 2, limit


def evaluate(
    directories: Sequence[Path], asked: Request, seq_len: int, execution: Execution, progress: Progress = silent
) -> tuple[Comparison, Readings]:
    """Return scores of the first checkpoint through a cache, beside the last one (or itself) through the exact one.

    And how the cache is read.
    """
    recipes = fitting(lm.load_config(directories[0]), asked.recipes, asked.left_out)
    cut = scores.text_windows(list(directories), asked.text, seq_len, asked.max_tokens, execution.bos)
    models = [load_model(directory, execution) for directory in directories]
    (found,) = candidates(models[0], directories[0], recipes, asked.calib, progress, execution.bos)
    return compared(models[0], models[-1], found, cut, source_name(asked.text), progress), readings(models[0], found)


def compared(
    model: Any, base: Any, candidate: Candidate, cut: TextWindows, text: str, progress: Progress = silent
) -> Comparison:
    """Return the scores of a model through a cache, beside `base` through the exact one, on windows of a text."""
    windows, seq_len = cut.tokens, cut.tokens.shape[1]
    say = make_counter(progress, f"scoring {text}", len(windows))
    positions = compare(model, windows, [candidate], _batch(model, [candidate], seq_len), say, base)
    first = max(prompt_of(seq_len, some_evict([candidate])), cut.prefix.unscored)
    found = scores.summary(positions[0][:, :, first:], text, seq_len, cut.prefix.text)
    assert isinstance(found, Comparison)
    return found


def generate(
    directory: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    asked: Request,
) -> Written:
    """Return what the model writes with one cache; the arguments are those of compress/evaluate/generation.py."""

    def load() -> PreTrainedModel:
        return with_cache(directory, Execution("auto", device), asked.recipes, asked.calib, silent)[0]

    return continued(directory, load, prompt, max_new_tokens, temperature, seed)


def _needles(
    model: Any, directory: Path, cut: TextWindows, found: Sequence[Candidate], count: int, progress: Progress
) -> Sequence[NeedleScore | None]:
    """Return how well each cache keeps needles in so many contexts as long as the windows."""
    if not count:
        return [None] * len(found)
    encode = encode_with(lm.load_tokenizer(directory))
    planted = cache_needles.contexts(cut.tokens, encode, count, found, model.config, len(cut.prefix.tokens))
    if not planted:
        return [None] * len(found)
    say = make_counter(progress, f"asking for needles at {cut.tokens.shape[1]} tokens", len(planted))
    return cache_needles.measure(model, planted, found, say)


def _equalized(model: Any, found: Sequence[Candidate], measured: Sequence[CacheBytes], length: int) -> list[Candidate]:
    """Return the smaller caches, each with as many more exact tokens as bring it to the bytes of the largest.

    At most the whole context becomes exact; a cache in which all of it is exact already is left out.
    """
    target = max(size.bytes_per_token for size in measured)
    longer = []
    for candidate, size in zip(found, measured, strict=True):
        flush = max(policy.flush for policy in policies(candidate.codings(model.config)))
        nbytes_more = size.exact_per_token - size.slope  # of a token that is exact
        tokens = (target - size.bytes_per_token) * length / nbytes_more if nbytes_more > 0 else 0
        if (extra := int(min(tokens, length)) // flush * flush) > 0:
            longer.append(replace(candidate, extra=extra))
    return longer


def _context(
    model: Any,
    cut: TextWindows,
    found: Sequence[Candidate],
    measured: tuple[Sequence[CacheBytes], Sequence[CacheSpeed | None]],
    progress: Progress,
) -> list[Row]:
    """Return the rows of one context length."""
    windows, (count, length) = cut.tokens, cut.tokens.shape
    batch = _batch(model, found, length)
    say = make_counter(progress, f"scoring at {length} tokens", count)
    positions = compare(model, windows, found, batch, say)
    makes = [lambda c=candidate: c.cache(model.config) for candidate in found]
    errors = output_errors(model, windows[:ERROR_WINDOWS], makes, max(1, min(4, BATCH_TOKENS // length)))
    planted = windows[: 2 * max(1, min(count // 2, RECALL_TOKENS // length))]
    begun = len(cut.prefix.tokens)
    recalled = recall(model, planted, found, batch, lambda done: None, begun) or Recall(0.0, [0.0] * len(found), 0, 0)
    base = [candidate for candidate in found if not candidate.extra]
    start = min(length // 2, max(exact_tokens(c.codings(model.config)) for c in base))
    start = max(start, prompt_of(length, some_evict(found)), cut.prefix.unscored)
    rows = []
    for i, candidate in enumerate(found):
        nll, exact_nll, kl, top1 = positions[i][:, :, start:]
        difference = (nll - exact_nll).mean(1)
        rows.append(
            Row(
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
                measured[0][i],
                measured[1][i],
            )
        )
    return rows


def _batch(model: Any, found: Sequence[Candidate], length: int) -> int:
    """Return how many windows to take at a time: the logits of a chunk through all caches fit in BATCH_NBYTES."""
    chunks = chunks_of(model.config, found, length)
    longest = max(stop - start for start, stop in chunks)
    vocabulary = model.config.get_text_config().vocab_size
    window = longest * vocabulary * model.dtype.itemsize * (1 + len(found))
    return max(1, min(BATCH_TOKENS // length, scores.BATCH_NBYTES // window))
