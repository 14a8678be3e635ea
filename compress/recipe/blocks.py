"""Read the blocks of a recipe that name a plugin and its settings: schemes, tables, transforms, tuning, the cache."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from yaml import Node, ScalarNode, SequenceNode

from compress import plugins
from compress.errors import RecipeError
from compress.kv.settings import CacheSettings, cache_settings
from compress.recipe.schema import OUTPUT_DEFAULTS, Acceptance, Step
from compress.recipe.yaml import Entries, check_keys, describe_node, error_at, mapping, plain, sequence, value

if TYPE_CHECKING:
    from compress.types import Scheme

SCHEME_KEYS = ("method", "incoherence", "activations", "lowrank", *OUTPUT_DEFAULTS, "sparsity")
# What embeddings and head get where their sections do not say otherwise.
TABLE_METHOD, TABLE_BITS = "rtn", 8
METHOD_OF_DRAFTS = "gptq"  # inputs are measured for it; without, the method of tables
# Formats whose weights can be the parts of a nested one: `bits` of their methods are those of a weight.
NESTED_FORMATS = ("int", "trellis", "e8p")
# Scope of a step of tuning -> what it tunes.
TUNED = {"block": "blocks", "model": "the whole model"}
RULE_KEYS = ("match", "match_any", "keep", *SCHEME_KEYS)


def scheme(entries: Entries, at: Node, where: str, above: Scheme | None) -> Scheme:
    """Return settings over the defaults of `method`, or over the scheme `above` where no method is named."""
    from compress.types import Activations, Correction, Scheme, Sparsity

    if "method" in entries:
        module, name = method(entries), plugins.current("quant", value(entries, "method", str))
        base = Scheme(name, module.Config(), module.INCOHERENCE)
        if above is not None and getattr(module, "INHERITS", True):
            base = dataclasses.replace(
                base, activations=above.activations, lowrank=above.lowrank, sparsity=above.sparsity
            )
    elif above is not None:
        base = above
    else:
        raise error_at(at, f"{where} needs a method, one of {', '.join(plugins.names('quant'))}")
    settings = {key: entry for key, entry in entries.items() if key not in SCHEME_KEYS}
    config = build(settings, at, f"{where} ({base.method})", base.config, RULE_KEYS if above else SCHEME_KEYS)
    activations = _part(entries, "activations", base.activations, Activations())
    if activations is not None and activations.is_coded and "activations" in entries:
        from compress.formats.stored import check_inputs  # which imports torch

        try:
            check_inputs(activations)
        except ValueError as error:
            raise error_at(entries["activations"][1], f"activations: {error}") from error
    lowrank = _part(entries, "lowrank", base.lowrank, Correction())
    types = get_type_hints(Scheme)
    basis = value(entries, "incoherence", types["incoherence"], base.incoherence)
    output = [value(entries, key, types[key], getattr(base, key)) for key in OUTPUT_DEFAULTS]
    sparsity = _part(entries, "sparsity", base.sparsity, Sparsity())
    made = dataclasses.replace(Scheme(base.method, config, basis, activations, lowrank, *output), sparsity=sparsity)
    _check_output(made, at, where)
    if made.nested is not False:
        _check_nested(made, at, where)
    if sparsity is not None and sparsity.has_rest_part and lowrank is not None:
        raise error_at(at, f"{where}: score rank has a low-rank part of its own; set lowrank: null, or another score")
    return made


def _check_output(made: Scheme, at: Node, where: str) -> None:
    """Raise RecipeError for two-sided rounding or stored scales that a scheme's method, or its basis, cannot have."""
    if made.two_sided and not is_two_sided(plugins.load("quant", made.method)):
        able = ", ".join(name for name in plugins.names("quant") if is_two_sided(plugins.load("quant", name)))
        raise error_at(at, f"{where}: {made.method} cannot round two-sided, {able} can; set two_sided: false")
    if made.incoherence is not False and made.incoherence is not True and made.incoherence < 2:
        raise error_at(at, f"{where}: incoherence {made.incoherence} is neither true, false nor a block of inputs")
    if made.incoherence is not True and (made.out_scales != "none" or made.in_vector):
        advice = "set incoherence: true, or out_scales: none and in_vector: false"
        raise error_at(at, f"{where}: out_scales and in_vector are those of a rotated basis; {advice}")


