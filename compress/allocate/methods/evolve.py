"""Evolutionary search on the joint effect of a choice (EvoPress, arXiv 2410.14649).

Units together do not damage what they damage alone: errors of one unit meet, and cancel or add to, those of others.
The search measures the KL of the whole model's predictions. A choice has offspring that differ in a
few entries and take no more bytes; they are measured in stages, fewer of them on more tokens in each, and the best
takes the place of its parent if it is better.

Published, and here as settings (`PUBLISHED`): start near a uniform choice; 128 offspring by random level switches
within groups of units of equal size; fresh sequences in each stage, what the stages before have measured is forgotten;
the parent joins the last. By default we do otherwise, in order to need fewer tokens:
- the start is the table's solution (allocate/solver.py), or where that is better the one without what the first
  method cannot do (other methods, low-rank parts, dropped units), which the end is compared with, too; changes trade
  between units of all sizes and use up the budget;
- offspring are the best of many random changes by a surrogate, the table's damages corrected by what has been measured
  since the search began (allocate/search_state.py); a share is random all the same;
- a race: offspring and parent are measured on the same sequences from the first stage on, a stage adds sequences, what
  is not expected to be better than the parent is out at once, and the order is that of the expected differences: those
  measured, drawn towards the surrogate's the more, the fewer sequences they were measured on. Many generations end
  after their first stage, and a parent is replaced only after the last;
- what has lost to a parent is not tried again.

The search knows nothing of what an entry is: its place in the order of bytes, its bytes and its damage are all. It does
not combine two parents, and makes no use of the measurements of another search. The calibration text must be long
enough that a choice cannot be fitted to it. Cost a generation: 8 offspring of 2048 tokens, three of 8192 more where
they seem better, and one of 16384, of which blocks that they share with the parent are computed once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from random import Random
from typing import Literal

from compress.allocate import mutation, search_state, solver
from compress.allocate.mutation import Moves
from compress.allocate.problem import AUTO, Allocated, Choice, ChoiceEvaluator, Estimator, Problem
from compress.allocate.search_state import Observation, SearchState, Surrogate, UnitValues

PROPOSALS_PER_CHILD = 32  # random changes of which the surrogate takes the best, for one offspring
RANDOM_TRIES_PER_CHILD = 100  # small problems have few changes


@dataclass(frozen=True)
class Config:
    start: Literal["hull", "uniform"] = "hull"  # first choice: the solution of the table (hull), or the best of random
    # near-uniform choices
    estimator: Estimator = AUTO  # damage from which the hull and the surrogate start; auto: the best that fits into the
    # time
    generations: int = 80  # [generations] of the search, at most
    offspring: int = 8  # [choices] that are measured in a generation
    survivors: tuple[int, ...] = (3, 1, 1)  # [choices] that remain after each stage of a generation
    tokens: tuple[int, ...] = (2048, 8192, 16384)  # [tokens] on which each stage measures a choice: whole sequences, at
    # least one
    selection: Literal["racing", "stages"] = "racing"  # racing: losers on the same sequences drop out early; stages:
    # fresh sequences in each, as published
    groups: Literal["size", "kind", "none"] = "none"  # units between which random changes trade bytes: of equal size,
    # of one kind, or any (none)
    surrogate: bool = True  # propose offspring by what has been measured so far; false: at random
    random_share: float = 0.25  # [fraction] of the offspring that is random all the same
    patience: int = 20  # [generations] without a better choice after which the search ends; 0: never
    initial: int = 64  # [choices] from which the uniform start is taken
    initial_tokens: int = 2048  # [tokens] on which the choices of the uniform start are measured

    def __post_init__(self) -> None:
        self._check_stages()
        if not 0 <= self.random_share <= 1:
            raise ValueError("random_share must be between 0 and 1")
        if self.surrogate and self.groups != "none":
            raise ValueError("groups must be none with a surrogate, whose changes trade between all units")
        for name, least in (
            ("generations", 0),
            ("patience", 0),
            ("initial", 1),
            ("initial_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}")

    def _check_stages(self) -> None:
        if not self.survivors or self.survivors[-1] != 1 or min(self.survivors) < 1:
            raise ValueError("survivors must be numbers of at least 1, the last of them 1")
        if list(self.survivors) != sorted(self.survivors, reverse=True):
            raise ValueError("survivors must not increase from one stage to the next")
        if len(self.tokens) != len(self.survivors) or min(self.tokens) < 1:
            raise ValueError("tokens must be one number of at least 1 for each of the survivors")
        if self.offspring < self.survivors[0]:
            raise ValueError("offspring must not be fewer than the survivors of the first stage")


PUBLISHED = Config(
    start="uniform",
    generations=150,
    offspring=128,
    survivors=(16, 4, 1),
    tokens=(2048, 16384, 131072),
    selection="stages",
    groups="size",
    surrogate=False,
    patience=0,
)


def needs(config: Config) -> frozenset[str]:
    return frozenset({"joint", config.estimator} if _has_table(config) else {"joint"})


def allocate(problem: Problem, config: Config, evaluator: ChoiceEvaluator | None) -> Allocated:
    """Return the choice that the search ends with, or its start where that is better on all sequences."""
    assert evaluator is not None, "needs() asks for an evaluator"
    began = time.monotonic()
    state = None
    for state in search(problem, config, evaluator):
        row = state.trace[-1]
        evaluator.say(f"generation {state.generation} of {config.generations}: KL {row['kl']:.5f}")
    assert state is not None, "a search has a start"
    before = evaluator.forwards
    ends = list(dict.fromkeys([state.start, state.parent]))
    ends += [choice for choice in _base_choice(problem, config) if choice not in ends]
    everything = range(evaluator.samples)
    kls = evaluator.divergence(ends, everything)
    best = kls.index(min(kls))
    facts = {
        "start_kl": kls[0],
        "kl": kls[best],
        "generations": float(state.generation),
        "forwards": state.forwards + evaluator.forwards - before,
        "tokens": float(state.tokens + len(ends) * len(everything) * evaluator.seq_len),
        "seconds": time.monotonic() - began,
    }
    if ends[best] not in (state.start, state.parent):
        said = f"Options of the first method alone, KL {kls[best]:.5f}, are better than what the search found."
        return Allocated(ends[best], (said,), tuple(state.trace), facts)
    return Allocated(ends[best], (_sentence(state, kls, best),), tuple(state.trace), facts)


def _base_choice(problem: Problem, config: Config) -> list[Choice]:
    """Return the table's solution among base entries alone, where there are others and it fits."""
    base = problem.base() if _has_table(config) else None
    if base is None:
        return []
    inner, places = base
    choice = solver.solve(inner, solver.damages_of(inner, config.estimator)).choice
    return [tuple(row[i] for row, i in zip(places, choice, strict=True))]


