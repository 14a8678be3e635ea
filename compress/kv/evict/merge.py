"""Merge evicted keys and values into similar ones that stay: D2O, arXiv 2406.13035.

Each evicted key finds the kept key of largest cosine. Those whose cosine is at least the mean over all evicted tokens
of the head are merged: the kept key becomes the mean of itself and of the merged keys, each times its cosine, and the
value likewise. The others are forgotten. As in the authors' code; sinks are no targets here, which keeps them exact.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PIECE = 1 << 20  # float32 cosines held at a time


def merged(keys: Tensor, values: Tensor, kept: Tensor, sink: int) -> tuple[Tensor, Tensor]:
    """Return the kept keys and values [kept, width] of one head, float32, with what was merged into them.

    keys, values: [n, width]; kept: int64, in token order, the first `sink` of them no targets.
    """
    is_kept = torch.zeros(keys.shape[0], dtype=torch.bool, device=keys.device)
    is_kept[kept] = True
    gone = (~is_kept).nonzero()[:, 0]
    own, others = keys[kept].float(), keys[gone].float()
    merged_keys, merged_values = own.clone(), values[kept].float()
    if not len(gone) or len(kept) <= sink:
        return merged_keys, merged_values
    targets = functional.normalize(own[sink:], dim=-1)
    pieces = functional.normalize(others, dim=-1).split(max(1, PIECE // len(targets)))
    nearest = [(piece @ targets.T).max(-1) for piece in pieces]
    cosines = torch.cat([found.values for found in nearest])
    places = torch.cat([found.indices for found in nearest]) + sink
    chosen = cosines >= cosines.mean()
    weights, places, gone = cosines[chosen][:, None], places[chosen], gone[chosen]
    counts = own.new_ones(len(own)).index_add_(0, places, own.new_ones(len(places)))[:, None]
    for total, source in ((merged_keys, keys), (merged_values, values)):
        total.index_add_(0, places, source[gone].float() * weights)
        total /= counts
    return merged_keys, merged_values
