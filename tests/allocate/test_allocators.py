"""The allocators on tables made here: what each decides, by hand and against all choices; budgets; refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from compress import plugins
from compress.allocate.methods import experts, knapsack, uniform
from compress.allocate.problem import Choice, Problem, Unit, UnitEntry, entries_at, option_named, rank_options
from compress.errors import BudgetError, RecipeError
from compress.papers.allocate import adaquant, layerwise, lq_lora
from helpers.allocator_tables import BITS, ESTIMATORS, best, bits, model, problem, run, with_values

PURE = [uniform, knapsack, layerwise, lq_lora, adaquant]


# All of them.


def test_every_allocator_is_found() -> None:
    assert {"uniform", "knapsack", "layerwise", "lq_lora", "adaquant", "experts"} <= set(plugins.names("allocate"))
    for name in ("uniform", "knapsack", "layerwise", "lq_lora", "adaquant", "experts"):
        module = plugins.load("allocate", name)
        assert module.needs(module.Config()) <= {*ESTIMATORS, "auto", "expert_squares", "lim", "zd", "share", "routing"}
        assert plugins.describe("allocate", name)


@pytest.mark.parametrize("method", [*PURE, experts], ids=lambda m: m.__name__.rsplit(".", 1)[1])
@pytest.mark.parametrize("bpw", [2.2, 3.0, 3.7, 5.5, 9.0])
def test_within_the_budget_and_the_same_again(method: ModuleType, bpw: float) -> None:
    given = problem(mixture(4, 4), bpw - 0.2) if method is experts else problem(model(), bpw)
    assert run(method, given) == run(method, given)


@pytest.mark.parametrize("method", [*PURE, experts], ids=lambda m: m.__name__.rsplit(".", 1)[1])
def test_a_budget_below_the_smallest_options(method: ModuleType) -> None:
    with pytest.raises(BudgetError, match="the smallest options take"):
        run(method, problem(model(is_expert=method is experts), 1.9))


@pytest.mark.parametrize("method", [knapsack, lq_lora, adaquant, experts], ids=lambda m: m.__name__.rsplit(".", 1)[1])
def test_solver_limits_are_checked(method: ModuleType) -> None:
    for key, value in (("seconds", 0.0), ("gap", 1.0)):
        with pytest.raises(ValueError, match=f"^{key}"):
            method.Config(**{key: value})


# Levels.


def test_levels() -> None:
    units = model(1, (1, 2))
    units = (units[0], dataclasses.replace(units[1], entries=units[1].entries[1:3]))  # the second has 3 and 4 bits
    assert rank_options(units) == ["bits=2", "bits=3", "bits=4", "bits=8"]
    assert [entries_at(units, f"bits={b}") for b in BITS] == [[0, 0], [1, 0], [2, 1], [3, 1]]
    assert option_named(units, "high", None, -1) == "bits=8"
    with pytest.raises(RecipeError, match="allocate: high 'bits=5' is none of the options, which are bits=2, bits=3"):
        option_named(units, "high", "bits=5", -1)


# Uniform.


@pytest.mark.parametrize(("bpw", "expected"), [(2.5, 2), (3.9, 3), (4.2, 4), (7.9, 4), (8.2, 8), (20, 8)])
def test_uniform_takes_the_largest_option_that_fits(bpw: float, expected: int) -> None:
    given = problem(model(), bpw)
    found = run(uniform, given)
    assert set(bits(given, found.choice)) == {expected}
    assert found.facts == {"option": f"bits={expected}", "unspent": given.budget - given.nbytes(found.choice)}


def test_uniform_fills_from_both_ends() -> None:
    given = problem(model(5, (1, 1)), 3.55)  # 527 bytes are left by 3 bits: four steps of 125
    found = run(uniform, given, fill="order")
    assert bits(given, found.choice) == [4, 4, 3, 3, 3, 3, 3, 3, 4, 4]
    left = given.budget - given.nbytes(found.choice)
    assert left == found.facts["unspent"] and left < 125
    assert run(uniform, given).facts["unspent"] == left + 4 * 125


def test_uniform_gives_dense_linears_the_first_steps() -> None:
    units = model(2, (1,)) + model(2, (1,), is_expert=True)
    given = problem(units, 3.5)
    assert bits(given, run(uniform, given, fill="order").choice) == [4, 3, 3, 3]


def test_uniform_by_name() -> None:
    given = problem(model(), 3.5)
    assert set(bits(given, run(uniform, given, option="bits=2").choice)) == {2}
    with pytest.raises(BudgetError, match="bits=4 everywhere takes 16192 bytes, more than the budget of 14000"):
        run(uniform, given, option="bits=4")


def test_uniform_where_no_option_fits_all() -> None:
    """One unit has no 2 bits, and 3 bits everywhere are too much."""
    units = model(1, (1, 2))
    units = (units[0], dataclasses.replace(units[1], entries=units[1].entries[1:]))
    given = Problem(units, 266 + 766)
    assert bits(given, run(uniform, given).choice) == [2, 3]


# Knapsack.


@pytest.mark.parametrize("estimator", ESTIMATORS[:-1])
@pytest.mark.parametrize("solver", ["hull", "milp"])
def test_knapsack_against_all_choices(estimator: str, solver: str) -> None:
    given = problem(model(2, (1, 4, 3), seed=1), 3.3)
    found = run(knapsack, given, estimator=estimator, solver=solver)
    least = best(given, lambda unit, entry: entry.damage[estimator])
    assert found.facts["damage"] == pytest.approx(given.damage(found.choice, estimator))
    assert found.facts["bound"] <= least * (1 + 1e-9)
    assert found.facts["damage"] >= least * (1 - 1e-9)
    assert solver == "hull" or found.facts["damage"] == pytest.approx(least, rel=1e-5)
    assert knapsack.needs(knapsack.Config(estimator=estimator)) == {estimator}  # type: ignore[arg-type]


def test_knapsack_scales_blocks() -> None:
    """The second block's errors are a hundred times as large and matter as little as the first's."""
    units = model(2, (2, 2), bits=(2, 4))
    units = with_values(units, "hessian", [[8.0, 1.0], [4.0, 0.5], [800.0, 100.0], [400.0, 50.0]])
    units = with_values(units, "noise", [[0.5, 0.1], [0.5, 0.1], [0.5, 0.1], [0.5, 0.1]])
    given = Problem(units, 2 * (516 + 1016))  # two units at 4 bits
    assert bits(given, run(knapsack, given, estimator="hessian").choice) == [2, 2, 4, 4]
    scaled = run(knapsack, given, estimator="hessian", scale="noise")
    assert bits(given, scaled.choice) == [4, 2, 4, 2]
    # in each block 1.2 in all, of which 1 / 13.5 is left at the raised unit and 4 / 13.5 at the other
    assert scaled.facts["damage"] == pytest.approx(2 * 1.2 * 5 / 13.5)
    assert knapsack.needs(knapsack.Config(estimator="hessian", scale="noise")) == {"hessian", "noise"}
    with pytest.raises(ValueError, match="^scale 'noise' is the estimator itself"):
        knapsack.Config(estimator="noise", scale="noise")


def test_a_block_without_damage_keeps_it() -> None:
    units = with_values(model(1, (1, 1)), "hessian", [[0.0] * 4, [0.0] * 4])
    assert run(knapsack, problem(units, 3), estimator="hessian", scale="noise").facts["damage"] == 0


# Experts.

PAPER: dict[str, Any] = {"error": "norms", "alpha": 1.0, "beta": 1.5, "gamma": 2.0}


def mixture(blocks: int, per_block: int, seed: int = 0) -> tuple[Unit, ...]:
    return model(blocks, (1,) * per_block, is_expert=True, seed=seed, bits=(1, 2, 3))


def published(given: Problem, gamma: float = 2.0) -> Callable[[Unit, UnitEntry], float]:
    """Damage as the paper has it."""
    total = {
        (unit.block, name): sum(u.scores[name] for u in given.units if u.block == unit.block)
        for unit in given.units
        for name in ("share", "routing")
    }

    def damage(unit: Unit, entry: UnitEntry) -> float:
        share, routing = (unit.scores[name] / total[unit.block, name] for name in ("share", "routing"))
        return share * routing**1.5 * entry.damage["expert"] ** gamma

    return damage


def least_mixture(given: Problem, damage: Callable[[Unit, UnitEntry], float]) -> float:
    """Of all choices with an expert at 3 and one at 2 bits in every block."""
    found = math.inf
    blocks = sorted({unit.block for unit in given.units})
    for choice in itertools.product(range(3), repeat=len(given.units)):
        there = {(unit.block, i) for unit, i in zip(given.units, choice, strict=True)}
        if given.nbytes(choice) <= given.budget and all((b, i) in there for b in blocks for i in (1, 2)):
            found = min(found, sum(damage(u, u.entries[i]) for u, i in zip(given.units, choice, strict=True)))
    return found


@pytest.mark.parametrize("gamma", [2.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_experts_against_all_choices(seed: int, gamma: float) -> None:
    given = problem(mixture(2, 4, seed), 2.0)
    found = run(experts, given, **{**PAPER, "gamma": gamma}, gap=0.0)
    damage = published(given, gamma)
    assert found.facts["damage"] == pytest.approx(least_mixture(given, damage), rel=1e-6)
    chosen = sum(damage(u, u.entries[i]) for u, i in zip(given.units, found.choice, strict=True))
    assert found.facts["damage"] == pytest.approx(chosen) and found.notes == ()


def test_squares_alone_by_default() -> None:
    given = problem(mixture(2, 4), 2.0)
    found = run(experts, given, gap=0.0)
    least = least_mixture(given, lambda unit, entry: entry.damage["expert_squares"])
    assert found.facts["damage"] == pytest.approx(least, rel=1e-6) and "expert" not in experts.needs(experts.Config())


def test_one_budget_for_all_blocks_is_better() -> None:
    """The first block's errors are ten times as large: with one budget it gets more than its share."""
    units = mixture(3, 6, seed=4)
    errors = [[e.damage["expert_squares"] * (10 if u.block == 0 else 1) for e in u.entries] for u in units]
    given = problem(with_values(units, "expert_squares", errors), 1.95)
    by_model, by_block = run(experts, given, gap=0.0), run(experts, given, gap=0.0, scope="block")
    assert by_model.facts["damage"] < by_block.facts["damage"]
    assert spent(given, by_model.choice)[0] > given.budget / 3
    totals = itertools.accumulate(spent(given, by_block.choice))
    assert all(total <= given.budget * (block + 1) / 3 for block, total in enumerate(totals))


