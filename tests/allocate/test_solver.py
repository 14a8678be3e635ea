"""The solvers: against all choices of small problems, their guarantees on larger ones, side constraints, refusals."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Sequence

import numpy as np
import pytest

from compress.allocate import hull, solver
from compress.allocate.problem import Choice, Problem, Unit, UnitEntry
from compress.allocate.solver import LinearSide, Solution, SolverLimits, damages_of, solve
from compress.errors import BudgetError, NumericalError

Rows = Sequence[Sequence[tuple[int, float]]]  # of each unit (bytes, damage) of its entries


def problem(rows: Rows, budget: int) -> Problem:
    units = [
        Unit(f"u{i}", (f"u{i}",), i, 100, tuple(UnitEntry(f"o{j}", b, 0.0, {"d": d}) for j, (b, d) in enumerate(row)))
        for i, row in enumerate(rows)
    ]
    return Problem(tuple(units), budget)


def solved(given: Problem, solver: str = "hull", sides: Sequence[LinearSide] = (), **limits: float) -> Solution:
    """With what every solution keeps."""
    solution = solve(given, damages_of(given, "d"), solver, sides, SolverLimits(**limits))  # type: ignore[arg-type]
    assert given.nbytes(solution.choice) <= given.budget
    assert given.damage(solution.choice, "d") == pytest.approx(solution.damage, rel=1e-12, abs=1e-12)
    assert solution.bound <= solution.damage
    return solution


def random_rows(rng: np.random.Generator, units: int, entries: int = 5) -> Rows:
    """Sizes 1:4:14; mostly, not always, more bytes are better; every third time damages are small whole numbers."""
    rows, whole = [], rng.random() < 1 / 3
    for _ in range(units):
        count = int(rng.integers(1, entries + 1))
        nbytes = np.sort(rng.integers(1, 60, count)) * rng.choice([1, 4, 14])
        damage = rng.integers(0, 5, count).astype(float) if whole else rng.lognormal(0, 2, count)
        if rng.random() < 0.8:
            damage = np.sort(damage)[::-1]
        rows.append(list(zip(nbytes.tolist(), damage.tolist(), strict=True)))
    return rows


def model_rows(rng: np.random.Generator, units: int) -> Rows:
    """Damage alpha n 4^-bits with log-normal alpha, 2 to 7 bits, as models have it."""
    rows = []
    for size, alpha in zip(rng.choice([1, 4, 14], units), rng.lognormal(0, 1.5, units), strict=True):
        rows.append([(int(size * 512 * b), float(alpha * size * 4.0**-b * rng.uniform(0.8, 1.2))) for b in range(2, 8)])
    return rows


def budgets(given: Problem, count: int) -> list[int]:
    return [int(b) for b in np.unique(np.linspace(given.least, given.most + 3, count).astype(int))]


def all_choices(given: Problem) -> list[tuple[int, float, Choice]]:
    """(bytes, damage, choice) of every choice."""
    choices = itertools.product(*(range(len(unit.entries)) for unit in given.units))
    return [(given.nbytes(choice), given.damage(choice, "d"), choice) for choice in choices]


def upgrades(given: Problem, choice: Choice) -> list[Choice]:
    """Choices within the budget with one entry changed and less damage."""
    found = []
    for place, (unit, i) in enumerate(zip(given.units, choice, strict=True)):
        for j, entry in enumerate(unit.entries):
            other = (*choice[:place], j, *choice[place + 1 :])
            if entry.damage["d"] < unit.entries[i].damage["d"] and given.nbytes(other) <= given.budget:
                found.append(other)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_against_all_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, int(rng.integers(1, 7)))
    every = all_choices(problem(rows, 0))
    for budget in budgets(problem(rows, 0), 6):
        given = problem(rows, budget)
        best = min(damage for nbytes, damage, _ in every if nbytes <= budget)
        greedy, optimal = solved(given), solved(given, "milp")
        assert optimal.damage == pytest.approx(best, rel=3e-6, abs=1e-12) and optimal.notes == ()
        assert best <= greedy.damage * (1 + 1e-12)
        assert max(greedy.bound, optimal.bound) <= best * (1 + 1e-9) + 1e-12
        assert optimal.bound >= greedy.bound - 1e-12
        assert not upgrades(given, greedy.choice) and not upgrades(given, optimal.choice)


@pytest.mark.parametrize("seed", range(8))
def test_more_bytes_are_never_worse(seed: int) -> None:
    """At every single budget of small problems."""
    rows = random_rows(np.random.default_rng(100 + seed), 5)
    least, most = problem(rows, 0).least, problem(rows, 0).most
    before = math.inf
    for budget in range(least, min(most, least + 250) + 1):
        given = problem(rows, budget)
        solution = solved(given)
        assert solution.damage <= before * (1 + 1e-12)
        assert not upgrades(given, solution.choice)
        before = solution.damage


def test_a_filling_that_gets_worse_with_room_is_not_taken() -> None:
    """One filling at the very room, exchanges included, leaves 23 of damage at 11 bytes and 25 at 12."""
    rows = [[(0, 11.0), (8, 0.0)], [(0, 5.0), (7, 0.0)], [(0, 7.0), (5, 0.0)], [(0, 14.0), (10, 0.0)]]
    assert [filled_once(problem(rows, budget)) for budget in (11, 12)] == [23.0, 25.0]
    damages = [solved(problem(rows, budget)).damage for budget in range(31)]
    assert all(after <= before for before, after in itertools.pairwise(damages))
    assert damages[11] == damages[12] == 23.0 and damages[30] == 0.0


def filled_once(given: Problem) -> float:
    """Damage of the hull's prefix and one filling of the room that is left."""
    table = _table(given)
    segments = hull.hulls(table)
    count = int(np.searchsorted(np.cumsum(segments.nbytes), given.budget - given.least, side="right"))
    at = np.zeros(len(table.rows), np.int64)
    at[segments.unit[:count]] = segments.to[:count]
    bought = hull._buy(table, segments[count:], at, given.budget)
    return table.loss(hull._exchange(table, bought, given.budget))


