"""Expected attention, arXiv 2510.00636: keep the tokens that coming queries are expected to attend to.

Queries before the rotary embedding are taken as Gaussian. Their mean m and covariance S are turned with R, the mean
rotation of the next `positions` positions: m' = R m, S' = R S R^T. The expectation of exp(q k / sqrt d) under that
Gaussian is exp(k m' / sqrt d + k S' k / (2 d)). A softmax over the tokens makes it attention, the mean over the query
heads of a KV head is taken, and it is multiplied with the norm of the token's value.

Where we differ: kvpress scales by sqrt d whatever the model scales with; here it is the model's scaling. Queries of the
first kv_cache.sink tokens are left out, as there. Only sums of queries are needed, so that a prompt may come in pieces.

What it does not do: it never sees the actual questions, so that one text may be asked many.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compress.kv.evict.layer import EvictingLayer
from compress.kv.evict.select import Seen

NEEDS = frozenset({"moments"})
LAYER = EvictingLayer


@dataclass(frozen=True)
class Config:
    positions: int = 512  # [tokens] to come, over whose rotations is averaged
    covariance: bool = True  # false: the mean of the queries alone
    norms: bool = True  # multiply with the norms of values; false beside evict.critical, which brings its own

    def __post_init__(self) -> None:
        if self.positions < 1:
            raise ValueError("positions must be 1 or more")


def score(config: Config, seen: Seen) -> Tensor:
    """Return the expected attention times the norms of the values, float32 [h, n]; sinks take no part in it."""
    assert seen.moments is not None, "the method says that it needs them"
    mean, covariance = seen.moments
    keys, values = seen.keys[:, seen.sink :].to(mean), seen.values[:, seen.sink :].to(mean)
    heads = keys.shape[0]
    logits = keys[:, None] @ (mean * seen.scaling).unflatten(0, (heads, -1))[..., None]  # h, H / h, n, 1
    if config.covariance:
        turned = keys[:, None] @ covariance.unflatten(0, (heads, -1))
        logits = logits + (turned * keys[:, None]).sum(-1, keepdim=True) * (seen.scaling**2 / 2)
    expected = logits[..., 0].softmax(-1).mean(1)
    if config.norms:
        expected = expected * values.norm(dim=-1)
    scores = seen.keys.new_zeros(seen.keys.shape[:2]).float()
    scores[:, seen.sink :] = expected.float()
    return scores
