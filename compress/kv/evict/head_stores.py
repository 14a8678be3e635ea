"""Store keys or values of heads that keep different numbers of tokens: a `Store` for each head.

Bytes are those of the tokens that each head has; nothing is padded, but where rows of a batch differ. Readers see the
heads side by side, aligned at their newest tokens: a head with fewer tokens than the longest one has empty columns at
the left, which the layer's mask leaves out (layer.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kv.codec import Codec
from compress.kv.settings import Policy
from compress.kv.token_store import Bytes, Store


class HeadStores:
    """Offers what readers of a `Store` use, [B, h, tokens, width] in token order."""

    columns: Tensor | None = None  # columns are in token order here, unlike those of a padded `Store`
    keeps_halves = False
    coded = 0  # that one kernel could read for all heads

    def __init__(self, codec: Codec, policy: Policy, heads: int) -> None:
        self.codec, self.policy = codec, policy
        self.heads = [Store(codec, policy) for _ in range(heads)]
        self.flush = self.heads[0].flush

    def __len__(self) -> int:
        return max(len(store) for store in self.heads)

    @property
    def batch(self) -> int:
        return self.heads[0].batch

    def place(self, parts: Sequence[Tensor], pads: Tensor) -> None:
        """Store the first tokens: [B, 1, n of this head, width] for each head; pads int64 [B, h]."""
        for head, (store, x) in enumerate(zip(self.heads, parts, strict=True)):
            head_pads = pads[:, head]
            store.append(x, head_pads if bool(head_pads.any()) else None)

    def append(self, x: Tensor, pads: Tensor | None = None, queries: Tensor | None = None) -> None:
        """x [B, h, n, width]; pads int64 [B, h] or [B, 1] of the first tokens."""
        for head, store in enumerate(self.heads):
            head_pads = None if pads is None else pads[:, min(head, pads.shape[1] - 1)]
            store.append(x[:, head : head + 1], head_pads)

    def read(self, new: Tensor | None = None) -> Tensor:
        """Return all tokens, then those of `new`; columns without a token are 0."""
        states = [store.read(None if new is None else new[:, i : i + 1]) for i, store in enumerate(self.heads)]
        length = max(head_states.shape[2] for head_states in states)
        out = states[0].new_zeros(states[0].shape[0], len(states), length, states[0].shape[3])
        for head, head_states in enumerate(states):
            out[:, head : head + 1, length - head_states.shape[2] :] = head_states
        return out

    def scores(self, q: Tensor, out: Tensor) -> None:
        """q [B, h, m, width] float32; out [B, h, m, tokens] gets its products with all keys, 0 without a key."""
        out.zero_()
        for head, store in enumerate(self.heads):
            head_scores = q.new_empty(q.shape[0], 1, q.shape[2], len(store))
            store.scores(q[:, head : head + 1], head_scores)
            out[:, head : head + 1, :, out.shape[3] - len(store) :] = in_token_order(head_scores, store.columns)

    def mix(self, p: Tensor) -> Tensor:
        """p [B, h, m, tokens] float32 -> the sum of all values [B, h, m, width], weighted by p."""
        parts = []
        for head, store in enumerate(self.heads):
            head_p = p[:, head : head + 1, :, p.shape[3] - len(store) :]
            parts.append(store.mix(in_storage_order(head_p, store.columns)))
        return torch.cat(parts, 1)

    def crop(self, count: int) -> None:
        for store in self.heads:
            store.crop(count)

    def select(self, index: Tensor) -> None:
        for store in self.heads:
            store.select(index)

    def clear(self) -> None:
        for store in self.heads:
            store.clear()

    def nbytes(self) -> Bytes:
        return sum((store.nbytes() for store in self.heads), Bytes())


def in_token_order(x: Tensor, columns: Tensor | None) -> Tensor:
    """Reorder x [B, h, m, n] by columns int64 [B, c]: the column that stands at each of the first c places."""
    if columns is None:
        return x
    return _reorder(x, columns.argsort(-1))


def in_storage_order(x: Tensor, columns: Tensor | None) -> Tensor:
    """Undo `in_token_order`."""
    return x if columns is None else _reorder(x, columns)


def _reorder(x: Tensor, columns: Tensor) -> Tensor:
    head = x.gather(3, columns[:, None, None].expand(-1, *x.shape[1:3], -1))
    return torch.cat((head, x[..., columns.shape[1] :]), 3)
