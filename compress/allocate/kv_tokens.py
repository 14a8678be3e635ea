"""Offer tokens beside bits: the share of a layer's tokens that stays is a choice like the bits of its keys and values.

An option {bits: 4, evict: {keep: 0.5}} says both; one without `evict` keeps what the recipe's own section says. Keys
and values of a layer store the same tokens, so their options go together where both have the same share.

Bytes are those of the tokens that stay at the context, a prompt and the tokens behind it
(compress/kv/evict/kept_tokens.py). Damage is that of the codes plus that of the tokens, each measured with the other
left out (compress/evaluate/cache_layers.py for tokens). Codes of tokens that are forgotten do no harm, so the sum is
more than what both cost together, the more the less stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from compress.allocate import kv_sizes
from compress.allocate.kv_budget import CacheOption, LayerCosts
from compress.allocate.kv_sizes import CacheSizes
from compress.errors import RecipeError
from compress.evaluate import cache_layers
from compress.evaluate.reader import Candidate, Say
from compress.kv.evict import kept_tokens
from compress.kv.evict.settings import Eviction
from compress.kv.settings import CacheSettings


@dataclass(frozen=True)
class Asked:
    """A recipe's cache, the options of its layers and the context that they are for."""

    settings: CacheSettings
    options: Sequence[CacheOption]
    context: int  # [tokens]

    def kept(self, model: Any, keep: float | None, sizes: CacheSizes) -> dict[int, int]:
        """Return how many tokens of the prompt stay in each layer that is coded, with this share of an option."""
        changed = replace(self.settings, evict=eviction(self.settings, keep))
        counts = kept_tokens.by_layer(model.config, changed, self.context)
        return {layer: counts[layer] for layer, _ in sizes.units}

    def evictions(self) -> dict[float | None, Eviction]:
        """Return the different ways in which options evict, by their shares."""
        ways = {option.keep: eviction(self.settings, option.keep) for option in self.options}
        return {keep: way for keep, way in ways.items() if way is not None}


def check(settings: CacheSettings) -> None:
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


def eviction(settings: CacheSettings, keep: float | None) -> Eviction | None:
    """Return how tokens are evicted where layers keep this share; None: they are not.

    keep: of an option; None: what the settings say.
    """
    if settings.evict is None or keep == 1:
        return None
    if keep is None:
        return None if settings.evict.budget.keep == 1 else settings.evict
    return replace(settings.evict, budget=replace(settings.evict.budget, keep=keep, keep_by_layer=()))


def chosen(settings: CacheSettings, shares: dict[int, float | None], layers: int) -> Eviction | None:
    """Return how tokens are evicted where these layers, of all that the model has, keep these shares.

    shares: by layer, None where it keeps what the settings say. Layers that are not among them keep all.
    """
    if settings.evict is None or all(share is None for share in shares.values()):
        return settings.evict
    budget = settings.evict.budget
    own = budget.keep_by_layer or (1.0 if budget.keep is None else budget.keep,) * layers
    by_layer = [1.0] * layers
    for layer, share in shares.items():
        by_layer[layer] = own[layer] if share is None else share
    if all(share == 1 for share in by_layer):
        return None
    if len({by_layer[layer] for layer in shares}) == 1:
        alike = replace(budget, keep=by_layer[min(shares)], keep_by_layer=())
    else:
        alike = replace(budget, keep=None, keep_by_layer=tuple(by_layer))
    return replace(settings.evict, budget=alike)


def sized(model: Any, tokens: Tensor, caches: Sequence[Candidate], asked: Asked) -> list[CacheSizes]:
    """Return the bytes of each option at the context; tokens int64 [1, seq_len], caches: of the options, all tokens."""
    alike = {id(candidate): candidate for candidate in caches}
    whole = dict(zip(alike, kv_sizes.sized(model, tokens, list(alike.values()), asked.context), strict=True))
    known: dict[tuple[int, int], CacheSizes] = {}
    prompt = kept_tokens.prompt_of(asked.context)

    def of_kept(candidate: Candidate, kept: int) -> CacheSizes:
        if (id(candidate), kept) not in known:
            stored = kept + asked.context - prompt
            known[id(candidate), kept] = kv_sizes.sized(model, tokens, [candidate], stored, kept)[0]
        return known[id(candidate), kept]

    found = []
    for candidate, option in zip(caches, asked.options, strict=True):
        every = whole[id(candidate)]
        counts, units = asked.kept(model, option.keep, every), dict(every.units)
        for layer, kind in every.units:
            if (kept := counts[layer]) < prompt:
                places = kept_tokens.places(kept, layer in every.before_rope) if kind == "keys" else 0
                units[layer, kind] = of_kept(candidate, kept).units[layer, kind] + places
        saved = sum(every.units.values()) - sum(units.values())
        found.append(replace(every, units=units, total=every.total - saved))
    return found


def measure(
    model: Any, windows: Tensor, asked: Asked, sizes: Sequence[CacheSizes], say: Say, batch: int = 1
) -> tuple[LayerCosts, ...]:
    """Return what forgetting tokens costs in each layer, by option; none where the settings do not evict.

    windows int64 [windows, seq_len]; `say` is told of them for each of `asked.evictions()`.
    """
    if asked.settings.evict is None:
        return ()
    ways = asked.evictions()
    scores = cache_layers.eviction_costs(model, windows, asked.settings, list(ways.values()), say, batch)
    by_keep = dict(zip(ways, scores, strict=True))
    counts = {option.keep: asked.kept(model, option.keep, sizes[0]) for option in asked.options}
    later = asked.context - kept_tokens.prompt_of(asked.context)
    found = []
    for layer in sorted({layer for layer, _ in sizes[0].units}):
        each = [by_keep.get(option.keep) for option in asked.options]
        found.append(
            LayerCosts(
                layer,
                tuple(0.0 if one is None else one.errors.get(layer, 0.0) for one in each),
                tuple(0.0 if one is None else one.kls.get(layer, 0.0) for one in each),
                tuple((counts[option.keep][layer] + later) / asked.context for option in asked.options),
                max((one.tokens for one in scores), default=0),
            )
        )
    return tuple(found)
