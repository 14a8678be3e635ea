"""The allocators on tables made here: what each decides, by hand and against all choices; budgets; refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from compress import plugins
from compress.allocate import uniform_options
from compress.allocate.methods import experts, knapsack, uniform
from compress.allocate.problem import FROM_BASE, KL_ONE_AT_A_TIME, Allocated, Choice, Entry, Problem, Unit
from compress.errors import BudgetError, RecipeError
from compress.papers.allocate import adaquant, layerwise, lq_lora

ESTIMATORS = (
    "hessian",
    "output",
    "weight",
    "fisher",
    "gradient",
    KL_ONE_AT_A_TIME,
    FROM_BASE,
    "noise",
    "expert",
)
BITS = (2, 3, 4, 8)
PURE = [uniform, knapsack, layerwise, lq_lora, adaquant]


def model(
    blocks: int = 4,
    kinds: Sequence[int] = (1, 4, 3),
    is_expert: bool = False,
    seed: int = 0,
    bits: Sequence[int] = BITS,
) -> tuple[Unit, ...]:
    """Per block one unit of each size in `kinds` (thousands of weights) with every estimator and score at random."""
    rng = np.random.default_rng(seed)
    units = []
    for block in range(blocks):
        for part, size in enumerate(kinds):
            alphas = {name: float(rng.lognormal(0, 1.5)) for name in ESTIMATORS}
            alphas["expert_squares"] = alphas[KL_ONE_AT_A_TIME] * alphas["expert"]
            entries = tuple(
                Entry(f"bits={b}", size * 125 * b + 16, b, {k: a * size * 4.0**-b for k, a in alphas.items()})
                for b in bits
            )
            scores = {name: float(rng.random()) for name in ("lim", "zd", "share", "routing")}
            name = f"model.layers.{block}.experts.{part}" if is_expert else f"model.layers.{block}.part{part}"
            units.append(Unit(name, (name,), block, size * 1000, entries, is_expert, scores))
    return tuple(units)


def with_values(units: Sequence[Unit], key: str, values: Sequence[Any], of: Callable[[Any], Any] = lambda v: v) -> Any:
    """Units with a score each, or a damage for each entry, of their own."""
    found = []
    for unit, value in zip(units, values, strict=True):
        if isinstance(value, Sequence):
            pairs = zip(unit.entries, value, strict=True)
            entries = tuple(dataclasses.replace(e, damage={**e.damage, key: of(v)}) for e, v in pairs)
            found.append(dataclasses.replace(unit, entries=entries))
        else:
            found.append(dataclasses.replace(unit, scores={**unit.scores, key: of(value)}))
    return tuple(found)


def problem(units: tuple[Unit, ...], bpw: float) -> Problem:
    return Problem(units, int(bpw * sum(unit.numel for unit in units) / 8))


def run(method: ModuleType, given: Problem, **settings: Any) -> Allocated:
    found: Allocated = method.allocate(given, method.Config(**settings), None)
    assert given.nbytes(found.choice) <= given.budget
    return found


def bits(given: Problem, choice: Choice) -> list[float]:
    return [unit.entries[i].bits for unit, i in zip(given.units, choice, strict=True)]


def best(given: Problem, damage: Callable[[Unit, Entry], float]) -> float:
    """Least damage of all choices."""
    losses = [[(entry.nbytes, damage(unit, entry)) for entry in unit.entries] for unit in given.units]
    sums = ((sum(b for b, _ in c), sum(d for _, d in c)) for c in itertools.product(*losses))
    return min(d for b, d in sums if b <= given.budget)


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
    assert uniform_options.ranked(units) == ["bits=2", "bits=3", "bits=4", "bits=8"]
    assert [uniform_options.at(units, f"bits={b}") for b in BITS] == [[0, 0], [1, 0], [2, 1], [3, 1]]
    assert uniform_options.named(units, "high", None, -1) == "bits=8"
    with pytest.raises(RecipeError, match="allocate: high 'bits=5' is none of the options, which are bits=2, bits=3"):
        uniform_options.named(units, "high", "bits=5", -1)


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


# Layerwise.


def test_layerwise_raises_whole_blocks_by_score() -> None:
    """Scores of a block are weighted by its units' weights: 0.7, 0.9, 0.1, 0.5 for lim."""
    scores = [0.1, 0.9, 0.6, 1.0, 0.4, 0.0, 0.5, 0.5]
    units = model(4, (1, 3), bits=(4, 8))
    given = problem(with_values(units, "lim", scores), 6.3)
    found = run(layerwise, given)
    assert bits(given, found.choice) == [8, 8, 8, 8, 4, 4, 4, 4]
    assert found.facts == {"high": "bits=8", "low": "bits=4", "blocks at high": 2}
    given = problem(with_values(units, "zd", scores), 6.3)  # fewer large weights: more important
    assert bits(given, run(layerwise, given, score="zd").choice) == [4, 4, 4, 4, 8, 8, 8, 8]
    assert layerwise.needs(layerwise.Config(score="zd")) == {"zd"}


