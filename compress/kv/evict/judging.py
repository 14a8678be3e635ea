"""Measure what tokens are judged by beside attention: queries that are expected, and what values add to the output.

`QueryMoments` streams the mean and the covariance of queries before the rotary embedding; `turn_moments` turns them to
positions to come, whose rotary rows `coming_rows` makes as the model itself will. `output_norms` is that of CriticalKV,
arXiv 2502.03805.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.kv.layer import Call

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # names of modules in transformers
NUMBERS_PER_PIECE = 1 << 22  # float32 numbers held at a time


class QueryMoments:
    """Sums of queries and of their outer products, float64, for each sequence of a batch."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None  # [B]
        self.sums: Tensor | None = None  # [B, H, width]
        self.products: Tensor | None = None  # [B, H, width, width]

    def add(self, queries: Tensor, counts: Tensor) -> None:
        """Add queries [B, H, n, width] before the rotary embedding; counts bool [B, n]: those of tokens that count."""
        x = queries.double() * counts[:, None, :, None]
        sums, products, tokens = x.sum(2), x.transpose(-1, -2) @ x, counts.sum(1)
        if self.tokens is None or self.sums is None or self.products is None:
            self.tokens, self.sums, self.products = tokens, sums, products
            return
        self.tokens, self.sums, self.products = self.tokens + tokens, self.sums + sums, self.products + products

    def of(self, row: int) -> tuple[Tensor, Tensor]:
        """Return mean [H, width] and covariance [H, width, width] of one sequence, float64."""
        assert self.tokens is not None and self.sums is not None and self.products is not None
        count = self.tokens[row].clamp(min=1)
        mean = self.sums[row] / count
        return mean, self.products[row] / count - mean[:, :, None] * mean[:, None]

    def select(self, index: Tensor) -> None:
        """Keep these sequences."""
        if self.tokens is not None and self.sums is not None and self.products is not None:
            index = index.to(self.tokens.device)
            self.tokens, self.sums = self.tokens[index], self.sums[index]
            self.products = self.products[index]

    @property
    def nbytes(self) -> int:
        tensors = (self.tokens, self.sums, self.products)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def turn_moments(moments: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn mean and covariance with the mean rotation of positions, whose rows are cos and sin [n, rotary width].

    That is R mean and R covariance R^T with R the mean of the positions' rotations, which are of the half-split form in
    the first channels.
    """
    mean, covariance = moments
    rotation = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    width = cos.shape[-1]
    half = width // 2
    c, s = (rows.to(mean).mean(0) for rows in (cos, sin))
    rotation[:width, :width] = torch.diag(c)
    j = torch.arange(half, device=mean.device)
    rotation[j, j + half] = -s[:half]
    rotation[j + half, j] = s[half:]
    return mean @ rotation.T, rotation @ covariance @ rotation.T


def coming_rows(call: Call, row: int, count: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [count, rotary width] of the next positions of one sequence.

    CompressError where no module of the model makes the rows of this pass from their positions alone.
    """
    cos, sin = call.turns if call.turns is not None else (None, None)
    assert cos is not None and sin is not None, "the caller has checked that there is a rotary embedding"
    positions = call.positions
    if positions is not None:
        for maker in call.makers:
            source = copy.deepcopy(maker)  # some change with the positions they are given
            if _same(_make_rows(source, cos, positions), (cos, sin)):
                last = positions[min(row, len(positions) - 1), -1]
                coming = last + 1 + torch.arange(count, device=positions.device)
                rows = _make_rows(source, cos, coming[None])
                return rows[0][0], rows[1][0]
    raise CompressError(
        "kv_cache.evict: the rotary embedding of this model is not made from positions alone, which expected attention "
        "needs; choose another method, such as snapkv"
    )


@torch.no_grad()
def _make_rows(source: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = source(like, positions)
    return cos, sin


def _same(rows: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(a.shape[1:] == b.shape[1:] and bool((a == b).all()) for a, b in zip(rows, expected, strict=True))


def output_projection(attention: nn.Module) -> nn.Module:
    """Return the output projection of an attention module. CompressError where it has none by a known name."""
    for name in OUTPUT_PROJECTIONS:
        module = getattr(attention, name, None)
        if isinstance(module, nn.Module):
            return module
    raise CompressError(
        "kv_cache.evict: critical needs the output projection of attention, one of "
        f"{', '.join(OUTPUT_PROJECTIONS)}, and {type(attention).__name__} has none; set critical: false"
    )


@torch.no_grad()
def linear_matrix(module: nn.Module, width: int, like: Tensor) -> Tensor:
    """Return what a linear module multiplies with, float32 [width, out]: got by calling it, so packed ones work."""
    base = module(like.new_zeros(1, width))
    return (module(torch.eye(width, dtype=like.dtype, device=like.device)) - base).float()


def output_norms(values: Tensor, weight: Tensor) -> Tensor:
    """Return the norm1 of W_O value, mean over the query heads of a KV head, float32 [h, n].

    values [h, n, width], weight [H width, out].
    """
    heads, tokens, width = values.shape
    by_head = weight.view(heads, -1, width, weight.shape[1])  # h, H / h, width, out
    step = max(1, NUMBERS_PER_PIECE // (heads * by_head.shape[1] * weight.shape[1]))
    # h, H / h, step, out
    parts = [(piece.float()[:, None] @ by_head).abs().sum(-1).mean(1) for piece in values.split(step, 1)]
    return torch.cat(parts, 1) if tokens else values.new_zeros(heads, 0).float()
