"""Keep what an evolutionary search has measured: its surrogate of the KL, and its state on disk.

Predict the KL of choices by damages that add up, corrected by the measurements of a search.

The value of an entry is c d (1 + f): d its damage by an estimator, c the scale from damages to KL, and f the sum of
corrections of the whole table, of the unit's kind, of its block, of the unit and of the entry, each normal and
independent before anything is measured. So one measurement says much about the scale, something about all units of the
same kind or block, and most about the entries that it was taken of; a model with free values would need as many
measurements as there are entries. A measurement is the KL of a choice less that of another on the same sequences. It
differs from the sum of values by what does not add up (it stays, however many sequences are measured) and by noise
(which falls with their number); both are taken to grow with the size of the change, as do the corrections, so that
nothing has a unit. Moves of corrections and of noise are the most likely ones of a small grid.

This is ridge regression in as many unknowns as there are measurements (at most `WINDOW`, the latest), float64, always
from all measurements at once, so that a search that goes on computes what it would have computed. Memory: WINDOW times
three numbers an entry.

The state is one JSON file a search, so that a killed one goes on. Its name and content carry a fingerprint of all that
decides the course of it: entries, bytes, damages, budget, settings, seed and the number of sequences. A state of
another search is never loaded, so a changed search starts over. The folder belongs to one model and one text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.allocate.problem import Choice, Problem
from compress.storage import json_text
from compress.storage.checkpoint import write_text
from compress.storage.files import read_text
from compress.storage.json_text import INTEGER, NUMBER, TEXT

UnitValues = list[list[float]]  # of each unit, a value of each entry; less is better

WINDOW = 256  # measurements that are used
CORRECTIONS = (0.25, 0.5, 1.0)  # grid: standard deviation of the corrections but for that of the scale, which has 1
NOISE = (0.1, 0.3, 1.0, 3.0, 10.0)  # grid: of a measurement on one sequence, in sizes of the change
UNEXPLAINED_DEVIATION = 0.5  # what does not add up, in sizes of the change

STATE_VERSION = 1  # another one starts over

STATE_LAYOUT: Any = {
    **{"identity": TEXT, "start": [INTEGER], "parent": [INTEGER], "rejected": [[INTEGER]]},
    **dict.fromkeys(("generation", "idle", "tokens"), INTEGER),
    **{"scale": NUMBER, "forwards": NUMBER, "trace": [{str: NUMBER}]},
    "measured": [{"change": {str: [INTEGER]}, "difference": NUMBER, "sequences": INTEGER}],
}


@dataclass(frozen=True)
class Observation:
    """A measurement: the KL of a choice less that of another on the same sequences."""

    change: Mapping[int, tuple[int, int]]  # unit -> entry of the other, entry of the choice; not empty
    difference: float  # nats a token
    sequences: int


class Surrogate:
    """A ridge regression on measurements; `sizes` are the (corrections, noise) that explain them best."""

    def __init__(
        self,
        values: Sequence[Sequence[float]],
        alike: Sequence[Sequence[int]],
        measured: Sequence[Observation],
        sizes: tuple[float, float] | None = None,
    ) -> None:
        """values: c d. alike: groupings of the units (by kind, by block), each the number of every unit's group."""
        self._lengths = [len(row) for row in values]
        self._values = torch.tensor([v for row in values for v in row], dtype=torch.float64)  # [entries]
        unit = torch.repeat_interleave(torch.arange(len(values)), torch.tensor(self._lengths))  # [entries]
        entry = torch.arange(len(unit))
        self._groups = [torch.zeros_like(unit), *(torch.tensor(group)[unit] for group in alike), unit, entry]
        self._counts = [int(group.max()) + 1 for group in self._groups]
        measured = measured[-WINDOW:]
        self._observe(measured)
        grid = [sizes] if sizes else list(product(CORRECTIONS, NOISE))
        if not measured:
            grid = [(CORRECTIONS[1], NOISE[2])]
        self._fit(grid)

    def _observe(self, measured: Sequence[Observation]) -> None:
        starts = [0, *accumulate(self._lengths)]
        changes = [(n, unit, *pair) for n, one in enumerate(measured) for unit, pair in one.change.items()]
        rows = torch.tensor([n for n, *_ in changes], dtype=torch.long)
        signs = torch.zeros(len(measured), len(self._values), dtype=torch.float64)  # [measured, entries]
        signs[rows, torch.tensor([starts[unit] + old for _, unit, old, _ in changes], dtype=torch.long)] = -1
        signs[rows, torch.tensor([starts[unit] + new for _, unit, _, new in changes], dtype=torch.long)] = 1
        parts = signs * self._values
        least = 1e-3 * float(self._values.abs().mean()) + 1e-12  # where the table knows no damage
        self._size = parts.norm(dim=1).clamp_min(least)  # [measured]
        parts /= self._size[:, None]
        sums = [
            parts.new_zeros(len(parts), count).index_add_(1, group, parts)
            for group, count in zip(self._groups, self._counts, strict=True)
        ]
        self._features = torch.cat(sums, 1)  # [measured, unknowns]
        self._predicted = parts.sum(1)
        self._differences = torch.tensor([one.difference for one in measured], dtype=torch.float64) / self._size
        self._sequences = torch.tensor([one.sequences for one in measured], dtype=torch.float64)

    def _fit(self, grid: Sequence[tuple[float, float]]) -> None:
        """Fit with the sizes under which the measurements are most likely."""
        residual, best = self._differences - self._predicted, -math.inf
        for correction, noise in grid:
            scaled = self._features * self._deviations(correction)
            error = UNEXPLAINED_DEVIATION**2 + noise**2 / self._sequences
            factor = torch.linalg.cholesky(scaled @ scaled.T + torch.diag(error))
            solved = torch.cholesky_solve(residual[:, None], factor)[:, 0]
            likelihood = -0.5 * float(residual @ solved) - float(factor.diagonal().log().sum())
            if likelihood > best + 1e-9:
                best, self.sizes = likelihood, (correction, noise)
                self._factor, self._solved, self._error = factor, solved, error
        self._features *= self._deviations(self.sizes[0])
        self._mean = self._features.T @ self._solved  # [unknowns]
        self._explained = self._predicted + self._features @ self._mean

    def _deviations(self, correction: float) -> Tensor:
        """Return the standard deviation of every unknown."""
        sizes = [1.0] + [correction] * (len(self._counts) - 1)
        return torch.repeat_interleave(torch.tensor(sizes, dtype=torch.float64), torch.tensor(self._counts))

    def _table(self, unknowns: Tensor) -> UnitValues:
        parts = (unknowns * self._deviations(self.sizes[0])).split(self._counts)
        factor = 1 + sum(part[group] for part, group in zip(parts, self._groups, strict=True))
        return [row.tolist() for row in (self._values * factor).split(self._lengths)]

    def mean(self) -> UnitValues:
        """Return the values to expect."""
        return self._table(self._mean)

    def expected_differences(self) -> list[float]:
        """Return of each measurement the difference to expect on all sequences: the measured one, drawn to the fit."""
        return ((self._explained + UNEXPLAINED_DEVIATION**2 * self._solved) * self._size).tolist()


