"""Recipes: YAML -> `Recipe`, strictly, and back.

    name: gptq4                # by default that of the file
    description: 4-bit GPTQ, one scale for 128 weights
    calibration:               # CalibrationConfig
      num_samples: 128
      seq_len: 2048
      importance: none         # attention: tokens weigh what attention pays to them (RSQ)
    transform:                 # in order, each a method of compress/transform and its `Config`; none by default
      - method: rotate
    quantize:                  # a method of compress/quant and its settings (its `Config`)
      method: gptq
      bits: 4
      incoherence: false       # true: choose codes in a random rotated basis; by default what suits the method
      activations: {bits: 8}   # quantize the inputs, too, at run time (`Activations`); by default they stay as they are
    rules:                     # the first match decides; fnmatch on the linear's full module name, case counts
      - match: "*.mlp.down_proj"
        bits: 8                # over the settings above; with `method:` over that method's defaults; or `keep: true`
    ignore: ["*.shared_head"]  # kept as they are, before any rule

Only `quantize.method` is required. Keys and types come from the dataclasses; anything else is an error with its line.

An override `key=value` ("quantize.bits=3", "rules.0.bits=2", "ignore=[]") replaces one value of the file; a key without
dots that is not a top-level key is a setting of `quantize`. A new method keeps those settings of the file that it has,
too; settings that are overrides themselves must be the new method's, whatever their order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import yaml
from yaml import MappingNode, Node, ScalarNode

from compress import plugins
from compress.errors import RecipeError
from compress.strict_yaml import (
    OVERRIDE,
    Entries,
    changed,
    check_keys,
    compose,
    error_at,
    found,
    is_override,
    mapping,
    sequence,
    value,
)

if TYPE_CHECKING:
    from compress.types import Activations, Scheme

TOP_KEYS = ("name", "description", "calibration", "transform", "quantize", "rules", "ignore")
SCHEME_KEYS = ("method", "incoherence", "activations")  # beside the method's settings
RULE_KEYS = ("match", "keep", *SCHEME_KEYS)

Importance = Literal[
    "none",
    "attention",
    "first_tokens",
    "activation_norm",
    "input_output_difference",
    "token_rarity",
    "token_similarity",
]


@dataclass(frozen=True)
class CalibrationConfig:
    num_samples: int = 128  # sequences
    seq_len: int = 2048  # tokens of each; capped by the model's maximum
    asymmetric: float = 0.0  # share of the way from each weight to its target in compress/asymmetric.py; 0: off
    importance: Importance = "none"  # what tokens weigh in the statistics (calib/importance.py)
    importance_min: float = 0.005  # weight of the least important token of a sample, of that of the most important one
    rolled: int = 1  # of each sample this many copies are used, each shifted in a circle

    def __post_init__(self) -> None:
        for key in ("num_samples", "seq_len", "rolled"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} {getattr(self, key)} is not positive")
        if not 0 <= self.asymmetric <= 1:
            raise ValueError(f"asymmetric {self.asymmetric} is not between 0 and 1")
        if not 0 < self.importance_min <= 1:
            raise ValueError(f"importance_min {self.importance_min} is not above 0 and at most 1")


@dataclass(frozen=True)
class Step:
    """A transform before quantization."""

    method: str
    config: Any


@dataclass(frozen=True)
class Rule:
    match: str  # fnmatch pattern
    scheme: Scheme | None  # None: keep the weight as it is


@dataclass(frozen=True)
class Recipe:
    name: str
    description: str
    calibration: CalibrationConfig
    quantize: Scheme
    rules: tuple[Rule, ...] = ()
    ignore: tuple[str, ...] = ()
    transform: tuple[Step, ...] = ()

    def scheme_for(self, name: str) -> Scheme | None:
        """What to do with the linear of this full module name; None: keep it as it is."""
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return None
        for rule in self.rules:
            if fnmatchcase(name, rule.match):
                return rule.scheme
        return self.quantize


def names() -> list[str]:
    """The built-in recipes, sorted."""
    listed = (entry.name for entry in files("compress.recipes").iterdir())
    return sorted(name.removesuffix(".yaml") for name in listed if name.endswith(".yaml"))


def text(name: str) -> str:
    """The YAML of a built-in recipe, comments included."""
    if name not in names():
        raise RecipeError(plugins.unknown("recipe", name, names()))
    return (files("compress.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def describe(name: str) -> str:
    """The description of a built-in recipe."""
    return value(mapping(compose(text(name), f"{name}.yaml"), "the recipe"), "description", str, "")


def load(name_or_file: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or else the built-in one of that name, with `key=value` overrides.

    RecipeError says what is wrong and where: file and line, or the override.
    """
    path = Path(name_or_file)
    if path.is_file():
        name, root = path.stem, compose(_read(path), str(path))
    elif name_or_file in names():
        name, root = name_or_file, compose(text(name_or_file), f"{name_or_file}.yaml")
    else:
        raise RecipeError(f"there is no such file, and {plugins.unknown('recipe', name_or_file, names())}")
    recipe = _recipe(root, name)
    return _recipe(_overridden(root, overrides), name) if overrides else recipe


