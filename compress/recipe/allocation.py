"""Read the section `allocate` of a recipe: options of weights, of embeddings and head, and of the cache.

    allocate:
      target: 2.1GiB
      options: [{bits: 2}, {bits: 4}]
      tables: [{bits: 8}, {keep: true}]                       # of the embeddings and the head
      cache_options: [{bits: 2}, {bits: 4, evict: {keep: 0.5}}, {method: lloyd, bits: 3}]

What a table costs is measured as a KL, in nats a token. It can be added only to damages of linears in the same unit.
`evict` of a cache option is the share of the prompt's tokens that stays in a layer; the rest of eviction is one for all
layers, in kv_cache.evict.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from yaml import Node, ScalarNode

from compress import plugins
from compress.errors import RecipeError, shown
from compress.kv.settings import CacheSettings
from compress.recipe import blocks
from compress.recipe.blocks import build, check_table, is_kept, method, scheme, table_default
from compress.recipe.schema import ALLOCATE_KEYS, KEEP, OF_EXPERTS, TABLES, Allocation, CacheEstimator, Target, Units
from compress.recipe.yaml import Entries, error_at, mapping, plain, sequence, value

if TYPE_CHECKING:
    from compress.types import Scheme

# The allocator where a recipe gives a target and no method.
DEFAULT_METHOD = "knapsack"
# The bits that are offered where a recipe lists no options.
DEFAULT_BITS = (2, 3, 4, 5, 6, 8)
# Damages that are a divergence of the whole model; what stands for them or measures whole choices.
IN_NATS = frozenset({"kl_one_at_a_time", "kl_one_at_a_time_from_base", "kl_shares", "noise", "auto", "joint"})
# Former name of an estimator -> its name, and the keys that hold one.
RENAMED_ESTIMATORS = {"swap": "kl_one_at_a_time", "swap_base": "kl_one_at_a_time_from_base"}
ESTIMATOR_KEYS = ("estimator", "scale", "cache_estimator")


def allocation(entries: Entries, quantize: Scheme) -> Allocation | None:
    """Return the section `allocate` of a recipe, None without one; RecipeError."""
    if "allocate" not in entries:
        return None
    at, node = entries["allocate"]
    block = rename_estimators(mapping(node, "allocate"))
    if "method" in block:
        module, name = method(block, "allocate"), value(block, "method", str)
    else:
        module, name = plugins.load("allocate", DEFAULT_METHOD), DEFAULT_METHOD
    listed = sequence(block, "options")
    context = _context(block, entries)
    if quantize.method == KEEP and listed:
        raise error_at(block["options"][0], "allocate: options are for weights and need quantize; offer cache_bits")
    options: tuple[Scheme | None, ...] = tuple(_option(option, quantize) for option in listed)
    if quantize.method != KEEP and not listed:
        options = _all_bits(quantize, at)
    if quantize.method != KEEP and len(set(options)) < max(2, len(options)):
        raise error_at(block["options"][0] if listed else at, "allocate needs two or more options, all different")
    target = value(block, "target", str | None)
    units = value(block, "units", Units, "fused")
    samples = value(block, "samples", int, Allocation.samples)
    rest = {key: entry for key, entry in block.items() if key not in ALLOCATE_KEYS}
    config = build(rest, at, f"allocate ({name})", module.Config(), ALLOCATE_KEYS)
    if samples < 1:
        raise error_at(block["samples"][0], f"allocate: samples {samples} is not positive")
    if units != "expert" and module.needs(config) & OF_EXPERTS:
        raise error_at(at, f"allocate: {name} chooses for whole experts; set allocate.units to expert, not {units}")
    tables = tuple(_option(option, table_default()) for option in sequence(block, "tables"))
    check_tables(tables, block, entries, quantize)
    check_damages(block, name, config, module.needs(config))
    bits = value(block, "cache_bits", tuple[float, ...], ())
    try:
        wanted = Target(target) if target is not None else None
        if wanted is not None and context is not None and not wanted.is_size:
            raise ValueError(f"a target with a context is a size (24GiB), not {target}")
    except ValueError as error:
        raise error_at(block["target"][0], f"allocate: {error}") from error
    estimator = value(block, "cache_estimator", CacheEstimator, Allocation.cache_estimator)
    offered = cache_options(block, entries, estimator)
    return Allocation(name, config, options, wanted, units, samples, context, bits, estimator, offered, tables)


def _context(block: Entries, entries: Entries) -> int | None:
    """Return how many tokens' cache is within the target."""
    context = value(block, "context", int | None)
    if context is not None and context < 1:
        raise error_at(block["context"][0], f"allocate: context {context} is not positive")
    asked = {"context": context, "cache_bits": value(block, "cache_bits", tuple[float, ...], ())}
    for key in [key for key, given in asked.items() if given and "kv_cache" not in entries]:
        raise error_at(block[key][0], f"allocate: {key} needs kv_cache; use a recipe that has it, such as w4kv4")
    return context


