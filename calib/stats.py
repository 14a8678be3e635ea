"""Sum statistics of layer inputs over a stream of batches, keyed by shared input.

A Hessian here is sum over tokens of x x^T, in float32 from inputs cast to float32 (TF32 off). It is a plain sum, so
that batches, shards and processes add up; the token count is kept beside it. Tokens are added in chunks of one window
in the order they come, so that the batch size of the forward pass does not change the sum (except for experts, whose
tokens are gathered from a whole batch). Only the upper block triangle is computed; `finish` mirrors it.

Beside it the drift of an input can be summed, (y - x) x^T with y the same input in the full-precision model: of every
batch the full-precision stream goes first, under `expect`, and the other follows under `collect`. The difference is
taken before the product, so that streams that agree give zero to the bit.

A token of weight r (calib/token_importance.py) goes into the sums as r tokens would, but is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from compress.errors import NumericalError, UnsupportedModelError
from compress.model.blockwise import InputsSeenError, attached
from compress.runtime.experts import Experts, ExpertTokens
from compress.types import Stats

PANELS = 8  # column panels: the lower triangle of panels, 7/16 of the work, is left out
MIN_PANEL = 128  # columns; narrower panels make the products inefficient


class HessianSum:
    """The running sum of x x^T for one shared input, and that of its drift if `paired`."""

    def __init__(self, columns: int, device: torch.device, paired: bool = False) -> None:
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.drift = torch.zeros_like(self.total) if paired else None  # None, too, when tokens could not be paired
        self.expected: Tensor | None = None  # the full-precision inputs that go with those that are added next
        self.count = 0
        self.panel = max(MIN_PANEL, -(-columns // PANELS))

    def add(self, inputs: Tensor, chunk: int, weights: Tensor | None = None) -> None:
        """Add inputs [..., columns], `chunk` tokens at a time; weights: float32, one for each token, in any shape."""
        for part, weight in zip(_rows(inputs, chunk), _weight_rows(weights, inputs, chunk), strict=True):
            x = part.float() if weight is None else part * weight.sqrt()  # [tokens, columns], float32
            for start in range(0, x.shape[1], self.panel):
                end = min(start + self.panel, x.shape[1])
                self.total[start:end, start:].addmm_(x[:, start:end].T, x[:, start:])
            self.count += x.shape[0]
        if self.drift is not None:
            self._pair(inputs, self.drift, chunk, weights)

    def expect(self, inputs: Tensor) -> None:
        """Keep the full-precision inputs [..., columns] of the tokens that `add` is given next."""
        if self.drift is not None:
            self.expected = inputs.clone()  # the rest of the block may write over them

    def _pair(self, inputs: Tensor, drift: Tensor, chunk: int, weights: Tensor | None) -> None:
        full, self.expected = self.expected, None
        if full is None or full.shape != inputs.shape:  # other tokens: routed elsewhere in the other stream
            self.drift = None
            return
        parts = (_rows(full, chunk), _rows(inputs, chunk), _weight_rows(weights, inputs, chunk))
        for y, part, weight in zip(*parts, strict=True):
            x = part.float()
            difference = y.float() - x
            drift.addmm_((difference if weight is None else difference.mul_(weight)).T, x)

    def finish(self, name: str) -> Stats:
        """Return the whole symmetric sum; raise NumericalError if it is not finite."""
        for start in range(0, self.total.shape[0], self.panel):
            end = min(start + self.panel, self.total.shape[0])
            self.total[end:, start:end] = self.total[start:end, end:].T
            block = self.total[start:end, start:end]  # a matrix product is symmetric only up to rounding
            block.copy_(block.triu() + block.triu(1).T)
        if not torch.isfinite(self.total.diagonal()).all():
            raise NumericalError(
                f"the inputs of {name} are not finite during calibration; check the checkpoint, or calibrate in float32"
            )
        return Stats(self.total, self.count, self.drift)


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


class PassEnd:
    """End the pass of a batch through a block once all inputs are collected, so that what follows is not computed.

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
    sums: Mapping[str, HessianSum],
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
            return _routed(weights, module.tokens(number, *given[module]))
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


def _routed(weights: Tensor, tokens: ExpertTokens) -> Tensor:
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
