"""Read `allocate.cache_options`: settings that the keys and the values of each layer of a cache may get.

    cache_options: [{bits: 2}, {bits: 4, evict: {keep: 0.5}}, {method: lloyd, bits: 3}]

`evict` says the share of the prompt's tokens that stays in a layer; the rest of eviction is one for all layers, in
kv_cache.evict.
"""

from __future__ import annotations

from typing import Any

from compress import plugins
from compress.errors import RecipeError, shown
from compress.kv.settings import CacheSettings
from compress.recipe import blocks
from compress.recipe.yaml import Entries, Node, error_at, mapping, plain, sequence


def cache_options(block: Entries, entries: Entries, estimator: str) -> tuple[dict[str, Any], ...]:
    """Return the options of the section `allocate`, each checked over the recipe's kv_cache; RecipeError."""
    listed = sequence(block, "cache_options")
    if not listed:
        return ()
    at = block["cache_options"][0]
    if "cache_bits" in block:
        raise error_at(at, "allocate: cache_bits and cache_options say the same thing; remove one")
    if "kv_cache" not in entries:
        raise error_at(at, "allocate: cache_options needs kv_cache; use a recipe that has it, such as w4kv4")
    if estimator == "rule":
        raise error_at(at, "allocate: cache_estimator rule knows of bits alone; offer cache_bits, or choose another")
    settings, found = blocks.cache(*entries["kv_cache"]), []
    for node in listed:
        mapping(node, "an option of cache_options")
        given = plain(node, "an option of cache_options")
        if "sink" in given:
            raise error_at(node, "allocate.cache_options: sink is one for keys and values; set kv_cache.sink")
        evict = _tokens(node, given.pop("evict"), settings) if "evict" in given else {}
        try:
            keys, _ = (side.over(given).plain() for side in (settings.keys, settings.values))
        except RecipeError as error:
            raise error_at(node, f"allocate.cache_options: {error}") from error
        found.append({**{key: keys[key] for key in given}, **evict})
    if any(option in found[:i] for i, option in enumerate(found)) or len(found) < 2:
        raise error_at(at, "allocate.cache_options are not two or more, all different; offer others")
    return tuple(found)


def _tokens(node: Node, given: Any, settings: CacheSettings) -> dict[str, Any]:
    """Return the entry `evict` of an option, checked; RecipeError."""
    where = "allocate.cache_options: evict"
    if settings.evict is None:
        raise error_at(node, f"{where} needs a method; set kv_cache.evict, {{method: snapkv, keep: 1.0}}")
    if not isinstance(given, dict) or set(given) != {"keep"}:
        raise error_at(
            node, f"{where} says keep, the share of tokens, and nothing else; set the rest in kv_cache.evict"
        )
    if not isinstance(keep := plugins.typed(given["keep"], float), float) or not 0 < keep <= 1:
        raise error_at(node, f"{where}: keep {shown(given['keep'])} is not a fraction above 0 and at most 1")
    return {"evict": {"keep": keep}}