def test_layerwise_fills_the_next_block() -> None:
    given = problem(with_values(model(3, (1, 3), bits=(4, 8)), "lim", [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]), 5.8)
    assert bits(given, run(layerwise, given).choice) == [8, 8, 8, 4, 4, 4]
    assert bits(given, run(layerwise, given, fill=False).choice) == [8, 8, 4, 4, 4, 4]
    left = given.budget - given.nbytes(run(layerwise, given).choice)
    assert left < 500  # what the smallest unit would take


def test_layerwise_options_by_name() -> None:
    given = problem(model(3), 3.6)
    assert set(bits(given, run(layerwise, given, low="bits=3", high="bits=4").choice)) == {3, 4}
    with pytest.raises(BudgetError, match="bits=4 everywhere takes 12144 bytes, more than the budget of 10800"):
        run(layerwise, given, low="bits=4")
    with pytest.raises(RecipeError, match="high 'bits=2' is not larger than low 'bits=3'"):
        run(layerwise, given, low="bits=3", high="bits=2")


# LQ-LoRA.


@pytest.mark.parametrize("estimator", ["weight", "fisher"])
def test_lq_lora_is_exact(estimator: str) -> None:
    given = problem(model(2, seed=2), 3.1)
    found = run(lq_lora, given, estimator=estimator)
    least = best(given, lambda unit, entry: entry.damage[estimator])
    assert given.damage(found.choice, estimator) == pytest.approx(least, rel=1e-5)
    assert lq_lora.needs(lq_lora.Config(estimator=estimator)) == {estimator}  # type: ignore[arg-type]


# AdaQuant.


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

    def change(unit: Unit, entry: Entry) -> float:
        base = unit.entries[-1]
        return 0.0 if entry is base else max(entry.damage[FROM_BASE] - base.damage[FROM_BASE], 1e-6)

    assert found.facts["damage"] == pytest.approx(best(given, change), rel=1e-5)
    with pytest.raises(RecipeError, match="low 'bits=5' is none of the options"):
        run(adaquant, given, low="bits=5")
    with pytest.raises(BudgetError, match="the smallest allowed options take"):
        run(adaquant, problem(given.units, 3), low="bits=4")


# Experts.

PAPER: dict[str, Any] = {"error": "norms", "alpha": 1.0, "beta": 1.5, "gamma": 2.0}


def mixture(blocks: int, per_block: int, seed: int = 0) -> tuple[Unit, ...]:
    return model(blocks, (1,) * per_block, is_expert=True, seed=seed, bits=(1, 2, 3))


def published(given: Problem, gamma: float = 2.0) -> Callable[[Unit, Entry], float]:
    """Damage as the paper has it."""
    total = {
        (unit.block, name): sum(u.scores[name] for u in given.units if u.block == unit.block)
        for unit in given.units
        for name in ("share", "routing")
    }

    def damage(unit: Unit, entry: Entry) -> float:
        share, routing = (unit.scores[name] / total[unit.block, name] for name in ("share", "routing"))
        return share * routing**1.5 * entry.damage["expert"] ** gamma

    return damage


def least_mixture(given: Problem, damage: Callable[[Unit, Entry], float]) -> float:
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
