"""Compare filtered next-token distributions of two models, exactly and without drawing.

Distributions are filtered and renormalized as transformers does before it draws a token: temperature, top-k, top-p
(Holtzman et al. 2020, arXiv 1904.09751), min-p (Nguyen et al. 2024, arXiv 2407.01082), typical (Meister et al. 2022,
arXiv 2202.00666: the tokens whose surprise is nearest to the entropy), eta (Hewitt et al. 2022, arXiv 2210.15191: no
token below min(e, sqrt(e) exp(-entropy))). Each filter sees the distribution that the former one has left,
renormalized. A repetition penalty (CTRL, arXiv 1909.05858) comes first of all: logits of tokens that the text has had
are divided by it where they are positive, and multiplied where they are not.

Of ties as many are kept as transformers keeps. Top-k keeps every token as likely as the k-th one, min-p all that are as
likely as its bound. Top-p sorts in ascending order and removes from below, so it may cut through equally likely tokens;
which of them stay depends on the sorting there, and here those with the higher ids do (the sort is stable).

What top-k, top-p and min-p keep is therefore an end of one and the same ascending order, and a kept set is the place at
which that end begins; typical and eta remove from what is left, all equally likely tokens alike. All arithmetic is
float64; transformers filters in float32, so a probability within a rounding error of a threshold may fall on its other
side. Filters keep other tokens of the compressed model than of its base, so KL may be infinite.

These figures are finite whatever is kept; p is the base, q the compressed model, both filtered and renormalized:

- acceptance: sum of min(p, q) = 1 - total variation. It is also the probability that a token which q drafts is accepted
  in speculative sampling (Leviathan et al. 2023, arXiv 2211.17192).
- kl_kept: KL(p || q on the tokens that the base keeps, renormalized there). Zero for equal models; without filters KL.
- kl: KL(p || q), for positions at which q keeps all that p keeps; kl_defined is 1 there and 0 elsewhere.
- jaccard: of the kept sets. outside: probability p of tokens that the compressed model filters away.
- same_cdf: how often one uniform random number gives both models the same token, where the token is looked up in the
  cumulative distribution in the order of the ids: the length of the parts of [0, 1] that belong to the same token.
- same_gumbel: the same where both add equal Gumbel noise to their log-probabilities and take the largest (what
  torch.multinomial and most serving engines do with equal seeds): sum over v of 1 / sum over w of max(p_w / p_v,
  q_w / q_v). Both are probabilities over the random numbers, not estimates; neither exceeds the acceptance.
- entropy, base_entropy in nats; kept, base_kept: tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

SPARSE = 8  # a kept set that is wider than the vocabulary divided by this is held as the whole vocabulary
NONE = "none"  # the name of no filters


class SamplingSetting(NamedTuple):
    """How a token is drawn."""

    temperature: float
    top_k: int = 0  # tokens that stay; 0: all
    top_p: float = 1.0  # probability that stays, at least; 1: all
    min_p: float = 0.0  # of the likeliest token's probability, what a token needs to stay; 0: all
    typical_p: float = 1.0  # probability that stays of the tokens nearest to the entropy, at least; 1: all
    eta: float = 0.0  # cutoff of eta sampling; 0: all
    repetition_penalty: float = 1.0  # of tokens that the text has had; 1: none

    @property
    def filters(self) -> str:
        """Name the filters, NONE without any."""
        default = SamplingSetting(self.temperature)
        parts = [
            f"{name.replace('_', '-')} {value:g}"
            for name, value in self._asdict().items()
            if value != getattr(default, name)
        ]
        return ", ".join(parts) or NONE

    @property
    def is_ordered(self) -> bool:
        """Whether a filter asks for the order of the logits."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


class Ordered(NamedTuple):
    """Logits [positions, vocabulary] float64, in the order of the ids and in ascending order with ids int64."""

    logits: Tensor
    values: Tensor
    ids: Tensor


class FilteredLaw(NamedTuple):
    """What a setting leaves of distributions: ids int64 [positions, width] ascending, and log-probabilities float64.

    A log-probability of minus infinity says that the token was filtered away. The width is that of the largest kept
    set, or of the whole vocabulary (`is_whole`) where that is not much more.
    """

    ids: Tensor
    log_probs: Tensor
    is_whole: bool


def check(setting: SamplingSetting) -> SamplingSetting:
    """Return a setting; ValueError, which names the value, for one that transformers would not take."""
    if not (math.isfinite(setting.temperature) and setting.temperature > 0):
        raise ValueError(f"temperature {setting.temperature:g} is not positive")
    if setting.top_k < 0:
        raise ValueError(f"top_k {setting.top_k} is negative")
    if not 0 < setting.top_p <= 1:
        raise ValueError(f"top_p {setting.top_p:g} is not above 0 and at most 1")
    if not 0 <= setting.min_p <= 1:
        raise ValueError(f"min_p {setting.min_p:g} is not 0 to 1")
    if not 0 < setting.typical_p <= 1:
        raise ValueError(f"typical_p {setting.typical_p:g} is not above 0 and at most 1")
    if not 0 <= setting.eta < 1:
        raise ValueError(f"eta {setting.eta:g} is not 0 to 1")
    if not (math.isfinite(setting.repetition_penalty) and setting.repetition_penalty > 0):
        raise ValueError(f"repetition_penalty {setting.repetition_penalty:g} is not positive")
    return setting


