"""Quest (arXiv 2406.10774): pages of keys, known by their smallest and largest channels, are retrieved by a bound.

A page of `page` tokens keeps the minimum and the maximum of each channel of its keys. The largest product that a query
can have with any key between them is sum_c max(q_c min_c, q_c max_c): an upper bound of the page's scores, so that no
page with a large score looks small. The pages with the largest bounds are read whole, and attention over them is exact.
The first `dense_layers` layers read everything.

Differences from the published code: one selection for all query heads of a KV head, by the mean over them of the
softmax of bounds over pages (the code has one for each query head, of models without shared heads); the budget is a
share of the coded tokens; sinks, the exact tail and tokens of a page that is not full are always read and come on top.
Bounds are kept in float16, which can move them by its rounding.
What it does not do: choose for the prompt, which attends to everything.

Outside the core because no table has it on the frontier (docs/results/kv_reading.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    keep: float = 0.0625  # share of the coded tokens that attention reads; sinks and the exact tail come on top
    page: int = 16  # [tokens] that are retrieved together
    dense_layers: int = 2  # first layers of the model, which read everything

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.page < 1:
            raise ValueError(f"page {self.page} is not 1 or more")
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers {self.dense_layers} is not 0 or more")


class Quest(Reader):
    """Smallest and largest channels of the keys of each page."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.unit = config.page
        self.bounds = Buffer()  # [B, h, pages, 2, width] float16: smallest, largest

    def choose(self, piece: QueryPiece) -> TokenChoice | None:
        if self.spec.layer < self.config.dense_layers or self.config.keep == 1:
            return None
        pages = piece.count // self.config.page
        for paged in iterate_blocks(piece, self.config.page, self.bounds.length):
            self.bounds.append(torch.stack((paged.amin(3), paged.amax(3)), 3).half())
        bounds = self.bounds.view(0, pages)
        if self.tally is not None:
            self.tally.extra += bounds.numel() * 2 * piece.q.shape[3]
        low, high = bounds.float().unbind(3)
        # max(q low, q high) is q high where q is positive and q low where it is negative
        scores = piece.rows.clamp(min=0) @ high.mT + piece.rows.clamp(max=0) @ low.mT
        scores = hide_unseen(scores.unflatten(2, piece.q.shape[2:4]), piece, self.config.page)
        weights = scores.softmax(-1).nan_to_num_(0).mean(2)  # B, h, n, pages
        budgets = -(-budget_of(piece, self.config.keep, weights) // self.config.page)
        choice = best(weights, budgets.clamp(max=pages))
        return None if choice is None else expand_blocks(choice, piece, self.config.page)

    def crop(self, coded: int, removed: int) -> None:
        self.bounds.crop(self.bounds.length - min(self.bounds.length, coded // self.config.page))

    def select(self, index: Tensor) -> None:
        self.bounds.take(index)

    def kept_tensors(self) -> list[Tensor]:
        return [self.bounds.view()] if self.bounds.length else []


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Reader:
    return Quest(config, spec)
