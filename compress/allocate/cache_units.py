"""Make units of an allocation from the keys and the values of a cache, beside those of weights.

Each tensor kind of each layer is a unit of the problem (compress/allocate/problem.py) with an entry for each option:
its bytes at a context length, and its damage, the increase of a loss. Three estimators of that:

    kl_one_at_a_time   nats a token, as those of weights are: KL(exact || cache) with this kind coded by this option in
                       all layers, shared out among the layers by their output errors
    output_error       the measured error of the layer's attention output with this unit alone coded by this option
    rule               KV-AdaQuant (arXiv 2502.15075): c 2^(-2 bits), so that one measurement, of the fewest bits, does

The published c are squared norms of W_K and W_V, which say that keys need more bits. That was found with groups along
channels; keys grouped along tokens can turn it round, so c is the measured error here. `raise_bits` is the published
greedy: all units at their fewest bits, then again and again the raise of largest gain a bit that still fits. The other
estimators are summed by the solver of the weights' bits (within a bound of the optimum).

Where options say how many tokens stay, the unit is a layer: its entries are all pairs
of an option for keys and one for values that keep the same share, and their damage that of both and of the tokens that
are forgotten.

Errors of layers, kinds and tokens are taken to add up; damage to what later layers see of earlier ones' errors is in
`kl_one_at_a_time` only. compress/allocate/cache_share.py divides one target between both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from compress.allocate.cache_options import CacheOption
from compress.allocate.problem import KL_ONE_AT_A_TIME, Choice, Problem, Unit, UnitEntry
from compress.allocate.solver import damages_of, solve
from compress.errors import BudgetError
from compress.kv.settings import KINDS
from compress.process_memory import show
from compress.recipe.schema import CacheEstimator

DIVERGENCE: Final = KL_ONE_AT_A_TIME
OUTPUT_ERROR: Final = "output_error"
RULE: Final = "rule"
UNIT_PREFIX = "kv_cache.layers."  # a unit is kv_cache.layers.3.keys
PAIR_SEPARATOR = " | "  # stands between the options of a layer's keys and values, in the name of an entry for both


@dataclass(frozen=True)
class TensorCosts:
    """The costs of one tensor kind of one layer, by option."""

    layer: int
    kind: str
    numel: int  # elements of the context
    nbytes: tuple[int, ...]
    errors: tuple[float, ...]  # of the attention's output, relative squared
    kls: tuple[float, ...]  # this unit's share of the divergence, nats a token


@dataclass(frozen=True)
class LayerCosts:
    """The costs of the tokens that one layer forgets, by option; their bytes are in those of keys and values."""

    layer: int
    errors: tuple[float, ...]  # of the attention's output, relative squared
    kls: tuple[float, ...]  # divergence, nats a token
    stored: tuple[float, ...]  # share of the context's tokens that the layer stores
    tokens: int  # that divergences were taken over


@dataclass(frozen=True)
class CacheCosts:
    """The costs of a recipe's cache at a context length."""

    units: tuple[TensorCosts, ...]
    fixed_nbytes: int  # of what no option changes: layers that stay exact, rotary rows
    tokens: int  # that divergences were taken over
    window: int = 0  # [tokens] of the windows on which they were measured
    forgotten: tuple[LayerCosts, ...] = ()  # by layer, where tokens are evicted


@dataclass(frozen=True)
class CacheOffer:
    """The options of a recipe's cache with their costs."""

    options: tuple[CacheOption, ...]
    costs: CacheCosts
    context: int
    layers: int  # of the model

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that an allocation chooses for."""
        if self.shares_tokens:
            return layer_units(self.costs, self.options)
        return kind_units(self.costs.units, self.options)

    @property
    def shares_tokens(self) -> bool:
        """Whether options say how many tokens stay, so that those of keys and values go together."""
        return any(option.keep is not None for option in self.options)


def kind_units(costs: Sequence[TensorCosts], options: Sequence[CacheOption]) -> tuple[Unit, ...]:
    """Return the units that an allocation chooses for, each with an entry for each option."""
    made = []
    for unit in costs:
        bits = [8 * n / unit.numel if o.bits is None else o.bits for o, n in zip(options, unit.nbytes, strict=True)]
        fewest = min(range(len(options)), key=lambda i: bits[i])
        constant = unit.errors[fewest] * 4 ** bits[fewest]
        entries = [
            UnitEntry(option.name, nbytes, b, {DIVERGENCE: kl, OUTPUT_ERROR: error, RULE: constant * 4**-b})
            for option, b, nbytes, error, kl in zip(options, bits, unit.nbytes, unit.errors, unit.kls, strict=True)
        ]
        order = sorted(entries, key=lambda entry: (entry.nbytes, entry.option))
        name = f"{UNIT_PREFIX}{unit.layer}.{unit.kind}"
        made.append(Unit(name, (name,), unit.layer, unit.numel, tuple(order)))
    return tuple(made)


def layer_units(costs: CacheCosts, options: Sequence[CacheOption]) -> tuple[Unit, ...]:
    """Return a unit for each layer, with an entry for each pair of options that keep the same share of tokens."""
    by_place = {(unit.layer, unit.kind): unit for unit in costs.units}
    alike = [(k, v) for k, v in product(range(len(options)), repeat=2) if options[k].keep == options[v].keep]
    made = []
    for of in costs.forgotten:
        keys, values = (by_place[of.layer, kind] for kind in KINDS)
        numel, entries = keys.numel + values.numel, []
        for k, v in alike:
            nbytes = keys.nbytes[k] + values.nbytes[v]
            damage = {
                DIVERGENCE: keys.kls[k] + values.kls[v] + of.kls[k],
                OUTPUT_ERROR: keys.errors[k] + values.errors[v] + of.errors[k],
            }
            name = f"{options[k].name}{PAIR_SEPARATOR}{options[v].name}"
            entries.append(UnitEntry(name, nbytes, 8 * nbytes / numel, damage))
        order = sorted(entries, key=lambda entry: (entry.nbytes, entry.option))
        names = tuple(f"{UNIT_PREFIX}{of.layer}.{kind}" for kind in KINDS)
        made.append(Unit(f"{UNIT_PREFIX}{of.layer}", names, of.layer, numel, tuple(order)))
    return tuple(made)


def raise_bits(problem: Problem, estimator: str = RULE) -> Choice:
    """Return the choice of KV-AdaQuant's greedy; entries with more bits are those with more bytes."""
    problem.check()
    at = [min(range(len(unit.entries)), key=lambda i: unit.entries[i].bits) for unit in problem.units]
    while True:
        room = problem.budget - problem.nbytes(tuple(at))
        best: tuple[float, int, int] | None = None
        for number, unit in enumerate(problem.units):
            now = unit.entries[at[number]]
            for index, entry in enumerate(unit.entries):
                if entry.bits > now.bits and entry.nbytes - now.nbytes <= room:
                    gain = (now.damage[estimator] - entry.damage[estimator]) / (entry.bits - now.bits)
                    best = max(best, (gain, -number, -index)) if best else (gain, -number, -index)
        if best is None or best[0] <= 0:
            return tuple(at)
        at[-best[1]] = -best[2]


