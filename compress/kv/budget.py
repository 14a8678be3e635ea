"""Bits where they count: how the keys and the values of each layer are stored, within a budget of bytes.

Each tensor kind of each layer is a unit of an allocation (compress/allocate/problem.py) with an entry for each option:
its exact bytes at a context length, and its damage. Two estimates of that:

    output_error   measured: the error of the layer's attention output with this unit alone coded by this option
    rule           KV-AdaQuant (arXiv 2502.15075): c 2^(-2 bits), so that one measurement, with the fewest bits, does

The published c are squared norms of W_K and W_V, which say that keys need more bits. That was found with groups along
channels; keys grouped along tokens can turn it round, so c is the measured error instead. `choose` solves the
allocation with the solver of the weights' bits (within a bound of the optimum); `raised` is the published greedy: all
units at their fewest bits, then again and again the raise of largest gain a bit that still fits.

    units = compress.evaluate.cache_options.measure(model, windows, recipe, options(recipe, (2, 3, 4, 8)), 65536)
    solution = choose(problem(units, budget))
    recipe = laid_out(recipe, solution.choice, options)      # a table of compress/kv/settings.py

Errors of layers and kinds are taken to add up; damage to what later layers see of earlier ones' errors is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.allocate.problem import Choice, Entry, Problem, Unit
from compress.allocate.solver import Solution, damages_of, solve
from compress.errors import BudgetError
from compress.kv.settings import KINDS

MEASURED, RULE = "output_error", "rule"


@dataclass(frozen=True)
class Option:
    """Settings laid over the recipe for the keys or the values of a layer."""

    name: str
    bits: float  # nominal, of a code
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """One tensor kind of one layer, by option."""

    layer: int
    kind: str
    numel: int  # elements of the context
    nbytes: tuple[int, ...]
    errors: tuple[float, ...]  # of the attention's output, relative squared


def options(bits: Sequence[int]) -> tuple[Option, ...]:
    """The recipe's method with these bits."""
    return tuple(Option(f"bits={b}", b, {"bits": b}) for b in bits)


def problem(units: Sequence[Measured], offered: Sequence[Option], budget: int) -> Problem:
    """The allocation of `budget` bytes for the whole cache at the measured context."""
    found = []
    for unit in units:
        least = min(range(len(offered)), key=lambda i: offered[i].bits)
        constant = unit.errors[least] * 4 ** offered[least].bits
        entries = [
            Entry(option.name, nbytes, option.bits, {MEASURED: error, RULE: constant * 4**-option.bits})
            for option, nbytes, error in zip(offered, unit.nbytes, unit.errors, strict=True)
        ]
        order = sorted(entries, key=lambda entry: (entry.nbytes, entry.option))
        name = f"layers.{unit.layer}.{unit.kind}"
        found.append(Unit(name, (name,), unit.layer, unit.numel, tuple(order)))
    return Problem(tuple(found), budget)


def choose(asked: Problem, estimator: str = MEASURED) -> Solution:
    """Least total damage within the budget. BudgetError if the fewest bits do not fit."""
    check(asked)
    return solve(asked, damages_of(asked, estimator))


def raised(asked: Problem, estimator: str = RULE) -> Choice:
    """The greedy of KV-AdaQuant; entries with more bits are those with more bytes."""
    check(asked)
    at = [min(range(len(unit.entries)), key=lambda i: unit.entries[i].bits) for unit in asked.units]
    while True:
        room = asked.budget - asked.nbytes(tuple(at))
        best: tuple[float, int, int] | None = None
        for number, unit in enumerate(asked.units):
            now = unit.entries[at[number]]
            for index, entry in enumerate(unit.entries):
                if entry.bits > now.bits and entry.nbytes - now.nbytes <= room:
                    gain = (now.damage[estimator] - entry.damage[estimator]) / (entry.bits - now.bits)
                    best = max(best, (gain, -number, -index)) if best else (gain, -number, -index)
        if best is None or best[0] <= 0:
            return tuple(at)
        at[-best[1]] = -best[2]


def check(asked: Problem) -> None:
    """BudgetError, in the words of a cache, unless some choice fits."""
    if asked.budget < asked.least:
        raise BudgetError(
            f"kv_cache: the fewest bits take {asked.least} bytes, more than the budget of {asked.budget}; raise the "
            "budget, shorten the context or offer fewer bits"
        )


def laid_out(recipe: Mapping[str, Any], asked: Problem, choice: Choice, offered: Sequence[Option]) -> dict[str, Any]:
    """The recipe (a table of compress/kv/settings.py) with what was chosen for each layer."""
    named = {option.name: option for option in offered}
    layers: dict[str, dict[str, Any]] = {key: dict(value) for key, value in recipe.get("layers", {}).items()}
    spans = {key for key in layers if not key.isdigit()}
    if spans:
        raise ValueError(f"layers are named one by one where bits are allocated, found {sorted(spans)}")
    for unit, index in zip(asked.units, choice, strict=True):
        _, layer, kind = unit.name.split(".")
        assert kind in KINDS
        own = layers.setdefault(layer, {})
        own[kind] = {**own.get(kind, {}), **named[unit.entries[index].option].settings}
    return {**recipe, "layers": layers}
