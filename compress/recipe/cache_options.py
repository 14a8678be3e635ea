"""Read `allocate.cache_options`: settings that the keys and the values of each layer of a cache may get."""

from __future__ import annotations

from typing import Any

from compress.errors import RecipeError
from compress.recipe import blocks
from compress.recipe.yaml import Entries, error_at, mapping, plain, sequence


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
        try:
            keys, _ = (side.over(given).plain() for side in (settings.keys, settings.values))
        except RecipeError as error:
            raise error_at(node, f"allocate.cache_options: {error}") from error
        found.append({key: keys[key] for key in given})
    if any(option in found[:i] for i, option in enumerate(found)) or len(found) < 2:
        raise error_at(at, "allocate.cache_options are not two or more, all different; offer others")
    return tuple(found)
