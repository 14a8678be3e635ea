"""Gather the tokens that stay, rows of different lengths aligned at their newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.evict.merge import merged


@dataclass(frozen=True)
class Kept:
    """The tokens that stay: for each row of the batch and each KV head their columns, int64, in token order."""

    rows: Sequence[Sequence[Tensor]]
    sink: int  # first tokens, into which nothing is merged
    merge: bool  # evicted tokens are added to similar ones

    def gathered(self, dense: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return keys and values [B, h, m, width], and how many first columns of each row hold no token, int64 [B, 1].

        All heads of a row keep equally many. Columns without a token are copies of the first one that stays.
        """
        index, pads = aligned(self.rows)
        both = [x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in dense]
        if self.merge:
            for row, heads in enumerate(self.rows):
                for head, kept in enumerate(heads):
                    self._merge(dense, both, (row, head), kept)
        return (both[0], both[1]), pads[:, :1]

    def _merge(self, dense: Sequence[Tensor], both: Sequence[Tensor], at: tuple[int, int], kept: Tensor) -> None:
        """Replace what stays of a row's head by what the evicted tokens were merged into."""
        keys, values = (x[at] for x in dense)
        start = int(kept[0])  # pads, which stand before it, are not merged: the first real token stays
        for x, own in zip(both, merged(keys[start:], values[start:], kept - start, self.sink), strict=True):
            x[at][x.shape[2] - len(kept) :] = own.to(x.dtype)


def aligned(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the columns [B, h, m] of all rows and heads, filled up at the left, and by how many each, int64 [B, h]."""
    longest = max(len(x) for heads in rows for x in heads)
    filled = [[torch.cat((x[:1].expand(longest - len(x)), x)) for x in heads] for heads in rows]
    pads = torch.tensor([[longest - len(x) for x in heads] for heads in rows], device=rows[0][0].device)
    return torch.stack([torch.stack(heads) for heads in filled]), pads


def by_head(dense: tuple[Tensor, Tensor], kept: Kept) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
    """Return keys and values of each head, [B, 1, m of this head, width], and the pads of each, int64 [B, h]."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    pads = []
    for head in range(len(kept.rows[0])):
        own = Kept([[heads[head]] for heads in kept.rows], kept.sink, kept.merge)
        (k, v), empty = own.gathered((dense[0][:, head : head + 1], dense[1][:, head : head + 1]))
        keys.append(k)
        values.append(v)
        pads.append(empty)
    return (keys, values), torch.cat(pads, 1)
