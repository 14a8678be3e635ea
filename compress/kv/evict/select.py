"""Choose the tokens that stay: budgets of layers and of heads, and the best tokens within them.

All functions are of one sequence without padding and have no state, so that what a row of a batch keeps does not depend
on the rows beside it. Ties go to the earlier token.

Shapes: scores float32 [h, n] (KV heads, tokens), larger for tokens that stay.

Papers: AdaKV, arXiv 2407.11550 (`head_counts`); CriticalKV, arXiv 2502.03805 (`critical`); PyramidKV, arXiv 2406.02069
(`pyramid`); D2O, arXiv 2406.13035 (`by_variance`). Formulas of the first three are those of kvpress. Where a share of a
layer would be more than all of its tokens, the excess goes to the other layers here, so that the mean stays what was
set.

The tokens that stay in a layer, and those that layers store at a context, are counted before there is a cache. A
context of n tokens is a prompt, from which tokens are evicted, and TOKENS_AFTER_PROMPT tokens, which came later and
stay: as many as those on which errors of eviction are measured (compress/evaluate/cache_scores.py).

Not exact where the text decides: `layers: variance` and `heads: ada` count as layers and heads that keep the mean. Nor
with methods that drop tokens within the prompt's pass, whose layers count as such, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from compress import plugins
from compress.kv.cache import make_cache
from compress.kv.evict.settings import Eviction
from compress.kv.settings import CacheSettings

SAFE_SHARE = 0.2  # AdaKV leaves so much of its equal share to a head
SCORED_SHARE = 0.5  # CriticalKV chooses so much of a head's tokens by score alone
EPSILON = 1e-4  # added to a score before it is multiplied (CriticalKV)
STEEPNESS = 20  # the last layer of a pyramid keeps 1/20 of the mean
MIN_LAYER_FRACTION = 0.01  # a layer keeps as much of its tokens (D2O)
PROBABILITIES_PER_PIECE = 1 << 22  # float32 probabilities held at a time
TOKENS_AFTER_PROMPT = 64


@dataclass(frozen=True)
class Seen:
    """What a method scores: the tokens of one sequence in one layer."""

    keys: Tensor  # [h, n, width] after the rotary embedding
    values: Tensor  # [h, n, value width]
    queries: Tensor | None  # [H, m, width] after the rotary embedding, of the newest m tokens
    scaling: float  # of the products of queries and keys
    sink: int  # first tokens, which stay
    moments: tuple[Tensor, Tensor] | None = None  # of queries at coming positions: mean [H, width] and covariance
    # [H, width, width]

    @cached_property
    def mass(self) -> Tensor:
        """Return the softmax attention that each token is given by all queries, summed, float32 [h, H / h, n]."""
        assert self.queries is not None, "the method says that it needs them"
        grouped = self.queries.float().unflatten(0, (self.keys.shape[0], -1))
        return column_mass(grouped * self.scaling, self.keys.float())

    def newest(self, count: int) -> Seen:
        """Return the same with no more queries than so many."""
        assert self.queries is not None, "the method says that it needs them"
        return replace(self, queries=self.queries[:, -count:])


def column_mass(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the summed softmax attention of all queries, float32 [h, H / h, n]; keys that follow a query are not read.

    queries: float32 [h, H / h, m, width], scaled, of the newest m tokens; keys: float32 [h, n, width].
    """
    heads, groups, rows, _ = queries.shape
    tokens = keys.shape[1]
    step = max(1, min(rows, PROBABILITIES_PER_PIECE // (heads * groups * tokens)))
    follows = torch.ones(step, step, dtype=torch.bool, device=keys.device).triu(1)
    total = keys.new_zeros(heads, groups, tokens)
    for first in range(0, rows, step):
        piece = queries[:, :, first : first + step]
        count = piece.shape[2]
        last = tokens - rows + first + count
        logits = piece.flatten(1, 2) @ keys[:, :last].mT
        logits = logits.unflatten(1, (groups, count))
        logits[..., last - count :].masked_fill_(follows[:count, :count], -torch.inf)
        total[..., :last] += logits.softmax(-1).sum(2)
    return total


def attention_variance(mass: Tensor) -> float:
    """Return how uneven the attention of a layer is (D2O): by head the variance of `mass` float32 [h, H / h, n], what
    tokens are given, scaled to 0..1 across the heads of the layer, then averaged.
    """
    by_head = mass.mean(1).double().var(-1, correction=0)
    low, high = by_head.min(), by_head.max()
    return float(((by_head - low) / (high - low).clamp(min=1e-30)).mean())


def count(tokens: int, fraction: float, least: int) -> int:
    """Return how many of so many tokens stay: a fraction, at least `least` or all."""
    return min(tokens, max(int(fraction * tokens + 1e-9), least))


def count_kept(
    eviction: Eviction,
    sink: int,
    layer: int,
    evicting: Sequence[int],
    tokens: int,
    variances: Sequence[float] | None = None,
) -> int:
    """Return how many of so many tokens of a sequence stay in a layer that evicts.

    sink: first tokens, which stay. evicting: the numbers of all layers that evict, ascending. variances: how uneven the
    attention of each of them is; None: that does not count.
    """
    budget, shares, whole = eviction.budget, [1.0] * len(evicting), set[int]()
    keep = budget.keep if budget.keep is not None else min(1.0, (budget.tokens or 0) / tokens)
    if budget.keep_by_layer:
        keep = budget.keep_by_layer[layer]
    if budget.layers == "pyramid":
        shares = pyramid(len(evicting))
    if variances is not None:
        shares, whole = by_variance(variances), {0, 1, len(evicting) - 1}
    fraction = fractions(keep, shares, whole)[evicting.index(layer)]
    return count(tokens, fraction, sink + eviction.newest(0))


def pyramid(layers: int) -> list[float]:
    """Return the shares of layers, mean 1, that fall from the first to the last in equal steps."""
    last = 1 / STEEPNESS
    step = (2 - 2 * last) / max(1, layers - 1)
    return [1.0] if layers == 1 else [2 - last - index * step for index in range(layers)]


def by_variance(variances: Sequence[float]) -> list[float]:
    """Return the shares of layers, mean 1: softmax(-variance) of the attention that a layer's tokens are given."""
    return (torch.tensor(variances, dtype=torch.float64).neg().softmax(0) * len(variances)).tolist()


def fractions(keep: float, shares: Sequence[float], whole: Collection[int] = ()) -> list[float]:
    """Return the fraction of its tokens that each layer keeps: in proportion to its share, at most all, mean `keep`.

    whole: layers that keep all. Where these are more than the budget allows, they are treated as the others.
    """
    total = keep * len(shares)
    fixed = set(whole) if total - len(whole) >= MIN_LAYER_FRACTION * (len(shares) - len(whole)) else set()
    while True:
        rest = [index for index in range(len(shares)) if index not in fixed]
        scale = (total - len(fixed)) / max(sum(shares[index] for index in rest), 1e-12)
        over = {index for index in rest if scale * shares[index] > 1}
        if not over:
            return [1.0 if i in fixed else max(MIN_LAYER_FRACTION, scale * share) for i, share in enumerate(shares)]
        fixed |= over


def protect(scores: Tensor, sink: int, recent: int) -> Tensor:
    """Return the scores with the first and the newest tokens above all others."""
    scores = scores.clone()
    scores[:, :sink] = torch.inf
    scores[:, max(0, scores.shape[1] - recent) :] = torch.inf
    return scores


def head_counts(scores: Tensor, kept: int) -> list[int]:
    """Return how many tokens each head keeps, h x kept in all: the best of all heads (AdaKV).

    The best SAFE_SHARE x kept tokens of each head are safe. Scores are `protected`.
    """
    heads, tokens = scores.shape
    safe = scores.clone()
    order = scores.argsort(dim=-1, descending=True, stable=True)
    safe.scatter_(1, order[:, : int(kept * SAFE_SHARE)], torch.inf)
    best = safe.flatten().argsort(dim=0, descending=True, stable=True)[: heads * kept] // tokens
    counts: list[int] = best.bincount(minlength=heads).tolist()
    return counts


def critical(scores: Tensor, norms: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the scores of the second stage of CriticalKV; `norms` [h, n] of what values add to the output.

    The best half of a head's count stands above all others, and these have (score + EPSILON) x norm.
    """
    second = (scores + EPSILON) * norms
    order = scores.argsort(dim=-1, descending=True, stable=True)
    for head, number in enumerate(counts):
        second[head, order[head, : int(number * SCORED_SHARE)]] = torch.inf
    return second


def best(scores: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the indices of the best tokens of each head in token order, int64 [counts[head]] each."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return [row[:number].sort().values for row, number in zip(order, counts, strict=True)]


def prompt_of(context: int, evicts: bool = True) -> int:
    """Return how many tokens of a context are the prompt: all but TOKENS_AFTER_PROMPT, or half of a short one.

    0 where nothing evicts.
    """
    return context - min(TOKENS_AFTER_PROMPT, context // 2) if evicts else 0


def by_layer(config: Any, settings: CacheSettings, context: int) -> list[int]:
    """Return how many tokens of the prompt of a context stay in each layer of a model of this configuration."""
    layers, prompt = make_cache(config, settings).layers, prompt_of(context)
    evicting = [index for index, layer in enumerate(layers) if not getattr(layer, "is_exempt", True)]
    counts = [prompt] * len(layers)
    for index in evicting:
        assert settings.evict is not None, "layers evict"
        keeps_all = getattr(plugins.load("evict", settings.evict.method), "keeps_all", None)
        if keeps_all is not None and keeps_all(settings.evict.config):
            continue  # counted with the bits of those that are kept, at most
        counts[index] = count_kept(settings.evict, settings.keys.policy.sink, index, evicting, prompt)
    return counts


def places(kept: int, is_before_rope: bool) -> int:
    """Return the bytes in which a layer remembers where the tokens stood that it kept, of one sequence.

    is_before_rope: keys are stored before the rotary embedding, whose rows are then found by column.
    """
    return 8 + (4 * kept if is_before_rope else 0)
