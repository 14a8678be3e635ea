"""Refit codebooks to the codes that were chosen, and alternate this with choosing codes.

With the codes fixed, the weight is linear in the codebook entries (`Layout`), and the entries that minimize tr(R H R^T)
solve a linear system over all codebooks of the matrix at once. `refit` solves it by conjugate gradients: a step costs
one product with the Hessian, whatever the number of entries and stages, the loss falls with every step, and there is no
learning rate (the references build the normal matrix, or run Adam and restore on failure).

Arrays are transposed, [in, out], as in the column loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from compress.quant import descent, feedback
from compress.quant.codebooks import Books, factored, rounded
from compress.quant.feedback import Layer, Objective

TOLERANCE = 1e-4  # of the loss: refits stop when a step gains less


@dataclass(frozen=True)
class Layout:
    """Which entry each vector of a matrix takes: values [in, out] are linear in the entries."""

    index: Tensor  # [stages, blocks, units] int64 into the entries; the stages are summed
    along_rows: bool  # vectors hold rows of one column (VPTQ); false: columns of one row (GPTVQ)
    multiplier: Tensor | None = None  # [in, out] or broadcastable: block scales

    def values(self, entries: Tensor) -> Tensor:
        """Return the values [in, out] of entries [total, d]."""
        vectors = entries[self.index[0]]
        for index in self.index[1:]:
            vectors = vectors + entries[index]  # blocks, units, d
        blocks, units, d = vectors.shape
        matrix = vectors.reshape(blocks, units * d) if self.along_rows else _columns(vectors)
        return matrix if self.multiplier is None else matrix * self.multiplier

    def adjoint(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return the transpose of `values`: sums of matrix [in, out] over each entry's members, shaped as `like`."""
        if self.multiplier is not None:
            matrix = matrix * self.multiplier
        _, blocks, units = self.index.shape
        d = like.shape[1]
        if self.along_rows:
            vectors = matrix.reshape(blocks * units, d)
        else:
            vectors = matrix.view(blocks, d, units).transpose(1, 2).reshape(blocks * units, d)
        sums = torch.zeros_like(like)
        for index in self.index:
            sums.index_add_(0, index.flatten(), vectors)
        return sums

    def curvature(self, weights: Tensor, like: Tensor) -> Tensor:
        """Return the normal matrix's diagonal as if H were diagonal; weights [in, out]: H's diagonal for every row."""
        return self.adjoint(weights if self.multiplier is None else weights * self.multiplier, like)