def spent(given: Problem, choice: Choice) -> list[int]:
    """Bytes of each block."""
    pairs = list(zip(given.units, choice, strict=True))
    return [sum(u.entries[i].nbytes for u, i in pairs if u.block == b) for b in range(given.units[-1].block + 1)]


def test_experts_spread() -> None:
    """Two experts of each block at 1 bit although the budget pays for more."""
    given = problem(mixture(2, 4), 9)
    found = run(experts, given, spread=("bits=1",), at_least=2)
    for block in (0, 1):
        of_block = [b for unit, b in zip(given.units, bits(given, found.choice), strict=True) if unit.block == block]
        assert sorted(of_block) == [1, 1, 3, 3]
    assert set(bits(given, run(experts, given, at_least=0).choice)) == {3}
    with pytest.raises(BudgetError, match="keeps the constraints"):
        run(experts, given, at_least=3)


def test_experts_leave_other_units_at_one_option() -> None:
    given = problem(model(2, (2,)) + mixture(2, 4), 4.5)
    found = run(experts, given)
    assert bits(given, found.choice)[:2] == [8, 8]
    assert found.notes == ("2 units that are no experts are stored with bits=8",)
    assert bits(given, run(experts, given, dense="bits=3").choice)[:2] == [3, 3]
    with pytest.raises(BudgetError, match="stored with bits=8, which leaves nothing"):
        run(experts, problem(given.units, 2.5))


def test_experts_that_are_never_routed_to() -> None:
    given = problem(with_values(mixture(1, 4), "share", [0.0] * 4), 2.0)
    assert run(experts, given, **PAPER).facts["damage"] == 0 < run(experts, given).facts["damage"]


def test_experts_are_needed() -> None:
    with pytest.raises(RecipeError, match="there are no experts among the units"):
        run(experts, problem(model(), 3))
    units = tuple(dataclasses.replace(unit, scores={}) for unit in mixture(1, 4))
    with pytest.raises(RecipeError, match="set allocate.units to expert"):
        run(experts, problem(units, 3))


@pytest.mark.parametrize("key", ["alpha", "beta", "gamma", "at_least"])
def test_experts_settings(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} -1 is negative"):
        experts.Config(**{key: -1})  # type: ignore[arg-type]