def join(offer: CacheOffer, weights: Sequence[Unit], room: int) -> Problem:
    """Return the problem of these weights and the cache together, in `room` bytes, what no option changes taken off.

    Raises BudgetError where the smallest options do not fit.
    """
    units, fixed = offer.units, offer.costs.fixed_nbytes
    together = Problem((*weights, *units), room - fixed)
    if together.budget < together.least:
        raise BudgetError(
            f"the target leaves {show(max(0, room))} for quantized weights and the cache, whose smallest options take "
            f"{show(together.least + fixed)}, {show(Problem(units, 0).least + fixed)} of it the cache of "
            f"{offer.context} tokens; raise the target, shorten the context, or offer smaller options"
        )
    return together


def divide(
    offer: CacheOffer, weights: Sequence[Unit], room: int, estimator: CacheEstimator = DIVERGENCE
) -> tuple[int, Choice]:
    """Return the bytes of the cache, everything included, and its choice; `room` bytes are for it and these weights.

    The cache's share is decided by divergences; with another estimator it is spent anew among layers and kinds. Raises
    BudgetError where the smallest options do not fit.
    """
    together = join(offer, weights, room)
    units, fixed = offer.units, offer.costs.fixed_nbytes
    choice = solve(together, damages_of(together, DIVERGENCE)).choice[len(weights) :]
    share = Problem(units, Problem(units, 0).nbytes(choice))
    if estimator == RULE:
        choice = raise_bits(share)
    elif estimator == OUTPUT_ERROR:
        choice = solve(share, damages_of(share, OUTPUT_ERROR)).choice
    return share.nbytes(choice) + fixed, choice


def describe(offer: CacheOffer, choice: Choice) -> dict[str, Any]:
    """Return the facts of a choice, as JSON values."""
    chosen = [unit.entries[i] for unit, i in zip(offer.units, choice, strict=True)]
    by_layer = chosen_options(offer.units, choice)
    number = {option.name: i for i, option in enumerate(offer.options)}
    at = {(layer, kind): number[name] for layer, by_kind in by_layer.items() for kind, name in by_kind.items()}
    of_kind = {kind: [unit for unit in offer.costs.units if unit.kind == kind] for kind in KINDS}
    forgotten = [(of, at[of.layer, "keys"]) for of in offer.costs.forgotten]
    divergence = sum(entry.damage[DIVERGENCE] for entry in chosen)
    if not offer.shares_tokens:
        divergence += sum(of.kls[i] for of, i in forgotten)
    return {
        "context": offer.context,
        "nbytes": sum(entry.nbytes for entry in chosen) + offer.costs.fixed_nbytes,
        "bits per element": {
            kind: 8 * sum(u.nbytes[at[u.layer, kind]] for u in of) / sum(u.numel for u in of)
            for kind, of in of_kind.items()
        },
        "divergence": divergence,
        "tokens": offer.costs.tokens,
        "measured at": offer.costs.window,
        "layers": {str(layer): by_kind for layer, by_kind in by_layer.items()},
        "layers of the model": offer.layers,
        **({"tokens stored": sum(of.stored[i] for of, i in forgotten) / len(forgotten)} if forgotten else {}),
        **({"tokens after prompts": forgotten[0][0].tokens} if forgotten else {}),
    }


def chosen_options(units: Sequence[Unit], choice: Choice) -> dict[int, dict[str, str]]:
    """Return layer -> kind -> name of an option."""
    by_layer: dict[int, dict[str, str]] = {}
    for unit, index in zip(units, choice, strict=True):
        option = unit.entries[index].option
        names = option.split(PAIR_SEPARATOR) if len(unit.members) > 1 else [option]
        for member, name in zip(unit.members, names, strict=True):
            layer, kind = member.removeprefix(UNIT_PREFIX).split(".")
            by_layer.setdefault(int(layer), {})[kind] = name
    return by_layer
