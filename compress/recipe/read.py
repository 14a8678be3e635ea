"""Read recipes from YAML, strictly, and write them back.

    name: gptq4                # by default that of the file
    description: 4-bit GPTQ, one scale for 128 weights
    calibration:               # CalibrationConfig
      num_samples: 128
      seq_len: 2048
      importance: none         # attention: tokens weigh what attention pays to them (RSQ); auto: where that is known
    transform:                 # in order, each a method of compress/transform and its `Config`; none by default
      - method: rotate
    quantize:                  # a method of compress/quant and its settings (its `Config`)
      method: gptq
      bits: 4
      incoherence: false       # true: choose codes in a random rotated basis; by default what suits the method
      activations: {bits: 8}   # quantize the inputs, too, at run time (`Activations`); by default they stay as they are
      lowrank: {rank: 16}      # two thin matrices that make up for what is lost (`Correction`); none by default
    rules:                     # the first match decides; fnmatch on the linear's full module name, case counts
      - match: "*.mlp.down_proj"
        bits: 8                # over the settings above; with `method:` over that method's defaults; or `keep: true`
      - match_any: ["*.k_proj", "*.qkv"]  # one is enough: for several architectures; of `match` each must be found
        bits: 8
    embeddings: {bits: 8}      # the table of token embeddings; a method whose format has rows; by default rtn at 8 bits
    head: {method: gptq, bits: 8}  # the output head, by any method; of a table that is both, what `head` says;
                               # {keep: true} leaves either as it is, which is the default
    ignore: ["lm_head"]        # kept as they are, before any rule; each must match a module or parameter of the model
    allocate:                  # which linears get which options; a method of compress/allocate and its `Config`
      method: knapsack
      target: 3.25bpw          # or 2.1GiB of all tensors, or 0.05kl: the smallest model within that divergence
      options: [{bits: 2}, {bits: 3}, {method: trellis, bits: 4}, {keep: true}]  # like rules; default: bits 2 to 8
      tables: [{bits: 8}, {bits: 4}, {keep: true}]  # of embeddings and head, which the target then counts, too
      units: fused             # what gets one option together: fused, linear, expert, block
      context: 65536           # the target is for the weights and for the kv_cache of so many tokens, by layer, K and V
      cache_bits: [2, 3, 4]    # what they may get; default: what the method of the cache takes
      cache_options: [{bits: 2}, {method: lloyd, bits: 3}]  # or any settings of the cache, in place of cache_bits, and
                               # evict: {keep: 0.5}, the share of tokens that stays
      cache_estimator: kl_one_at_a_time  # how the cache's share is spent; or output_error, rule (KV-AdaQuant)
    tune:                      # train what lies beside the codes: methods of compress/tune and their `Config`, or one
      - method: blockwise
        steps: 100
      - method: end_to_end
    kv_cache:                  # how generation stores keys and values (compress/kv/settings.py); by default as they are
      method: kivi
    experts:                   # of a mixture, `ExpertPruning`: tokens go without experts that matter little to them
      prune: true
    towers:                    # rules for linears beside the text (vision, audio); kept where none matches
      - match: "*.visual.*"    # by default 8 bits by rtn: only methods without data can be used here
        bits: 8
    export: gptq               # refuse what `compress export --to gptq` could not write without loss

Only `quantize.method` or `kv_cache.method` is required; without `quantize` all weights stay as they are. Keys and types
come from the dataclasses; anything else is an error with its line.

An override `key=value` ("quantize.bits=3", "rules.0.bits=2", "ignore=[]") replaces one value of the file
(compress/recipe/overrides.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from yaml import Node, ScalarNode, SequenceNode

from compress import plugins
from compress.errors import RecipeError, shown
from compress.recipe import facts, table_options
from compress.recipe.blocks import built, cache, is_kept, method, scheme, table, table_default
from compress.recipe.cache_options import cache_options
from compress.recipe.overrides import overridden
from compress.recipe.renamed import current
from compress.recipe.schema import (
    ALLOCATE_KEYS,
    KEEP,
    OF_EXPERTS,
    RENAMED,
    TABLES,
    TOP_KEYS,
    Allocation,
    CacheEstimator,
    CalibrationConfig,
    Recipe,
    Rule,
    Target,
    Units,
    settings,
)
from compress.recipe.steps import plain_step, plain_tuning, transforms, tuning
from compress.recipe.yaml import Entries, check_keys, compose, error_at, mapping, rename, sequence, value
from compress.storage.files import open_regular

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from compress.types import ExpertPruning, Scheme

ALLOCATOR = "knapsack"  # where a target is given and no method
BITS = (2, 3, 4, 5, 6, 8)  # offered where a recipe lists no options
TOWER = "rtn"  # for linears beside the text model, where a rule of `towers` names no method
FILE_LIMIT = 16 << 20  # bytes
PACKAGE, PAPERS = "compress.recipes", "papers"


def names() -> list[str]:
    """Return the names of the built-in recipes, sorted, those of papers behind the others."""
    return [*_names_in(files(PACKAGE)), *_names_in(files(PACKAGE) / PAPERS)]


def is_paper(name: str) -> bool:
    """Return whether a built-in recipe lies in recipes/papers, which holds what is not on the frontier."""
    return name in _names_in(files(PACKAGE) / PAPERS)


def text(name: str) -> str:
    """Return the YAML of a built-in recipe, comments included."""
    if name not in names():
        raise RecipeError(_unknown(name))
    folder = files(PACKAGE) / PAPERS if is_paper(name) else files(PACKAGE)
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def _names_in(folder: Traversable) -> list[str]:
    """Return the names of the recipes in a folder, sorted; none where there is no such folder."""
    entries = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def _unknown(name: str) -> str:
    """Return the error for a recipe that does not exist, with the names that are close to it."""
    close = plugins.close_words(name, names(), 3)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    return f"unknown recipe {shown(name)}; {guess}`compress recipes --all` lists them"


def describe(name: str) -> str:
    """Return the description of a built-in recipe."""
    return value(mapping(compose(text(name), f"{name}.yaml"), "the recipe"), "description", str, "")


def load(name_or_file: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the built-in recipe of that name, or else that of a file, with `key=value` overrides.

    A file with the name of a built-in recipe is meant by its path: ./int4. RecipeError says what is wrong and where:
    file and line, or the override.
    """
    path = Path(name_or_file)
    if name_or_file in names():
        name, root = name_or_file, compose(text(name_or_file), f"{name_or_file}.yaml")
    elif os.path.isfile(name_or_file):  # False for what no file can be called, too
        name, root = path.stem, _from_file(path)
    elif os.path.isdir(name_or_file):
        raise RecipeError(f"{name_or_file} is a directory; give a YAML file, or a built-in recipe (`compress recipes`)")
    else:
        raise RecipeError(f"there is no such file, and {_unknown(name_or_file)}")
    rename(root, RENAMED)
    recipe = _recipe(root, name)
    return _recipe(overridden(root, overrides), name) if overrides else recipe