def grid(temperatures: Sequence[float], *filters: Sequence[float]) -> list[SamplingSetting]:
    """Return every combination, temperatures innermost, each once; ValueError for an impossible value.

    filters: values of top_k, top_p and the others, in the order of SamplingSetting; those left out are off.
    """
    combined = product(*filters, sorted(temperatures))
    return list(dict.fromkeys(check(SamplingSetting(t, *cast(Any, kept))) for *kept, t in combined))


def penalize(logits: Tensor, tokens: Tensor, penalty: float, seen: Tensor | None = None) -> Tensor:
    """Return logits [positions, vocabulary] with a repetition penalty, float64.

    tokens int64 [positions, n]: what stands in front of each position; seen bool, of the same shape: which of them
    count, None: all.
    """
    logits = logits.double()
    if penalty == 1:
        return logits
    counts = torch.ones_like(tokens, dtype=logits.dtype) if seen is None else seen.to(logits.dtype)
    has_come = torch.zeros_like(logits).scatter_add_(1, tokens.to(logits.device), counts.to(logits.device)) > 0
    return torch.where(has_come, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def order(logits: Tensor) -> Ordered:
    """Sort logits [positions, vocabulary], given in any floating type."""
    logits = logits.double()
    return Ordered(logits, *logits.sort(dim=-1, stable=True))


def first_kept(values: Tensor, setting: SamplingSetting) -> Tensor:
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


def filtered_law(ordered: Ordered, setting: SamplingSetting) -> FilteredLaw:
    """Return the filtered and renormalized distributions of a setting."""
    return _narrow(_by_order(ordered, setting), setting)


def _by_order(ordered: Ordered, setting: SamplingSetting) -> FilteredLaw:
    """Return what top-k, top-p and min-p leave."""
    logits, values, ids = ordered
    vocab_size = values.shape[1]
    first = first_kept(values, setting)
    offset = int(first.min())
    if not bool(first.any()):
        return FilteredLaw(_every(ids), (logits / setting.temperature).log_softmax(-1), True)
    places = torch.arange(offset, vocab_size, device=ids.device)
    scaled = (values[:, offset:] / setting.temperature).masked_fill(places < first[:, None], -torch.inf)
    law = FilteredLaw(ids[:, offset:], scaled.log_softmax(-1), False)
    if (vocab_size - offset) * SPARSE > vocab_size:
        return dense(law, vocab_size)
    ids, places = law.ids.sort(-1)
    return FilteredLaw(ids, law.log_probs.gather(1, places), False)


def _narrow(law: FilteredLaw, setting: SamplingSetting) -> FilteredLaw:
    """Return what typical and eta sampling leave of a law, renormalized; the ids stay."""
    log_probs = law.log_probs
    if setting.typical_p < 1:
        distance = (-log_probs - entropy(log_probs)[:, None]).abs()
        ascending, places = distance.sort(-1)
        mass = log_probs.gather(1, places).exp().cumsum(-1)
        last = (mass < setting.typical_p).sum(-1, keepdim=True).clamp(max=mass.shape[1] - 1)
        log_probs = log_probs.masked_fill(distance > ascending.gather(1, last), -torch.inf).log_softmax(-1)
    if setting.eta > 0:
        bound = (math.sqrt(setting.eta) * (-entropy(log_probs)).exp()).clamp(max=setting.eta)
        is_low = (log_probs.exp() < bound[:, None]) & (log_probs < log_probs.amax(-1, keepdim=True))
        log_probs = log_probs.masked_fill(is_low, -torch.inf).log_softmax(-1)
    return law._replace(log_probs=log_probs)


def of_logits(logits: Tensor, setting: SamplingSetting) -> FilteredLaw:
    """Return the same for logits [positions, vocabulary] in any floating type, sorted only where a filter asks."""
    if not setting.is_ordered:
        logits = logits.double()
        law = FilteredLaw(_every(logits), (logits / setting.temperature).log_softmax(-1), True)
        return _narrow(law, setting)
    return filtered_law(order(logits), setting)


def dense(law: FilteredLaw, vocab_size: int) -> FilteredLaw:
    """Return the same distributions over the whole vocabulary."""
    if law.is_whole:
        return law
    empty = torch.full((len(law.ids), vocab_size), -torch.inf, dtype=torch.float64, device=law.ids.device)
    log_probs = empty.scatter_(1, law.ids, law.log_probs)
    return FilteredLaw(_every(log_probs), log_probs, True)


def _every(like: Tensor) -> Tensor:
    """Return all ids for each row of `like` [positions, vocabulary], without memory of their own."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape)


NAMES = (
    *("acceptance", "kl_kept", "kl", "kl_defined", "jaccard", "outside", "same_cdf", "same_gumbel"),
    *("entropy", "base_entropy", "kept", "base_kept"),
)


def by_ratio(base: Ordered, model: Ordered) -> Tensor:
    """Return the ids in the order of q / p, int64 [positions, vocabulary]; no temperature and no filter changes it."""
    return (model.logits - base.logits).argsort(-1)


def compare(base: Ordered, model: Ordered, setting: SamplingSetting, ratios: Tensor) -> Tensor:
    """Return float64 [len(NAMES), positions] of two models' logits at the same positions. ratios: `by_ratio`."""
    p, q = filtered_law(base, setting), filtered_law(model, setting)
    log_p, log_q, below = align(p, q)
    order = ratios if p.is_whole or q.is_whole else (log_q - log_p).nan_to_num(0, 0, 0).argsort(-1)
    has_p = log_p > -torch.inf
    is_both = has_p & (log_q > -torch.inf)
    probs_p, probs_q = log_p.exp(), log_q.exp()
    shared_p, shared_q = probs_p.where(is_both, 0.0), probs_q.where(is_both, 0.0)
    at_p = model.logits if p.is_whole or q.is_whole else model.logits.gather(1, p.ids)
    on_kept = (at_p / setting.temperature).masked_fill(~has_p, -torch.inf).log_softmax(-1)
    counts = [(each.log_probs > -torch.inf).sum(-1) for each in (p, q)]
    both = is_both.sum(-1)
    outside = probs_p.where(~is_both, 0.0).sum(-1)
    above_p, above_q = probs_p.cumsum(-1), below + probs_q
    overlap = torch.minimum(above_p, above_q) - torch.maximum(above_p - probs_p, below)
    rows = {
        "acceptance": torch.minimum(shared_p, shared_q).sum(-1),
        "kl_kept": mean_log_ratio(probs_p, log_p, on_kept),
        "kl": (shared_p * (log_p - log_q).where(is_both, 0.0)).sum(-1),
        "kl_defined": both == counts[0],
        "jaccard": both.double() / (counts[0] + counts[1] - both),
        "outside": outside,
        "same_cdf": overlap.clamp(min=0).where(is_both, 0.0).sum(-1),
        "same_gumbel": _same_gumbel(shared_p.gather(1, order), shared_q.gather(1, order), outside),
        "entropy": entropy(q.log_probs),
        "base_entropy": entropy(p.log_probs),
        "kept": counts[1],
        "base_kept": counts[0],
    }
    rows["kl"] = rows["kl"].where(rows["kl_defined"], 0.0)
    return torch.stack([rows[name].double() for name in NAMES])


def align(p: FilteredLaw, q: FilteredLaw) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p and log q at the tokens of p, and the probability q of all smaller ids; [positions, width] each.

    A q that is held over the whole vocabulary brings p there, too.
    """
    width = q.ids.shape[1]
    if q.is_whole or p.is_whole:
        widest = max(width, p.ids.shape[1])
        p, q = dense(p, widest), dense(q, widest)
        probs = q.log_probs.exp()
        return p.log_probs, q.log_probs, probs.cumsum(-1) - probs
    probs = q.log_probs.exp()
    place = torch.searchsorted(q.ids, p.ids).clamp(max=width - 1)
    log_q = q.log_probs.gather(1, place).masked_fill(q.ids.gather(1, place) != p.ids, -torch.inf)
    return p.log_probs, log_q, (probs.cumsum(-1) - probs).gather(1, place)


def mean_log_ratio(probs: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the mean over p of log p - log q at each position; tokens without probability count nothing."""
    return torch.where(probs > 0, probs * (log_p - log_q), 0.0).sum(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats at each position."""
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def _same_gumbel(p: Tensor, q: Tensor, outside: Tensor) -> Tensor:
    """Return the probability that equal Gumbel noise gives both models the same token.

    p, q float64 [positions, width]: of the tokens that both keep, 0 elsewhere, sorted by q / p. outside: probability p
    of the rest. For a token v the terms max(p_w / p_v, q_w / q_v) are p_w / p_v where q_w / p_w is at most that of v,
    and q_w / q_v elsewhere: sums of what lies before and behind v. Tokens that only one model keeps count with their
    own probability.
    """
    races = (p.cumsum(-1) + outside[:, None]) / p + (1 - q.cumsum(-1)).clamp(min=0) / q
    return torch.where((p > 0) & (q > 0), 1 / races, 0.0).sum(-1)
