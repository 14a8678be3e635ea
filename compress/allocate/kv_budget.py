"""Choose how the keys and the values of each layer are stored, within a budget of bytes.

Each tensor kind of each layer is a unit of an allocation (compress/allocate/problem.py) with an entry for each option:
its bytes at a context length, and its damage, the increase of a loss. Three estimators of that:

    kl_one_at_a_time   nats a token, as those of weights are: KL(exact || cache) with this kind coded by this option in
                       all layers, shared out among the layers by their output errors
    output_error       the measured error of the layer's attention output with this unit alone coded by this option
    rule               KV-AdaQuant (arXiv 2502.15075): c 2^(-2 bits), so that one measurement, of the fewest bits, does

The published c are squared norms of W_K and W_V, which say that keys need more bits. That was found with groups along
channels; keys grouped along tokens can turn it round, so c is the measured error here. `raised` is the published
greedy: all units at their fewest bits, then again and again the raise of largest gain a bit that still fits. The other
estimators are summed by the solver of the weights' bits (within a bound of the optimum).

Where options say how many tokens stay (compress/allocate/kv_tokens.py), the unit is a layer: its entries are all pairs
of an option for keys and one for values that keep the same share, and their damage that of both and of the tokens that
are forgotten.

Errors of layers, kinds and tokens are taken to add up; damage to what later layers see of earlier ones' errors is in
`kl_one_at_a_time` only. compress/allocate/kv_share.py puts this beside the weights: one budget for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from compress import plugins
from compress.allocate.problem import KL_ONE_AT_A_TIME, Choice, Entry, Problem, Unit
from compress.allocate.solver import damages_of, solve
from compress.errors import BudgetError, RecipeError
from compress.kv.settings import KINDS, CacheSettings, Coding, LayerRule
from compress.process_memory import show
from compress.recipe.schema import CacheEstimator

DIVERGENCE: Final = KL_ONE_AT_A_TIME
OUTPUT_ERROR: Final = "output_error"
RULE: Final = "rule"
PREFIX = "kv_cache.layers."  # of the units' names: kv_cache.layers.3.keys
BESIDE = " | "  # between the options of a layer's keys and values, in the name of an entry for both
BITS = (1, 2, 3, 4, 6, 8)  # offered where a recipe lists none


@dataclass(frozen=True)
class CacheOption:
    """Settings laid over the recipe for the keys or the values of a layer."""

    name: str
    bits: float | None  # nominal, of a code; None: options differ in more than that
    settings: Mapping[str, Any]
    keep: float | None = None  # share of the prompt's tokens that stays; None: as the recipe says


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
            return pairs(self.costs, self.options)
        return units(self.costs.units, self.options)

    @property
    def shares_tokens(self) -> bool:
        """Whether options say how many tokens stay, so that those of keys and values go together."""
        return any(option.keep is not None for option in self.options)


def options(
    settings: CacheSettings, bits: Sequence[float] = (), listed: Sequence[Mapping[str, Any]] = ()
) -> tuple[CacheOption, ...]:
    """Return an option for each of these bits, by default for those that the recipe's methods take.

    listed: settings of the cache, one option each, in their place.
    Raises RecipeError for bits that a method does not take, or that leave no choice.
    """
    if listed:
        return tuple(_listed(settings, each) for each in listed)
    if bits and len(set(bits)) < max(2, len(bits)):
        raise RecipeError(f"allocate.cache_bits: {list(bits)} are not two or more different numbers; offer others")
    offered = []
    for number in (int(b) if float(b).is_integer() else b for b in bits or BITS):
        try:
            for side in (settings.keys, settings.values):
                replace(side.config, bits=number)
        except (TypeError, ValueError) as error:  # no such setting, or not this number
            if bits:
                raise RecipeError(f"allocate.cache_bits: {number:g} bits: {error}; offer others") from error
            continue
        offered.append(CacheOption(f"bits={number:g}", number, {"bits": number}))
    if len(offered) < 2:
        methods = " and ".join(dict.fromkeys((settings.keys.method, settings.values.method)))
        raise RecipeError(f"kv_cache: {methods} has no bits to choose; use a method that has, such as kivi")
    return tuple(offered)


def _listed(settings: CacheSettings, given: Mapping[str, Any]) -> CacheOption:
    """Return the option of one entry of `cache_options`.

    A codec that shares out channels among all layers does so within each layer here, because layers get options of
    their own; RecipeError where the entry says otherwise.
    """
    own = {key: value for key, value in given.items() if key != "evict"}
    keep = given["evict"]["keep"] if "evict" in given else None
    named = [f"{key}={value}" for key, value in own.items()]
    named += [] if keep is None else [f"tokens={keep:g}"]
    changes = [shared_out(settings.of(kind).over(own)) for kind in KINDS]
    for key in changes[0]:
        if key in own:
            raise RecipeError(
                f"allocate.cache_options: {key}: {own[key]} divides channels among layers, and so does the target; "
                f"set {key}: {changes[0][key]}"
            )
    alone = changes[0] if changes[0] == changes[1] else {}
    return CacheOption(", ".join(named) or "as it is", None, {**own, **alone}, keep)


def shared_out(coding: Coding) -> dict[str, str]:
    """Return the settings to change so that what a layer stores does not depend on the other layers."""
    alone: Mapping[str, tuple[str, str]] = getattr(plugins.load("kv", coding.method), "ALONE", {})
    return {key: own for key, (shared, own) in alone.items() if getattr(coding.config, key) == shared}


def units(costs: Sequence[TensorCosts], options: Sequence[CacheOption]) -> tuple[Unit, ...]:
    """Return the units that an allocation chooses for, each with an entry for each option."""
    made = []
    for unit in costs:
        bits = [8 * n / unit.numel if o.bits is None else o.bits for o, n in zip(options, unit.nbytes, strict=True)]
        fewest = min(range(len(options)), key=lambda i: bits[i])
        constant = unit.errors[fewest] * 4 ** bits[fewest]
        entries = [
            Entry(option.name, nbytes, b, {DIVERGENCE: kl, OUTPUT_ERROR: error, RULE: constant * 4**-b})
            for option, b, nbytes, error, kl in zip(options, bits, unit.nbytes, unit.errors, unit.kls, strict=True)
        ]
        order = sorted(entries, key=lambda entry: (entry.nbytes, entry.option))
        name = f"{PREFIX}{unit.layer}.{unit.kind}"
        made.append(Unit(name, (name,), unit.layer, unit.numel, tuple(order)))
    return tuple(made)


def pairs(costs: CacheCosts, options: Sequence[CacheOption]) -> tuple[Unit, ...]:
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
            name = f"{options[k].name}{BESIDE}{options[v].name}"
            entries.append(Entry(name, nbytes, 8 * nbytes / numel, damage))
        order = sorted(entries, key=lambda entry: (entry.nbytes, entry.option))
        names = tuple(f"{PREFIX}{of.layer}.{kind}" for kind in KINDS)
        made.append(Unit(f"{PREFIX}{of.layer}", names, of.layer, numel, tuple(order)))
    return tuple(made)


def raised(problem: Problem, estimator: str = RULE) -> Choice:
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


def joined(offer: CacheOffer, weights: Sequence[Unit], room: int) -> Problem:
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


def divided(
    offer: CacheOffer, weights: Sequence[Unit], room: int, estimator: CacheEstimator = DIVERGENCE
) -> tuple[int, Choice]:
    """Return the bytes of the cache, everything included, and its choice; `room` bytes are for it and these weights.

    The cache's share is decided by divergences; with another estimator it is spent anew among layers and kinds. Raises
    BudgetError where the smallest options do not fit.
    """
    together = joined(offer, weights, room)
    units, fixed = offer.units, offer.costs.fixed_nbytes
    choice = solve(together, damages_of(together, DIVERGENCE)).choice[len(weights) :]
    share = Problem(units, Problem(units, 0).nbytes(choice))
    if estimator == RULE:
        choice = raised(share)
    elif estimator == OUTPUT_ERROR:
        choice = solve(share, damages_of(share, OUTPUT_ERROR)).choice
    return share.nbytes(choice) + fixed, choice


def described(offer: CacheOffer, choice: Choice) -> dict[str, Any]:
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
        for member, name in zip(unit.members, option.split(BESIDE) if len(unit.members) > 1 else [option], strict=True):
            layer, kind = member.removeprefix(PREFIX).split(".")
            by_layer.setdefault(int(layer), {})[kind] = name
    return by_layer


def laid_out(
    settings: CacheSettings,
    options_by_layer: Mapping[int, Mapping[str, str]],
    layers: int,
    options: Sequence[CacheOption],
) -> CacheSettings:
    """Return the settings with the chosen option of each of the model's layers in place of the rules.

    A rule says what differs from the settings' keys and values; layers that got the same share one.
    """
    named = {option.name: option for option in options}
    codings = settings.by_layer(layers)
    alike: list[tuple[dict[str, Any], list[int]]] = []
    for layer, kinds in options_by_layer.items():
        said = {}
        for kind, option in kinds.items():
            own = codings[layer][kind].over(named[option].settings).plain()
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
