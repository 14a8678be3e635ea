"""Knapsack: least summed damage within the bytes, by measured or estimated damage of each unit and option.

Takes any of the estimators, from cheap ones by statistics to the KL of the whole model with one unit changed at a time,
and adds damages up; hull greedy, or the exact 0/1 program (allocate/solver.py).

Errors of a layer's output are not comparable between blocks: a given error weighs more in one block than in another.
`scale` names a second estimator that knows: the damages of each block are multiplied so that their sum over the block's
units and options is that of the second one. With `scale: noise`, the slope of the KL in the size of random noise on the
weights (the linearity theorem, arXiv 2411.17525), one factor a block is what is asked of it, and options within a block
are still told apart by what they do to real inputs.

Damages that depend on each other do not add up: at two bits a unit does more harm among others at two bits than alone.
`rounds` measures them again around what was chosen (allocate/methods/knapsack.py), and keeps the best choice.

Damages that are measured with one unit changed, or with all units at the same option, do not add up where the model is
hurt: a unit's damage depends on the company that it is in. A round measures the share that each unit has in the KL of
the present choice (`ShareEvaluator`), multiplies the damages of all its options by share / damage of the chosen one,
and solves anew. The choice with the least measured KL of all rounds is kept, the first one included, so that rounds
never worsen the KL on the text that is measured on. A round costs a forward and a backward pass for the shares, and a
forward pass for the KL.

Rounds end early at a choice that has been measured. What is measured is kept in the folder, so that a killed run goes
on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from compress.allocate import search_state
from compress.allocate.problem import (
    AUTO,
    JOINT,
    Allocated,
    BlockScale,
    Choice,
    Estimator,
    Problem,
    ShareEvaluator,
)
from compress.allocate.solver import Solver, SolverLimits, damages_of, solve
from compress.storage import json_text
from compress.storage.checkpoint import write_text
from compress.storage.files import read_text
from compress.storage.json_text import NUMBER

MAX_FACTOR = 4.0  # a round changes a damage by no more, either way: one gradient is not taken at its word
MIN_SHARE_OF_MEAN = 1e-3  # a unit counts so much whose share is nothing or negative

Damages = list[list[float]]


@dataclass(frozen=True)
class Config(SolverLimits):
    estimator: Estimator = AUTO  # measured or estimated damage of each unit at each option, which is added up; auto:
    # the best that fits into the time
    scale: BlockScale = "none"  # damage to which the sum of each block is scaled; none: not scaled
    solver: Solver = "hull"  # hull: greedy on convex hulls; milp: a 0/1 program, exact to `gap`
    rounds: int = 0  # [rounds] of measuring damages again around the choice, each at a backward and two forward passes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 0:
            raise ValueError(f"rounds {self.rounds} is negative")
        if self.scale == self.estimator:
            raise ValueError(f"scale {self.scale!r} is the estimator itself")


def needs(config: Config) -> frozenset[str]:
    """Return the damages that must be in the table."""
    return frozenset({config.estimator, config.scale, *([JOINT] if config.rounds else [])} - {"none"})


def allocate(problem: Problem, config: Config, evaluator: ShareEvaluator | None = None) -> Allocated:
    problem.check()
    damages = damages_of(problem, config.estimator)
    if config.scale != "none":
        damages = _scale_to(problem, damages, damages_of(problem, config.scale))

    def solve_damages(known: list[list[float]]) -> Allocated:
        return solve(problem, known, config.solver, limits=config).to_allocated()

    if not config.rounds:
        return solve_damages(damages)
    assert evaluator is not None, "needs() asks for an evaluator"
    return improve(problem, damages, config.rounds, solve_damages, evaluator)


def _scale_to(problem: Problem, damages: list[list[float]], scales: list[list[float]]) -> list[list[float]]:
    """Multiply the damages by one factor a block, after which a block's sum is that of `scales`; 0 stays 0."""
    have, want = defaultdict[int, float](float), defaultdict[int, float](float)
    for unit, losses, scale in zip(problem.units, damages, scales, strict=True):
        have[unit.block] += sum(losses)
        want[unit.block] += sum(scale)
    factor = {block: want[block] / have[block] if have[block] > 0 else 1.0 for block in have}
    return [[loss * factor[unit.block] for loss in losses] for unit, losses in zip(problem.units, damages, strict=True)]