def _check_nested(made: Scheme, at: Node, where: str) -> None:
    """Raise RecipeError for levels that a scheme's method, or what else it says, cannot have."""

    def error(message: str) -> RecipeError:
        return error_at(at, f"{where}: nested: {message}")

    if (format := plugins.load("quant", made.method).FORMAT) not in NESTED_FORMATS:
        raise error(f"{made.method} stores {format}; methods of {', '.join(NESTED_FORMATS)} can, or nested: false")
    levels, bits = made.levels, made.config.bits
    if len(levels) < 2 or list(levels) != sorted(set(levels)) or levels[0] < 1 or bits not in made.level_bits:
        raise error(f"{list(made.level_bits)} are no two or more rising levels of which one is bits, {bits}")
    try:
        _ = made.part_configs
    except ValueError as problem:
        raise error(f"a part cannot be: {problem}") from problem
    if made.has_original and (made.incoherence is not False or made.activations or made.lowrank):
        raise error(f"level {levels[-1]} is the original; remove incoherence, activations and lowrank, or that level")
    if made.sparsity is not None:
        raise error("all parts read all inputs; remove sparsity, or set nested: false")
    if made.lowrank is not None and (made.lowrank.train or made.lowrank.train_blocks):
        raise error("what is trained would be no level's own; remove lowrank.train, or set nested: false")


def is_two_sided(method: ModuleType) -> bool:
    """Return whether a method can round two-sided."""
    return getattr(method, "TWO_SIDED", False)


def is_kept(entries: Entries, where: str) -> bool:
    """Return whether a block says `keep: true`. Raises RecipeError where it says more than that."""
    if "keep" not in entries:
        return False
    value(entries, "keep", Literal[True])
    if others := sorted(entries.keys() - {"keep"}):
        raise error_at(entries[others[0]][0], f"{where} keeps the weight; remove keep or {others}")
    return True


def table(entries: Entries, section: str) -> Scheme | None:
    """Return the scheme of the section `embeddings` or `head`, over 8 bits by rtn; None where the table is kept.

    Of embeddings rows are looked up: nothing may lie around or beside what is stored. Nothing is trained outside of the
    blocks.
    """
    if section not in entries:
        return None
    at, node = entries[section]
    settings = mapping(node, section)
    if is_kept(settings, section):
        return None
    chosen = scheme(settings, at, section, table_default())
    if section == "embeddings" and (chosen.incoherence or chosen.activations is not None or chosen.lowrank is not None):
        raise error_at(at, "embeddings: their rows are looked up; remove incoherence, activations and lowrank")
    check_table(chosen, at, section)
    return chosen


def table_default() -> Scheme:
    """Return the scheme over which those of embeddings and head are laid."""
    from compress.types import Scheme

    return Scheme(TABLE_METHOD, plugins.load("quant", TABLE_METHOD).Config(bits=TABLE_BITS))


def drafts_default(reads_text: bool = True) -> Scheme:
    """Return the scheme of draft heads over which that of a recipe is laid; reads_text: whether inputs are measured."""
    from compress.types import Scheme

    module = plugins.load("quant", method := METHOD_OF_DRAFTS if reads_text else TABLE_METHOD)
    return Scheme(method, module.Config(bits=TABLE_BITS), module.INCOHERENCE)


def check_table(chosen: Scheme, at: Node, where: str) -> None:
    """Raise RecipeError for a scheme that needs what only linears of blocks have."""
    lowrank = chosen.lowrank
    if lowrank is not None and (lowrank.train or lowrank.train_blocks or lowrank.metric == "fisher"):
        raise error_at(at, f"{where}: lowrank cannot be trained, nor weighed by gradients, outside of the blocks")
    if chosen.two_sided or chosen.out_scales == "sensitivity":
        raise error_at(at, f"{where}: no gradients are taken outside of the blocks; remove two_sided and sensitivity")
    if chosen.activations is not None and chosen.activations.scale == "tensor":
        raise error_at(at, f"{where}: activations can have a scale of each token only; set scale: token")


def _part(entries: Entries, key: str, base: Any, default: Any) -> Any:
    """Return the block `key` laid over `base`, or over `default` if that is None; `base` without one, None for null."""
    if key not in entries:
        return base
    at, node = entries[key]
    if isinstance(node, ScalarNode) and describe_node(node) == "nothing":
        return None
    return build(mapping(node, key), at, key, base or default)


def method(entries: Entries, kind: str = "quant") -> ModuleType:
    """Return the method that a block names; one line on stderr where the block has its former name."""
    name = value(entries, "method", str)
    present = present_name(entries, kind)
    say_renamed(name, present)
    try:
        return plugins.load(kind, present)
    except RecipeError as error:
        raise error_at(entries["method"][0], str(error)) from error


def present_name(entries: Entries, kind: str) -> str:
    """Return the present name of the method of a block; keys at the values that it works with now move nothing."""
    name = value(entries, "method", str)
    if (kind, name) not in plugins.SPLIT_OFF:
        return plugins.current(kind, name)
    removed = plugins.removed_keys(plugins.load(kind, name).Config)
    is_moved = any(key in removed and plain(node, key) != removed[key] for key, (_, node) in entries.items())
    return plugins.SPLIT_OFF[kind, name] if is_moved else name


@functools.cache  # once a process: a block is read more than once
def say_renamed(name: str, present: str) -> None:
    if present != name:
        print(f"method {name!r} of the recipe is called {present!r} now", file=sys.stderr)


