"""Sum statistics of layer inputs over a stream of batches, keyed by shared input.

A Hessian here is sum over tokens of x x^T, in float32 from inputs cast to float32 (TF32 off). The products of chunks of
tokens are rounded to a grid and summed without rounding, so that neither their order nor the process that makes them
changes a bit of the sum. Nor does the batch size, as long as batches are whole chunks and but for experts, whose tokens
are gathered from a whole batch. The token count is kept beside it. Only the upper block triangle is computed; `finish`
mirrors it.

Beside it the drift of an input can be summed, (y - x) x^T with y the same input in the full-precision model: of every
batch the full-precision stream goes first, under `expect`, and the other follows under `collect`. The difference is
taken before the product, so that streams that agree give zero to the bit.

A token of weight r (calib/token_importance.py) goes into the sums as r tokens would, but is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from compress.errors import NumericalError, UnsupportedModelError
from compress.model.blockwise import attached
from compress.numerics import products
from compress.ranks import Ranks
from compress.runtime.experts import Experts, ExpertTokens
from compress.types import Stats

PANELS = 8  # column panels: the lower triangle of panels, 7/16 of the work, is left out
GRID = 34  # bits that the largest entry of the first product has above one step of the grid of sums
SHORT = 2.0**-9  # norm, as part of the longest column's, below which columns share a scale
TINY = 2.0**-60
CHUNK = 2048  # tokens of a product
MIN_PANEL = 128  # columns; narrower panels make the products inefficient


class InputsSeenError(Exception):
    """The inputs that a pass through a block was for have been seen: the rest of the pass is not needed."""


class Scales:
    """The grid of a sum of left^T right: powers of two for the columns of both, which the first product decides."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns, self.device = columns, device
        self.found: tuple[Tensor, ...] = ()  # [columns] float32: of left and right

    def decide(self, left: Tensor, right: Tensor) -> None:
        """Take the grid for a first product; both [tokens, columns] float32."""
        self.found = (_scale(left if left.any() else right), _scale(right))


