"""Rotary rows of cached tokens, for codecs that store keys before the rotary embedding.

One `Rope` for all layers of a cache that are rotated alike: the rows of cos and sin that the model computed, kept per
token because left padding and scaled embeddings make them a matter of the batch. A batch without padding keeps one row.
Only the half-split form (channel j turns with j + width / 2, in the first channels) is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.kv.buffer import Buffer


class Rope:
    def __init__(self) -> None:
        self._rows = Buffer()  # [B or 1, 2 (cos, sin), tokens, rotary width], in the type of the model

    def __len__(self) -> int:
        return self._rows.length

    def append(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [B or 1, n, rotary width] of the next tokens."""
        rows = torch.stack((cos, sin), 1)
        if (rows == rows[:1]).all():
            rows = rows[:1]
        if self._rows.length:
            held = self._rows.view().shape[0]
            if held < rows.shape[0]:
                self._rows.take(torch.zeros(rows.shape[0], dtype=torch.long))
            rows = rows.expand(max(held, rows.shape[0]), -1, -1, -1)
        self._rows.append(rows)

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, stop - start, rotary width]."""
        if stop > len(self):
            raise CompressError(
                "kv_cache: keys before RoPE need compress.kv.hooks.attach(model) before the first token"
            )
        rows = self._rows.view(start, stop)
        return rows[:, 0], rows[:, 1]

    def select(self, index: Tensor) -> None:
        if self._rows.length and self._rows.view().shape[0] > 1:
            self._rows.take(index)

    def crop(self, count: int) -> None:
        self._rows.crop(min(count, self._rows.length))

    def clear(self) -> None:
        self._rows.clear()

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def allocated(self) -> int:
        return self._rows.allocated
