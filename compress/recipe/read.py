"""Read recipes from YAML, strictly.

    name: gptq4                # by default that of the file
    description: 4-bit GPTQ, one scale for 128 weights
    calibration:               # CalibrationConfig
      num_samples: 128         # or `tokens: 65536`; by default as many as are enough (calib/enough.py)
      seq_len: 512
      importance: none         # attention: tokens weigh what attention pays to them (RSQ); auto: where that is known
    transform:                 # in order, each a method of compress/transform and its `Config`; none by default
      - method: rotate
    quantize:                  # a method of compress/quant and its settings (its `Config`)
      method: gptq
      bits: 4
      incoherence: false       # true: choose codes in a random rotated basis; 32: behind Hadamard transforms of 32
                               # inputs each (for MXFP4); by default what suits the method
      activations: {bits: 8}   # quantize the inputs, too, at run time (`Activations`); by default they stay as they are
      lowrank: {rank: 16}      # two thin matrices that make up for what is lost (`Correction`); none by default
      sparsity: {share: 0.5}   # small inputs of a linear go unread at run time (`Sparsity`); none by default
      two_sided: true          # feed errors back between outputs, too, by the loss's gradients (YAQA); default: false
      out_scales: rms          # store a scale of each output beside its sign, of a rotated basis; default: none
      in_vector: true          # store numbers in place of signs of inputs, to be trained; default: false
      vector_bits: 8           # of a stored scale or number with its sign: 16, the default, or 8
    rules:                     # the first match decides; fnmatch on the linear's full module name, case counts
      - match: "*.mlp.down_proj"
        bits: 8                # over the settings above; with `method:` over that method's defaults; or `keep: true`
      - match_any: ["*.k_proj", "*.qkv"]  # one is enough: for several architectures; of `match` each must be found
        bits: 8
    embeddings: {bits: 8}      # the table of token embeddings; a method whose format has rows; by default rtn at 8 bits
    head: {method: gptq, bits: 8}  # the output head, by any method; of a table that is both, what `head` says;
                               # {keep: true} leaves either as it is, which is the default
    draft_heads: {bits: 8}     # layers that predict further tokens (MTP), by default gptq at 8 bits; or {keep: true}
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
    accept:                    # what the result must reach beside the original (compress/evaluate/acceptance.py)
      kl: 0.1                  # nats a token at most, on `text`
      task: {recall: -0.02}    # share of right answers, less the original's, at least
      text: held_out.txt

Only `quantize.method` or `kv_cache.method` is required; without `quantize` all weights stay as they are. Keys and types
come from the dataclasses; anything else is an error with its line. `extends: int4` puts a recipe under this one, and
`A+B` puts recipes side by side (compress/recipe/sources.py).

An override `key=value` ("quantize.bits=3", "rules.0.bits=2", "ignore=[]") replaces one value of the tree, which is then
read like a file that says so. A key without dots that is not a top-level key is a setting of `quantize`. A new method
keeps those settings of the file that it has, too; settings that are overrides themselves must be the new method's,
whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from yaml import MappingNode, Node, SequenceNode

from compress import plugins
from compress.errors import RecipeError, cut, shown
from compress.kv.settings import POLICY_KEYS, SECTION_KEYS
from compress.recipe import facts, sources
from compress.recipe.allocation import allocation
from compress.recipe.blocks import (
    RULE_KEYS,
    SCHEME_KEYS,
    acceptance,
    build,
    cache,
    check_table,
    drafts_default,
    fields,
    is_kept,
    is_two_sided,
    method,
    scheme,
    table,
    transforms,
    tuning,
)
from compress.recipe.schema import (
    ALLOCATE_KEYS,
    DRAFT_HEADS,
    KEEP,
    RENAMED,
    SETTING_KEYS,
    TABLES,
    TOP_KEYS,
    CalibrationConfig,
    Recipe,
    Rule,
)
from compress.recipe.yaml import (
    OVERRIDE,
    Entries,
    check_keys,
    compose,
    error_at,
    is_null,
    is_override,
    mapping,
    replace_at,
    say_renamed,
    sequence,
    value,
)

if TYPE_CHECKING:
    from compress.types import ExpertPruning, Scheme

# What quantizes linears beside the text model where a rule of `towers` names nothing else.
TOWER_METHOD = "rtn"


def load(name_or_file: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the built-in recipe of that name, that of a file, or several side by side as `A+B`, with overrides.

    overrides: `key=value`, and files (.yaml), which lie over the recipe in their order, below all `key=value`. A file
    with the name of a built-in recipe is meant by its path: ./int4. RecipeError says what is wrong and where: file and
    line, or the override.
    """
    name, root = sources.tree(name_or_file)
    recipe = _recipe(root, name)
    files, values = list[str](), list[str]()
    for override in overrides:
        (files if sources.is_file_of_set(override) else values).append(override)
    for file in files:
        root = sources.lay_over(root, file)
        recipe = _recipe(root, name)
    return _recipe(apply_overrides(root, values), name) if values else recipe