class GridSum:
    """A running sum of left^T right, the same to the bit in whatever order and in however many parts it is taken.

    Each product is float32, rounded to a grid that the first one decides, and added in float64. What lies on the grid
    adds up without any rounding as long as no sum passes 2^53 steps, 2^(53 - GRID) times the largest entry of the first
    product. `is_upper`: left is right, and only the upper triangle of column panels is held.
    """

    def __init__(self, columns: int, device: torch.device, is_upper: bool) -> None:
        self.columns, self.is_upper, self.panel = columns, is_upper, _panel(columns)
        self.panels = [
            torch.zeros(min(self.panel, columns - start), columns - first, dtype=torch.float64, device=device)
            for start, first in self._starts()
        ]
        self.device = device
        self.grid = Scales(columns, device)

    def _starts(self) -> list[tuple[int, int]]:
        """Return the first row and the first column of each panel."""
        return [(start, start if self.is_upper else 0) for start in range(0, self.columns, self.panel)]

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add left^T right; both [tokens, columns] float32."""
        if not self.grid.found:
            self.grid.decide(left, right)
        right = _on_grid(right, self.grid.found[1])
        left = right if self.is_upper else _on_grid(left, self.grid.found[0])
        for total, (start, first) in zip(self.panels, self._starts(), strict=True):
            total += products.multiply(left[start : start + self.panel], right[first:]).round_()

    def finish(self) -> Tensor:
        """Return the sum [columns, columns] float32 and free what it was made of; the lower triangle may be unset."""
        whole = torch.empty(self.columns, self.columns, dtype=torch.float32, device=self.device)
        ones = torch.ones_like(whole[0])
        left, right = (1 / scale.double() for scale in self.grid.found or (ones, ones))
        for start, first in self._starts():
            rows = slice(start, start + self.panel)
            whole[rows, first:] = self.panels.pop(0).mul_(left[rows, None]).mul_(right[first:])
        return whole


def _on_grid(rows: Tensor, scales: Tensor) -> Tensor:
    """Return rows [tokens, columns] times scales [columns], transposed: columns lie one behind the other."""
    turned = torch.empty(rows.shape[1], rows.shape[0], dtype=torch.float32, device=rows.device)
    return torch.mul(rows.T, scales[:, None], out=turned)


def _panel(columns: int) -> int:
    return max(MIN_PANEL, -(-columns // PANELS))


def _scale(rows: Tensor) -> Tensor:
    """Return [columns] powers of two that bring columns to a norm of some 2^(GRID / 2), short ones at most as far."""
    norms = rows.square().sum(0).sqrt()
    longest = norms.max()
    if not TINY < longest < 1 / TINY:  # nothing but zeros, or not finite: `HessianSum.finish` says so
        return torch.full_like(norms, 2.0 ** (GRID // 2))
    return torch.ldexp(torch.ones_like(norms), GRID // 2 - torch.frexp(norms.clamp(min=longest * SHORT)).exponent)


def chunk_tokens(seq_len: int) -> int:
    """Return how many tokens are multiplied together: a number of whole windows."""
    return seq_len * max(1, CHUNK // max(1, seq_len))


def nbytes(columns: int, paired: bool = False) -> int:
    """Return the bytes of the running sums for an input of so many columns."""
    panel = _panel(columns)
    upper = sum(min(panel, columns - start) * (columns - start) for start in range(0, columns, panel))
    sums = [upper, columns**2] if paired else [upper]
    return sum(8 * numbers + 4 * min(panel, columns) * columns for numbers in sums)


def adding_nbytes(columns: int) -> int:
    """Return the bytes that adding a product to a running sum takes: a panel of it in float64."""
    return 8 * min(_panel(columns), columns) * columns


class HessianSum:
    """The running sum of x x^T for one shared input, and that of its drift if `paired`."""

    def __init__(self, columns: int, device: torch.device, paired: bool = False) -> None:
        self.total = GridSum(columns, device, is_upper=True)
        self.drift = GridSum(columns, device, is_upper=False) if paired else None  # None, too, if tokens do not pair
        self.expected: Tensor | None = None  # the full-precision inputs that go with those that are added next
        self.largest = torch.zeros(columns, dtype=torch.float32, device=device)  # magnitude of each input
        self.count = 0

    def add(self, inputs: Tensor, chunk: int, weights: Tensor | None = None) -> None:
        """Add inputs [..., columns], `chunk` tokens at a time; weights: float32, one for each token, in any shape."""
        for part, weight in zip(_rows(inputs, chunk), _weight_rows(weights, inputs, chunk), strict=True):
            x = self.scaled(part, weight)
            if len(x):
                self.total.add(x, x)
                self.largest = torch.maximum(self.largest, torch.maximum(part.amax(0), -part.amin(0)).float())
            self.count += len(x)
        if self.drift is not None:
            self._pair(inputs, self.drift, chunk, weights)

    @staticmethod
    def scaled(rows: Tensor, weights: Tensor | None) -> Tensor:
        """Return what is multiplied of rows [tokens, columns], whose weights are [tokens, 1]; float32."""
        return rows.float() if weights is None else rows.float() * weights.sqrt()

    def parts(self) -> dict[str, GridSum]:
        """Return its sums by what they are of."""
        return {"total": self.total} | ({"drift": self.drift} if self.drift is not None else {})

    def grids(self) -> dict[str, Scales]:
        """Return the grids of its sums by what they are of."""
        return {side: part.grid for side, part in self.parts().items()}

    def expect(self, inputs: Tensor) -> None:
        """Keep the full-precision inputs [..., columns] of the tokens that `add` is given next."""
        if self.drift is not None:
            self.expected = inputs.clone()  # the rest of the block may write over them

    def _pair(self, inputs: Tensor, drift: GridSum, chunk: int, weights: Tensor | None) -> None:
        full, self.expected = self.expected, None
        if full is None or full.shape != inputs.shape:  # other tokens: routed elsewhere in the other stream
            self.drift = None
            return
        parts = (_rows(full, chunk), _rows(inputs, chunk), _weight_rows(weights, inputs, chunk))
        for y, part, weight in zip(*parts, strict=True):
            x = part.float()
            difference = y.float() - x
            if len(x):
                drift.add(difference if weight is None else difference.mul_(weight), x)

    def finish(self, name: str) -> Stats:
        """Return the whole symmetric sum and free what it was made of; raise NumericalError if it is not finite."""
        panel, total = self.total.panel, self.total.finish()
        for start in range(0, total.shape[0], panel):
            end = min(start + panel, total.shape[0])
            total[end:, start:end] = total[start:end, end:].T
            block = total[start:end, start:end]  # a matrix product is symmetric only up to rounding
            block.copy_(block.triu() + block.triu(1).T)
        if not torch.isfinite(total.diagonal()).all():
            raise NumericalError(
                f"the inputs of {name} are not finite during calibration; quantize with --dtype float32, or check the "
                "checkpoint's weights"
            )
        drift = self.drift.finish() if self.drift is not None else None
        return Stats(total, self.count, drift, largest_inputs=self.largest)


class HasGrids(Protocol):
    """A running sum, or several."""

    def grids(self) -> dict[str, Scales]:
        """Return the grids of its sums by what they are of."""


def agree(sums: Mapping[str, HasGrids], ranks: Ranks) -> None:
    """Give the sums of all processes the grids of the main one, which has seen the first batch, to be added up later.

    An input that this batch did not reach gets the coarsest grid of those of its width.
    """
    grids = {(key, side): grid for key, total in sums.items() for side, grid in total.grids().items()}
    coarsest: dict[tuple[int, str], tuple[Tensor, ...]] = {}
    for (_, side), grid in grids.items():
        if grid.found:
            known = coarsest.get((grid.columns, side), grid.found)
            coarsest[grid.columns, side] = tuple(map(torch.minimum, known, grid.found))
    own = {name: grid.found or coarsest.get((grid.columns, name[1]), ()) for name, grid in grids.items()}
    for name, scales in ranks.share({name: tuple(map(Tensor.cpu, scales)) for name, scales in own.items()}).items():
        if name in grids:
            grids[name].found = tuple(scale.to(grids[name].device) for scale in scales)


def join(sums: Mapping[str, HessianSum], ranks: Ranks) -> None:
    """Add up the sums of all processes, which hold the same inputs in the same order."""
    if ranks.size == 1:
        return
    held = ranks.gather({key: (total.count, total.drift is not None, total.largest) for key, total in sums.items()})
    for key, total in sums.items():
        total.count = sum(counts[key][0] for counts in held)
        total.largest = torch.stack([counts[key][2].to(total.largest.device) for counts in held]).amax(0)
        if not all(counts[key][1] for counts in held):
            total.drift = None
        for part in total.parts().values():
            ranks.add_up(part.panels)


def _rows(inputs: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Split inputs [..., columns] into [tokens, columns], `chunk` tokens at a time."""
    return inputs.reshape(-1, inputs.shape[-1]).split(chunk)