@dataclass(frozen=True)
class Spanned:
    """Values that are linear in X [lists, r], where X @ basis [r, length] are the entries, d = 1, list after list."""

    layout: Layout
    basis: Tensor  # [r, length]

    def values(self, coefficients: Tensor) -> Tensor:
        """Return the values [in, out] of coefficients [lists, r]."""
        return self.layout.values((coefficients @ self.basis).view(-1, 1))

    def adjoint(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return the transpose of `values`, shaped as `like`."""
        return self.layout.adjoint(matrix, self._entries(like)).view(len(like), -1) @ self.basis.T

    def curvature(self, weights: Tensor, like: Tensor) -> Tensor:
        """Return the preconditioner: sums of weights [in, out], of squared values, for each coefficient."""
        return self.layout.curvature(weights, self._entries(like)).view(len(like), -1) @ self.basis.T.square()

    def _entries(self, like: Tensor) -> Tensor:
        return like.new_empty(len(like) * self.basis.shape[1], 1)


def _columns(vectors: Tensor) -> Tensor:
    blocks, units, d = vectors.shape
    return vectors.transpose(1, 2).reshape(blocks * d, units)


def refit(layer: Objective, layout: Layout | Spanned, entries: Tensor, steps: int) -> Tensor:
    """Return unknowns of `layout`, such as entries [total, d], that lower the layer's loss, codes fixed.

    Preconditioned conjugate gradients from `entries`; ends after `steps` or at TOLERANCE. Entries without members stay.
    """

    def product(matrix: Tensor) -> Tensor:
        return torch.addmm(matrix, layer.hessian, matrix, beta=layer.damping)

    diagonal = (layer.hessian.diagonal() + layer.damping).unsqueeze(1)
    curvature = layout.curvature(diagonal.expand_as(layer.weight).contiguous(), entries)
    scale = torch.where(curvature > 0, 1 / curvature, 0.0)
    entries = entries.clone()
    residual = layer.weight - layout.values(entries)
    pull = product(residual)
    loss = (residual * pull).sum(dtype=torch.float64).item()
    gradient = layout.adjoint(pull, entries)
    direction = conditioned = gradient * scale
    power = (gradient * conditioned).sum(dtype=torch.float64).item()
    for _ in range(steps):
        moved = layout.values(direction)
        pulled = product(moved)
        bend = (moved * pulled).sum(dtype=torch.float64).item()
        if not bend > 0:
            break
        length = power / bend
        entries += length * direction
        gradient = gradient - length * layout.adjoint(pulled, entries)
        gain, loss = length * power, loss - length * power
        if gain < TOLERANCE * loss:
            break
        conditioned = gradient * scale
        before, power = power, (gradient * conditioned).sum(dtype=torch.float64).item()
        direction = conditioned + power / before * direction
    return entries


def refit_factors(layer: Objective, layout: Layout, entries: Tensor, rank: int, steps: int) -> Books:
    """Return codebooks of a rank in place of `entries` [groups, k, 1], both factors in their storage types.

    The truncated singular value decomposition, then one round of alternating least squares on the loss of `refit`: the
    left factor is fitted to the right one and rounded, the right one fitted to what was stored and rounded.
    """
    groups, size, _ = entries.shape
    u, s, right = torch.linalg.svd(entries.squeeze(2), full_matrices=False)
    left, right = u[:, :rank] * s[:rank], right[:rank]
    if steps:
        left = refit(layer, Spanned(layout, right), left, steps)
    columns = rounded(left.T.unsqueeze(2), "int8")  # r, groups, 1
    if steps:
        across = replace(layout, index=layout.index % size * groups + layout.index // size)  # entries code by code
        basis = columns.entries.squeeze(2)
        right = refit(layer, Spanned(across, basis), right.T.contiguous(), steps).T
    return factored(columns, right)


class Learner(descent.Revisable, Protocol):
    """A rounder with codebooks."""

    books: Books

    def values(self) -> Tensor:
        """Return the values [in, out] of the present codes and entries."""

    def refit(self, layer: Objective) -> None:
        """Fit the entries to the codes and round them to their storage type."""


def alternate(layer: Layer, rounder: Learner, rounds: int, passes: int) -> None:
    """Run the loop, then `settle`."""
    feedback.run(layer.weight, layer.factor, rounder)
    rounder.group = 0  # codebooks are not learned again
    settle(layer, rounder, rounds, passes)


def settle(layer: Layer, rounder: Learner, rounds: int, passes: int) -> float:
    """Refit in turn with `rounds` loops and `passes` sweeps of coordinate descent, refit a last time; return the loss.

    A step that does not lower the loss is taken back; the rest of its kind is left out.
    """
    least = layer.loss(rounder.values())

    def loop() -> None:
        feedback.run(layer.weight, layer.factor, rounder)

    def descend() -> None:
        descent.improve_blocks(layer, rounder.values(), rounder, 1)

    for choose, count in ((loop, rounds), (descend, passes), (None, 1)):
        for _ in range(count):
            codes, books = rounder.codes.clone(), rounder.books
            rounder.refit(layer)
            if choose is not None:
                choose()
            loss = layer.loss(rounder.values())
            if loss >= least:
                rounder.codes, rounder.books = codes, books
                break
            least = loss
    return least
