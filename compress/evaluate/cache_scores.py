"""Score predictions through a compressed cache (teacher forcing), and its recall of text that lies far back.

Windows are fed in chunks: the past is read as it is stored, the chunk itself exactly, then it is stored. With chunks
that divide `flush` and `residual_length`, the first of them as long as nothing is coded, this is what token-by-token
decoding reads (tests compare them), so `exact_prefill` plays no part. Where it is false and every token is coded alone,
tokens of a chunk are read through their codes, too, as in an engine's pages, and chunks may be long. The uncompressed
cache of transformers goes through the same chunks beside it. Where one of the caches evicts tokens, all but the last 64
tokens of a window are the prompt, and come in one chunk; only those last ones tell what eviction costs.

Recall. A passage (the needle) is put into other text at several depths, all outside of what stays exact, and comes
again at the end. How much less surprising it is there is what the cache has kept: kept = (nll without the needles - nll
through the cache) / (nll without - nll through the exact cache), on the passage after its first tokens, which are the
cue. It needs a model that makes use of the repetition; `gain`, the denominator, says how much it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calib.documents import source_name
from compress.errors import NumericalError
from compress.evaluate import scores
from compress.evaluate.cache_candidates import candidates_of, fitting
from compress.evaluate.reader import Candidate, Execution, Reader, Readings, Say, load_model, readings
from compress.evaluate.scores import BATCH_NBYTES, Comparison, TextWindows
from compress.kv.evict.select import prompt_of
from compress.kv.settings import EXACT, CacheSettings, Codings, Policy
from compress.model import load as lm
from compress.progress import Progress, make_counter, silent

NEEDLE_TOKENS = 32
CUE_TOKENS = 8  # the first tokens of a needle, which are not scored
COPIES = 4  # a model of a few million weights does little with one

ALONE_TOKENS = 256  # a chunk where every token is coded alone
BATCH_TOKENS = 8192  # tokens of the windows that go through a model at a time


def policies(codings: Codings) -> list[Policy]:
    """Return the policies of everything that is coded, or of everything if nothing is."""
    both = [coding for layer in codings for coding in layer.values()]
    return [coding.policy for coding in both if coding.method != EXACT] or [coding.policy for coding in both]


def spans(caches: Sequence[Codings], tokens: int) -> list[tuple[int, int]]:
    """Return the chunks through which all of these caches read what they would read token by token."""
    every = [policy for codings in caches for policy in policies(codings)]
    sinks = [policy.sink for policy in every]
    step = math.gcd(*(p.flush for p in every), *(p.residual_length for p in every), *(s - sinks[0] for s in sinks))
    if min(policy.residual_length for policy in every) < step:
        step = 1
    first = min(policy.sink + policy.residual_length for policy in every) or step
    ends = [*range(min(first, tokens), tokens, step), tokens]
    return list(zip([0, *ends], ends, strict=False))


def some_evict(candidates: Sequence[Candidate]) -> bool:
    """Return whether one of the caches evicts tokens."""
    return any(candidate.settings.evict is not None for candidate in candidates)


def chunks_of(config: Any, candidates: Sequence[Candidate], tokens: int) -> list[tuple[int, int]]:
    """Return the chunks of `spans` for a model of this configuration, the prompt in one where tokens are evicted."""
    if all(candidate.is_alone(config) for candidate in candidates):
        ends = [*range(ALONE_TOKENS, tokens, ALONE_TOKENS), tokens]
        return list(zip([0, *ends], ends, strict=False))
    chunks, prompt = spans([c.codings(config) for c in candidates], tokens), prompt_of(tokens, some_evict(candidates))
    if not prompt:
        return chunks
    return [(0, prompt), *((max(start, prompt), stop) for start, stop in chunks if stop > prompt)]


def exact_tokens(codings: Codings) -> int:
    """Return how many tokens of past it takes until at least four flushes are coded everywhere."""
    return max(p.sink + p.residual_length + 4 * p.flush for p in policies(codings))


def compare(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], batch: int, say: Say, base: Any = None
) -> Tensor:
    """Return figures of windows int64 [windows, seq_len] through caches: float64 [candidates, 4, windows, seq_len - 1].

    The four: nll of the next token through the cache and through the exact one of `base` (None: of the same model),
    KL(exact || cache), same likeliest token.
    """
    exact = Reader(base or model)
    readers = [Reader(model, candidate) for candidate in candidates]
    length = windows.shape[1]
    chunks = chunks_of(model.config, candidates, length)
    batches = []
    for tokens in windows.split(batch):
        tokens = tokens.to(model.device)
        read = [reader.through(tokens, chunks) for reader in (exact, *readers)]
        parts = []
        for (start, stop), plain, *logits in zip(chunks, *read, strict=True):
            end = min(stop, length - 1)
            target = tokens[:, start + 1 : end + 1].flatten()
            if end > start:
                plain = plain[:, : end - start].flatten(0, 1)
                rows = [scores.score([x[:, : end - start].flatten(0, 1), plain], target) for x in logits]
                parts.append(torch.stack(rows).unflatten(-1, (len(tokens), -1)))
        batches.append(torch.cat(parts, -1))
        say(len(tokens))
    result = torch.cat(batches, 2)
    if not torch.isfinite(result).all():
        raise NumericalError("the model gives logits that are not finite through a cache; its weights are damaged")
    return result


@dataclass(frozen=True)
class Recall:
    """How much of what repeated passages are worth each cache keeps."""

    gain: float  # nats a token that the needles are worth through the exact cache
    kept: Sequence[float | None]  # share of the gain, for each candidate; 1 is all; None where there is no gain
    samples: int
    tokens: int  # scored


def recall(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], batch: int, say: Say, begun: int = 0
) -> Recall | None:
    """Return the recall through caches on windows int64 [2 n, seq_len]: n samples, the second half lends the needles.

    begun: tokens that every window begins with, which stay. None where a window has no room outside of what stays
    exact.
    """
    codings = [c.codings(model.config) for c in candidates]
    length, count = windows.shape[1], len(windows) // 2
    first = max(begun, *(policy.sink for each in codings for policy in policies(each)))
    room = length - NEEDLE_TOKENS - max(map(exact_tokens, codings)) - first
    if room < COPIES * NEEDLE_TOKENS or not count:
        return None
    chunks = chunks_of(model.config, candidates, length)
    plain = windows[:count].clone()
    plain[:, -NEEDLE_TOKENS:] = windows[count : 2 * count, -NEEDLE_TOKENS:]
    planted = plain.clone()
    for copy in range(COPIES):
        at = first + copy * (room - NEEDLE_TOKENS) // (COPIES - 1)
        planted[:, at : at + NEEDLE_TOKENS] = planted[:, -NEEDLE_TOKENS:]
    exact = Reader(model)
    runs = [(plain, exact), (planted, exact), *((planted, Reader(model, each)) for each in candidates)]
    nll = []
    for rows, reader in runs:
        parts = [_needle_nll(reader, tokens.to(model.device), chunks) for tokens in rows.split(batch)]
        nll.append(float(torch.cat(parts).mean()))
        say(count)
    gain = nll[0] - nll[1]
    kept = [(nll[0] - value) / gain if gain > 0 else None for value in nll[2:]]
    return Recall(gain, kept, count, count * (NEEDLE_TOKENS - CUE_TOKENS))


def _needle_nll(reader: Reader, tokens: Tensor, chunks: Sequence[tuple[int, int]]) -> Tensor:
    """Return the nll of the last NEEDLE_TOKENS - CUE_TOKENS tokens, [B, NEEDLE_TOKENS - CUE_TOKENS]."""
    count, kept = NEEDLE_TOKENS - CUE_TOKENS, []
    for (_, stop), logits in zip(chunks, reader.through(tokens, chunks), strict=True):
        if stop > tokens.shape[1] - count - 1:
            kept.append(logits)
    last = torch.cat(kept, 1)[:, -count - 1 : -1].float()
    return -last.log_softmax(-1).gather(-1, tokens[:, -count:, None])[..., 0].double().cpu()


def evaluate(
    directories: Sequence[Path],
    text: str | Path,
    caches: Mapping[str, CacheSettings],
    calib: str | None,
    lengths: tuple[int, int],
    execution: Execution,
    progress: Progress = silent,
) -> tuple[Comparison, Readings]:
    """Return scores of the first checkpoint through a cache, beside the last one (or itself) through the exact one.

    And how the cache is read. caches: one by name; none: the checkpoint's own. calib: text for one that is calibrated.
    lengths: tokens of a window, and of the text.
    """
    fit = fitting(lm.load_config(directories[0]), caches, None)
    cut = scores.text_windows(list(directories), text, *lengths, execution.bos)
    models = [load_model(directory, execution) for directory in directories]
    (candidate,) = candidates_of(models[0], directories[0], fit, calib, progress, execution.bos)
    reader = Reader(models[0], candidate)
    return compare_text(reader, models[-1], cut, source_name(text), progress), readings(reader.model, candidate)


def compare_text(reader: Reader, base: Any, cut: TextWindows, text: str, progress: Progress = silent) -> Comparison:
    """Return the scores of a model through its cache, beside `base` through the exact one, on windows of a text."""
    assert reader.cache is not None
    windows, candidates = cut.tokens, [reader.cache]
    say = make_counter(progress, f"scoring {text}", len(windows))
    batch = windows_at_a_time(reader.model, candidates, windows.shape[1])
    positions = compare(reader.model, windows, candidates, batch, say, base)
    comparison = scores.summary(
        positions[0][:, :, first_scored(cut, candidates) :], text, windows.shape[1], cut.prefix.text
    )
    assert isinstance(comparison, Comparison)
    return comparison


def first_scored(cut: TextWindows, candidates: Sequence[Candidate]) -> int:
    """Return the first position of a window that is scored: behind its prefix, and the prompt where tokens go."""
    return max(prompt_of(cut.tokens.shape[1], some_evict(candidates)), cut.prefix.unscored)


def windows_at_a_time(model: Any, candidates: Sequence[Candidate], length: int) -> int:
    """Return how many windows to take at a time: the logits of a chunk through all caches fit in BATCH_NBYTES."""
    longest = max(stop - start for start, stop in chunks_of(model.config, candidates, length))
    vocabulary = model.config.get_text_config().vocab_size
    window_nbytes = longest * vocabulary * model.dtype.itemsize * (1 + len(candidates))
    return max(1, min(BATCH_TOKENS // length, BATCH_NBYTES // window_nbytes))
