"""Bits where they count: how the keys and the values of each layer are stored, within a budget of bytes.

Each tensor kind of each layer is a unit of an allocation (compress/allocate/problem.py) with an entry for each option:
its bytes at a context length, and its damage. Three estimates of that:

    swap           nats a token, as those of weights are: KL(exact || cache) with this kind coded by this option in all
                   layers, shared out among the layers by their output errors; units of weights may stand beside them
    output_error   measured: the error of the layer's attention output with this unit alone coded by this option
    rule           KV-AdaQuant (arXiv 2502.15075): c 2^(-2 bits), so that one measurement, with the fewest bits, does

The published c are squared norms of W_K and W_V, which say that keys need more bits. That was found with groups along
channels; keys grouped along tokens can turn it round, so c is the measured error instead. `choose` solves the
allocation with the solver of the weights' bits (within a bound of the optimum); `raised` is the published greedy: all
units at their fewest bits, then again and again the raise of largest gain a bit that still fits.
`measure` is that of compress/allocate/kv_options.py.

    costs = measure(model, windows, candidates, sized(model, tokens, candidates, 65536), say)
    asked = problem(costs.units, options, budget)
    recipe = laid_out(recipe, chosen(asked.units, choose(asked).choice), layers, options)

Errors of layers and kinds are taken to add up; damage to what later layers see of earlier ones' errors is in `swap`
only. compress/allocate/kv_session.py puts this beside the weights: one budget for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from compress.allocate.problem import Choice, Entry, Problem, Unit
from compress.allocate.solver import Solution, damages_of, solve
from compress.errors import BudgetError
from compress.kv.settings import CacheSettings, LayerRule

SWAP: Final = "swap"
MEASURED: Final = "output_error"
RULE: Final = "rule"
PREFIX = "kv_cache.layers."  # of the units' names: kv_cache.layers.3.keys


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
    kls: tuple[float, ...]  # this unit's share of the divergence, nats a token


def options(bits: Sequence[float]) -> tuple[Option, ...]:
    """The recipe's method with these bits."""
    return tuple(Option(f"bits={b:g}", b, {"bits": b}) for b in bits)


def units(measured: Sequence[Measured], offered: Sequence[Option]) -> tuple[Unit, ...]:
    """What an allocation chooses for."""
    found = []
    for unit in measured:
        least = min(range(len(offered)), key=lambda i: offered[i].bits)
        constant = unit.errors[least] * 4 ** offered[least].bits
        entries = [
            Entry(option.name, nbytes, option.bits, {SWAP: kl, MEASURED: error, RULE: constant * 4**-option.bits})
            for option, nbytes, error, kl in zip(offered, unit.nbytes, unit.errors, unit.kls, strict=True)
        ]
        order = sorted(entries, key=lambda entry: (entry.nbytes, entry.option))
        name = f"{PREFIX}{unit.layer}.{unit.kind}"
        found.append(Unit(name, (name,), unit.layer, unit.numel, tuple(order)))
    return tuple(found)


def problem(measured: Sequence[Measured], offered: Sequence[Option], budget: int) -> Problem:
    """The allocation of `budget` bytes for what is coded of the cache at the measured context."""
    return Problem(units(measured, offered), budget)


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


def chosen(asked: Sequence[Unit], choice: Choice) -> dict[int, dict[str, str]]:
    """Layer -> kind -> name of an option."""
    found: dict[int, dict[str, str]] = {}
    for unit, index in zip(asked, choice, strict=True):
        layer, kind = unit.name.removeprefix(PREFIX).split(".")
        found.setdefault(int(layer), {})[kind] = unit.entries[index].option
    return found


def laid_out(
    settings: CacheSettings, options_by_layer: Mapping[int, Mapping[str, str]], layers: int, offered: Sequence[Option]
) -> CacheSettings:
    """Return the settings with what was chosen for each layer of the model; the rules that were there are worked in.

    A rule says what differs from the settings' keys and values; layers that got the same share one.
    """
    named = {option.name: option for option in offered}
    codings = settings.by_layer(layers)
    alike: list[tuple[dict[str, Any], list[int]]] = []
    for layer, kinds in options_by_layer.items():
        said = {}
        for kind, option in kinds.items():
            own = {**codings[layer][kind].plain(), **named[option].settings}
            common = settings.of(kind).plain()
            differs = {key: value for key, value in own.items() if value != common.get(key)}
            said[kind] = own if "method" in differs else differs
        same = [numbers for other, numbers in alike if other == said]
        if same:
            same[0].append(layer)
        else:
            alike.append((said, [layer]))
    rules = [LayerRule(tuple(numbers), said) for said, numbers in alike if any(said.values())]
    return replace(settings, layers=tuple(rules))
