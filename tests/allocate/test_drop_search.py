"""Units that may be dropped: targets in shares, the published search, its rivals, and options of several methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import api
from compress.allocate import solver, times
from compress.allocate.methods import evolve, knapsack
from compress.allocate.problem import KL_ONE_AT_A_TIME, Choice, Problem, Unit, UnitEntry
from compress.allocate.table import SensitivityTable
from compress.errors import BudgetError
from compress.papers.allocate import drop_order
from compress.recipe.schema import Target
from compress.runtime.linear import PackedLinear
from helpers.landscape import Landscape
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, SMALL, Setup, job, report_of

CONFIG = evolve.Config(generations=10, offspring=4, survivors=(2, 1), tokens=(128, 256), patience=0)


def sublayers(blocks: int = 8) -> tuple[Unit, ...]:
    """Attention and MLP of each block, dropped or kept, with damages and angles that grow with the block."""
    units = []
    for number in range(2 * blocks):
        damage, size = float(number % 5 + number / 100), 300 if number % 2 else 100
        entries = (
            UnitEntry("drop", 0, 0, {KL_ONE_AT_A_TIME: damage}),
            UnitEntry("keep", size, 16, {KL_ONE_AT_A_TIME: 0}),
        )
        units.append(
            Unit(
                f"{number // 2}.{'mlp' if number % 2 else 'attention'}",
                (str(number),),
                number // 2,
                size,
                entries,
                scores={"angular": damage},
            )
        )
    return tuple(units)


def table(units: Sequence[Unit]) -> SensitivityTable:
    return SensitivityTable(tuple(units), ("drop", "keep"), 0, 0, 0, 0, 0)


def test_targets_in_shares_are_read() -> None:
    for text, unit in (("75% units", "%units"), ("75%units", "%units"), ("70% time", "%time")):
        target = Target(text)
        assert (target.unit, target.is_share, target.is_size) == (unit, True, False)
    for text in ("75%", "75% layers", "0% units"):
        with pytest.raises(ValueError, match="target"):
            Target(text)


def test_costs_take_the_place_of_bytes_and_the_table_keeps_its_own() -> None:
    units = sublayers(2)
    priced = times.Costs([[5, 3] for _ in units], 20)
    sorted_table, problem = times.price(table(units), Target("80% time"), priced)
    assert problem.budget == 16 and [e.nbytes for e in problem.units[0].entries] == [3, 5]
    assert [e.option for e in sorted_table.units[0].entries] == ["keep", "drop"]
    assert sorted_table.nbytes((0, 0, 0, 0)) == 800 and problem.nbytes((0, 0, 0, 0)) == 12
    with pytest.raises(BudgetError, match="60.0%"):
        times.price(table(units), Target("50% time"), priced)


@pytest.mark.parametrize("method", ["kl", "angular", "even"])
def test_rivals_leave_the_share(method: str) -> None:
    units = sublayers()
    _, problem = times.price(table(units), Target("75% units"), times.count_units(units))
    if method == "kl":
        choice = knapsack.allocate(problem, knapsack.Config(estimator=KL_ONE_AT_A_TIME)).choice
    else:
        config = drop_order.Config("angular" if method == "angular" else "even")
        choice = drop_order.allocate(problem, config).choice
    dropped = [number for number, entry in enumerate(choice) if not entry]
    assert dropped == {"kl": [0, 5, 10, 15], "angular": [0, 5, 10, 15], "even": [4, 5, 12, 13]}[method]


class Apart(Landscape):
    """What is dropped does harm only together with its neighbour, which no damage of a unit alone tells."""

    def true(self, choice: Choice, samples: Sequence[int] | None = None) -> float:
        pairs = zip(choice, choice[1:], strict=False)
        return 0.1 + sum(not a and not b for a, b in pairs) + sum(0.01 * i for i, a in enumerate(choice) if not a)


def test_the_published_search_swaps_and_keeps_the_count(tmp_path: Path) -> None:
    config = replace(evolve.PUBLISHED, generations=20, offspring=32, survivors=(2, 1), tokens=(2048, 32768), initial=4)
    _, problem = times.price(table(sublayers()), Target("75% units"), times.count_units(sublayers()))
    bench = Apart(tmp_path)
    result = evolve.allocate(problem, config, bench)
    assert all(sum(choice) == 12 for choices, _ in bench.asked for choice in choices)
    assert result.facts["kl"] <= 0.1 + 0.01 * sum((0, 2, 4, 6)) + 0.1


class Together(Landscape):
    """Dropping looks free for each unit alone, and ruins the model as soon as anything is dropped."""

    def true(self, choice: Choice, samples: Sequence[int] | None = None) -> float:
        return sum(10.0 if entry == 0 else 0.1 / entry for entry in choice)


@pytest.mark.parametrize("generations", [0, 6])
def test_never_worse_than_bits_alone(tmp_path: Path, generations: int) -> None:
    bench = Together(tmp_path)
    plain = bench.problem(3.0)
    units = tuple(
        replace(
            u, entries=(UnitEntry("drop", 0, 0, dict.fromkeys(u.entries[0].damage, 0.0), is_base=False), *u.entries)
        )
        for u in plain.units
    )
    problem = Problem(units, plain.budget)
    alone = solver.solve(plain, solver.damages_of(plain, KL_ONE_AT_A_TIME)).choice
    mixed = solver.solve(problem, solver.damages_of(problem, KL_ONE_AT_A_TIME)).choice
    result = evolve.allocate(problem, replace(CONFIG, generations=generations), bench)
    bits = bench.true(tuple(entry + 1 for entry in alone))
    assert bench.true(mixed) > 10 and bench.true(result.choice) <= bits
    assert problem.nbytes(result.choice) <= plain.budget


OPTIONS = (
    "[{bits: 3}, {bits: 4}, {bits: 3, lowrank: {rank: 4}}, {method: sparsegpt, bits: 4, kept: 2, of: 4}, "
    "{method: drop}]"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("mistral", tmp_path_factory.mktemp("pico") / "m", dtype=torch.bfloat16)


@pytest.mark.slow
def test_one_budget_for_bits_rank_sparsity_and_drop(source: Path, tmp_path: Path) -> None:
    """Every kind of option is measured and named, bytes are met, and dropped units are written as such."""
    settings = "method: evolve, target: 2.6bpw, samples: 8, generations: 2, estimator: hessian"
    allocate = f"allocate={{{settings}, options: {OPTIONS}}}"
    overrides = (*KEEP_TABLES, *SMALL, "group_size=32", "two_sided=false", allocate)
    api.quantize(job(source, Setup("int4", overrides), tmp_path / "out"))
    facts = report_of(tmp_path / "out")["allocation"]
    assert facts["bpw"] <= 2.6 and len(facts["weights by option"]) == 5
    assert sum("drop" in name for name in facts["weights by option"]) == 1


def test_shares_of_units_and_of_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the sublayers goes by the search; times decide with a table of our own."""
    set_to = ("calibration.num_samples=8", "calibration.seq_len=32", "allocate.samples=8", "allocate.generations=2")
    setup = Setup("evo-drop25", (*set_to, "allocate.estimator=kl_one_at_a_time"))
    asked = job(source, setup, tmp_path / "out")
    report = api.quantize(replace(asked, measurements=tmp_path / "measured"))
    units = report["allocation"]["units"]
    assert sorted(units.values()) == ["drop", "keep", "keep", "keep"] and report["allocation"]["share"] == 0.75
    assert report["nbytes"]["total"] < report["source_nbytes"]

    real = times._time

    def fake(linears: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
        assert all(isinstance(linear, PackedLinear | torch.nn.Linear | None) for linear in linears.values())
        assert {key: seconds > 0 for key, seconds in real(linears, dtype).items()} == {
            key: linear is not None for key, linear in linears.items()
        }
        return {key: 0.0 if linear is None else 1e-6 * int(key.partition("x")[0]) for key, linear in linears.items()}

    monkeypatch.setattr(times, "TURNS", 3)
    monkeypatch.setattr(times, "_time", fake)
    timed = Setup("evo-drop25", (*set_to, "allocate.estimator=kl_one_at_a_time", "allocate.target=80% time"))
    again = replace(job(source, timed, tmp_path / "timed"), measurements=tmp_path / "measured")
    facts = api.quantize(again)["allocation"]
    assert 0 < facts["share"] <= 0.8 and "drop" in facts["units"].values()
    assert json.loads((tmp_path / "measured" / times.FILE).read_text())["seconds"]
