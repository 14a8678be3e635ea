"""Measure damages again around what they made one choose, and choose again.

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
from collections.abc import Callable, Sequence
from contextlib import suppress

from compress.allocate import search_state
from compress.allocate.problem import Allocated, Choice, Problem, ShareEvaluator
from compress.storage import json_text
from compress.storage.checkpoint import write_text
from compress.storage.files import read_text
from compress.storage.json_text import NUMBER

MAX_FACTOR = 4.0  # a round changes a damage by no more, either way: one gradient is not taken at its word
MIN_SHARE_OF_MEAN = 1e-3  # a unit counts so much whose share is nothing or negative

Damages = list[list[float]]


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