def _sentence(state: SearchState, kls: Sequence[float], best: int) -> str:
    after = f"after {state.generation} generations"
    if best:
        return f"On all sequences the search lowered KL from {kls[0]:.5f} to {kls[best]:.5f} {after}."
    if state.parent != state.start:
        return f"On all sequences the start, KL {kls[0]:.5f}, is no worse than the search's {kls[1]:.5f} {after}; kept."
    return f"The search found nothing better than its start, KL {kls[0]:.5f} on all sequences, {after}."


def search(problem: Problem, config: Config, evaluator: ChoiceEvaluator) -> Iterator[SearchState]:
    """Yield the state at the start and after each generation, the same object; goes on where a search was killed."""
    problem.check()
    return _Evolution(problem, config, evaluator).run()


def _has_table(config: Config) -> bool:
    return config.start == "hull" or config.surrogate


class _Evolution:
    """One search. Chance is that of the seed and the number of the generation, so that nothing of it must be kept."""

    def __init__(self, problem: Problem, config: Config, evaluator: ChoiceEvaluator) -> None:
        self.problem, self.config, self.evaluator = problem, config, evaluator
        self.damages: UnitValues = (
            solver.damages_of(problem, config.estimator)
            if _has_table(config)
            else [[-float(entry.nbytes) for entry in unit.entries] for unit in problem.units]
        )
        self.moves = Moves(problem, self.damages)
        self.groups = mutation.groups(problem, config.groups)
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(unit.kind for unit in problem.units))}
        self.alike = [[kinds[unit.kind] for unit in problem.units], [unit.block for unit in problem.units]]
        settings = {
            **asdict(config),
            "seed": evaluator.seed,
            "samples": evaluator.samples,
            "seq_len": evaluator.seq_len,
        }
        self.identity = search_state.fingerprint(problem, self.damages, settings)
        self.tokens = 0
        self.base = _base_choice(problem, config)

    def run(self) -> Iterator[SearchState]:
        state = search_state.load(self.evaluator.folder, self.identity)
        if state is None:
            before = self.evaluator.forwards
            state = self._first()
            self._finish(state, before)
        else:
            self.tokens = state.tokens
            self.evaluator.say(f"the search goes on after generation {state.generation}")
        yield state
        while not self._is_done(state):
            before = self.evaluator.forwards
            self._generation(state)
            self._finish(state, before)
            yield state

    def _is_done(self, state: SearchState) -> bool:
        config = self.config
        return state.generation >= config.generations or 0 < config.patience <= state.idle

    def _finish(self, state: SearchState, before: float) -> None:
        """Account for a generation, and keep its state."""
        state.forwards += self.evaluator.forwards - before
        state.tokens = self.tokens
        state.trace[-1] |= {"forwards": state.forwards, "tokens": float(state.tokens)}
        search_state.save(self.evaluator.folder, self.identity, state)

    def _count(self, tokens: int) -> int:
        """Return the number of sequences of so many tokens, as far as there are any."""
        return min(self.evaluator.samples, math.ceil(tokens / self.evaluator.seq_len))

    def _subset(self, tokens: int, rng: Random) -> list[int]:
        return rng.sample(range(self.evaluator.samples), self._count(tokens))

    def _kl(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        self.tokens += len(choices) * len(samples) * self.evaluator.seq_len
        return self.evaluator.divergence(choices, samples)

    def _first(self) -> SearchState:
        config, rng = self.config, Random(f"{self.evaluator.seed} start")
        if config.start == "hull":
            choices = list(dict.fromkeys([solver.solve(self.problem, self.damages).choice, *self.base]))
        else:
            choices = list(dict.fromkeys(mutation.round_down(self.moves, rng) for _ in range(config.initial)))
        kls = self._kl(choices, self._subset(config.initial_tokens, rng))
        kl, start = min(zip(kls, choices, strict=True))
        state = SearchState(start, start, trace=[{"generation": 0.0, "kl": kl}])
        damage = sum(row[i] for row, i in zip(self.damages, start, strict=True))
        if kl > 0 and damage > 0:
            state.scale = kl / damage
        return state

    def _generation(self, state: SearchState) -> None:
        rng = Random(f"{self.evaluator.seed} {state.generation}")
        select = {"racing": self._race, "stages": self._stages}[self.config.selection]
        model = self._surrogate(state, ()) if self.config.surrogate else None
        children = self._children(state, model, rng)
        parent, kl = select(state, children, model, rng) if children else (state.parent, state.trace[-1]["kl"])
        is_new = parent != state.parent
        state.rejected = [] if is_new or not children else [*state.rejected, *children]
        state.idle = 0 if is_new else state.idle + 1
        state.parent = parent
        state.generation += 1
        state.trace.append({"generation": float(state.generation), "kl": kl})

    def _surrogate(
        self, state: SearchState, more: Sequence[Observation], sizes: tuple[float, float] | None = None
    ) -> Surrogate:
        values = [[state.scale * damage for damage in row] for row in self.damages]
        return Surrogate(values, self.alike, [*state.measured, *more], sizes)

    def _children(self, state: SearchState, model: Surrogate | None, rng: Random) -> list[Choice]:
        """Return different choices, none of them the parent; fewer than asked for where there are no more.

        A race does not try again what has lost to this parent, until there is nothing else.
        """
        count, parent = self.config.offspring, state.parent
        known = {parent, *(state.rejected if self.config.selection == "racing" else ())}
        children: dict[Choice, None] = {}
        if model is not None:
            values = model.mean()
            for _ in range(count - round(self.config.random_share * count)):
                if child := self._promising(parent, known | children.keys(), values, rng):
                    children[child] = None
        for _ in range(RANDOM_TRIES_PER_CHILD * count):
            if len(children) == count:
                break
            if child := self._random(parent, rng):
                if model is not None:
                    child = mutation.fill(self.moves, child, self.damages)
                if child not in known:
                    children[child] = None
        return list(children)

    def _random(self, parent: Choice, rng: Random) -> Choice | None:
        if self.config.groups == "none":
            return mutation.trade(self.moves, parent, rng)
        return mutation.switch_levels(self.moves, parent, self.groups, rng)

    def _promising(self, parent: Choice, known: Set[Choice], values: UnitValues, rng: Random) -> Choice | None:
        """Return the best new choice by `values` of some guided changes; None if there is none."""

        def worth(choice: Choice) -> tuple[float, Choice]:
            pairs = zip(values, choice, parent, strict=True)
            return float(f"{sum(row[i] - row[j] for row, i, j in pairs if i != j):.9g}"), choice

        drawn = {mutation.mutate_guided(self.moves, parent, values, rng) for _ in range(PROPOSALS_PER_CHILD)}
        new = [choice for choice in drawn if choice is not None and choice not in known]
        return min(new, key=worth, default=None)

    def _stages(
        self, state: SearchState, children: Sequence[Choice], model: Surrogate | None, rng: Random
    ) -> tuple[Choice, float]:
        """Select as published: fresh sequences in each stage, the parent joins the last."""
        alive, kls, last = list(children), [math.inf], len(self.config.survivors) - 1
        for stage, (keep, tokens) in enumerate(zip(self.config.survivors, self.config.tokens, strict=True)):
            if stage == last:
                alive.append(state.parent)
            kls = self._kl(alive, self._subset(tokens, rng))
            order = sorted(range(len(alive)), key=lambda i: (kls[i], i))[:keep]
            alive, kls = [alive[i] for i in order], [kls[i] for i in order]
        return alive[0], kls[0]

    def _race(
        self, state: SearchState, children: Sequence[Choice], model: Surrogate | None, rng: Random
    ) -> tuple[Choice, float]:
        """Select in a race: each stage adds sequences, and all are compared with the parent on the same ones."""
        order = rng.sample(range(self.evaluator.samples), self.evaluator.samples)
        sums, counts = dict.fromkeys(children, 0.0), dict.fromkeys(children, 0)
        alive, total, used = list(children), 0.0, 0
        measured: list[Observation] = []
        gains: dict[Choice, float] = {}
        for keep, tokens in zip(self.config.survivors, self.config.tokens, strict=True):
            samples = order[used : used + self._count(tokens)]
            if not samples:  # all are used: the best so far wins
                break
            base, *kls = self._kl([state.parent, *alive], samples)
            total, used = total + base * len(samples), used + len(samples)
            for child, kl in zip(alive, kls, strict=True):
                sums[child] += (kl - base) * len(samples)
                counts[child] += len(samples)
            measured = [_observe(state.parent, child, sums[child], counts[child]) for child in children]
            differences = [one.difference for one in measured]
            if model is not None:
                differences = self._surrogate(state, measured, model.sizes).expected_differences()[-len(children) :]
            gains = dict(zip(children, differences, strict=True))
            better = [child for child in alive if gains[child] < 0]
            alive = sorted(better, key=lambda child: (gains[child], child))[:keep]
            if not alive:
                break
        state.learn(measured)
        kl = total / used
        return (alive[0], kl + gains[alive[0]]) if alive else (state.parent, kl)


def _observe(parent: Choice, child: Choice, differences: float, sequences: int) -> Observation:
    """Return the observation of a child; differences: their sum over the sequences."""
    change = {unit: (old, new) for unit, (old, new) in enumerate(zip(parent, child, strict=True)) if old != new}
    return Observation(change, differences / sequences, sequences)