def improve(
    problem: Problem, damages: Damages, rounds: int, solve: Callable[[Damages], Allocated], evaluator: ShareEvaluator
) -> Allocated:
    """Return the best of the choices of `rounds` rounds and of the first one, by measured KL on all sequences."""
    store = _Store(problem, damages, evaluator)
    solutions: list[Allocated] = []
    kls: list[float] = []
    for number in range(rounds + 1):
        solution = solve(damages)
        if any(solution.choice == other.choice for other in solutions):
            break
        solutions.append(solution)
        evaluator.say(f"measuring the choice of round {number} of {rounds}")
        kls.append(store.kl(solution.choice))
        if number < rounds:
            evaluator.say(f"sharing out the divergence of round {number} of {rounds}")
            damages = rescale(damages, solution.choice, store.shares(solution.choice))
    best = kls.index(min(kls))
    listed = ", ".join(f"{kl:.5f}" for kl in kls)
    note = f"KL on all sequences by rounds of measuring damages anew: {listed}; that of round {best} is kept."
    return Allocated(
        solutions[best].choice,
        (*solutions[best].notes, note),
        tuple({"round": float(number), "kl": kl} for number, kl in enumerate(kls)),
        {**solutions[best].facts, "start_kl": kls[0], "kl": kls[best]},
    )


class _Store:
    """What is measured of choices, kept in a file of the evaluator's folder."""

    def __init__(self, problem: Problem, damages: Damages, evaluator: ShareEvaluator) -> None:
        self.evaluator = evaluator
        settings = {"rounds of": evaluator.seed, "samples": evaluator.samples, "seq_len": evaluator.seq_len}
        identity = search_state.fingerprint(problem, damages, settings)
        self.path = evaluator.folder / f"rounds-{identity}.json"
        self.known: dict[str, list[float]] = {}  # what is measured -> the numbers
        with suppress(OSError, ValueError):  # no file, or one that cannot be read: all is measured anew
            stored = json.loads(read_text(self.path))
            if json_text.mismatch(stored, {str: [NUMBER]}) is None:
                self.known = stored

    def kl(self, choice: Choice) -> float:
        """Return KL(original || choice) on all sequences."""
        everything = range(self.evaluator.samples)
        return self._measure("kl", choice, lambda: self.evaluator.divergence([choice], everything))[0]

    def shares(self, choice: Choice) -> list[float]:
        """Return each unit's share of it."""
        return self._measure("shares", choice, lambda: self.evaluator.shares(choice))

    def _measure(self, what: str, choice: Choice, measure: Callable[[], list[float]]) -> list[float]:
        key = f"{what} {','.join(map(str, choice))}"
        if key not in self.known:
            self.known[key] = measure()
            write_text(self.path, json.dumps(self.known))
        return self.known[key]


def rescale(damages: Damages, choice: Choice, shares: Sequence[float]) -> Damages:
    """Multiply each unit's damages by one factor, so that the chosen one becomes its share, within MAX_FACTOR.

    The factors are relative: damages as a whole are first brought to the size of the shares.
    """
    least = MIN_SHARE_OF_MEAN * sum(max(0.0, share) for share in shares) / len(shares)
    wanted = [max(share, least) for share in shares]
    chosen = [row[at] for row, at in zip(damages, choice, strict=True)]
    size = sum(wanted) / sum(chosen) if sum(chosen) > 0 else 1.0
    rows = []
    for row, damage, share in zip(damages, chosen, wanted, strict=True):
        factor = share / (size * damage) if size * damage > 0 else 1.0
        rows.append([size * max(1 / MAX_FACTOR, min(factor, MAX_FACTOR)) * value for value in row])
    return rows
