"""AdaQuant's integer program: by hand, and against all choices of a small table."""

from __future__ import annotations

import pytest

from compress.allocate.problem import FROM_BASE, Problem, Unit, UnitEntry
from compress.errors import BudgetError, RecipeError
from compress.papers.allocate import adaquant
from helpers.allocator_tables import best, bits, model, problem, run, with_values


def test_adaquant_counts_changes_against_the_base() -> None:
    """Changes below 1e-6 count as 1e-6, even negative ones; the base is free."""
    changes = [[0.5, 0.1], [0.05, 0.1], [0.4, 0.1], [0.1 + 1e-9, 0.1]]
    given = Problem(with_values(model(4, (1,), bits=(4, 8)), FROM_BASE, changes), 2 * (516 + 1016))
    found = run(adaquant, given)
    assert bits(given, found.choice) == [8, 4, 8, 4]
    assert found.facts["damage"] == pytest.approx(2e-6, rel=1e-9)
    everything = run(adaquant, Problem(given.units, 4 * 1016))
    assert set(bits(given, everything.choice)) == {8} and everything.facts["damage"] == 0


def test_adaquant_with_one_low_option() -> None:
    given = problem(model(3, (1, 2), seed=3), 5)
    assert set(bits(given, run(adaquant, given, low="bits=4").choice)) == {4, 8}
    found = run(adaquant, given)

    def change(unit: Unit, entry: UnitEntry) -> float:
        base = unit.entries[-1]
        return 0.0 if entry is base else max(entry.damage[FROM_BASE] - base.damage[FROM_BASE], 1e-6)

    assert found.facts["damage"] == pytest.approx(best(given, change), rel=1e-5)
    with pytest.raises(RecipeError, match="low 'bits=5' is none of the options"):
        run(adaquant, given, low="bits=5")
    with pytest.raises(BudgetError, match="the smallest allowed options take"):
        run(adaquant, problem(given.units, 3), low="bits=4")
