"""Sums of statistics are exact: the same to the bit in any order, in any number of parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.calib.stats import HessianSum, agree
from compress.ranks import Ranks
from helpers import problems


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("wild", [1.0, 300.0])
def test_neither_order_nor_parts_change_a_bit(wild: float) -> None:
    """Sums on one grid add up exactly, also where later chunks have columns that were short or zero in the first."""
    chunks = list(problems.inputs(12 * 16, 300).split(16))
    chunks[0][:, :7], chunks[0][:, 7:9] = 0, chunks[0][:, 7:9] * 1e-6
    chunks[5] *= wild
    first = HessianSum(300, torch.device("cpu"), paired=True)
    exact, drifts = torch.zeros(300, 300).double(), torch.zeros(300, 300).double()
    for chunk in chunks:
        expected = chunk.roll(1, 0)
        first.expect(expected)
        first.add(chunk, 16)
        exact += chunk.double().T @ chunk.double()
        drifts += (expected - chunk).double().T @ chunk.double()
    assert first.drift is not None
    parts = [HessianSum(300, torch.device("cpu"), paired=True) for _ in range(3)]
    for part in parts:
        assert part.drift is not None
        part.total.grid.found, part.drift.grid.found = first.total.grid.found, first.drift.grid.found
    for number in (11, 3, 7, 0, 9, 1, 10, 5, 2, 8, 4, 6):
        parts[number % 3].expect(chunks[number].roll(1, 0))
        parts[number % 3].add(chunks[number], 16)
    for sums in zip(*(part.total.panels for part in parts), strict=True):
        sums[0].add_(sums[1]).add_(sums[2])
    for sums in zip(*(part.drift.panels for part in parts if part.drift is not None), strict=True):
        sums[0].add_(sums[1]).add_(sums[2])
    whole, joined = first.finish("whole"), parts[0].finish("joined")
    assert torch.equal(whole.hessian, joined.hessian)
    assert whole.drift is not None and joined.drift is not None and torch.equal(whole.drift, joined.drift)
    assert relative(whole.hessian, exact) < 1e-6 and relative(whole.drift, drifts) < 1e-6


def test_inputs_that_the_first_batch_does_not_reach_get_the_coarsest_grid_of_their_width() -> None:
    x = problems.inputs(16, 8)
    sums = {key: HessianSum(8, torch.device("cpu")) for key in ("small", "large", "none")} | {
        "other": HessianSum(4, torch.device("cpu"))
    }
    sums["small"].add(x, 16)
    sums["large"].add(x * 100, 16)
    agree(sums, Ranks())
    assert torch.equal(sums["none"].total.grid.found[0], sums["large"].total.grid.found[0])
    assert sums["other"].total.grid.found == ()
