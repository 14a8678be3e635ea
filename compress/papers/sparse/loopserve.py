"""LoopServe (arXiv 2507.13681): what attention reads is chosen anew at every turn, and every few tokens within one.

What one question of a conversation attends to says little of what the next one will. So nothing is forgotten: all
tokens stay stored, and single tokens read a share `keep` of them, those that the newest `window` queries attend to. The
choice is made anew at the first token behind each prompt, whatever the turn, and again after each `every` tokens, so
that tokens come back when a later question needs them.

Prompts are read along lines of the attention matrix that are chosen online, for each head, from a sample of the
queries: columns (tokens that many queries attend to) and diagonals (a fixed distance). Lines are taken in the order of
their mass until they hold a share `alpha` of it. Of a first prompt both kinds are taken. A later prompt reads columns
of the past, and its own tokens in full.

Differences from the paper, whose code was not at hand: the mass is that of the union of the lines, so that crossings
count once; sampled queries are half the newest and half spread evenly; a choice for decoding is one for each KV head.
What it does not do: save time on a prompt, which is computed under a mask of a byte for each head and pair of tokens;
lines for prompts of up to SAMPLED_QUERIES tokens, for models with a bound on scores (softcap) and for masks that are
added to scores: these prompts read everything; keep a choice from token to token for batches with left padding, which
choose at each token and read later prompts in full. A shorter row of such a batch samples its queries by the columns
of the batch, so that its first prompt is read along other lines than alone. The bytes of the cache are those of all
tokens, and all stay in one memory. Measured: docs/results/kv_reading.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compress.kv.codec import Spec
from compress.kv.layer import Logits
from compress.kv.sparse.layer import ReadingLayer
from compress.kv.sparse.reader import QueryPiece, Reader, TokenChoice, check_keep, group_queries, top

NEEDS: frozenset[str] = frozenset()
SAMPLED_QUERIES = 64  # a prompt chooses its lines by the attention of so many


@dataclass(frozen=True)
class Config:
    keep: float = 0.0625  # share of the coded tokens that single tokens read; sinks and the exact tail come on top
    alpha: float = 0.95  # share of the sampled attention that the lines of a prompt hold; 1: prompts read everything
    every: int = 16  # [tokens] after which the choice is made anew within a turn
    window: int = 16  # [tokens] the newest, whose queries choose

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha:g} is not above 0 and at most 1")
        if min(self.every, self.window) < 1:
            raise ValueError("every and window are 1 or more")


def choose_lines(p: Tensor, rows: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return which columns and which diagonals are read, bool [heads, n] each.

    p: attention [heads, sampled, n] of the queries at the places rows int64 [sampled], causal. Diagonal d is the tokens
    d before each query. The fewest lines, in the order of their mass, whose union holds `alpha` of each head's mass.
    """
    heads, count = p.shape[0], p.shape[-1]
    distance = rows[:, None] - torch.arange(count, device=p.device)  # [sampled, n], negative: a later token
    flat = distance.clamp(min=0).expand(heads, -1, -1)
    diagonals = torch.zeros(heads, count, dtype=p.dtype, device=p.device)
    diagonals.scatter_add_(1, flat.flatten(1), (p * (distance >= 0)).flatten(1))
    order = torch.cat((p.sum(1), diagonals), 1).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(2 * count, device=p.device).expand(heads, -1))
    columns, slashes = rank.split(count, 1)
    by_distance = slashes.gather(1, flat.flatten(1)).view_as(p)
    first = torch.minimum(columns[:, None], by_distance)  # rank of the first line that an entry lies on
    mass = torch.zeros(heads, 2 * count, dtype=torch.float64, device=p.device)
    mass.scatter_add_(1, first.flatten(1), p.double().flatten(1))
    lines = 1 + (mass.cumsum(1) < alpha * mass.sum(1, keepdim=True) - 1e-9).sum(1, keepdim=True)
    return columns < lines, slashes < lines