def dump(recipe: Recipe) -> str:
    """YAML with every default written out; loads back to an equal recipe."""
    return yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True, width=120)


def fingerprint(recipe: Recipe) -> str:
    """sha256 (hex) of everything that decides numbers: all but the name and the description."""
    content = {key: part for key, part in _plain(recipe).items() if key not in ("name", "description")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe in the layout of its YAML."""

    def settings(scheme: Scheme) -> dict[str, Any]:
        activations = dataclasses.asdict(scheme.activations) if scheme.activations else None
        around = {"method": scheme.method, "incoherence": scheme.incoherence, "activations": activations}
        return {**around, **dataclasses.asdict(scheme.config)}

    return {
        "name": recipe.name,
        "description": recipe.description,
        "calibration": dataclasses.asdict(recipe.calibration),
        "transform": [{"method": step.method, **dataclasses.asdict(step.config)} for step in recipe.transform],
        "quantize": settings(recipe.quantize),
        "rules": [{"match": r.match, **(settings(r.scheme) if r.scheme else {"keep": True})} for r in recipe.rules],
        "ignore": list(recipe.ignore),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error


def _recipe(root: Node, default_name: str) -> Recipe:
    entries = mapping(root, "a recipe")
    check_keys(entries, TOP_KEYS, "the recipe")
    if "quantize" not in entries:
        raise error_at(root, f"quantize is missing; it needs a method, one of {', '.join(plugins.names('quant'))}")
    at, block = entries["quantize"]
    quantize = _scheme(mapping(block, "quantize"), at, "quantize", None)
    calibration = CalibrationConfig()
    if "calibration" in entries:
        at, block = entries["calibration"]
        calibration = _config(mapping(block, "calibration"), at, "calibration", calibration)
    return Recipe(
        name=value(entries, "name", str, default_name),
        description=value(entries, "description", str, ""),
        calibration=calibration,
        quantize=quantize,
        rules=tuple(_rule(node, quantize) for node in sequence(entries, "rules")),
        ignore=value(entries, "ignore", tuple[str, ...], ()),
        transform=_steps(entries),
    )


def _steps(entries: Entries) -> tuple[Step, ...]:
    """The transforms; one of the whole model comes before those of blocks, which it would undo, and only once."""
    steps: list[Step] = []
    scopes: list[str] = []
    for node in sequence(entries, "transform"):
        block = mapping(node, "a transform")
        if "method" not in block:
            raise error_at(node, f"a transform needs a method, one of {', '.join(plugins.names('transform'))}")
        module = _method(block, "transform")
        name = value(block, "method", str)
        if module.SCOPE == "model" and scopes:
            raise error_at(
                node, f"{name} must be the first transform: a scale that is folded into a norm before it has no effect"
            )
        settings = {key: entry for key, entry in block.items() if key != "method"}
        steps.append(Step(name, _config(settings, node, f"transform ({name})", module.Config(), ("method",))))
        scopes.append(module.SCOPE)
    return tuple(steps)


def _rule(node: Node, above: Scheme) -> Rule:
    entries = mapping(node, "a rule")
    if "match" not in entries:
        raise error_at(node, "a rule needs match, the pattern of the linears that it is for")
    match = value(entries, "match", str)
    del entries["match"]
    if "keep" not in entries:
        return Rule(match, _scheme(entries, node, f"the rule for {match!r}", above))
    value(entries, "keep", Literal[True])
    if others := sorted(entries.keys() - {"keep"}):
        raise error_at(entries[others[0]][0], f"the rule for {match!r} keeps the weight; remove keep or {others}")
    return Rule(match, None)


def _scheme(entries: Entries, at: Node, where: str, above: Scheme | None) -> Scheme:
    """Settings over the defaults of `method`, or over the scheme `above` if there is one and no method is named."""
    from compress.types import Scheme

    if "method" in entries:
        module = _method(entries)
        activations = above.activations if above is not None else None
        base = Scheme(value(entries, "method", str), module.Config(), module.INCOHERENCE, activations)
    elif above is not None:
        base = above
    else:
        raise error_at(at, f"{where} needs a method, one of {', '.join(plugins.names('quant'))}")
    settings = {key: entry for key, entry in entries.items() if key not in SCHEME_KEYS}
    config = _config(settings, at, f"{where} ({base.method})", base.config, RULE_KEYS if above else SCHEME_KEYS)
    activations = _activations(entries, base.activations)
    return Scheme(base.method, config, value(entries, "incoherence", bool, base.incoherence), activations)


def _activations(entries: Entries, base: Activations | None) -> Activations | None:
    from compress.types import Activations

    if "activations" not in entries:
        return base
    at, node = entries["activations"]
    if isinstance(node, ScalarNode) and found(node) == "nothing":
        return None
    return _config(mapping(node, "activations"), at, "activations", base or Activations())


def _method(entries: Entries, kind: str = "quant") -> ModuleType:
    """The method that a block names."""
    try:
        return plugins.load(kind, value(entries, "method", str))
    except RecipeError as error:
        raise error_at(entries["method"][0], str(error)) from error


def _config(entries: Entries, at: Node, where: str, base: Any, beside: Sequence[str] = ()) -> Any:
    """The dataclass instance `base` with the values of `entries`; `beside`: what else the block may hold."""
    hints = typing.get_type_hints(type(base))
    check_keys(entries, [*beside, *_fields(base)], where)
    values = {key: value(entries, key, hints[key]) for key in entries}
    try:
        return dataclasses.replace(base, **values)
    except ValueError as error:  # from __post_init__; begins with the name of the field, if one field is at fault
        key = str(error).partition(" ")[0]
        raise error_at(entries[key][0] if key in entries else at, f"{where}: {error}") from error


def _overridden(root: Node, overrides: Sequence[str]) -> Node:
    """The tree of a valid recipe with the values of `overrides`, which are still to be checked."""
    for override in overrides:
        root = _replaced(root, override)
    quantize = mapping(mapping(root, "the recipe")["quantize"][1], "quantize")
    if "method" not in quantize:
        return root
    known = [*SCHEME_KEYS, *_fields(_method(quantize).Config)]
    others = [*TOP_KEYS, *(f"calibration.{name}" for name in _fields(CalibrationConfig))]
    for override in overrides:
        key = _key(override)
        if _is_bare(key) and key not in known:
            raise RecipeError(f"{OVERRIDE}{override}: {plugins.unknown('key', key, [*known, *others])}")
    return root


def _replaced(root: Node, override: str) -> Node:
    source, key = f"{OVERRIDE}{override}", _key(override)
    path = ["quantize", key] if _is_bare(key) else key.split(".")
    if "=" not in override or "" in path:
        raise RecipeError(f"{source}: expected key=value, with dots between the parts of a nested key")
    new = compose(override.partition("=")[2], source)
    root = changed(root, path, lambda old: new, source)
    if path == ["quantize", "method"] or (path[0] == "rules" and path[2:] == ["method"]):
        root = _fitted(root, path[:-1], _method({"method": (new, new)}).Config, source)
    return root


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _is_bare(key: str) -> bool:
    """Whether a key of an override stands for a setting of `quantize`."""
    return "." not in key and key not in TOP_KEYS


def _fields(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _fitted(root: Node, path: Sequence[str], config: type, source: str) -> Node:
    """The tree without what the file sets, at `path` or in rules that build on it, and `config` does not have."""
    known = [*RULE_KEYS, *_fields(config)]

    def fitting(block: MappingNode) -> Node:
        pairs = [(key, content) for key, content in block.value if key.value in known or is_override(key)]
        return MappingNode(block.tag, pairs, block.start_mark, block.end_mark)

    root = changed(root, path, fitting, source)
    rules = sequence(mapping(root, "the recipe"), "rules") if path == ["quantize"] else []
    for index, rule in enumerate(rules):
        if "method" not in mapping(rule, "a rule"):
            root = changed(root, ["rules", str(index)], fitting, source)
    return root