# ---------------------------------------------------------------- the state


@dataclass
class SearchState:
    """The state after `generation` generations. Chance is drawn anew in each, from the seed and its number."""

    start: Choice
    parent: Choice
    scale: float = 1.0  # KL for a damage of the table
    generation: int = 0
    idle: int = 0  # generations since the parent changed
    rejected: list[Choice] = field(default_factory=list)  # measured since then
    tokens: int = 0  # scored: of all candidates, whatever they share
    forwards: float = 0.0  # tokens that went through the whole model
    measured: list[Observation] = field(default_factory=list)  # the latest
    trace: list[dict[str, float]] = field(default_factory=list)

    def learn(self, measured: Sequence[Observation]) -> None:
        self.measured = [*self.measured, *measured][-WINDOW:]


def fingerprint(problem: Problem, damages: Sequence[Sequence[float]], settings: Mapping[str, Any]) -> str:
    """Return the hash of all that the course of a search depends on; settings: JSON values."""
    units = [(unit.name, unit.block, [entry.nbytes for entry in unit.entries]) for unit in problem.units]
    content = [STATE_VERSION, units, problem.budget, damages, settings]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def save(folder: Path, identity: str, state: SearchState) -> None:
    """Replace the file by one that is whole."""
    write_text(folder / f"search-{identity}.json", json.dumps({"identity": identity, **asdict(state)}))


def load(folder: Path, identity: str) -> SearchState | None:
    """Read the state of this search; None if there is none, or what is there cannot be read."""
    try:
        stored = json.loads(read_text(folder / f"search-{identity}.json"))
        if json_text.mismatch(stored, STATE_LAYOUT) or stored.pop("identity") != identity:
            return None
        stored["measured"] = [_read_observation(one) for one in stored["measured"]]
        stored["rejected"] = [tuple(choice) for choice in stored["rejected"]]
        return SearchState(**{**stored, "start": tuple(stored["start"]), "parent": tuple(stored["parent"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_observation(stored: Mapping[str, Any]) -> Observation:
    change = {int(unit): (old, new) for unit, (old, new) in stored["change"].items()}
    return Observation(change, stored["difference"], stored["sequences"])