def _weight_rows(weights: Tensor | None, inputs: Tensor, chunk: int) -> Sequence[Tensor | None]:
    """Return the weights [tokens, 1] of each of the `_rows` of the inputs, or None for each."""
    if weights is None:
        return [None] * len(_rows(inputs, chunk))
    return _rows(_fitting(weights, inputs).reshape(-1, 1), chunk)


def _fitting(weights: Tensor, inputs: Tensor) -> Tensor:
    """Return the weights. Raises UnsupportedModelError where the inputs are not those of as many tokens."""
    if weights.numel() * inputs.shape[-1] != inputs.numel():
        raise UnsupportedModelError(
            f"a linear reads {inputs.numel() // inputs.shape[-1]} rows of a batch of {weights.numel()} tokens: which "
            "tokens they are is not known; set calibration.importance to none or auto"
        )
    return weights


def shrink(stats: Stats) -> tuple[Stats, str | None]:
    """Shrink a Hessian that is singular because fewer tokens than columns were seen; return a note for the report.

    With n columns and count < n tokens, (1 - count / n) of the mean diagonal is added to the diagonal: the rounding
    then leans towards plain nearest as evidence thins out. This is the fallback for rarely routed experts. In place.
    """
    columns = stats.hessian.shape[0]
    if stats.count == 0 or stats.count >= columns:
        return stats, None
    share = 1 - stats.count / columns
    diagonal = stats.hessian.diagonal()
    diagonal += share * diagonal.mean()
    return (
        stats,
        f"only {stats.count} calibration tokens for {columns} inputs: Hessian shrunk by {share:.2f} of its mean",
    )


