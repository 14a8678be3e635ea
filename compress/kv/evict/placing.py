"""Place the tokens that stay: gather them, merge evicted ones into them, and find their rotary rows.

Rows of different lengths are aligned at their newest tokens.

Merging is that of D2O, arXiv 2406.13035. Each evicted key finds the kept key of largest cosine. Those whose cosine is
at least the mean over all evicted tokens of the head are merged: the kept key becomes the mean of itself and of the
merged keys, each times its cosine, and the value likewise. The others are forgotten. As in the authors' code; sinks are
no targets here, which keeps them exact.

Codecs of keys before RoPE need rotary rows of tokens between which others were evicted: one `KeptRope` for each layer,
over the `Rope` of the cache, which keeps the rows of all tokens that were seen. It holds the column of each token that
stayed, int32; all that came later follow without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.kv.rope import Rope

COSINES_PER_PIECE = 1 << 20  # float32 cosines held at a time


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that stay: for each row of the batch and each KV head their columns, int64, in token order."""

    rows: Sequence[Sequence[Tensor]]
    sink: int  # first tokens, into which nothing is merged
    merge: bool  # evicted tokens are added to similar ones

    def gather(self, dense: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return keys and values [B, h, m, width], and how many first columns of each row hold no token, int64 [B, 1].

        All heads of a row keep equally many. Columns without a token are copies of the first one that stays.
        """
        index, pads = align_rows(self.rows)
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
        merged = merge_evicted(keys[start:], values[start:], kept - start, self.sink)
        for x, rows in zip(both, merged, strict=True):
            x[at][x.shape[2] - len(kept) :] = rows.to(x.dtype)


def align_rows(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the columns [B, h, m] of all rows and heads, filled up at the left, and by how many each, int64 [B, h]."""
    longest = max(len(x) for heads in rows for x in heads)
    filled = [[torch.cat((x[:1].expand(longest - len(x)), x)) for x in heads] for heads in rows]
    pads = torch.tensor([[longest - len(x) for x in heads] for heads in rows], device=rows[0][0].device)
    return torch.stack([torch.stack(heads) for heads in filled]), pads


def by_head(dense: tuple[Tensor, Tensor], kept: KeptTokens) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
    """Return keys and values of each head, [B, 1, m of this head, width], and the pads of each, int64 [B, h]."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    pads = []
    for head in range(len(kept.rows[0])):
        alone = KeptTokens([[heads[head]] for heads in kept.rows], kept.sink, kept.merge)
        (k, v), empty = alone.gather((dense[0][:, head : head + 1], dense[1][:, head : head + 1]))
        keys.append(k)
        values.append(v)
        pads.append(empty)
    return (keys, values), torch.cat(pads, 1)


def merge_evicted(keys: Tensor, values: Tensor, kept: Tensor, sink: int) -> tuple[Tensor, Tensor]:
    """Return the kept keys and values [kept, width] of one head, float32, with what was merged into them.

    keys, values: [n, width]; kept: int64, in token order, the first `sink` of them no targets.
    """
    is_kept = torch.zeros(keys.shape[0], dtype=torch.bool, device=keys.device)
    is_kept[kept] = True
    gone = (~is_kept).nonzero()[:, 0]
    kept_keys, others = keys[kept].float(), keys[gone].float()
    merged_keys, merged_values = kept_keys.clone(), values[kept].float()
    if not len(gone) or len(kept) <= sink:
        return merged_keys, merged_values
    targets = functional.normalize(kept_keys[sink:], dim=-1)
    pieces = functional.normalize(others, dim=-1).split(max(1, COSINES_PER_PIECE // len(targets)))
    nearest = [(piece @ targets.T).max(-1) for piece in pieces]
    cosines = torch.cat([cosine for cosine, _ in nearest])
    places = torch.cat([index for _, index in nearest]) + sink
    chosen = cosines >= cosines.mean()
    weights, places, gone = cosines[chosen][:, None], places[chosen], gone[chosen]
    counts = kept_keys.new_ones(len(kept_keys)).index_add_(0, places, kept_keys.new_ones(len(places)))[:, None]
    for total, source in ((merged_keys, keys), (merged_values, values)):
        total.index_add_(0, places, source[gone].float() * weights)
        total /= counts
    return merged_keys, merged_values


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
        last = self.shift + max(stop, self.columns.shape[1])
        return _gather_rows(self.rope.rows(0, last), self._columns(start, stop))

    def halves(self, start: int, stop: int, keep: bool) -> Tensor:
        """Return the first half of the columns of cos and sin [B or 1, 2, stop - start, rotary width / 2]."""
        if self.columns is None:
            return self.rope.halves(start, stop, keep)
        last = self.shift + max(stop, self.columns.shape[1])
        return _gather_rows(self.rope.halves(0, last, keep), self._columns(start, stop))

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


def _gather_rows(rows: Tensor, columns: Tensor) -> Tensor:
    """rows [B or 1, 2, n, width], columns [B, c] -> [B, 2, c, width]."""
    rows = rows.expand(len(columns), -1, -1, -1)
    return rows.gather(2, columns[:, None, :, None].expand(-1, 2, -1, rows.shape[3]))