def ambiguous(name: str) -> str | None:
    """Return a note that a built-in recipe is taken where a file here has its name, too; None without such a file."""
    if name not in names() or not Path(name).is_file():
        return None
    return f"{name} is the built-in recipe; the file of this name is ./{name}"


def dump(recipe: Recipe) -> str:
    """Return YAML with every default written out; loads back to an equal recipe."""
    return yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True, width=120)


def fingerprint(recipe: Recipe) -> str:
    """Return the sha256 (hex) of everything that decides numbers: all but the name and the description.

    calibration.bos is left out where it is auto: what samples begin with is then the tokenizer's matter, and recipes
    keep the fingerprint that they had before there was this key.
    """
    content = {key: part for key, part in _plain(recipe).items() if key not in ("name", "description")}
    if recipe.calibration.bos == "auto":
        del content["calibration"]["bos"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe in the layout of its YAML."""

    return {
        "name": recipe.name,
        "description": recipe.description,
        "calibration": dataclasses.asdict(recipe.calibration),
        "transform": [plain_step(step) for step in recipe.transform],
        **({"quantize": settings(recipe.quantize)} if recipe.packs else {}),
        "rules": [_plain_rule(rule) for rule in recipe.rules],
        "ignore": list(recipe.ignore),
        **{key: settings(found) for key in TABLES if (found := getattr(recipe, key)) is not None},
        **({"allocate": _plain_allocation(recipe.allocate)} if recipe.allocate is not None else {}),
        **plain_tuning(recipe.tune),
        **({"experts": dataclasses.asdict(recipe.experts)} if recipe.experts is not None else {}),
        **({"kv_cache": recipe.kv_cache.plain()} if recipe.kv_cache is not None else {}),
        **({"towers": [_plain_rule(rule) for rule in recipe.towers]} if recipe.towers else {}),
        **({"export": recipe.export} if recipe.export is not None else {}),
    }


def _plain_allocation(allocation: Allocation) -> dict[str, Any]:
    return {
        "method": allocation.method,
        "target": allocation.target.text if allocation.target is not None else None,
        "options": [_kept_or(option) for option in allocation.options],
        **({"tables": [_kept_or(option) for option in allocation.tables]} if allocation.tables else {}),
        "units": allocation.units,
        "samples": allocation.samples,
        "context": allocation.context,
        "cache_bits": list(allocation.cache_bits),
        **({"cache_options": [dict(each) for each in allocation.cache_options]} if allocation.cache_options else {}),
        "cache_estimator": allocation.cache_estimator,
        **dataclasses.asdict(allocation.config),
    }


def _kept_or(scheme: Scheme | None) -> dict[str, Any]:
    return settings(scheme) if scheme is not None else {"keep": True}


def _plain_rule(rule: Rule) -> dict[str, Any]:
    match = rule.match[0] if len(rule.match) == 1 else list(rule.match)
    return {"match_any" if rule.alternatives else "match": match, **_kept_or(rule.scheme)}


def _from_file(path: Path) -> Node:
    """Return the tree of a file; one that is no recipe but text is refused without a word of it in the error."""
    try:
        with open_regular(path) as stream:
            raw = stream.read(FILE_LIMIT + 1)
        content = raw.decode("utf-8")
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}; give a YAML file") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"cannot read the recipe {path}: it is not utf-8 text; give a YAML file") from error
    if len(raw) > FILE_LIMIT:
        raise RecipeError(f"{path} is not a recipe: it has more than {FILE_LIMIT >> 20} MiB; give a YAML file")
    root = compose(content, str(path))
    if isinstance(root, ScalarNode) and root.value:
        raise error_at(root, "a recipe must be keys with values, found text; give a YAML file")
    return root


def _recipe(root: Node, default_name: str) -> Recipe:
    entries = mapping(root, "a recipe")
    check_keys(entries, TOP_KEYS, "the recipe")
    facts.about(entries), facts.measurements(entries)  # checked, and left out: they decide nothing
    quantize = _quantize(entries, root)
    calibration = CalibrationConfig()
    if "calibration" in entries:
        at, block = entries["calibration"]
        calibration = built(mapping(block, "calibration"), at, "calibration", calibration)
    return Recipe(
        name=value(entries, "name", str, default_name),
        description=value(entries, "description", str, ""),
        calibration=calibration,
        quantize=quantize,
        rules=tuple(_rule(node, quantize) for node in sequence(entries, "rules")),
        ignore=value(entries, "ignore", tuple[str, ...], ()),
        transform=transforms(entries),
        allocate=_allocation(entries, quantize),
        tune=tuning(entries),
        experts=_experts(entries),
        kv_cache=cache(*entries["kv_cache"]) if "kv_cache" in entries else None,
        towers=_towers(entries),
        embeddings=table(entries, "embeddings"),
        head=table(entries, "head"),
        export=_target(entries),
    )


def _target(entries: Entries) -> str | None:
    """Return the format that the result must fit, as users name it; None without one."""
    if "export" not in entries:
        return None
    name, known = value(entries, "export", str, ""), [each.replace("_", "-") for each in plugins.names("export")]
    if name not in known:
        raise error_at(entries["export"][1], plugins.unknown("export target", name, known))
    return name


def _towers(entries: Entries) -> tuple[Rule, ...]:
    """Return the rules for what lies beside the text model; by default 8 bits without data."""
    from compress.types import Scheme

    nodes = sequence(entries, "towers")
    if nodes and "quantize" not in entries:
        raise error_at(entries["towers"][0], "towers needs quantize, which this recipe does not have")
    return tuple(_rule(node, Scheme(TOWER, plugins.load("quant", TOWER).Config(bits=8))) for node in nodes)


def _quantize(entries: Entries, root: Node) -> Scheme:
    from compress.types import Scheme

    if "quantize" in entries:
        at, block = entries["quantize"]
        return scheme(mapping(block, "quantize"), at, "quantize", None)
    if "kv_cache" not in entries and not ("transform" in entries and sequence(entries, "transform")):
        raise error_at(root, f"quantize is missing; it needs a method, one of {', '.join(plugins.names('quant'))}")
    for key in ("rules", *TABLES, "allocate", "experts"):
        if key == "allocate" and key in entries and "context" in mapping(entries[key][1], key):
            continue  # bits of the cache alone
        if key in entries and (key != "rules" or sequence(entries, key)):
            raise error_at(entries[key][0], f"{key} needs quantize, which this recipe does not have")
    return Scheme(KEEP, None)


def _experts(entries: Entries) -> ExpertPruning | None:
    from compress.types import ExpertPruning

    if "experts" not in entries:
        return None
    at, node = entries["experts"]
    return built(mapping(node, "experts"), at, "experts", ExpertPruning())


def _allocation(entries: Entries, quantize: Scheme) -> Allocation | None:
    if "allocate" not in entries:
        return None
    at, node = entries["allocate"]
    block = current(mapping(node, "allocate"))
    if "method" in block:
        module, name = method(block, "allocate"), value(block, "method", str)
    else:
        module, name = plugins.load("allocate", ALLOCATOR), ALLOCATOR
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
    config = built(rest, at, f"allocate ({name})", module.Config(), ALLOCATE_KEYS)
    if samples < 1:
        raise error_at(block["samples"][0], f"allocate: samples {samples} is not positive")
    if units != "expert" and module.needs(config) & OF_EXPERTS:
        raise error_at(at, f"allocate: {name} chooses for whole experts; set allocate.units to expert, not {units}")
    tables = tuple(_option(option, table_default()) for option in sequence(block, "tables"))
    table_options.check(tables, block, entries, quantize)
    table_options.check_damages(block, name, config, module.needs(config))
    bits = value(block, "cache_bits", tuple[float, ...], ())
    try:
        wanted = Target(target) if target is not None else None
        if wanted is not None and context is not None and wanted.unit in ("bpw", "kl"):
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
    for bits in BITS:
        try:
            options.append(dataclasses.replace(quantize, config=dataclasses.replace(quantize.config, bits=bits)))
        except (TypeError, ValueError):  # no such setting, or not this number
            continue
    if len(options) < 2:
        raise error_at(at, f"allocate: {quantize.method} has no bits to choose; list the options")
    return tuple(options)


def _rule(node: Node, above: Scheme) -> Rule:
    entries = mapping(node, "a rule")
    keys = [key for key in ("match", "match_any") if key in entries]
    if not keys:
        raise error_at(node, "a rule needs match, the pattern of the linears that it is for")
    if len(keys) > 1:
        raise error_at(entries["match_any"][0], "a rule has match or match_any, not both")
    key = keys[0]
    at, patterns = entries.pop(key)
    is_list = isinstance(patterns, SequenceNode)
    match = value({key: (at, patterns)}, key, tuple[str, ...] if is_list else str)
    match = match if is_list else (match,)
    if not match:
        raise error_at(at, f"{key} is an empty list; name a linear, or remove the rule")
    where = f"the rule for {shown(match[0])}"
    found = None if is_kept(entries, where) else scheme(entries, node, where, above)
    return Rule(match, found, key == "match_any")
