"""Attend to keys and values in packed pages, and write them: by a kernel of the device, else by plain torch.

The layout is that of compress/kv/pages.py. Kernels see turned vectors alone. A kernel is the file `paged.py` of the
device's folder, with `supports`, `attend` and `write` of the same arguments as here. What it does not read takes the
plain way: codes of some tokens of a KV head are decoded once, multiplied with all queries of the head, and a running
softmax joins them, so that neither all scores nor all decoded tokens are held at once.

All tokens, those of the call too, are read through their codes. Cutting a prompt into chunks or batches changes
results by the rounding of float32 only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compress.kernels import dispatch

TILE_TOKENS = 512  # decoded at a time
TILE_SCORES = 1 << 18  # float32 scores at a time: they stay in the cache of a core
LOWEST = -1e30  # a score that nothing sees: finite, so that differences are numbers

Read = Callable[[int, int, int], tuple[Tensor, Tensor]]  # (KV head, first, end) -> keys, values [tokens, width] float32


class TokenCodes(Protocol):
    """How the keys or values of a token and KV head are coded: compress/kv/pages.py."""

    @property
    def bits(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def levels(self) -> bool: ...
    @property
    def planes(self) -> tuple[int, ...]: ...
    @property
    def code_bytes(self) -> int: ...
    @property
    def parameter_bytes(self) -> int: ...


class PageLayout(Hashable, Protocol):
    """Where tokens lie in pages: compress/kv/pages.py."""

    @property
    def keys(self) -> TokenCodes: ...
    @property
    def values(self) -> TokenCodes: ...
    @property
    def tokens(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def encode_into(self, pages: Tensor, slots: Tensor, states: tuple[Tensor, Tensor], tables: LevelPair) -> None: ...
    def decode_first(self, pages: Tensor, blocks: Tensor, length: int, tables: LevelPair) -> tuple[Tensor, Tensor]: ...


LevelPair = tuple[Tensor | None, Tensor | None]  # float32 levels of keys and of values, where they have levels


class Requests(NamedTuple):
    """Requests of a step; the n queries of one are the last of its tokens."""

    block_table: Tensor  # int32 [requests, most blocks]
    query_starts: Tensor  # int32 [requests + 1], rows of q
    lengths: Tensor  # int32 [requests], tokens with those of this step


def attend(  # noqa: PLR0913, PLR0917 (what an engine has)
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    layout: PageLayout,
    key_levels: Tensor | None = None,
    value_levels: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return sums of turned values [T, H, d_v] float32 for q [T, H, d], turned and times the scale of the softmax.

    pages: uint8 [blocks, h, N, C], of which the last two axes are one run; block_table int32 [requests, most blocks],
    query_starts int32 [requests + 1] and lengths int32 [requests]. Query i of a request with n queries and l tokens
    stands at l - n + i, sees what is before it and itself, of these the last `window`. Query heads H are a multiple of
    the KV heads h; those of a KV head follow each other. A request without queries or tokens adds nothing. Rows of q
    that no request has are 0 in the result. On a GPU no number is read by the host where a kernel takes the layout.
    """
    requests, tables = Requests(block_table, query_starts, lengths), (key_levels, value_levels)
    kernel = dispatch.pages(q.device)
    if kernel is not None and kernel.supports(q, pages, layout):
        attended: Tensor = kernel.attend(q, pages, requests, layout, tables, window)
        return attended
    out = torch.zeros(*q.shape[:2], layout.values.width, dtype=torch.float32, device=q.device)
    for row, (start, count, length) in enumerate(spans(requests)):
        blocks = block_table[row]

        def read(head: int, first: int, end: int, blocks: Tensor = blocks) -> tuple[Tensor, Tensor]:
            own = blocks[first // layout.tokens :]
            keys, values = layout.decode_first(pages[:, head : head + 1], own, end - first, tables)
            return keys[:, 0], values[:, 0]

        rows = slice(start, start + count)
        attend_in_tiles(q[rows], pages.shape[1], read, SeenSpan(length, layout.tokens, window), out[rows])
    return out


def write(
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    slots: Tensor,
    layout: PageLayout,
    key_levels: Tensor | None = None,
    value_levels: Tensor | None = None,
) -> None:
    """Code turned keys [T, h, d] and values [T, h, d_v] and write them to slots int64 [T] of pages; -1 is no slot."""
    tables, kernel = (key_levels, value_levels), dispatch.pages(keys.device)
    if kernel is not None and kernel.writes(keys, values, pages, layout):
        kernel.write(keys, values, pages, slots, layout, tables)
    else:
        layout.encode_into(pages, slots, (keys, values), tables)


def spans(requests: Requests) -> list[tuple[int, int, int]]:
    """Return (first row of q, queries, tokens) of each request; waits for a GPU."""
    starts, lengths = requests.query_starts.tolist(), requests.lengths.tolist()
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    return [
        (start, min(count, length), length) for start, count, length in zip(starts[:-1], counts, lengths, strict=True)
    ]


class SeenSpan(NamedTuple):
    """Which tokens the queries of a request see."""

    length: int
    tokens: int  # of a page
    window: int | None

    def first(self, queries: int) -> int:
        """Return the first token that one of the last so many sees, rounded down to a page."""
        seen = max(0, self.length - queries - self.window + 1) if self.window else 0
        return seen // self.tokens * self.tokens


def attend_in_tiles(q: Tensor, heads: int, read: Read, span: SeenSpan, out: Tensor) -> None:
    """Write to out [n, H, d_v] what the n queries q [n, H, d] of one request see, a tile of tokens at a time."""
    count, groups, width = q.shape[0], q.shape[1] // heads, out.shape[2]
    size = -(-TILE_TOKENS // span.tokens) * span.tokens
    rows = max(1, TILE_SCORES // (size * groups))
    old = span.length - count
    for head in range(heads):
        own = slice(head * groups, (head + 1) * groups)
        queries = q[:, own].float().transpose(0, 1).contiguous()
        top = queries.new_full((groups, count, 1), LOWEST)
        total, sums = torch.zeros_like(top), queries.new_zeros(groups, count, width)
        for first in range(span.first(count), span.length, size):
            end = min(first + size, span.length)
            keys, values = read(head, first, end)
            for row in range(max(0, first - old), count, rows):
                if span.window and old + row - span.window >= end - 1:
                    break  # so do all queries behind it
                part = slice(row, min(row + rows, count))
                scores = (queries[:, part].flatten(0, 1) @ keys.mT).unflatten(0, (groups, -1))
                _mask(scores, old + row, first, span.window)
                most = torch.maximum(top[:, part], scores.amax(-1, keepdim=True))
                power, ratio = (scores - most).exp_(), (top[:, part] - most).exp_()
                total[:, part] = total[:, part] * ratio + power.sum(-1, keepdim=True)
                mixed = (power.flatten(0, 1) @ values).unflatten(0, (groups, -1))
                sums[:, part] = sums[:, part] * ratio + mixed
                top[:, part] = most
        out[:, own] = (sums / total).transpose(0, 1)


def _mask(scores: Tensor, position: int, first: int, window: int | None) -> None:
    """Take from scores [..., n, m] of queries from `position` on the tokens from `first` on that they do not see."""
    count, tokens = scores.shape[-2:]
    if first + tokens - 1 <= position and (not window or position + count - window <= first):
        return
    here = torch.arange(position, position + count, device=scores.device)[:, None]
    there = torch.arange(first, first + tokens, device=scores.device)
    hidden = there > here
    if window:
        hidden |= there <= here - window
    scores.masked_fill_(hidden, -torch.inf)
