"""The compiled search finds the paths of torch, on every processor, and costs of 16 bits lose nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import Params
from compress.kernels import llvm
from compress.kernels.loops import viterbi as viterbi_compiled
from compress.kernels.loops.viterbi import best_lanes
from compress.quant import trellis, viterbi
from compress.quant.viterbi import Search
from helpers import problems

compiled = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled")


def search_of(bits: float, state_bits: int, code: str = "mul1") -> Search:
    params = Params(bits, state_bits, 64, code)
    table = trellis._hyb_table() if code == "hyb" else None
    return Search(trellis_format.states_table(params, table), params.state_bits, params.symbol_bits)


def values_of(search: Search, rows: int, columns: int) -> Tensor:
    """Values about as large as what states emit; a few far beyond."""
    values = problems.random(rows, columns, seed=search.state_bits) * search.table.square().mean().sqrt()
    values[:, 5] *= 4
    values[0, 7] = 1e6
    return values


SHAPES: list[tuple[float, int, str]]
SHAPES = [(1, 8, "mul1"), (1, 11, "mul1"), (2, 9, "mul1"), (2, 12, "3inst"), (3, 10, "mul1"), (4, 12, "mcg")]
SHAPES += [(1, 9, "hyb"), (2, 10, "hyb"), (2, 4, "mul1"), (4, 8, "mul1")]
SHAPES += [(1.5, 3, "mul1"), (1.5, 11, "mul1"), (2.5, 5, "mul1"), (2.5, 12, "mul1"), (3.5, 9, "mul1")]
SHAPES += [(1.25, 3, "mul1"), (1.25, 10, "mul1"), (1.75, 4, "mul1"), (2.25, 9, "mul1"), (3.75, 10, "mul1")]


@compiled
@pytest.mark.parametrize(("bits", "state_bits", "code"), SHAPES)
def test_compiled_paths_are_those_of_torch(
    bits: float, state_bits: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = search_of(bits, state_bits, code)
    assert search.compiled is not None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for sequences in (1, 19, 60):  # in a vector that is not full, in several, in wide ones
        values = values_of(search, sequences, 64)
        found = search.encode(values)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "compiled", None)
            assert torch.equal(search.encode(values), found)


@compiled
@pytest.mark.skipif("avx2" not in llvm.features(), reason="for processors like this one, but older")
@pytest.mark.parametrize("features", [{"f16c"}, {"f16c", "avx2"}])
@pytest.mark.parametrize(("bits", "code"), [(2, "mul1"), (4, "mul1"), (1, "hyb"), (2.5, "mul1")])
def test_older_processors_find_the_same(
    features: set[str], bits: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = search_of(bits, 9, code)
    values = values_of(new, 60, 64)
    found = new.encode(values)
    monkeypatch.setattr(llvm, "features", lambda: frozenset(features))
    monkeypatch.setattr(llvm, "_processor", lambda: ("haswell" if "avx2" in features else "ivybridge", ""))
    llvm.function.cache_clear()
    try:
        old = search_of(bits, 9, code)
        assert new.compiled is not None and old.compiled is not None
        assert best_lanes(60, 300) == viterbi_compiled.LANES
        assert torch.equal(old.encode(values), found)
    finally:
        llvm.function.cache_clear()


@pytest.mark.parametrize("bits", [1, 1.25, 1.5, 1.75, 2, 2.5, 2.75, 3, 3.5, 3.75, 4, 5])
@pytest.mark.parametrize("state_bits", [10, 16])
def test_no_path_from_the_seam_reaches_the_largest_cost(bits: float, state_bits: int) -> None:
    """Else a path could start elsewhere. Between two subtractions a cost grows by `most` a step, at most."""
    search = search_of(bits, state_bits)
    steps = 0
    nodes = torch.zeros(search.nodes, dtype=torch.bool)
    nodes[1] = True
    new = search.step_bits * 2
    while not nodes.all():  # that the seam reaches
        now, following = new[steps % len(search.step_bits) :][:2]
        states = (nodes.nonzero() << now | torch.arange(1 << now)).flatten()
        nodes = torch.zeros(1 << (state_bits - following), dtype=torch.bool)
        nodes[states % len(nodes)] = True
        steps += 1
    limits, largest = search.limits, (1 << (search.costs.bits - search.most_bits)) - 1
    assert (steps + limits.period) * limits.most < largest
    assert steps * limits.most < limits.far <= largest
    assert limits.saturates or limits.far + steps * limits.most <= largest


@pytest.mark.parametrize(("bits", "state_bits", "code"), SHAPES)
def test_costs_are_squared_distances(bits: float, state_bits: int, code: str) -> None:
    """Up to a shift for each input, rounding, and what is so far away that a path will not take it."""
    search = search_of(bits, state_bits, code)
    values = problems.random(6, search.dim, seed=1) * search.table.square().mean().sqrt()
    added = search._level_costs(search.integers(values.view(6, -1))[:, 0])[:, search.index].double()
    exact = (search.table.double() - values[:, None].double()).square().sum(2)
    size = search.unit**2 / 2**search.costs.shift
    outside = (values.abs() - search.table.abs().amax(0)).clamp_min(0).double().square().sum(1, keepdim=True)
    expected = (exact - outside) * size
    near = expected < search.limits.knee
    step = 2 * viterbi.LEVELS[search.most_bits] ** -1 * search.table.abs().max().double() * search.unit
    slack = 2 + 2 * (exact * size).sqrt() * (1 + step) / 2 ** (search.costs.shift / 2)
    assert near.any() and ((added - expected).abs() < slack)[near].all()
    assert (added[~near] >= search.limits.knee - slack[~near]).all()
    assert added.min() >= 0 and added.max() <= search.limits.most


@pytest.mark.parametrize(
    ("bits", "state_bits"),
    [(1, 7), (2, 8), (3, 9), (4, 8), (1.5, 7), (2.5, 8), (3.5, 8), (1.25, 7), (1.75, 7), (3.25, 9)],
)
def test_the_path_is_the_best_of_float64(bits: float, state_bits: int) -> None:
    """Against Viterbi's algorithm in float64 from and to the same seam: within 0.5% of the least squared error."""
    search = search_of(bits, state_bits)
    values = problems.random(8, 64, seed=int(bits))
    states = search.encode(values)
    found = (search.table[states][..., 0].double() - values.double()).square().sum(1)
    least = torch.stack([slow(search, row, int(s[-1]) % search.nodes) for row, s in zip(values, states, strict=True)])
    assert (found >= least - 1e-9).all()
    assert found.sum() < 1.005 * least.sum()


def slow(search: Search, values: Tensor, seam: int) -> Tensor:
    """Return the least squared error of a path from the node `seam` to itself, all in float64."""
    cost = torch.full((search.nodes,), float("inf"), dtype=torch.float64)
    cost[seam] = 0
    for t, value in enumerate(values.double()):
        now, following = (search.step_bits * 2)[t % len(search.step_bits) :][:2]
        distance = (search.table[:, 0].double() - value).square()
        total = cost[torch.arange(len(distance)) >> now] + distance
        cost = total.view(1 << following, -1).amin(0)  # over the oldest symbol
    return cost[seam]