def _option(node: Node, above: Scheme) -> Scheme | None:
    entries = mapping(node, "an option")
    return None if is_kept(entries, "an option") else scheme(entries, node, "an option", above)


def _all_bits(quantize: Scheme, at: Node) -> tuple[Scheme, ...]:
    """Return the scheme at every number of bits that its method takes."""
    options = []
    for bits in DEFAULT_BITS:
        try:
            options.append(dataclasses.replace(quantize, config=dataclasses.replace(quantize.config, bits=bits)))
        except (TypeError, ValueError):  # no such setting, or not this number
            continue
    if len(options) < 2:
        raise error_at(at, f"allocate: {quantize.method} has no bits to choose; list the options")
    return tuple(options)


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
    settings, options = blocks.cache(*entries["kv_cache"]), list[dict[str, Any]]()
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
        options.append({**{key: keys[key] for key in given}, **evict})
    if any(option in options[:i] for i, option in enumerate(options)) or len(options) < 2:
        raise error_at(at, "allocate.cache_options are not two or more, all different; offer others")
    return tuple(options)


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


def check_tables(options: tuple[Scheme | None, ...], block: Entries, recipe: Entries, quantize: Scheme) -> None:
    """Raise RecipeError for options of tables that leave no choice, or that a section of the recipe contradicts.

    block: the section `allocate`; recipe: all sections.
    """
    if not options:
        return
    at = block["tables"][0]
    if quantize.method == KEEP:
        raise error_at(at, "allocate: tables are for weights and need quantize; remove them")
    for section in TABLES:
        if section in recipe:
            raise error_at(
                recipe[section][0], f"{section} and allocate.tables say both how it is stored; remove one of them"
            )
    if len(set(options)) < max(2, len(options)):
        raise error_at(at, "allocate: tables needs two or more options, all different")
    for option, node in zip(options, sequence(block, "tables"), strict=True):
        if option is not None:
            check_table(option, node, "allocate: tables")


def check_damages(block: Entries, name: str, config: Any, needs: Set[str]) -> None:
    """Raise RecipeError for an allocator that does not add up damages in nats a token; needs: what it asks for."""
    others = sorted(needs - IN_NATS)
    if not sequence(block, "tables") or (needs and not others) or getattr(config, "scale", "none") in IN_NATS:
        return
    what = f"by {' and '.join(others)}" if others else "without damages"
    raise error_at(
        block["tables"][0],
        f"allocate: {name} chooses {what}, which the KL that a table is measured by cannot be added to; use method "
        "knapsack with the estimator auto, kl_one_at_a_time, kl_shares or noise, or with a scale by one of these",
    )


def rename_estimators(entries: Entries) -> Entries:
    """Return the settings of an allocation with the names of today; each former name gets one line on stderr."""
    renamed = dict(entries)
    for key in ESTIMATOR_KEYS:
        at, node = entries.get(key, (None, None))
        if at is not None and isinstance(node, ScalarNode) and node.value in RENAMED_ESTIMATORS:
            _tell(f"allocate: {key}: {node.value} is called {RENAMED_ESTIMATORS[node.value]} now")
            renamed[key] = (at, ScalarNode(node.tag, RENAMED_ESTIMATORS[node.value], node.start_mark, node.end_mark))
    return renamed


@functools.cache
def _tell(line: str) -> None:
    """Print a line on stderr, once in a process."""
    print(line, file=sys.stderr)
