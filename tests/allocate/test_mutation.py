"""Changes of choices, the published ones by their distributions, and the surrogate that judges them."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from compress.allocate import mutation, solver
from compress.allocate.mutation import Moves
from compress.allocate.problem import KL_ONE_AT_A_TIME, Problem, Unit, UnitEntry
from compress.allocate.search_state import UNEXPLAINED_DEVIATION, Observation, Surrogate
from helpers.landscape import Landscape


def sizes_of(problem: Problem) -> Moves:
    return Moves(problem, solver.damages_of(problem, KL_ONE_AT_A_TIME))


# The published operators


def test_number_of_flips() -> None:
    rng = Random(0)
    counts = Counter(mutation.flips(rng) for _ in range(9000))
    for flips, share in ((1, 5 / 9), (2, 3 / 9), (3, 1 / 9)):  # the smaller of two dice with three sides
        assert counts[flips] / 9000 == pytest.approx(share, abs=0.02)


def test_groups(tmp_path: Path) -> None:
    problem = Landscape(tmp_path, blocks=2).problem()  # qkv, o, gate_up, down of two blocks; qkv and down as large
    assert mutation.groups(problem, "none") == [list(range(8))]
    assert mutation.groups(problem, "size") == [[0, 3, 4, 7], [1, 5], [2, 6]]
    assert mutation.groups(problem, "kind") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_givers_and_takers_are_uniform_in_groups_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Landscape(tmp_path, blocks=2).problem()
    sizes, groups, rng = sizes_of(problem), mutation.groups(problem, "size"), Random(0)
    monkeypatch.setattr(mutation, "flips", lambda rng: 1)
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(8000):
        if child := mutation.switch_levels(sizes, (1,) * 8, groups, rng):
            pairs[child.index(0), child.index(2)] += 1
    assert set(pairs) == {pair for group in groups for pair in itertools.permutations(group, 2)}
    for group in groups:  # len / 8 for the group, 1 / len for giver and taker each
        for pair in itertools.permutations(group, 2):
            assert pairs[pair] / 8000 == pytest.approx(1 / (8 * len(group)), abs=0.01)


def test_trades_between_sizes(tmp_path: Path) -> None:
    problem = Landscape(tmp_path, blocks=2).problem()
    sizes, rng = sizes_of(problem), Random(0)
    parent = (1,) * 8
    children = [child for _ in range(500) if (child := mutation.trade(sizes, parent, rng))]
    crossed = 0
    for child in children:
        pairs = enumerate(zip(parent, child, strict=True))
        steps = [(new - old) * problem.units[u].entries[0].nbytes // 2 for u, (old, new) in pairs]
        assert problem.nbytes(child) <= problem.budget
        assert 1 <= sum(abs(new - old) for old, new in zip(parent, child, strict=True)) <= mutation.MAX_CHANGES
        crossed += len({abs(step) for step in steps if step}) > 1
    assert crossed > 100  # most change units of different sizes


def test_uniform_start(tmp_path: Path) -> None:
    bench = Landscape(tmp_path)
    rng = Random(0)
    assert mutation.round_down(sizes_of(bench.problem(3.0)), rng) == (1,) * 12
    problem = bench.problem(3.4)
    drawn = {mutation.round_down(sizes_of(problem), rng) for _ in range(50)}
    assert len(drawn) == 50
    for choice in drawn:
        assert max(choice) == 2 and 0 <= problem.budget - problem.nbytes(choice) < 128 * 5


@pytest.mark.parametrize("rule", ["size", "kind"])
def test_switches_in_groups_keep_the_bytes(tmp_path: Path, rule: str) -> None:
    problem = Landscape(tmp_path).problem()
    sizes, groups, rng = sizes_of(problem), mutation.groups(problem, rule), Random(0)
    parent = mutation.round_down(sizes, rng)
    children = {mutation.switch_levels(sizes, parent, groups, rng) for _ in range(300)} - {None}
    assert len(children) > 50
    for child in children:
        assert problem.nbytes(child) == problem.nbytes(parent)
        for group in groups:
            assert sum(child[u] for u in group) == sum(parent[u] for u in group)


def test_switches_keep_the_bytes_of_uneven_levels() -> None:
    entries = tuple(UnitEntry(str(n), n, n) for n in (1, 2, 4, 8))
    problem = Problem(tuple(Unit(f"{u}.x", (f"{u}",), u, 8, entries) for u in range(5)), 20)
    sizes, rng = Moves(problem, [[-float(e.nbytes) for e in entries]] * 5), Random(0)
    parent = (2, 1, 3, 2, 0)
    children = {mutation.switch_levels(sizes, parent, mutation.groups(problem, "size"), rng) for _ in range(200)} - {
        None
    }
    assert children and {problem.nbytes(child) for child in children} == {problem.nbytes(parent)}


def test_guided_changes_fill_the_budget_and_mostly_improve(tmp_path: Path) -> None:
    problem = Landscape(tmp_path).problem()
    sizes, values, rng = sizes_of(problem), solver.damages_of(problem, KL_ONE_AT_A_TIME), Random(0)
    parent = mutation.fill(sizes, (0,) * 12, values)
    children = {child for _ in range(300) if (child := mutation.mutate_guided(sizes, parent, values, rng))}
    assert len(children) > 50 and parent not in children
    for child in children:
        room = problem.budget - problem.nbytes(child)
        assert room >= 0
        for unit, now in zip(problem.units, child, strict=True):
            assert all(e.nbytes - unit.entries[now].nbytes > room for e in unit.entries[now + 1 :])
    chance = [child for _ in range(300) if (child := mutation.trade(sizes, parent, rng))]
    median = [sorted(problem.damage(c, KL_ONE_AT_A_TIME) for c in some)[len(some) // 2] for some in (children, chance)]
    assert median[0] < median[1]


# The surrogate


def test_surrogate_is_the_normal_posterior() -> None:
    """Against the mean and covariance of the joint normal distribution, written down entry by entry."""
    values = [[3.0, 1.0], [2.0, 0.5, 0.1], [1.0, 0.2]]
    kinds, blocks, s, n = [0, 1, 0], [0, 0, 1], 0.5, 0.3
    measured = [
        Observation({0: (0, 1), 1: (2, 0)}, 0.4, 2),
        Observation({2: (1, 0)}, 0.9, 8),
        Observation({0: (1, 0)}, 1.5, 4),
    ]
    model = Surrogate(values, [kinds, blocks], measured, (s, n))
    entries = [(u, i) for u, row in enumerate(values) for i in range(len(row))]

    def prior(a: tuple[int, int], b: tuple[int, int]) -> float:
        same = (kinds[a[0]] == kinds[b[0]]) + (blocks[a[0]] == blocks[b[0]]) + (a[0] == b[0]) + (a == b)
        return values[a[0]][a[1]] * values[b[0]][b[1]] * (1 + s * s * same)

    mean = torch.tensor([values[u][i] for u, i in entries], dtype=torch.float64)
    covariance = torch.tensor([[prior(a, b) for b in entries] for a in entries], dtype=torch.float64)
    rows = torch.zeros(3, len(entries), dtype=torch.float64)
    for row, one in zip(rows, measured, strict=True):
        for unit, (old, new) in one.change.items():
            row[entries.index((unit, old))], row[entries.index((unit, new))] = -1, 1
    size = (rows * mean).norm(dim=1)
    own = torch.diag(size.square() * UNEXPLAINED_DEVIATION**2)
    noise = torch.diag(size.square() * n * n / torch.tensor([2.0, 8.0, 4.0], dtype=torch.float64))
    total = rows @ covariance @ rows.T + own + noise
    y = torch.tensor([one.difference for one in measured], dtype=torch.float64)
    gain = torch.linalg.solve(total, y - rows @ mean)
    wanted = mean + covariance @ rows.T @ gain
    found = torch.tensor([v for row in model.mean() for v in row], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    expected_differences = rows @ wanted + own @ gain
    torch.testing.assert_close(torch.tensor(model.expected_differences(), dtype=torch.float64), expected_differences)


def test_surrogate_without_measurements_is_the_table() -> None:
    values = [[3.0, 1.0], [2.0, 0.5]]
    model = Surrogate(values, [[0, 0]], [])
    assert model.mean() == values
    assert model.expected_differences() == []