@pytest.mark.parametrize("seed", range(4))
def test_models(seed: int) -> None:
    rows = model_rows(np.random.default_rng(seed), 200)
    before = math.inf
    for bits in np.linspace(2.1, 6.5, 8):
        given = problem(rows, int(sum(row[0][0] for row in rows) / 2 * bits))
        solution = solved(given)
        assert solution.gap < 0.01
        assert solution.damage <= before and not upgrades(given, solution.choice)
        before = solution.damage


def test_exact_at_what_the_hull_takes() -> None:
    """Where the budget ends with a segment the greedy is optimal, and says so."""
    rows = [[(10, 8.0), (20, 2.0), (30, 1.0)], [(5, 4.0), (9, 3.0), (25, 0.0)]]
    for budget, damage in ((15, 12.0), (25, 6.0), (45, 2.0), (55, 1.0), (99, 1.0)):
        solution = solved(problem(rows, budget))
        assert solution.damage == solution.bound == damage


def test_what_no_hull_has() -> None:
    """The middle entry is above the line from first to last; it is taken where the last does not fit."""
    rows = [[(10, 10.0), (20, 9.0), (40, 0.0)]]
    assert [solved(problem(rows, budget)).choice for budget in (19, 20, 39, 40)] == [(0,), (1,), (1,), (2,)]
    assert solved(problem(rows, 25)).bound == pytest.approx(5.0)


def test_exchanges() -> None:
    """The greedy buys the best rate first (unit 0) and then has no room for unit 1's upgrade, which is worth more."""
    rows = [[(0, 6.0), (5, 0.0)], [(0, 10.0), (9, 0.0)]]
    assert solved(problem(rows, 10)).choice == (0, 1)
    assert solved(problem(rows, 14)).choice == (1, 1)


