"""Compare the distributions that two models draw tokens from, exactly and without drawing.

Filters keep other tokens of the compressed model than of its base, so KL may be infinite. These figures are finite
whatever is kept; p is the base, q the compressed model, both filtered and renormalized:

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

import torch
from torch import Tensor

from compress.evaluate.sampling_filters import Kept, Ordered, Setting, dense, kept

NAMES = (
    *("acceptance", "kl_kept", "kl", "kl_defined", "jaccard", "outside", "same_cdf", "same_gumbel"),
    *("entropy", "base_entropy", "kept", "base_kept"),
)


def by_ratio(base: Ordered, model: Ordered) -> Tensor:
    """Return the ids in the order of q / p, int64 [positions, vocabulary]; no temperature and no filter changes it."""
    return (model.logits - base.logits).argsort(-1)


def compared(base: Ordered, model: Ordered, setting: Setting, ratios: Tensor) -> Tensor:
    """Return float64 [len(NAMES), positions] of two models' logits at the same positions. ratios: `by_ratio`."""
    p, q = kept(base, setting), kept(model, setting)
    log_p, log_q, below = joined(p, q)
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
        "kl_kept": expected(probs_p, log_p, on_kept),
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


def joined(p: Kept, q: Kept) -> tuple[Tensor, Tensor, Tensor]:
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


def expected(probs: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
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
