"""Streamed statistics of layer inputs, keyed by shared input.

A Hessian here is sum over tokens of x x^T, in float32 from inputs cast to float32 (TF32 off). It is a plain sum, so
that batches, shards and processes add up; the token count is kept beside it. Tokens are added in chunks of one window
in the order they come, so that the batch size of the forward pass does not change the sum (except for experts, whose
tokens are gathered from a whole batch). Only the upper block triangle is computed; `finish` mirrors it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compress.errors import NumericalError
from compress.types import Stats

PANELS = 8  # column panels: the lower triangle of panels, 7/16 of the work, is left out
MIN_PANEL = 128  # columns; narrower panels make the products inefficient


class HessianSum:
    """The running sum for one shared input."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.count = 0
        self.panel = max(MIN_PANEL, -(-columns // PANELS))

    def add(self, inputs: Tensor, chunk: int) -> None:
        """Add inputs [..., columns], `chunk` tokens at a time."""
        for part in inputs.reshape(-1, inputs.shape[-1]).split(chunk):
            x = part.float()  # [tokens, columns]
            for start in range(0, x.shape[1], self.panel):
                end = min(start + self.panel, x.shape[1])
                self.total[start:end, start:].addmm_(x[:, start:end].T, x[:, start:])
            self.count += x.shape[0]

    def finish(self, name: str) -> Stats:
        """The whole symmetric sum; raises NumericalError if it is not finite."""
        for start in range(0, self.total.shape[0], self.panel):
            end = min(start + self.panel, self.total.shape[0])
            self.total[end:, start:end] = self.total[start:end, end:].T
            block = self.total[start:end, start:end]  # a matrix product is symmetric only up to rounding
            block.copy_(block.triu() + block.triu(1).T)
        if not torch.isfinite(self.total.diagonal()).all():
            raise NumericalError(
                f"the inputs of {name} are not finite during calibration; check the checkpoint, or calibrate in float32"
            )
        return Stats(self.total, self.count)


def shrink(stats: Stats) -> tuple[Stats, str | None]:
    """Stats made safe where fewer tokens than columns were seen, which leaves the Hessian singular; and a note for
    the report.

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


@contextmanager
def collect(linears: Mapping[str, nn.Module], sums: Mapping[str, HessianSum], chunk: int) -> Iterator[None]:
    """While active, each forward pass of `linears[key]` adds its input to `sums[key]`; hooks are removed at the end."""

    def hook(key: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sums[key].add(inputs[0], chunk)

        return add

    handles = []
    try:
        for key in sums:
            handles.append(linears[key].register_forward_pre_hook(hook(key)))
        yield
    finally:
        for handle in handles:
            handle.remove()
