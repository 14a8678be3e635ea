"""Stream the mean and the covariance of queries before the rotary embedding, and turn them to coming positions."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
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
        held = (self.tokens, self.sums, self.products)
        return sum(x.numel() * x.element_size() for x in held if x is not None)


def turned(moments: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
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