def test_dominated_and_forbidden_entries() -> None:
    rows = [[(10, 1.0), (10, 0.5), (12, 0.7), (20, math.inf), (30, 0.5)]]
    for name in ("hull", "milp"):
        assert solved(problem(rows, 40), name).choice == (1,)
    with pytest.raises(BudgetError, match="smallest allowed options take 10 bytes"):
        solved(problem(rows, 9))


def test_negative_damages() -> None:
    rows = [[(1, 0.0), (2, -1.0)], [(1, 5.0), (2, 4.5)]]
    for name in ("hull", "milp"):
        solution = solved(problem(rows, 3), name)
        assert solution.choice == (1, 0) and solution.damage == 4.0


def test_one_choice_only() -> None:
    for name in ("hull", "milp"):
        assert solved(problem([[(3, 2.0)], [(4, 0.0)]], 7), name).choice == (0, 0)


def test_ties_go_to_the_first_unit() -> None:
    rows = [[(1, 1.0), (2, 0.0)]] * 6
    assert solved(problem(rows, 9)).choice == (1, 1, 1, 0, 0, 0)


@pytest.mark.parametrize("solver", ["hull", "milp"])
@pytest.mark.parametrize(("nbytes", "damage"), [(1, 2.0**-60), (2**20, 1.0), (2**28, 2.0**40)])
def test_units_of_bytes_and_damage_do_not_matter(solver: str, nbytes: int, damage: float) -> None:
    rng = np.random.default_rng(3)
    for rows in (random_rows(rng, 6), model_rows(rng, 40)):
        budget = (problem(rows, 0).least + problem(rows, 0).most) // 2
        plain = solved(problem(rows, budget), solver)
        scaled = solved(problem([[(b * nbytes, d * damage) for b, d in row] for row in rows], budget * nbytes), solver)
        assert scaled.damage == pytest.approx(plain.damage * damage, rel=2e-6 if solver == "milp" else 1e-12)
        assert solver == "milp" or scaled.choice == plain.choice


def test_same_answer_again() -> None:
    given = problem(model_rows(np.random.default_rng(5), 60), 500_000)
    for name in ("hull", "milp"):
        assert solved(given, name) == solved(given, name)


def test_as_many_units_as_experts() -> None:
    """20,000 units in a fraction of a second; no step is quadratic."""
    rows = model_rows(np.random.default_rng(6), 20_000)
    given = problem(rows, int(sum(row[0][0] for row in rows) * 1.7))
    assert solved(given).gap < 1e-4


# Side constraints.


def brute(given: Problem, sides: Sequence[LinearSide]) -> float | None:
    kept = [
        damage
        for nbytes, damage, choice in all_choices(given)
        if nbytes <= given.budget and all(keeps(choice, side) for side in sides)
    ]
    return min(kept, default=None)


def keeps(choice: Choice, side: LinearSide) -> bool:
    return side.low <= sum(choice[unit] == entry for unit, entry in side.indices) <= side.high


@pytest.mark.parametrize("seed", range(12))
def test_sides_against_all_choices(seed: int) -> None:
    rng = np.random.default_rng(200 + seed)
    rows = random_rows(rng, 5, 4)
    pairs = [(unit, entry) for unit, row in enumerate(rows) for entry in range(len(row))]
    first = [pairs[i] for i in rng.choice(len(pairs), min(4, len(pairs)), replace=False)]
    second = [pairs[i] for i in rng.choice(len(pairs), min(6, len(pairs)), replace=False)]
    sides = [LinearSide(tuple(first), low=1), LinearSide(tuple(second), low=1, high=2)]
    for budget in budgets(problem(rows, 0), 4):
        given = problem(rows, budget)
        best = brute(given, sides)
        if best is None:
            with pytest.raises(BudgetError, match="no choice within the budget of"):
                solved(given, "milp", sides)
            continue
        solution = solved(given, "milp", sides)
        assert all(keeps(solution.choice, side) for side in sides)
        assert solution.damage == pytest.approx(best, rel=3e-6, abs=1e-9)
        assert solution.bound <= best + 1e-9


