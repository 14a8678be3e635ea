"""Compare the distributions that two models draw tokens from, exactly and without drawing.

Filters keep other tokens of the compressed model than of its base, so KL may be infinite. These figures are finite
whatever is kept; p is the base, q the compressed model, both filtered and renormalized:

- acceptance: sum of min(p, q) = 1 - total variation. It is also the probability that a token which q drafts is accepted
  in speculative sampling (Leviathan et al. 2023, arXiv 2211.17192).
- kl_kept: KL(p || q on the tokens that the base keeps, renormalized there). Zero for equal models; without filters KL.
- kl: KL(p || q), for positions at which q keeps all that p keeps; kl_defined is 1 there and 0 elsewhere.
- jaccard: of the kept sets. outside: probability p of tokens that the compressed model filters away.
- same_cdf: how often one uniform random number gives both models the same token, where the token is looked up in the
  cumulative distribution in the order of the ids. It is the length of the parts of [0, 1] that belong to the same token.
- same_gumbel: the same where both add equal Gumbel noise to their log-probabilities and take the largest (what
  torch.multinomial and most serving engines do with equal seeds): sum over v of 1 / sum over w of max(p_w / p_v,
  q_w / q_v). Both are probabilities over the random numbers, not estimates; neither exceeds the acceptance.
- entropy, base_entropy in nats; kept, base_kept: tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.evaluate.sampling_filters import Kept, Ordered, Setting, kept

NAMES = (
    *("acceptance", "kl_kept", "kl", "kl_defined", "jaccard", "outside", "same_cdf", "same_gumbel"),
    *("entropy", "base_entropy", "kept", "base_kept"),
)


def compared(base: Ordered, model: Ordered, setting: Setting) -> Tensor:
    """Return float64 [len(NAMES), positions] of two models' logits at the same positions."""
    p, q = kept(base, setting), kept(model, setting)
    log_p, log_q, below = joined(p, q)
    has_p, is_both = log_p.isfinite(), log_p.isfinite() & log_q.isfinite()
    probs_p, probs_q = log_p.exp(), log_q.exp()
    shared_p, shared_q = probs_p.where(is_both, 0.0), probs_q.where(is_both, 0.0)
    on_kept = (model.logits.gather(1, p.ids) / setting.temperature).masked_fill(~has_p, -torch.inf).log_softmax(-1)
    counts = [each.log_probs.isfinite().sum(-1) for each in (p, q)]
    both = is_both.sum(-1)
    outside = probs_p.where(~is_both, 0.0).sum(-1)
    above_p, above_q = probs_p.cumsum(-1), below + probs_q
    overlap = torch.minimum(above_p, above_q) - torch.maximum(above_p - probs_p, below)
    rows = {
        "acceptance": torch.minimum(shared_p, shared_q).sum(-1),
        "kl_kept": expected(probs_p, log_p, on_kept),
        "kl": (shared_p * (log_p - log_q).where(is_both, 0.0)).sum(-1),
        "kl_defined": both == counts[0],
        "jaccard": both / (counts[0] + counts[1] - both),
        "outside": outside,
        "same_cdf": overlap.clamp(min=0).where(is_both, 0.0).sum(-1),
        "same_gumbel": _same_gumbel(shared_p, shared_q, (log_q - log_p).where(is_both, 0.0), outside),
        "entropy": entropy(q.log_probs),
        "base_entropy": entropy(p.log_probs),
        "kept": counts[1],
        "base_kept": counts[0],
    }
    rows["kl"] = rows["kl"].where(rows["kl_defined"], 0.0)
    return torch.stack([rows[name].double() for name in NAMES])


def joined(p: Kept, q: Kept) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p and log q at the tokens of p, and the probability q of all smaller ids; [positions, width] each."""
    probs = q.log_probs.exp()
    if p.ids.shape == q.ids.shape and torch.equal(p.ids, q.ids):
        return p.log_probs, q.log_probs, probs.cumsum(-1) - probs
    width = q.ids.shape[1]
    place = torch.searchsorted(q.ids, p.ids).clamp(max=width - 1)
    is_found = q.ids.gather(1, place) == p.ids
    log_q = q.log_probs.gather(1, place).masked_fill(~is_found, -torch.inf)
    below = (probs.cumsum(-1) - probs).gather(1, place)
    return p.log_probs, log_q, below


def expected(probs: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the mean over p of log p - log q at each position; tokens without probability count nothing."""
    return torch.where(probs > 0, probs * (log_p - log_q), 0.0).sum(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats at each position."""
    return -torch.where(log_probs.isfinite(), log_probs.exp() * log_probs, 0.0).sum(-1)


def _same_gumbel(shared_p: Tensor, shared_q: Tensor, log_ratio: Tensor, outside: Tensor) -> Tensor:
    """Return the probability that equal Gumbel noise gives both models the same token.

    For a token v the terms max(p_w / p_v, q_w / q_v) are p_w / p_v where q_w / p_w is at most that of v, and q_w / q_v
    elsewhere: with the tokens sorted by that ratio they are sums of what lies before and behind v. Tokens that only one
    model keeps count with their own probability.
    """
    order = log_ratio.argsort(-1)
    p, q = shared_p.gather(1, order), shared_q.gather(1, order)
    behind = q.sum(-1, keepdim=True) - q.cumsum(-1)
    only_q = 1 - q.sum(-1, keepdim=True)
    races = (p.cumsum(-1) + outside[:, None]) / p + (behind + only_q).clamp(min=0) / q
    return torch.where((p > 0) & (q > 0), 1 / races, 0.0).sum(-1)
