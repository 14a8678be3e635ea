"""Apply overrides `key=value` to the YAML tree of a recipe, which is then read like a file that says so.

A key without dots that is not a top-level key is a setting of `quantize`. A new method keeps those settings of the file
that it has, too; settings that are overrides themselves must be the new method's, whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from yaml import MappingNode, Node

from compress import plugins
from compress.errors import RecipeError, cut
from compress.kv.settings import POLICY_KEYS, SECTION_KEYS
from compress.recipe.blocks import RULE_KEYS, SCHEME_KEYS, fields, method
from compress.recipe.schema import ALLOCATE_KEYS, RENAMED, TOP_KEYS, CalibrationConfig
from compress.recipe.yaml import OVERRIDE, changed, compose, is_override, mapping, say_renamed, sequence


def overridden(root: Node, overrides: Sequence[str]) -> Node:
    """Return the tree of a valid recipe with the values of `overrides`, which are still to be checked."""
    for override in overrides:
        root = _replaced(root, override)
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


def _replaced(root: Node, override: str) -> Node:
    source, key = f"{OVERRIDE}{cut(override)}", _key(override)
    path = ["quantize", key] if _is_bare(key) else key.split(".")
    if "=" not in override or "" in path:
        raise RecipeError(f"{source}: expected key=value, with dots between the parts of a nested key")
    if new_name := RENAMED.get((path[0], path[-1])) if len(path) == 2 else None:
        say_renamed(source, key, new_name)
        path = [path[0], new_name]
    new = compose(override.partition("=")[2], source)
    root = changed(root, path, lambda old: new, source)
    if path == ["quantize", "method"] or (path[0] == "rules" and path[2:] == ["method"]):
        root = _fitted(root, path[:-1], method({"method": (new, new)}).Config, source)
    if path == ["allocate", "method"]:
        root = _fitted(root, path[:-1], method({"method": (new, new)}, "allocate").Config, source)
    if path == ["kv_cache", "method"]:
        root = _fitted(root, path[:-1], method({"method": (new, new)}, "kv").Config, source)
    return root


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _is_bare(key: str) -> bool:
    """Return whether a key of an override stands for a setting of `quantize`."""
    return "." not in key and key not in TOP_KEYS


def _fitted(root: Node, path: Sequence[str], config: type, source: str) -> Node:
    """Return the tree without the settings, at `path` and in rules that build on it, that `config` does not have."""
    sections = {"allocate": ALLOCATE_KEYS, "kv_cache": ("method", *SECTION_KEYS, *POLICY_KEYS)}
    known = [*sections.get(path[0], RULE_KEYS), *fields(config)]

    def fitting(block: MappingNode) -> Node:
        pairs = [(key, content) for key, content in block.value if key.value in known or is_override(key)]
        return MappingNode(block.tag, pairs, block.start_mark, block.end_mark)

    root = changed(root, path, fitting, source)
    rules = sequence(mapping(root, "the recipe"), "rules") if path == ["quantize"] else []
    for index, rule in enumerate(rules):
        if "method" not in mapping(rule, "a rule"):
            root = changed(root, ["rules", str(index)], fitting, source)
    return root