def undo_shrinking(stats: Stats) -> Tensor:
    """Return the diagonal [columns] of a Hessian as it was before `shrink`: sums of squares."""
    diagonal = stats.hessian.diagonal().clone()
    share = max(0.0, 1 - stats.count / len(diagonal)) if stats.count else 0.0
    return diagonal.sub_(share / (1 + share) * diagonal.mean()).clamp_(min=0)


class Summed(HasGrids, Protocol):
    """What takes the inputs of a linear."""

    def add(self, inputs: Tensor, chunk: int, weights: Tensor | None = None) -> None:
        """Add inputs [..., columns], `chunk` tokens at a time; weights: float32, one for each token, in any shape."""


class PassEnd:
    """End the pass of a batch through a block once all inputs are collected, so that what follows is not computed.

    keys: of the inputs, and of what else is to be seen.

    The first batch runs to its end. Where it did not show each input once (experts without tokens, a module that is
    called twice), the others do, too.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys, self.seen, self.ends = sorted(keys), list[str](), False

    def begin(self) -> None:
        """Begin a batch."""
        self.ends = self.ends or sorted(self.seen) == self.keys
        self.seen = []

    def see(self, key: str) -> None:
        """Note an input that has been collected. Raises InputsSeenError when it was the last one."""
        self.seen.append(key)
        if self.ends and len(set(self.seen)) == len(self.keys):
            raise InputsSeenError


def collect(
    linears: Mapping[str, nn.Module],
    sums: Mapping[str, Summed],
    chunk: int,
    weights: Tensor | None = None,
    experts: Mapping[str, tuple[Experts, int]] | None = None,
    pass_end: PassEnd | None = None,
    is_weight_needed: bool = True,
) -> AbstractContextManager[None]:
    """While active, add the input of each forward pass of `linears[key]` to `sums[key]`.

    weights: float32 [batch, tokens], what the tokens of the one batch that passes count. experts: for each key that
    belongs to an expert, which is given some tokens only, the module of all experts and the number of the expert.
    pass_end: where the output of the pass is not needed; it may end by InputsSeenError. is_weight_needed: raise
    UnsupportedModelError for inputs of which it is not known which tokens they are; else these count alike.
    """
    selecting = experts if weights is not None and experts is not None else {}
    given: dict[Experts, tuple[Tensor, ...]] = {}  # what each module of experts was called with last

    def note(module: Experts, *inputs: Tensor) -> None:
        given[module] = inputs

    def weights_of(key: str, inputs: Tensor) -> Tensor | None:
        if weights is None:
            return None
        try:
            if key not in selecting:
                return _fitting(weights, inputs)
            module, number = selecting[key]
            return _routed_weights(weights, module.tokens(number, *given[module]))
        except UnsupportedModelError:
            if is_weight_needed:
                raise
            return None

    def add(key: str, inputs: Tensor) -> None:
        sums[key].add(inputs, chunk, weights_of(key, inputs))
        if pass_end is not None:
            pass_end.see(key)

    if pass_end is not None:
        pass_end.begin()
    noting = [(module, partial(note, module)) for module in {module for module, _ in selecting.values()}]
    return hooked([*noting, *((linears[key], partial(add, key)) for key in sums)])


def expect(linears: Mapping[str, nn.Module], sums: Mapping[str, HessianSum]) -> AbstractContextManager[None]:
    """While active, keep the input of `linears[key]` for the drift of `sums[key]`, if that is paired."""
    return hooked([(linears[key], total.expect) for key, total in sums.items()])


def _routed_weights(weights: Tensor, tokens: ExpertTokens) -> Tensor:
    """Return the weights of the tokens that an expert is given, in their order."""
    if tokens.count != weights.numel():
        raise UnsupportedModelError(
            f"experts are chosen for {tokens.count} rows of a batch of {weights.numel()} tokens: which tokens they "
            "are is not known; set calibration.importance to none or auto"
        )
    return weights.flatten()[tokens.index]


def hooked(actions: Iterable[tuple[nn.Module, Callable[..., None]]]) -> AbstractContextManager[None]:
    """While active, call each action with the arguments of its module's forward passes."""
    return attached(
        [module.register_forward_pre_hook(lambda _, inputs, act=action: act(*inputs)) for module, action in actions]
    )