class LoopServe(Reader):
    """A layer's part: the newest queries, and what they chose."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.newest: Tensor | None = None  # [B, h, query heads, at most window, width]
        self.chosen: Tensor | None = None  # int64 [B, h, 1, tokens] that single tokens read; None: to be chosen
        self.known = 0  # candidates that there were when they were chosen
        self.steps = 0  # single tokens since then
        self.prompt_share: float | None = None  # of the attention matrix of the first prompt that was read

    def watch(self, q: Tensor) -> None:
        seen = q if self.newest is None else torch.cat((self.newest, q[..., -self.config.window :, :]), 3)
        self.newest = seen[..., -self.config.window :, :].clone()
        if q.shape[3] > 1:
            self.chosen = None

    def mask_first(self, q: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask of a first prompt, bool [B, H, n, n]: the lines that are chosen, where `mask` allows them.

        q [B, h, query heads, n, width] float32, scaled; keys [B, h, n, width]; mask [B, 1, n, n], None: causal. None if
        all is to be read.
        """
        count = q.shape[3]
        if self.config.alpha == 1 or count <= SAMPLED_QUERIES or (mask is not None and mask.dtype != torch.bool):
            return None
        half = SAMPLED_QUERIES // 2
        newest = torch.arange(count - SAMPLED_QUERIES + half, count, device=q.device)
        spread = torch.linspace(0, count - len(newest) - 1, half, device=q.device).long()
        rows = torch.cat((spread, newest)).unique()
        causal = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
        allowed = causal[None, None] if mask is None else mask & causal
        scores = (q[:, :, :, rows] @ keys.float()[:, :, None].mT).flatten(1, 2)  # [B, H, sampled, n]
        p = scores.masked_fill(~allowed[:, :, rows], -torch.inf).softmax(-1).nan_to_num_(0)
        columns, diagonals = choose_lines(p.flatten(0, 1), rows, self.config.alpha)
        distance = (torch.arange(count, device=q.device)[:, None] - torch.arange(count, device=q.device)).clamp(min=0)
        read = diagonals[:, distance] | columns[:, None]
        read |= torch.eye(count, dtype=torch.bool, device=q.device)
        read = read.view(*scores.shape[:2], count, count) & allowed
        self.prompt_share = float(read.sum()) / float(allowed.expand_as(read).sum())
        return read

    def choose(self, piece: QueryPiece) -> TokenChoice | None:
        self.watch(piece.q)
        if piece.q.shape[3] > 1:
            return None if self.config.alpha == 1 else self._columns(piece)
        if self.config.keep == 1:
            return None
        self.steps += 1
        if self.chosen is None or self.steps >= self.config.every or piece.allowed is not None:
            best = top(self._attention(piece).mean(2)[:, :, None], piece, self.config.keep)
            if best is None or best.valid is not None:
                self.chosen = None
                return best
            self.chosen, self.known, self.steps = best.places, piece.count, 0
        since = torch.arange(self.known, piece.count, device=self.chosen.device)
        return TokenChoice(torch.cat((self.chosen, since.expand(*self.chosen.shape[:3], -1)), 3))

    def _columns(self, piece: QueryPiece) -> TokenChoice | None:
        """Choose the fewest candidates that hold `alpha` of what the newest queries see of them, the same for all."""
        if piece.allowed is not None:
            return None
        mass, order = self._attention(piece).mean(2).sort(-1, descending=True)  # [B, h, count]
        needed = 1 + (mass.cumsum(-1) < self.config.alpha * mass.sum(-1, keepdim=True) - 1e-6).sum(-1, keepdim=True)
        most = int(needed.max())
        if most >= piece.count:
            return None
        shape = (-1, -1, piece.q.shape[3], -1)
        valid = torch.arange(most, device=order.device) < needed
        return TokenChoice(order[..., :most][:, :, None].expand(shape), valid[:, :, None].expand(shape))

    def _attention(self, piece: QueryPiece) -> Tensor:
        """Return what the newest queries attend to among candidates, [B, h, queries, count]."""
        assert self.newest is not None, "the queries of the piece were seen"
        keys, rows = piece.layer.stores["keys"], self.newest.flatten(2, 3)
        scores = rows.new_empty(*rows.shape[:3], len(keys))
        keys.scores(rows, scores)
        scores = scores[..., keys.sink.length : keys.sink.length + piece.count]
        if piece.allowed is not None:
            scores = scores.masked_fill(~piece.allowed[:, None, -1:], -torch.inf)
        return scores.softmax(-1).nan_to_num_(0)

    def crop(self, coded: int, removed: int) -> None:
        self.chosen = None
        if self.newest is not None:
            self.newest = self.newest[..., : max(0, self.newest.shape[3] - removed), :]

    def select(self, index: Tensor) -> None:
        if self.chosen is not None:
            self.chosen = self.chosen[index.to(self.chosen.device)]
        if self.newest is not None:
            self.newest = self.newest[index.to(self.newest.device)]

    def kept_tensors(self) -> list[Tensor]:
        return [x for x in (self.newest, self.chosen) if x is not None]


class LoopServeLayer(ReadingLayer):
    """A `ReadingLayer` whose first prompt is read along lines."""

    def read_prompt(self, query: Tensor, new: tuple[Tensor, Tensor], mask: Any, logits: Logits) -> Tensor | None:
        reader = self.reader
        if not isinstance(reader, LoopServe) or logits.softcap is not None:
            return None
        q = group_queries(query, reader.spec.heads, logits.scaling)
        if (read := reader.mask_first(q, new[0], mask)) is None:
            return None
        reader.watch(q)
        attend = functional.scaled_dot_product_attention
        output: Tensor = attend(query, *new, attn_mask=read, scale=logits.scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous()


LAYER = LoopServeLayer


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Reader:
    return LoopServe(config, spec)
