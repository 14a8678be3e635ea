"""Score predictions through a compressed cache (teacher forcing), and its recall of text that lies far back.

Windows are fed in chunks: the past is read as it is stored, the chunk itself exactly, then it is stored. With chunks
that divide `flush` and `residual_length`, the first of them as long as nothing is coded, this is what token-by-token
decoding reads (tests compare them), so `exact_prefill` plays no part. The uncompressed cache of transformers goes
through the same chunks beside it. Where one of the caches evicts tokens, all but the last 64 tokens of a window are
the prompt, and come in one chunk; only those last ones tell what eviction costs.

Recall. A passage (the needle) is put into other text at several depths, all outside of what stays exact, and comes
again at the end. How much less surprising it is there is what the cache has kept: kept = (nll without the needles - nll
through the cache) / (nll without - nll through the exact cache), on the passage after its first tokens, which are the
cue. It needs a model that makes use of the repetition; `gain`, the denominator, says how much it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import DynamicCache

from compress.errors import NumericalError, RecipeError
from compress.evaluate.feed import read_on
from compress.evaluate.scores import score
from compress.kv.cache import make_cache
from compress.kv.evict.kept_tokens import prompt_of
from compress.kv.layer import CachePath, KVCache
from compress.kv.settings import EXACT, CacheSettings, Coding, Codings, Policy, exact

NEEDLE = 32  # tokens
CUE = 8  # of them, not scored
COPIES = 4  # a model of a few million weights does little with one

Say = Callable[[int], None]  # is told how many windows more are done


@dataclass(frozen=True)
class Candidate:
    """A cache to be measured."""

    name: str
    settings: CacheSettings
    static: Mapping[str, Tensor]
    path: CachePath = "decode"
    extra: int = 0  # tokens that stay exact beyond the recipe's residual_length
    only: str | None = None  # "keys" or "values": the other kind stays exact

    def cache(self, config: Any) -> KVCache:
        """Return a fresh cache for a model of this configuration."""
        made = self.as_generated(config)
        made.exact_prefill = True
        made.codings = tuple({k: self._changed(k, coding) for k, coding in layer.items()} for layer in made.codings)
        return made

    def as_generated(self, config: Any) -> KVCache:
        """Return a fresh cache as `generate` makes it: a prompt is read as its settings say."""
        return make_cache(config, self.settings, self.static, self.path)

    def codings(self, config: Any) -> Codings:
        """Return the codings of a model's layers."""
        return self.cache(config).codings

    def _changed(self, kind: str, coding: Coding) -> Coding:
        if coding.method == EXACT:
            return coding
        if self.only not in (None, kind):
            return exact(coding.policy.sink)
        policy = replace(coding.policy, residual_length=coding.policy.residual_length + self.extra)
        return replace(coding, policy=policy)


def readable(model: Any, candidate: Candidate) -> Candidate:
    """Return the candidate, fused if its codecs are read in no other way; RecipeError if they do not fit the model."""
    tokens = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    for path in get_args(CachePath):
        tried = replace(candidate, path=path)
        try:
            with torch.no_grad():
                model(input_ids=tokens, past_key_values=tried.cache(model.config), use_cache=True)
            return tried
        except RecipeError:
            if path == "fused":
                raise
    raise AssertionError


def policies(codings: Codings) -> list[Policy]:
    """Return the policies of everything that is coded, or of everything if nothing is."""
    both = [coding for layer in codings for coding in layer.values()]
    return [coding.policy for coding in both if coding.method != EXACT] or [coding.policy for coding in both]


def spans(caches: Sequence[Codings], tokens: int) -> list[tuple[int, int]]:
    """Return the chunks through which all of these caches read what they would read token by token."""
    found = [policy for codings in caches for policy in policies(codings)]
    sinks = [policy.sink for policy in found]
    step = math.gcd(*(p.flush for p in found), *(p.residual_length for p in found), *(s - sinks[0] for s in sinks))
    if min(policy.residual_length for policy in found) < step:
        step = 1
    first = min(policy.sink + policy.residual_length for policy in found) or step
    ends = [*range(min(first, tokens), tokens, step), tokens]
    return list(zip([0, *ends], ends, strict=False))


def some_evict(candidates: Sequence[Candidate]) -> bool:
    """Return whether one of the caches evicts tokens."""
    return any(candidate.settings.evict is not None for candidate in candidates)


def chunks_of(config: Any, candidates: Sequence[Candidate], tokens: int) -> list[tuple[int, int]]:
    """Return the chunks of `spans` for a model of this configuration, the prompt in one where tokens are evicted."""
    found, prompt = spans([c.codings(config) for c in candidates], tokens), prompt_of(tokens, some_evict(candidates))
    if not prompt:
        return found
    return [(0, prompt), *((max(start, prompt), stop) for start, stop in found if stop > prompt)]


