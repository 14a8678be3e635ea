"""Offer settings for the keys and the values of each layer of a cache, and lay what was chosen over a recipe.

An option says the bits, or any settings of the cache, and the share of a layer's tokens that stays: {bits: 4, evict:
{keep: 0.5}} says both; one without `evict` keeps what the recipe's own section says. Keys and values of a layer store
the same tokens, so their options go together where both have the same share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress import plugins
from compress.errors import RecipeError, shown
from compress.kv.evict.settings import Eviction
from compress.kv.generation import check_length
from compress.kv.settings import KINDS, CacheSettings, Coding, LayerRule, reading_layers
from compress.recipe.schema import Allocation, Recipe
from compress.run import kv_cache

DEFAULT_BITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class CacheOption:
    """Settings laid over the recipe for the keys or the values of a layer."""

    name: str
    bits: float | None  # nominal, of a code; None: options differ in more than that
    settings: Mapping[str, Any]
    keep: float | None = None  # share of the prompt's tokens that stays; None: as the recipe says


def options(
    settings: CacheSettings, bits: Sequence[float] = (), listed: Sequence[Mapping[str, Any]] = ()
) -> tuple[CacheOption, ...]:
    """Return an option for each of these bits, by default for those that the recipe's methods take.

    listed: settings of the cache, one option each, in place of bits.
    Raises RecipeError for bits that a method does not take, or that leave no choice.
    """
    if listed:
        return tuple(_listed_option(settings, each) for each in listed)
    if bits and len(set(bits)) < max(2, len(bits)):
        raise RecipeError(f"allocate.cache_bits: {list(bits)} are not two or more different numbers; offer others")
    offered = []
    for number in (int(b) if float(b).is_integer() else b for b in bits or DEFAULT_BITS):
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


def _listed_option(settings: CacheSettings, entry: Mapping[str, Any]) -> CacheOption:
    """Return the option of one entry of `cache_options`.

    A codec that shares out channels among all layers does so within each layer here, because layers get options of
    their own; RecipeError where the entry says otherwise.
    """
    codes = {key: value for key, value in entry.items() if key != "evict"}
    keep = entry["evict"]["keep"] if "evict" in entry else None
    named = [f"{key}={value}" for key, value in codes.items()]
    named += [] if keep is None else [f"tokens={keep:g}"]
    changes = [independent_settings(settings.of(kind).over(codes)) for kind in KINDS]
    for key in changes[0]:
        if key in codes:
            raise RecipeError(
                f"allocate.cache_options: {key}: {codes[key]} divides channels among layers, and so does the target; "
                f"set {key}: {changes[0][key]}"
            )
    alone = changes[0] if changes[0] == changes[1] else {}
    return CacheOption(", ".join(named) or "as it is", None, {**codes, **alone}, keep)


def independent_settings(coding: Coding) -> dict[str, str]:
    """Return the settings to change so that what a layer stores does not depend on the other layers."""
    alone: Mapping[str, tuple[str, str]] = getattr(plugins.load("kv", coding.method), "ALONE", {})
    return {key: alone_value for key, (shared, alone_value) in alone.items() if getattr(coding.config, key) == shared}


def check(config: Any, settings: CacheSettings, options: Sequence[CacheOption], context: int) -> int:
    """Return the number of the model's layers.

    Raises CompressError where the model has fewer positions than the context, RecipeError for a cache or an option that
    does not fit the model, and where no layer is left to choose for.
    """
    check_length(config, context)
    _check_eviction(settings)
    layers = kv_cache.check(config, settings)
    if not reading_layers(layers):
        raise RecipeError("kv_cache: skip_layers leaves no layer to code; name fewer, or give no context")
    for option in options:
        changed = replace(settings_at(settings, option), evict=eviction_keeping(settings, option.keep))
        try:
            kv_cache.check(config, changed)
        except RecipeError as error:
            raise RecipeError(f"the option {shown(option.name)} of the cache: {error}") from error
    return len(layers)


def settings_at(settings: CacheSettings, option: CacheOption) -> CacheSettings:
    """Return the settings with an option laid over keys and values of all layers."""
    rules = []
    for rule in settings.layers:
        kinds = {kind: {**rule.settings.get(kind, {}), **option.settings} for kind in KINDS}
        rules.append(replace(rule, settings={**rule.settings, **option.settings, **kinds}))
    keys, values = (settings.of(kind).over(option.settings) for kind in KINDS)
    return replace(settings, keys=keys, values=values, layers=tuple(rules))


def _check_eviction(settings: CacheSettings) -> None:
    """Raise RecipeError for ways to evict whose bytes at a context are not known before, or that say the same twice."""
    if settings.evict is None:
        return
    budget = settings.evict.budget
    where = "kv_cache.evict: a target with a context"
    if settings.evict.prunes:
        raise RecipeError(
            f"{where} measures what each layer forgets by itself, and {settings.evict.method} drops tokens for all "
            "layers behind one; choose another method, such as snapkv"
        )
    if budget.tokens is not None:
        raise RecipeError(f"{where} counts shares of its tokens; set keep in place of tokens")
    if budget.decode:
        raise RecipeError(f"{where} counts tokens that are evicted after the prompt; set decode: false")
    if budget.heads == "ada":
        raise RecipeError(f"{where} cannot tell the bytes of heads: ada, which the text decides; set equal or shared")
    if budget.layers != "equal":
        raise RecipeError(f"{where} divides tokens among layers itself; set layers: equal in place of {budget.layers}")


def eviction_keeping(settings: CacheSettings, keep: float | None) -> Eviction | None:
    """Return how tokens are evicted where layers keep this share; None: they are not.

    keep: of an option; None: what the settings say.
    """
    if settings.evict is None or keep == 1:
        return None
    if keep is None:
        return None if settings.evict.budget.keep == 1 else settings.evict
    return replace(settings.evict, budget=replace(settings.evict.budget, keep=keep, keep_by_layer=()))


def evictions(settings: CacheSettings, options: Sequence[CacheOption]) -> dict[float | None, Eviction]:
    """Return the different ways in which options evict, by their shares."""
    ways = {option.keep: eviction_keeping(settings, option.keep) for option in options}
    return {keep: way for keep, way in ways.items() if way is not None}


def eviction_by_layer(settings: CacheSettings, shares: dict[int, float | None], layers: int) -> Eviction | None:
    """Return how tokens are evicted where these layers, of all that the model has, keep these shares.

    shares: by layer, None where it keeps what the settings say. Layers that are not among them keep all.
    """
    if settings.evict is None or all(share is None for share in shares.values()):
        return settings.evict
    budget = settings.evict.budget
    common = budget.keep_by_layer or (1.0 if budget.keep is None else budget.keep,) * layers
    by_layer = [1.0] * layers
    for layer, share in shares.items():
        by_layer[layer] = common[layer] if share is None else share
    if all(share == 1 for share in by_layer):
        return None
    if len({by_layer[layer] for layer in shares}) == 1:
        alike = replace(budget, keep=by_layer[min(shares)], keep_by_layer=())
    else:
        alike = replace(budget, keep=None, keep_by_layer=tuple(by_layer))
    return replace(settings.evict, budget=alike)


def lay_out(
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
        changes = {}
        for kind, option in kinds.items():
            full = codings[layer][kind].over(named[option].settings).plain()
            common = settings.of(kind).plain()
            differs = {key: value for key, value in full.items() if value != common.get(key)}
            changes[kind] = full if "method" in differs else differs
        same = [numbers for other, numbers in alike if other == changes]
        if same:
            same[0].append(layer)
        else:
            alike.append((changes, [layer]))
    rules = [LayerRule(tuple(numbers), changes) for changes, numbers in alike if any(changes.values())]
    return replace(settings, layers=tuple(rules))


def apply_choice(recipe: Recipe, allocation: Allocation, facts: dict[str, Any]) -> Recipe:
    """Return the recipe with what the facts of a cache state: rules of its layers, and their shares of tokens."""
    assert recipe.kv_cache is not None, "the recipe was checked"
    offered = options(recipe.kv_cache, allocation.cache_bits, allocation.cache_options)
    by_layer = {int(layer): by_kind for layer, by_kind in facts["layers"].items()}
    layers, named = facts["layers of the model"], {option.name: option.keep for option in offered}
    cache = lay_out(recipe.kv_cache, by_layer, layers, offered)
    shares = {layer: named[by_kind["keys"]] for layer, by_kind in by_layer.items()}
    cache = replace(cache, evict=eviction_by_layer(recipe.kv_cache, shares, layers))
    return replace(recipe, kv_cache=cache)
