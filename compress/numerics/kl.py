"""Take the Kullback-Leibler divergence of predictions, some positions at a time so that logits stay small."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LOGITS_NBYTES = 32 << 20  # float32 logits of one model at a time


def from_logits(original: Tensor, other: Tensor) -> Tensor:
    """Return KL(original || other) of each token, in nats; logits [tokens, vocabulary] float32."""
    return from_log_probs(original.log_softmax(-1), other.log_softmax(-1))


def from_log_probs(original: Tensor, other: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return KL(original || other) of each token, summed in `dtype`; log-probabilities [tokens, vocabulary]."""
    return nn.functional.kl_div(other, original, reduction="none", log_target=True).sum(-1, dtype=dtype)


def rows_at_a_time(vocab_size: int) -> int:
    """Return the number of positions whose logits LOGITS_NBYTES allow."""
    return max(1, LOGITS_NBYTES // (4 * vocab_size))


def slices(count: int, vocab_size: int) -> list[slice]:
    """Return positions 0 .. count, `rows_at_a_time` in each slice."""
    step = rows_at_a_time(vocab_size)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