def exact_tokens(codings: Codings) -> int:
    """Return how many tokens of past it takes until at least four flushes are coded everywhere."""
    return max(p.sink + p.residual_length + 4 * p.flush for p in policies(codings))


@torch.no_grad()
def through(model: Any, tokens: Tensor, cache: Any, chunks: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Yield the logits [B, n, vocab] of each chunk of tokens [B, seq_len], read through the cache."""
    for start, stop in chunks:
        logits = read_on(model, tokens[:, :stop], start, cache)
        missing = stop - start - logits.shape[1]  # of a prompt that lost tokens on its way, which is not scored
        yield torch.cat((logits[:, :1].expand(-1, missing, -1), logits), 1) if missing else logits


def compare(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], batch: int, say: Say, base: Any = None
) -> Tensor:
    """windows int64 [windows, seq_len] -> float64 [candidates, 4, windows, seq_len - 1].

    The four: nll of the next token through the cache and through the exact one of `base` (None: of the same model),
    KL(exact || cache), same likeliest token.
    """
    base = base or model
    length = windows.shape[1]
    chunks = chunks_of(model.config, candidates, length)
    found = []
    for tokens in windows.split(batch):
        tokens = tokens.to(model.device)
        exact = through(base, tokens, DynamicCache(config=base.config), chunks)
        others = [through(model, tokens, c.cache(model.config), chunks) for c in candidates]
        parts = []
        for (start, stop), plain, *logits in zip(chunks, exact, *others, strict=True):
            end = min(stop, length - 1)
            target = tokens[:, start + 1 : end + 1].flatten()
            if end > start:
                plain = plain[:, : end - start].flatten(0, 1)
                rows = [score([x[:, : end - start].flatten(0, 1), plain], target) for x in logits]
                parts.append(torch.stack(rows).unflatten(-1, (len(tokens), -1)))
        found.append(torch.cat(parts, -1))
        say(len(tokens))
    result = torch.cat(found, 2)
    if not torch.isfinite(result).all():
        raise NumericalError("the model gives logits that are not finite through a cache; its weights are damaged")
    return result


@dataclass(frozen=True)
class Recall:
    gain: float  # nats a token that the needles are worth through the exact cache
    kept: Sequence[float | None]  # of it, for each candidate; 1 is all; None where there is no gain
    samples: int
    tokens: int  # scored


def recall(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], batch: int, say: Say, begun: int = 0
) -> Recall | None:
    """windows int64 [2 n, seq_len]: n samples, the second half of the windows lends the needles.

    begun: tokens that every window begins with, which stay. None where a window has no room outside of what stays
    exact.
    """
    codings = [c.codings(model.config) for c in candidates]
    length, count = windows.shape[1], len(windows) // 2
    first = max(begun, *(policy.sink for each in codings for policy in policies(each)))
    room = length - NEEDLE - max(map(exact_tokens, codings)) - first
    if room < COPIES * NEEDLE or not count:
        return None
    chunks = chunks_of(model.config, candidates, length)
    plain = windows[:count].clone()
    plain[:, -NEEDLE:] = windows[count : 2 * count, -NEEDLE:]
    planted = plain.clone()
    for copy in range(COPIES):
        at = first + copy * (room - NEEDLE) // (COPIES - 1)
        planted[:, at : at + NEEDLE] = planted[:, -NEEDLE:]
    runs: list[tuple[Tensor, Candidate | None]] = [(plain, None), (planted, None), *((planted, c) for c in candidates)]
    nll = []
    for rows, candidate in runs:
        parts = [_needle_nll(model, tokens.to(model.device), candidate, chunks) for tokens in rows.split(batch)]
        nll.append(float(torch.cat(parts).mean()))
        say(count)
    gain = nll[0] - nll[1]
    kept = [(nll[0] - value) / gain if gain > 0 else None for value in nll[2:]]
    return Recall(gain, kept, count, count * (NEEDLE - CUE))


def _needle_nll(model: Any, tokens: Tensor, candidate: Candidate | None, chunks: Sequence[tuple[int, int]]) -> Tensor:
    """Return the nll of the last NEEDLE - CUE tokens, [B, NEEDLE - CUE]."""
    cache = DynamicCache(config=model.config) if candidate is None else candidate.cache(model.config)
    count, kept = NEEDLE - CUE, []
    for (_, stop), logits in zip(chunks, through(model, tokens, cache, chunks), strict=True):
        if stop > tokens.shape[1] - count - 1:
            kept.append(logits)
    last = torch.cat(kept, 1)[:, -count - 1 : -1].float()
    return -last.log_softmax(-1).gather(-1, tokens[:, -count:, None])[..., 0].double().cpu()
