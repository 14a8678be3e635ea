"""Find the rotary rows of stored tokens between which others were evicted, for codecs of keys before RoPE.

One `KeptRope` for each layer, over the `Rope` of the cache, which keeps the rows of all tokens that were seen. It holds
the column of each token that stayed, int32; all that came later follow without a gap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.kv.rope import Rope


class KeptRope:
    """Stands where a `Rope` does in a `Store`; columns are counted in stored tokens."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.columns: Tensor | None = None  # int32 [B, c]: the columns of the first c stored tokens
        self.shift = 0  # from the place of a later token to its column

    def place(self, columns: Tensor, seen: int) -> None:
        """Hold the columns int64 [B, c] of the stored tokens, of `seen` columns in all."""
        self.columns, self.shift = columns.int(), seen - columns.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return cos and sin [B or 1, 2, stop - start, rotary width] of stored tokens."""
        if self.columns is None:
            return self.rope.rows(start, stop)
        return _gather(self.rope.rows(0, self.shift + max(stop, self.columns.shape[1])), self._columns(start, stop))

    def halves(self, start: int, stop: int, keep: bool) -> Tensor:
        """Return the first half of the columns of cos and sin [B or 1, 2, stop - start, rotary width / 2]."""
        if self.columns is None:
            return self.rope.halves(start, stop, keep)
        last = self.shift + max(stop, self.columns.shape[1])
        return _gather(self.rope.halves(0, last, keep), self._columns(start, stop))

    def all_columns(self, tokens: int, batch: int) -> Tensor:
        """Return the columns int64 [B, tokens] of all stored tokens."""
        if self.columns is None:
            return torch.arange(tokens).expand(batch, -1)
        return self._columns(0, tokens)

    def select(self, index: Tensor) -> None:
        """Keep these sequences."""
        if self.columns is not None:
            self.columns = self.columns[index.to(self.columns.device)]

    @property
    def nbytes(self) -> int:
        return 0 if self.columns is None else self.columns.numel() * self.columns.element_size()

    def _columns(self, start: int, stop: int) -> Tensor:
        """Return the columns int64 [B, stop - start] of stored tokens."""
        assert self.columns is not None
        head = self.columns[:, start:stop].long()
        rest = torch.arange(start + head.shape[1], stop, device=head.device) + self.shift
        return torch.cat((head, rest.expand(len(head), -1)), 1)


def _gather(rows: Tensor, columns: Tensor) -> Tensor:
    """rows [B or 1, 2, n, width], columns [B, c] -> [B, 2, c, width]."""
    rows = rows.expand(len(columns), -1, -1, -1)
    return rows.gather(2, columns[:, None, :, None].expand(-1, 2, -1, rows.shape[3]))