def build(entries: Entries, at: Node, where: str, base: Any, beside: Sequence[str] = ()) -> Any:
    """Return the dataclass instance `base` with the values of `entries`; beside: other keys that the block may hold."""
    hints = plugins.hints(base)
    entries = _without_removed(entries, base, where)
    check_keys(entries, [*beside, *fields(base)], where)
    values = {key: value(entries, key, hints[key]) for key in entries}

    def error(key: str, message: str) -> RecipeError:
        return error_at(entries[key][0] if key in entries else at, message)

    return plugins.replaced(base, values, where, error)


def _without_removed(entries: Entries, base: Any, where: str) -> Entries:
    """Leave out the settings that a method had once, at the value that it works with now; RecipeError at any other."""
    removed = plugins.removed_keys(type(base))
    for key in removed.keys() & entries.keys():
        if plain(entries[key][1], key) != removed[key]:
            usual = json.dumps(removed[key])
            raise error_at(entries[key][0], f"{where}: {key} was taken away and is always {usual}; remove the key")
    return {key: entry for key, entry in entries.items() if key not in removed}


def fields(config: Any) -> list[str]:
    """Return the names of the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(config)]


def cache(at: Node, node: Node) -> CacheSettings:
    """Return the settings of the `kv_cache` section whose key stands `at`."""
    sequence(mapping(node, "kv_cache"), "layers")  # the form with a mapping is that of config.json

    def error(path: tuple[str | int, ...], message: str) -> RecipeError:
        key, content = at, node
        for step in path:
            if isinstance(content, SequenceNode):
                key = content = content.value[int(step)]
            else:
                key, content = mapping(content, "kv_cache")[str(step)]
        return error_at(key, message)

    return cache_settings(plain(node, "kv_cache"), error)


def transforms(entries: Entries) -> tuple[Step, ...]:
    """Return the transforms; one of the whole model comes first and once: it would undo those of blocks."""
    steps: list[Step] = []
    scopes: list[str] = []
    for node in sequence(entries, "transform"):
        block = mapping(node, "a transform")
        if "method" not in block:
            raise error_at(node, f"a transform needs a method, one of {', '.join(plugins.names('transform'))}")
        module = method(block, "transform")
        name = present_name(block, "transform")
        if module.SCOPE == "model" and scopes:
            raise error_at(
                node, f"{name} must be the first transform: a scale that is folded into a norm before it has no effect"
            )
        rest = {key: entry for key, entry in block.items() if key != "method"}
        steps.append(Step(name, build(rest, node, f"transform ({name})", module.Config(), ("method",))))
        scopes.append(module.SCOPE)
    return tuple(steps)


def tuning(entries: Entries) -> tuple[Step, ...]:
    """Return how stored numbers are tuned: by one step or a list, blocks before the whole model, each scope once."""
    if "tune" not in entries:
        return ()
    at, node = entries["tune"]
    if "quantize" not in entries:
        raise error_at(at, "tune needs quantize, which this recipe does not have")
    steps: dict[str, Step] = {}
    for part in sequence(entries, "tune") if isinstance(node, SequenceNode) else [node]:
        block = mapping(part, "tune")
        if "method" not in block:
            raise error_at(part, f"tune needs a method, one of {', '.join(plugins.names('tune'))}")
        module, name = method(block, "tune"), value(block, "method", str)
        if (scope := module.SCOPE) in steps:
            raise error_at(part, f"{name}: {steps[scope].method} tunes {TUNED[scope]} already; remove one of them")
        if steps and scope == "block":
            raise error_at(part, f"{name} tunes blocks while they are quantized; put it before {steps['model'].method}")
        rest = {key: entry for key, entry in block.items() if key != "method"}
        steps[scope] = Step(name, build(rest, part, f"tune ({name})", module.Config(), ("method",)))
    return tuple(steps.values())


def acceptance(entries: Entries) -> Acceptance | None:
    """Return the section `accept` of a recipe, None without one; RecipeError."""
    if "accept" not in entries:
        return None
    at, node = entries["accept"]
    block = mapping(node, "accept")
    check_keys(block, [field.name for field in dataclasses.fields(Acceptance)], "accept")
    tasks = mapping(block["task"][1], "accept.task") if "task" in block else {}
    kl, text = value(block, "kl", float | None), value(block, "text", str | None)
    least = {name: value(tasks, name, float) for name in tasks}
    if kl is None and not least:
        raise error_at(at, "accept needs kl, such as 0.1 nats a token, or task, such as {recall: -0.02}")
    if kl is not None and not 0 < kl < math.inf:
        raise error_at(block["kl"][0], f"accept: kl {kl} is not positive; give nats a token, such as 0.1")
    for name, bound in least.items():
        if not -1 <= bound <= 0:
            reason = "is no share of answers that may be lost; give one from -1 to 0, such as -0.02"
            raise error_at(tasks[name][0], f"accept: {bound} of the task {name} {reason}")
    return Acceptance(kl, least, text)
