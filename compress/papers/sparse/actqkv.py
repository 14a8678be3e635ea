"""ActQKV (arXiv 2502.13542): a probe query from the tokens that stand out retrieves blocks of keys.

A single query is a noisy guide to what a passage needs, and the mean of many is dull. ActQKV forms a probe query from
the anchor tokens of a window, those whose activation departs most from the window's mean, retrieves the blocks of keys
that are most similar to it, and divides the budget among layers by how dense their information is.

Two forms. `published` follows the authors' code (MrXiaoaa/ActQKV, which came to hand after the other form was written):

    window      the last `window` queries of a head, the one that attends included
    weights     a query's mean over all channels of all heads of (q - mean)^2 / (variance + mean variance / 100), with
                mean and variance of the window; they sum to 1
    probe       the mean of the window's queries with these weights
    block       the mean of the keys of `block` tokens, float16
    similarity  the cosine of probe and block, as vectors over all query heads of the layer, which read the same blocks
    density     the entropy of a softmax of that over blocks, by its largest value
    budget      keep x density / (mean over layers of their latest densities), at most 1; `budget: equal` is keep

What was compared with that code: weights, probe, similarity and choice are equal on one layer where a block is known by
all of its keys (tests/papers/sparse/test_actqkv.py). It differs in that the code

    knows a block by the mean of the few keys that nearby queries attend to most; with one of them it chooses others
    takes queries and keys before the rotary embedding, here they are behind it
    has one running mean and variance for all layers and all texts, and equal weights until it has 1,000 of them
    takes windows only within the prompt: while decoding its probe is the query, which is `window: 1` here
    averages densities over the last 100 queries, and reads at least 32 blocks
    adds the similarity with the question within the prompt

`anchors` is how the abstract was filled in without it:

    bias        ||q - mean of the window||, of queries after the rotary embedding
    anchors     queries whose bias is at least the mean bias of the window; the one that attends always is one
    probe       the mean of the anchors
    similarity  probe . block, then softmax over blocks, and the mean over the query heads of a KV head
    density     exp(entropy of that softmax) / blocks, averaged over KV heads

Sinks and the exact tail are always read and come on top. Rows of a batch have budgets of their own.
What it does not do: retrieve for the prompt, which attends to everything; values by channel.

Outside the core because at a sixteenth of the tokens it has 21 times the KL of Double Sparsity (0.1932 and 0.0092,
docs/results/kv_reading.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.kv.buffer import Buffer
from compress.kv.codec import Spec
from compress.kv.sparse.layer import ReadingLayer
from compress.kv.sparse.reader import QueryPiece, Reader, TokenChoice, best, budget_of, check_keep
from compress.papers.sparse.blocks import expand_blocks, hide_unseen, iterate_blocks

NEEDS: frozenset[str] = frozenset()
LAYER = ReadingLayer


@dataclass(frozen=True)
class Config:
    keep: float = 0.0625  # share of the coded tokens that attention reads, mean over layers; sinks and the exact tail
    # come on top
    window: int = 16  # [queries] that a probe is made from; 1: the query itself
    block: int = 32  # [tokens] that are retrieved together
    form: Literal["anchors", "published"] = "anchors"  # of probe, similarity and density: as above
    budget: Literal["density", "equal"] = "density"  # of layers: by the density of their attention, or all alike
    dense_layers: int = 2  # first layers of the model, which read everything

    def __post_init__(self) -> None:
        check_keep(self.keep)
        for name in ("window", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not 1 or more")
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers {self.dense_layers} is not 0 or more")


class ActQKV(Reader):
    """The last queries, the means of blocks of keys, and the latest density of a layer."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.unit = config.block
        self.last: Tensor | None = None  # the queries before, [B, h, query heads, at most window - 1, width] float32
        self.means = Buffer()  # [B, h, blocks, width] float16
        self.density: Tensor | None = None  # [B]

    def watch(self, q: Tensor) -> None:
        whole = q if self.last is None else torch.cat((self.last, q), 3)
        self.last = whole[:, :, :, max(0, whole.shape[3] - self.config.window + 1) :].clone()

    def choose(self, piece: QueryPiece) -> TokenChoice | None:
        is_published = self.config.form == "published"
        probe = (_weighted_probe if is_published else _anchored_probe)(*self._windows(piece.q))
        self.watch(piece.q)
        if self.spec.layer < self.config.dense_layers or self.config.keep == 1:
            return None
        blocks = piece.count // self.config.block
        for keys in iterate_blocks(piece, self.config.block, self.means.length):
            self.means.append(keys.mean(3).half())
        means = self.means.view(0, blocks).float()
        if self.tally is not None:
            self.tally.extra += means.numel() * 2 * piece.q.shape[3]
        scores = (_cosines if is_published else _attention)(probe, means)
        scores = hide_unseen(scores, piece, self.config.block)
        weights = scores.softmax(-1).nan_to_num_(0).mean(2)  # B, h, n, blocks
        keep = self._keep(piece, weights)
        budgets = -(-budget_of(piece, keep, weights) // self.config.block)
        choice = best(weights, budgets.clamp(max=blocks))
        return None if choice is None else expand_blocks(choice, piece, self.config.block)

    def crop(self, coded: int, removed: int) -> None:
        self.means.crop(self.means.length - min(self.means.length, coded // self.config.block))
        if self.last is not None:
            self.last = self.last[:, :, :, : max(0, self.last.shape[3] - removed)]

    def select(self, index: Tensor) -> None:
        self.means.take(index)
        self.last, self.density = (
            None if x is None else x.index_select(0, index.to(x.device)) for x in (self.last, self.density)
        )

    def kept_tensors(self) -> list[Tensor]:
        return [x for x in (self.last, self.density, self.means.view() if self.means.length else None) if x is not None]

    def _windows(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows of queries q [B, h, query heads, n, width], and which of their tokens there are.

        [B, h, query heads, n, window, width], and bool [n, window, 1]: the first queries have shorter windows.
        """
        n, window = q.shape[3], self.config.window
        before = q[:, :, :, :0] if self.last is None else self.last
        missing = window - 1 - before.shape[3]
        whole = torch.cat((q.new_zeros(*q.shape[:3], missing, q.shape[4]), before, q), 3)
        number = torch.arange(window, device=q.device) + torch.arange(n, device=q.device)[:, None]
        return whole.unfold(3, window, 1).transpose(-1, -2), (number >= missing)[..., None]

    def _keep(self, piece: QueryPiece, weights: Tensor) -> float | Tensor:
        """Return the share of tokens that each query reads in this layer, [B, n]."""
        if self.config.budget == "equal":
            return float(self.config.keep)
        entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
        if self.config.form == "published":
            density = entropy.mean(1) / max(math.log(weights.shape[-1]), 1.0)
        else:
            density = entropy.exp().mean(1) / weights.shape[-1]  # B, n
        self.density = density[:, -1]
        readers = [getattr(layer, "reader", None) for layer in piece.layer.cache.layers]
        others = [x.density for x in readers if isinstance(x, ActQKV) and x is not self and x.density is not None]
        mean = (sum(others, torch.zeros_like(self.density))[:, None] + density) / (len(others) + 1)
        return (self.config.keep * density / mean).clamp(max=1)


def _anchored_probe(windows: Tensor, is_real: Tensor) -> Tensor:
    """Return the mean of the queries that stand out of each window, [B, h, query heads, n, width]."""
    mean = windows.sum(4, keepdim=True) / is_real.sum(1, keepdim=True)
    bias = (windows - mean).norm(dim=-1, keepdim=True) * is_real
    anchors = (bias >= bias.sum(4, keepdim=True) / is_real.sum(1, keepdim=True)) & is_real
    anchors[:, :, :, :, -1] = True
    return (windows * anchors).sum(4) / anchors.sum(4)


def _weighted_probe(windows: Tensor, is_real: Tensor) -> Tensor:
    """Return the mean of each window's queries, weighted by how far all of their channels are from the mean."""
    count = is_real.sum(1, keepdim=True)
    square = (windows - windows.sum(4, keepdim=True) / count).square() * is_real
    variance = square.sum(4, keepdim=True) / (count - 1).clamp(min=1)
    heads = (1, 2, 5)
    deviation = (
        (square / (variance + variance.mean(heads, keepdim=True) / 100)).nan_to_num_(0).mean(heads, keepdim=True)
    )
    total = deviation.sum(4)
    return torch.where(total > 0, (windows * deviation).sum(4) / total, windows[:, :, :, :, -1])


def _attention(probe: Tensor, means: Tensor) -> Tensor:
    """Return the products of probes [B, h, query heads, n, width] with blocks, [B, h, query heads, n, blocks]."""
    return (probe.flatten(2, 3) @ means.mT).unflatten(2, probe.shape[2:4])


def _cosines(probe: Tensor, means: Tensor) -> Tensor:
    """Return the cosines of probes and blocks over all heads, the same for each KV head: [B, h, 1, n, blocks]."""
    products = _attention(probe, means).sum((1, 2))
    sizes = (
        probe.square().sum((1, 2, 4)).sqrt()[..., None] * (probe.shape[2] * means.square().sum((1, 3))).sqrt()[:, None]
    )
    return (products / sizes.clamp(min=1e-12))[:, None, None].expand(-1, means.shape[1], -1, -1, -1)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Reader:
    return ActQKV(config, spec)