def test_a_gap_leaves_no_upgrade_that_keeps_the_sides() -> None:
    rows = model_rows(np.random.default_rng(7), 80)
    sides = [LinearSide(tuple((i, 5) for i in range(40)), low=3, high=4)]
    given = problem(rows, int(sum(row[0][0] for row in rows) * 1.5))
    solution = solved(given, "milp", sides, gap=0.5)
    assert keeps(solution.choice, sides[0])
    assert not [choice for choice in upgrades(given, solution.choice) if keeps(choice, sides[0])]
    assert solved(given, "milp", sides).damage <= solution.damage


def test_the_greedy_takes_no_sides() -> None:
    with pytest.raises(ValueError, match="keeps no constraints"):
        solved(problem([[(1, 1.0)]], 1), "hull", [LinearSide(((0, 0),), low=1)])


# Refusals and fallbacks.


def no_time(*args: object, **kwargs: object) -> solver.ProgramAnswer:
    return solver.ProgramAnswer(None, note="the 0/1 solver found nothing: Time limit reached")


def test_the_fallback_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(model_rows(np.random.default_rng(8), 30), 200_000)
    greedy = solved(given)
    monkeypatch.setattr(solver, "_program", no_time)
    solution = solved(given, "milp")
    assert (solution.choice, solution.bound) == (greedy.choice, greedy.bound)
    assert solution.notes == ("the 0/1 solver found nothing: Time limit reached; the greedy's choice is taken",)
    with pytest.raises(BudgetError, match="Time limit reached; allow it more time"):
        solved(given, "milp", [LinearSide(((0, 0),), low=1)])


def test_out_of_time() -> None:
    """Whatever the solver has by then, the answer is at least the greedy's and a note says that it stopped."""
    rows = [
        [(b * 1000 + b * i % 97, d) for b, d in row] for i, row in enumerate(model_rows(np.random.default_rng(9), 800))
    ]
    given = problem(rows, int(sum(row[0][0] for row in rows) * 1.3))
    solution = solved(given, "milp", seconds=1e-3)
    assert solution.damage <= solved(given).damage
    assert len(solution.notes) == 1 and "the 0/1 solver" in solution.notes[0]


def test_not_a_number() -> None:
    with pytest.raises(NumericalError, match="u1: the damage of o1 is nan"):
        solved(problem([[(1, 1.0)], [(1, 1.0), (2, math.nan)]], 9))


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"gap": 1.0}, {"gap": -0.1}])
def test_limits(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        SolverLimits(**limits)


@pytest.mark.skipif(os.name != "posix", reason="stdout is left alone elsewhere")
def test_c_code_does_not_print_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with solver._quiet():
        ctypes.CDLL(None).puts(b"a line of C")
    print("ours")
    captured = capfd.readouterr()
    assert captured.out == "ours\n" and captured.err == "a line of C\n"


def test_hulls_are_convex_and_end_at_the_best() -> None:
    rng = np.random.default_rng(10)
    for _ in range(20):
        row = random_rows(rng, 1, 9)[0]
        given = problem([row], 10**6)
        segments = hull.hulls(_table(given))
        assert (np.diff(segments.rate) <= 0).all()
        end = 0 if not len(segments.to) else int(segments.to[-1])
        assert _table(given).damage[0, end] == min(d for _, d in row)


def _table(given: Problem) -> hull.EntryTable:
    rows = [sorted((e.nbytes, e.damage["d"], i) for i, e in enumerate(u.entries)) for u in given.units]
    nbytes, damage, index = (np.array([[item[k] for item in row] for row in rows]) for k in range(3))
    return hull.EntryTable(nbytes, damage, index).drop_dominated()
