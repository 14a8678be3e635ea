"""The recipe's `kv_cache` -> which codec, with which settings, for the keys and the values of every layer.

kv_cache:
  method: kivi              # a file of compress/kv
  bits: 2                   # settings of its Config, for keys and values
  keys: {residual_length: 64}
  values: {bits: 4}         # over the common ones; another `method` starts from its own defaults
  layers: {"0-1": {bits: 8}, "5": {values: {method: fp8}}}   # over those; -1 is the last layer
  skip_layers: [0, -1]      # stay exact
  sink: 4                   # first tokens that stay exact
  residual_length: 128      # newest tokens that stay exact, at least
  flush: 32                 # tokens that are coded at a time
  exact_prefill: true       # tokens attend to others of the same forward pass exactly; false: as later steps do
  other_layers: error       # sliding, chunked, linear ... layers: error, or exact: they stay as transformers has them
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress import plugins
from compress.errors import RecipeError
from compress.kv.token_store import Policy

KINDS = ("keys", "values")
GLOBAL = ("skip_layers", "layers", "exact_prefill", "other_layers")
OTHER_LAYERS = ("error", "exact")
EXACT = "identity"  # codec of layers that are skipped


@dataclass(frozen=True)
class Coding:
    """One tensor kind of one layer."""

    method: str
    config: Any
    policy: Policy


@dataclass(frozen=True)
class Settings:
    layers: tuple[dict[str, Coding], ...]  # for each layer: "keys" and "values"
    exact_prefill: bool = True
    other_layers: str = "error"
    recipe: Mapping[str, Any] = field(default_factory=dict)


def resolve(recipe: Mapping[str, Any], layers: int) -> Settings:
    """Settings of a model with so many layers; RecipeError names the key that is wrong."""
    common = {key: value for key, value in recipe.items() if key not in (*GLOBAL, *KINDS)}
    if not isinstance(recipe.get("method"), str):
        known = ", ".join(plugins.names("kv"))
        raise RecipeError(f"kv_cache needs a method, one of {known}")
    listed = recipe.get("skip_layers") or ()
    if not isinstance(listed, list | tuple):
        raise RecipeError(f"kv_cache.skip_layers must be a list of layer numbers, found {listed!r}")
    skipped = {_layer(index, layers, "skip_layers") for index in listed}
    overrides = [
        (_span(key, layers), _table(value, f"kv_cache.layers.{key}"))
        for key, value in _table(recipe.get("layers") or {}, "kv_cache.layers").items()
    ]
    found = []
    for index in range(layers):
        own = [value for span, value in overrides if index in span]
        found.append({kind: _coding(kind, [common, recipe, *own], index in skipped) for kind in KINDS})
        if found[-1]["keys"].policy.sink != found[-1]["values"].policy.sink:
            raise RecipeError("kv_cache: sink must be the same for keys and values; set it once")
    other = recipe.get("other_layers", "error")
    if other not in OTHER_LAYERS:
        raise RecipeError(f"kv_cache.other_layers: {plugins.unknown('value', str(other), OTHER_LAYERS)}")
    exact_prefill = recipe.get("exact_prefill", True)
    if not isinstance(exact_prefill, bool):
        raise RecipeError(f"kv_cache.exact_prefill must be true or false, found {exact_prefill!r}")
    return Settings(tuple(found), exact_prefill, other, dict(recipe))


def _coding(kind: str, sources: list[Mapping[str, Any]], skipped: bool) -> Coding:
    """The first source counts for what is common, the `kind` of the second, then each override and its kind."""
    common, recipe, *own = sources
    parts = [common, _table(recipe.get(kind) or {}, f"kv_cache.{kind}")]
    for override in own:
        parts.append({key: value for key, value in override.items() if key not in KINDS})
        parts.append(_table(override.get(kind) or {}, f"kv_cache.layers: {kind}"))
    keys: dict[str, Any] = {}
    for part in parts:
        if part.get("method", keys.get("method")) != keys.get("method"):  # another method: its own settings only
            keys = {key: value for key, value in keys.items() if key in _names(Policy)}
        keys |= part
    method = str(keys.pop("method"))
    policy = {name: keys.pop(name) for name in _names(Policy) if name in keys}
    if skipped:
        return exact()
    config = make(plugins.load("kv", method).Config, keys, f"kv_cache.{kind} ({method})", _names(Policy))
    return Coding(method, config, make(Policy, policy, "kv_cache"))


def exact(sink: int = 0) -> Coding:
    """Of what is not coded."""
    return Coding(EXACT, plugins.load("kv", EXACT).Config(), Policy(sink=sink, residual_length=0, flush=1))


def make(cls: Any, keys: Mapping[str, Any], where: str, also: tuple[str, ...] = ()) -> Any:
    """The frozen dataclass of these settings; RecipeError for an unknown key, a wrong type or an impossible value."""
    hints = typing.get_type_hints(cls)
    for key, value in keys.items():
        if key not in hints:
            raise RecipeError(f"{where}: {plugins.unknown('key', key, (*hints, *also))}")
        if not _fits(value, hints[key]):
            raise RecipeError(f"{where}: {key} cannot be {value!r}")
    try:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()})
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0]) for item in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint or (value is None and hint is type(None))


def _span(key: Any, layers: int) -> range:
    """ "3", 3, "-1" or "0-3" (both ends count) as layer numbers."""
    text = str(key)
    first, dash, last = text.rpartition("-")
    if dash and first:
        found = range(_layer(first, layers, "layers"), _layer(last, layers, "layers") + 1)
        if not found:
            raise RecipeError(f"kv_cache.layers: {text!r} names no layer; give the first one first")
        return found
    index = _layer(text, layers, "layers")
    return range(index, index + 1)


def _layer(index: Any, layers: int, where: str) -> int:
    try:
        number = int(str(index))  # 2 and "2", not 2.5
    except ValueError:
        raise RecipeError(f"kv_cache.{where}: {index!r} is not a layer number") from None
    if not -layers <= number < layers:
        raise RecipeError(f"kv_cache.{where}: there is no layer {number}, the model has {layers}")
    return number % layers


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where} must be keys with values, found {value!r}")
    return value


def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def side(coding: Any) -> dict[str, Any]:
    """A `Side`, or a `Coding` of compress/kv/settings.py, in the layout of its YAML."""
    config = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(coding.config).items()}
    return {"method": coding.method, **config, **dataclasses.asdict(coding.policy)}
