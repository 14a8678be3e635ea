"""Filter and renormalize next-token distributions as transformers does before it draws a token.

The order is that of transformers: temperature, top-k, top-p (Holtzman et al. 2020, arXiv 1904.09751), min-p (Nguyen et
al. 2024, arXiv 2407.01082). Each filter sees the distribution that the former one has left, renormalized.

Of ties as many are kept as transformers keeps. Top-k keeps every token as likely as the k-th one, min-p all that are as
likely as its bound. Top-p sorts in ascending order and removes from below, so it may cut through equally likely tokens;
which of them stay depends on the sorting there, and here those with the higher ids do (the sort is stable).

What every filter keeps is therefore an end of one and the same ascending order, and a kept set is the place at which
that end begins. All arithmetic is float64; transformers filters in float32, so a probability within a rounding error of
a threshold may fall on its other side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

SPARSE = 8  # a kept set that is wider than the vocabulary divided by this is held as the whole vocabulary
NONE = "none"  # the name of no filters


class Setting(NamedTuple):
    """How a token is drawn."""

    temperature: float
    top_k: int = 0  # tokens that stay; 0: all
    top_p: float = 1.0  # probability that stays, at least; 1: all
    min_p: float = 0.0  # of the likeliest token's probability, what a token needs to stay; 0: all

    @property
    def filters(self) -> str:
        """Name the filters, NONE without any."""
        parts = [f"top-k {self.top_k}"] if self.top_k else []
        parts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"min-p {self.min_p:g}"] if self.min_p else []
        return ", ".join(parts) or NONE


class Ordered(NamedTuple):
    """Logits [positions, vocabulary] float64, in the order of the ids and in ascending order with ids int64."""

    logits: Tensor
    values: Tensor
    ids: Tensor


class Kept(NamedTuple):
    """What a setting leaves of distributions: ids int64 [positions, width] ascending, and log-probabilities float64.

    A log-probability of minus infinity says that the token was filtered away. The width is that of the largest kept
    set, or of the whole vocabulary (`is_whole`) where that is not much more.
    """

    ids: Tensor
    log_probs: Tensor
    is_whole: bool


def check(setting: Setting) -> Setting:
    """Return a setting; ValueError, which names the value, for one that transformers would not take."""
    if not (math.isfinite(setting.temperature) and setting.temperature > 0):
        raise ValueError(f"temperature {setting.temperature:g} is not positive")
    if setting.top_k < 0:
        raise ValueError(f"top_k {setting.top_k} is negative")
    if not 0 < setting.top_p <= 1:
        raise ValueError(f"top_p {setting.top_p:g} is not above 0 and at most 1")
    if not 0 <= setting.min_p <= 1:
        raise ValueError(f"min_p {setting.min_p:g} is not 0 to 1")
    return setting


def grid(
    temperatures: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> list[Setting]:
    """Return every combination, temperatures innermost, each once; ValueError for an impossible value."""
    combined = product(top_k, top_p, min_p, sorted(temperatures))
    return list(dict.fromkeys(check(Setting(t, k, p, m)) for k, p, m, t in combined))


def ordered(logits: Tensor) -> Ordered:
    """Sort logits [positions, vocabulary], given in any floating type."""
    logits = logits.double()
    return Ordered(logits, *logits.sort(dim=-1, stable=True))


def first_kept(values: Tensor, setting: Setting) -> Tensor:
    """Return int64 [positions]: from which place on the ascending logits [positions, vocabulary] are kept."""
    vocab_size = values.shape[1]
    first = torch.zeros(len(values), dtype=torch.long, device=values.device)
    if 0 < setting.top_k < vocab_size:
        first = (values < values[:, -setting.top_k, None]).sum(-1)
    offset = int(first.min())  # what lies below is kept nowhere
    scaled = values[:, offset:] / setting.temperature
    places = torch.arange(offset, vocab_size, device=values.device)
    if setting.top_p < 1:
        probs = scaled.masked_fill(places < first[:, None], -torch.inf).softmax(-1)
        removed = (probs.cumsum(-1) <= 1 - setting.top_p).sum(-1) + offset
        first = torch.maximum(first, removed.clamp(max=vocab_size - 1))
    if setting.min_p > 0:
        probs = scaled.masked_fill(places < first[:, None], -torch.inf).softmax(-1)
        first = torch.maximum(first, (probs < setting.min_p * probs[:, -1:]).sum(-1) + offset)
    return first


def kept(distribution: Ordered, setting: Setting) -> Kept:
    """Return the filtered and renormalized distributions of a setting."""
    logits, values, ids = distribution
    vocab_size = values.shape[1]
    first = first_kept(values, setting)
    offset = int(first.min())
    if not bool(first.any()):
        return Kept(_every(ids), (logits / setting.temperature).log_softmax(-1), True)
    places = torch.arange(offset, vocab_size, device=ids.device)
    scaled = (values[:, offset:] / setting.temperature).masked_fill(places < first[:, None], -torch.inf)
    found = Kept(ids[:, offset:], scaled.log_softmax(-1), False)
    if (vocab_size - offset) * SPARSE > vocab_size:
        return dense(found, vocab_size)
    own, order = found.ids.sort(-1)
    return Kept(own, found.log_probs.gather(1, order), False)


def of_logits(logits: Tensor, setting: Setting) -> Kept:
    """Return the same for logits [positions, vocabulary] in any floating type, sorted only where a filter asks."""
    if setting.filters == NONE:
        logits = logits.double()
        return Kept(_every(logits), (logits / setting.temperature).log_softmax(-1), True)
    return kept(ordered(logits), setting)


def dense(found: Kept, vocab_size: int) -> Kept:
    """Return the same distributions over the whole vocabulary."""
    if found.is_whole:
        return found
    empty = torch.full((len(found.ids), vocab_size), -torch.inf, dtype=torch.float64, device=found.ids.device)
    log_probs = empty.scatter_(1, found.ids, found.log_probs)
    return Kept(_every(log_probs), log_probs, True)


def _every(like: Tensor) -> Tensor:
    """Return all ids for each row of `like` [positions, vocabulary], without memory of their own."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape)
