"""The evolutionary search: what it finds, that it keeps to budgets, and that a killed one ends like any other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from compress.allocate import search_state, solver
from compress.allocate.methods import evolve
from compress.allocate.methods.evolve import PUBLISHED, Config
from compress.allocate.problem import Choice, Problem
from compress.errors import BudgetError
from helpers.json_damage import mutations
from helpers.landscape import Landscape

SMALL = Config(generations=12, offspring=4, survivors=(2, 1), tokens=(128, 256), patience=0)


def best_of_all(problem: Problem, bench: Landscape) -> float:
    choices = itertools.product(*(range(len(unit.entries)) for unit in problem.units))
    return min(bench.true(choice) for choice in choices if problem.nbytes(choice) <= problem.budget)


# Results


@pytest.mark.parametrize("bits", [2.4, 3.0, 3.7])
@pytest.mark.parametrize("seed", [0, 1])
def test_finds_the_best_choice_where_damages_add_up(tmp_path: Path, bits: float, seed: int) -> None:
    bench = Landscape(tmp_path, blocks=1, additive=True, seed=seed)
    problem = bench.problem(bits)
    found = evolve.allocate(problem, replace(SMALL, estimator="wrong", generations=20), bench)
    assert bench.true(found.choice) == pytest.approx(best_of_all(problem, bench), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_improves_on_the_hull_where_errors_interact(tmp_path: Path, seed: int) -> None:
    bench = Landscape(tmp_path, seed=seed)
    problem = bench.problem()
    found = evolve.allocate(problem, replace(SMALL, generations=25), bench)
    start = solver.solve(problem, solver.damages_of(problem, "kl_one_at_a_time")).choice
    assert bench.true(found.choice) < 0.97 * bench.true(start)
    assert found.facts["kl"] == pytest.approx(bench.true(found.choice)) and "lowered" in found.notes[0]
    assert found.facts["start_kl"] == pytest.approx(bench.true(start))


def test_small_problems_with_interactions_come_close_to_the_best(tmp_path: Path) -> None:
    bench = Landscape(tmp_path, blocks=1, seed=3)
    problem = bench.problem()
    found = evolve.allocate(problem, replace(SMALL, generations=30), bench)
    assert bench.true(found.choice) <= 1.02 * best_of_all(problem, bench)


def test_published_settings_improve_on_their_start(tmp_path: Path) -> None:
    bench = Landscape(tmp_path)
    config = replace(PUBLISHED, generations=10, offspring=16, survivors=(4, 2, 1), tokens=(64, 128, 768))
    assert evolve.needs(config) == {"joint"}
    found = evolve.allocate(bench.problem(3.3), config, bench)
    assert found.facts["kl"] < 0.9 * found.facts["start_kl"]


class Cruel(Landscape):
    """Every choice but the start seems better on a few sequences, and is worse on all."""

    def true(self, choice: Choice, samples: Sequence[int] | None = None) -> float:
        distance = sum(a != b for a, b in zip(choice, self.start, strict=True))
        few = samples is not None and len(samples) < self.samples
        return 1.0 + (-0.01 if few else 0.01) * distance


def test_never_worse_than_the_start(tmp_path: Path) -> None:
    bench = Cruel(tmp_path)
    problem = bench.problem()
    bench.start = solver.solve(problem, solver.damages_of(problem, "kl_one_at_a_time")).choice
    found = evolve.allocate(problem, SMALL, bench)
    assert found.choice == bench.start
    assert "kept" in found.notes[0]


# Budgets


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, surrogate=False), replace(SMALL, start="uniform")])
@pytest.mark.parametrize("bits", [2.0, 2.6, 3.0, 4.9, 5.0])
def test_never_over_budget_and_nothing_is_left_over(tmp_path: Path, config: Config, bits: float) -> None:
    bench = Landscape(tmp_path, blocks=2)
    problem = bench.problem(bits)
    found = evolve.allocate(problem, replace(config, generations=4), bench)
    assert all(problem.nbytes(choice) <= problem.budget for choices, _ in bench.asked for choice in choices)
    if config.surrogate or bits == 2.0:
        room = problem.budget - problem.nbytes(found.choice)
        for unit, now in zip(problem.units, found.choice, strict=True):
            assert all(e.nbytes - unit.entries[now].nbytes > room for e in unit.entries[now + 1 :])


def test_a_budget_below_the_least_is_an_error(tmp_path: Path) -> None:
    bench = Landscape(tmp_path)
    with pytest.raises(BudgetError, match="raise the target"):
        evolve.allocate(replace(bench.problem(), budget=100), SMALL, bench)


# Stages and races


def test_published_stages(tmp_path: Path) -> None:
    bench = Landscape(tmp_path)
    config = replace(PUBLISHED, generations=1, offspring=8, survivors=(4, 2, 1), tokens=(64, 100, 512))
    state, *_ = list(evolve.search(bench.problem(3.0), config, bench))[-1:]
    first, second, third = bench.asked[1:]  # after the start
    assert [len(choices) for choices, _ in (first, second, third)] == [8, 4, 3]
    assert [len(set(samples)) for _, samples in (first, second, third)] == [2, 4, 16]  # whole sequences
    assert set(second[0]) < set(first[0]) and set(third[0]) < {*second[0], state.start}
    assert state.start in third[0] and state.start not in first[0]
    ranked = sorted(first[0], key=lambda choice: bench.true(choice, first[1]))
    assert second[0] == ranked[:4]
    assert state.parent == min(third[0], key=lambda choice: bench.true(choice, third[1]))


def test_elitism(tmp_path: Path) -> None:
    bench = Landscape(tmp_path)
    config = replace(PUBLISHED, generations=15, offspring=8, survivors=(2, 1), tokens=(32, 768))  # all sequences
    seen = [bench.true(state.parent) for state in evolve.search(bench.problem(3.0), config, bench)]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0]


def test_a_race_adds_sequences_and_compares_on_the_same(tmp_path: Path) -> None:
    bench = Landscape(tmp_path, seed=2)
    config = replace(SMALL, generations=1, offspring=6, survivors=(3, 1), tokens=(96, 320))
    state, *_ = list(evolve.search(bench.problem(), config, bench))[-1:]
    first, second = bench.asked[1:]
    assert len(first[0]) == 7 and 2 <= len(second[0]) <= 4
    assert first[0][0] == second[0][0] == state.start
    assert not set(first[1]) & set(second[1])
    entrants = set(second[0]) - {state.start}
    assert [len(first[1]), len(second[1])] == [3, 10]
    assert len(state.measured) == 6
    for one in state.measured:
        child = tuple(one.change.get(u, (0, now))[1] for u, now in enumerate(state.start))
        samples = first[1] + (second[1] if child in entrants else [])
        assert one.sequences == len(samples)
        assert one.difference == pytest.approx(bench.true(child, samples) - bench.true(state.start, samples), abs=1e-12)


def test_a_race_ends_when_the_parent_is_best(tmp_path: Path) -> None:
    bench = Landscape(tmp_path, blocks=1, additive=True)
    states = [replace(state) for state in evolve.search(bench.problem(), replace(SMALL, generations=10), bench)]
    calls = [samples for _, samples in bench.asked[1:]]  # after the start
    assert states[-1].idle > 0 and len(calls) < 2 * 10


def test_a_race_does_not_repeat_what_has_lost(tmp_path: Path) -> None:
    bench = Landscape(tmp_path, seed=3)
    tried: set[Choice] = set()
    for _ in evolve.search(bench.problem(), replace(SMALL, generations=30), bench):
        pass
    parent = None
    for choices, _ in bench.asked[1:]:
        tried = tried if choices[0] == parent else set()
        parent = choices[0]
        new = set(choices[1:]) - tried
        assert not new or len(new) == len(choices) - 1  # a later stage, or other choices throughout
        tried |= new


def test_a_search_ends_when_nothing_is_found_for_a_while(tmp_path: Path) -> None:
    bench = Landscape(tmp_path, blocks=1, additive=True)
    config = replace(SMALL, generations=200, patience=5)
    found = evolve.allocate(bench.problem(), config, bench)
    assert 5 <= found.facts["generations"] < 100
    kls = [row["kl"] for row in found.trace]
    assert len(kls) == found.facts["generations"] + 1


def test_one_possible_choice_is_no_search(tmp_path: Path) -> None:
    bench = Landscape(tmp_path)
    problem = bench.problem(2.0)
    found = evolve.allocate(problem, SMALL, bench)
    assert found.choice == (0,) * 12
    assert "nothing better" in found.notes[0]


# Determinism and resuming


class Apart(Landscape):
    """Measures each choice in a call of its own, in the reverse order."""

    def divergence(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        return [super(Apart, self).divergence([choice], samples)[0] for choice in reversed(choices)][::-1]


@pytest.mark.parametrize("config", [SMALL, replace(PUBLISHED, generations=4, offspring=16, tokens=(64, 64, 128))])
def test_deterministic_however_it_is_measured(tmp_path: Path, config: Config) -> None:
    benches = [kind(tmp_path / str(i)) for i, kind in enumerate((Landscape, Landscape, Apart))]
    for bench in benches:
        bench.folder.mkdir()
    results = [evolve.allocate(bench.problem(3.3), config, bench) for bench in benches]
    assert results[0].choice == results[1].choice == results[2].choice
    assert results[0].trace == results[1].trace == results[2].trace
    other = Landscape(tmp_path)
    other.seed = 5
    assert evolve.allocate(other.problem(3.3), config, other).trace != results[0].trace


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, replace(PUBLISHED, generations=6, offspring=16, tokens=(64, 64, 128))])
@pytest.mark.parametrize("calls", [0, 1, 2, 9, 12])
def test_a_killed_search_ends_like_any_other(tmp_path: Path, config: Config, calls: int) -> None:
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    whole = Landscape(folders[0])
    wanted = evolve.allocate(whole.problem(3.3), config, whole)
    killed = Landscape(folders[1])
    killed.calls_left = calls
    with pytest.raises(KeyboardInterrupt):
        evolve.allocate(killed.problem(3.3), config, killed)
    resumed = Landscape(folders[1])
    found = evolve.allocate(resumed.problem(3.3), config, resumed)
    assert (found.choice, found.notes, found.trace) == (wanted.choice, wanted.notes, wanted.trace)
    facts = [{k: v for k, v in result.facts.items() if k != "seconds"} for result in (found, wanted)]
    assert facts[0] == facts[1]
    assert len(resumed.asked) <= len(whole.asked)
    if calls > 3:
        assert len(resumed.asked) < len(whole.asked) and "goes on" in resumed.said[0]
    assert not list(folders[1].glob("*.part"))


def test_the_state_of_another_search_is_not_used(tmp_path: Path) -> None:
    bench = Landscape(tmp_path)
    evolve.allocate(bench.problem(3.0), SMALL, bench)
    others = [(3.1, SMALL, 0), (3.0, SMALL, 1)]
    others += [(3.0, replace(SMALL, offspring=5), 0), (3.0, replace(SMALL, generations=3), 0)]
    for bits, config, seed in others:
        other = Landscape(tmp_path)
        other.seed = seed
        evolve.allocate(other.problem(bits), config, other)
        assert "goes on" not in other.said[0]
    (path,) = list(tmp_path.glob("*.json"))[:1]
    identity = path.stem.removeprefix("search-")
    assert search_state.load(tmp_path, identity) is not None
    assert search_state.load(tmp_path, "0" * 16) is None
    whole = path.read_text()
    for _, damaged in mutations(json.loads(whole), most=300):
        path.write_text(json.dumps(damaged))
        found = search_state.load(tmp_path, identity)
        assert found is None or isinstance(found.generation, int)
    path.write_text(whole[:-9])
    assert search_state.load(tmp_path, identity) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"survivors": ()}, "survivors"),
        ({"survivors": (4, 2)}, "survivors"),
        ({"survivors": (1, 2, 1), "tokens": (1, 1, 1)}, "survivors"),
        ({"tokens": (1,)}, "tokens"),
        ({"tokens": (0, 1)}, "tokens"),
        ({"offspring": 2}, "offspring"),
        ({"random_share": 1.5}, "random_share"),
        ({"groups": "size"}, "groups"),
        ({"generations": -1}, "generations"),
        ({"patience": -1}, "patience"),
        ({"initial": 0}, "initial"),
        ({"initial_tokens": 0}, "initial_tokens"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        replace(Config(), **changes)
    assert evolve.needs(Config()) == {"joint", Config().estimator}