DATA_FREE = {  # scheme -> a recipe, and what of it needs data put otherwise
    **{"int8": ("int8",), "fp8": ("fp8",), "fp8-block": ("fp8-block",)},
    "int4": ("int4", "quantize.method=rtn", "quantize.symmetric=false"),
    "nvfp4": ("nvfp4-w4a16", "quantize.method=grid_rtn"),
    "mxfp4": ("mxfp4", "quantize.method=grid_rtn", "quantize.incoherence=false"),
}


def data_free(scheme: str) -> tuple[str, list[str]]:
    """Return the recipe, and the overrides, of a scheme that rounds each weight by itself; a recipe as it is."""
    name, *overrides = DATA_FREE.get(scheme, (scheme,))
    return name, overrides


def _recipe(root: Node, default_name: str) -> Recipe:
    entries = mapping(root, "a recipe")
    check_keys(entries, TOP_KEYS, "the recipe")
    facts.about(entries), facts.measurements(entries)  # checked, and left out: they decide nothing
    quantize = _quantize(entries, root)
    calibration = CalibrationConfig()
    if "calibration" in entries:
        at, block = entries["calibration"]
        calibration = build(mapping(block, "calibration"), at, "calibration", calibration)
    return Recipe(
        name=value(entries, "name", str, default_name),
        description=value(entries, "description", str, ""),
        calibration=calibration,
        quantize=quantize,
        rules=tuple(_rule(node, quantize) for node in sequence(entries, "rules")),
        ignore=value(entries, "ignore", tuple[str, ...], ()),
        transform=transforms(entries),
        allocate=allocation(entries, quantize),
        tune=tuning(entries),
        experts=_experts(entries),
        kv_cache=cache(*entries["kv_cache"]) if "kv_cache" in entries else None,
        towers=_towers(entries),
        embeddings=table(entries, "embeddings"),
        head=table(entries, "head"),
        draft_heads=_draft_heads(entries),
        export=_target(entries),
        accept=acceptance(entries),
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
    above = Scheme(TOWER_METHOD, plugins.load("quant", TOWER_METHOD).Config(bits=8))
    return tuple(_rule(node, above) for node in nodes)


def _draft_heads(entries: Entries) -> Scheme | None:
    """Return the scheme of the section `draft_heads`, over 8 bits by gptq; None without the section."""
    from compress.types import Scheme

    if DRAFT_HEADS not in entries:
        return None
    at, node = entries[DRAFT_HEADS]
    settings = mapping(node, DRAFT_HEADS)
    if is_kept(settings, DRAFT_HEADS):
        return Scheme(KEEP, None)
    chosen = scheme(settings, at, DRAFT_HEADS, drafts_default())
    check_table(chosen, at, DRAFT_HEADS)
    return chosen


def _quantize(entries: Entries, root: Node) -> Scheme:
    from compress.types import Scheme

    if "quantize" in entries:
        at, block = entries["quantize"]
        return scheme(mapping(block, "quantize"), at, "quantize", None)
    if "kv_cache" not in entries and not ("transform" in entries and sequence(entries, "transform")):
        raise error_at(root, f"quantize is missing; it needs a method, one of {', '.join(plugins.names('quant'))}")
    for key in ("rules", *TABLES, DRAFT_HEADS, "allocate", "experts"):
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
    return build(mapping(node, "experts"), at, "experts", ExpertPruning())


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
    chosen = None if is_kept(entries, where) else scheme(entries, node, where, above)
    return Rule(match, chosen, key == "match_any")


def apply_overrides(root: Node, overrides: Sequence[str]) -> Node:
    """Return the tree of a valid recipe with the values of `overrides`, which are still to be checked."""
    for override in overrides:
        root = _apply_override(root, override)
    entries = mapping(root, "the recipe")
    quantize = mapping(entries["quantize"][1], "quantize") if "quantize" in entries else {}
    if "method" not in quantize:
        return root
    config = method(quantize).Config
    known = [*SCHEME_KEYS, *fields(config)]
    others = [*TOP_KEYS, *(f"calibration.{name}" for name in fields(CalibrationConfig))]
    for override in overrides:
        key = _key(override)
        if _is_bare(key) and key not in known and key not in plugins.removed_keys(config):
            raise RecipeError(f"{OVERRIDE}{cut(override)}: {plugins.unknown('key', key, [*known, *others])}")
    return root


def _apply_override(root: Node, override: str) -> Node:
    source, key = f"{OVERRIDE}{cut(override)}", _key(override)
    path = ["quantize", key] if _is_bare(key) else key.split(".")
    if "=" not in override or "" in path:
        raise RecipeError(f"{source}: expected key=value, with dots between the parts of a nested key")
    if new_name := RENAMED.get((path[0], path[-1])) if len(path) == 2 else None:
        say_renamed(source, key, new_name)
        path = [path[0], new_name]
    new = compose(override.partition("=")[2], source)
    if len(path) == 1 and path[0] in SETTING_KEYS and is_null(new) and new.value:
        assert isinstance(root, MappingNode)
        return sources.without(root, path[0])
    root = replace_at(root, path, lambda old: new, source)
    if path == ["quantize", "method"] or (path[0] == "rules" and path[2:] == ["method"]):
        root = _drop_unknown_settings(root, path[:-1], method({"method": (new, new)}), source)
    if path == ["allocate", "method"]:
        root = _drop_unknown_settings(root, path[:-1], method({"method": (new, new)}, "allocate"), source)
    if path == ["kv_cache", "method"]:
        root = _drop_unknown_settings(root, path[:-1], method({"method": (new, new)}, "kv"), source)
    return root


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _is_bare(key: str) -> bool:
    """Return whether a key of an override stands for a setting of `quantize`."""
    return "." not in key and key not in TOP_KEYS


def _drop_unknown_settings(root: Node, path: Sequence[str], chosen: ModuleType, source: str) -> Node:
    """Return the tree without the settings, at `path` and in rules that build on it, that a method does not have."""
    sections = {"allocate": ALLOCATE_KEYS, "kv_cache": ("method", *SECTION_KEYS, *POLICY_KEYS)}
    known = {*sections.get(path[0], RULE_KEYS), *fields(chosen.Config)}
    known -= set() if is_two_sided(chosen) else {"two_sided"}

    def keep_known(block: MappingNode) -> Node:
        pairs = [(key, content) for key, content in block.value if key.value in known or is_override(key)]
        return MappingNode(block.tag, pairs, block.start_mark, block.end_mark)

    root = replace_at(root, path, keep_known, source)
    rules = sequence(mapping(root, "the recipe"), "rules") if path == ["quantize"] else []
    for index, rule in enumerate(rules):
        if "method" not in mapping(rule, "a rule"):
            root = replace_at(root, ["rules", str(index)], keep_known, source)
    return root
