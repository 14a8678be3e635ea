"""Refit codebooks to the codes that were chosen, and alternate this with choosing codes.

With the codes fixed, the weight is linear in the codebook entries (`EntryLayout`), and the entries that minimize tr(R H
R^T) solve a linear system over all codebooks of the matrix at once. `refit` solves it by conjugate gradients: a step
costs one product with the Hessian, whatever the number of entries, the loss falls with every step, and there is no
learning rate (the references build the normal matrix, or run Adam and restore on failure).

With an output metric G, codebooks are fitted to all rows first, as without it. Then groups of rows are rounded again
with feedback between them (compress/quant/two_sided.py), and the entries refitted to the loss tr(R^T H R G), in turn.

Arrays are transposed, [in, out], as in the column loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from compress.quant import descent, feedback, two_sided
from compress.quant.codebooks import StoredEntries
from compress.quant.feedback import Layer, Objective
from compress.types import OutputMetric

REFIT_TOLERANCE = 1e-4  # relative: a refit stops when a step lowers the loss by less
MAX_REFIT_STEPS = 20
MORE_LOOPS = 1  # column loops after the first, each with refitted codebooks


@dataclass(frozen=True)
class EntryLayout:
    """Which entry each vector of a matrix takes: values [in, out] are linear in the entries."""

    index: Tensor  # [blocks, units] int64 into the entries
    along_rows: bool  # vectors hold rows of one column (VPTQ); false: columns of one row (GPTVQ)

    def values(self, entries: Tensor) -> Tensor:
        """Return the values [in, out] of entries [total, d]."""
        vectors = entries[self.index]
        blocks, units, d = vectors.shape
        if self.along_rows:
            return vectors.reshape(blocks, units * d)
        return vectors.transpose(1, 2).reshape(blocks * d, units)

    def adjoint(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return the transpose of `values`: sums of matrix [in, out] over each entry's members, shaped as `like`."""
        (blocks, units), d = self.index.shape, like.shape[1]
        if self.along_rows:
            vectors = matrix.reshape(blocks * units, d)
        else:
            vectors = matrix.view(blocks, d, units).transpose(1, 2).reshape(blocks * units, d)
        return torch.zeros_like(like).index_add_(0, self.index.flatten(), vectors)


def refit(layer: Objective, layout: EntryLayout, entries: Tensor) -> Tensor:
    """Return entries [total, d] that lower the layer's loss, codes fixed.

    Preconditioned conjugate gradients from `entries`; ends after MAX_REFIT_STEPS or at REFIT_TOLERANCE. Entries without
    members stay.
    """
    diagonal = (layer.hessian.diagonal() + layer.damping).unsqueeze(1)
    curvature = layout.adjoint(diagonal.expand_as(layer.weight).contiguous(), entries)
    scale = torch.where(curvature > 0, 1 / curvature, 0.0)
    entries = entries.clone()
    residual = layer.weight - layout.values(entries)
    pull = layer.pull(residual)
    loss = (residual * pull).sum(dtype=torch.float64).item()
    gradient = layout.adjoint(pull, entries)
    direction = conditioned = gradient * scale
    power = (gradient * conditioned).sum(dtype=torch.float64).item()
    for _ in range(MAX_REFIT_STEPS):
        moved = layout.values(direction)
        pulled = layer.pull(moved)
        bend = (moved * pulled).sum(dtype=torch.float64).item()
        if not bend > 0:
            break
        length = power / bend
        entries += length * direction
        gradient = gradient - length * layout.adjoint(pulled, entries)
        gain, loss = length * power, loss - length * power
        if gain < REFIT_TOLERANCE * loss:
            break
        conditioned = gradient * scale
        before, power = power, (gradient * conditioned).sum(dtype=torch.float64).item()
        direction = conditioned + power / before * direction
    return entries


class Divisible(descent.Revisable, Protocol):
    """A rounder whose fitted state serves some of its rows, too."""

    def part(self, rows: slice) -> Divisible:
        """Return a rounder of some rows with what is fitted, and codes of its own."""


class Learner(Divisible, Protocol):
    """A rounder with codebooks."""

    books: StoredEntries

    def values(self) -> Tensor:
        """Return the values [in, out] of the present codes and entries."""

    def refit(self, layer: Objective) -> None:
        """Fit the entries to the codes and round them to their storage type."""


def alternate(layer: Layer, rounder: Learner, sweeps: int) -> None:
    """Run the column loop, then refit in turn with more of it and with sweeps of coordinate descent; refit at the end.

    A step that does not lower the loss is taken back; the rest of its kind is left out.
    """

    def run_loop() -> None:
        feedback.run(layer.weight, layer.factor, rounder)

    def descend() -> None:
        descent.improve_blocks(layer, rounder.values(), rounder, 1)

    run_loop()
    rounder.group = 0  # codebooks are not learned again
    least = layer.loss(rounder.values())
    for choose, count in ((run_loop, MORE_LOOPS), (descend, sweeps), (None, 1)):
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


def alternate_two_sided(
    layer: Layer, rounder: Learner, sweeps: int, output: OutputMetric, unit: int = 1, cut: int = 0
) -> None:
    """Round groups of rows behind each other with codebooks that are fitted, and refit these, in turn.

    As in `alternate`, the first round that does not lower the loss, here tr(R^T H R G), is taken back. unit, cut: as of
    `two_sided.by_tiles`.
    """
    both = two_sided.objective(layer, output, unit)
    least = both.loss(rounder.values())
    for _ in range(1 + MORE_LOOPS):
        codes, books = rounder.codes, rounder.books
        rounder.codes = round_two_sided(layer, rounder, sweeps, output, unit, cut)
        rounder.refit(both)
        loss = both.loss(rounder.values())
        if loss >= least:
            rounder.codes, rounder.books = codes, books
            break
        least = loss


def round_two_sided(
    layer: Layer, rounder: Divisible, sweeps: int, output: OutputMetric, unit: int = 1, cut: int = 0
) -> Tensor:
    """Return the codes of groups of rows that are rounded behind each other, by parts of a rounder, with sweeps."""

    def quantize_group(rows: slice, target: Tensor) -> tuple[Tensor, Tensor]:
        part = rounder.part(rows)
        values = target - feedback.run(target, layer.factor, part).residual
        if sweeps:
            values = descent.improve_blocks(replace(layer, weight=target), values, part, sweeps)
        return part.codes, values

    return torch.cat(two_sided.by_tiles(layer.weight, output, quantize_group, unit, cut), 1)
