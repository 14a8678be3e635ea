"""Random recipes that follow the schema: plugins and settings as the sources declare them, values mostly possible."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from random import Random
from typing import Any

from fuzz import values

SMALL = [1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 128, -1, 0]
PATTERNS = ["*", "*.self_attn.*", "*.mlp.down_proj", "*.k_proj", "lm_head", "nothing", "model.layers.0.*", "*.q_proj"]
HOSTILE = 0.04  # of values


@functools.cache
def _plugins(kind: str) -> tuple[str, ...]:
    from compress import plugins

    return tuple(plugins.names(kind))


@functools.cache
def _hints(kind: str, name: str) -> dict[str, Any]:
    """Return the types of a plugin's settings."""
    from compress import plugins

    config = plugins.load(kind, name).Config
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(config) if field.init}


@functools.cache
def _parts() -> dict[str, dict[str, Any]]:
    """Return the types of the sections of a recipe."""
    from compress import types as shared
    from compress.recipe import schema

    classes = {
        "calibration": schema.CalibrationConfig,
        "activations": shared.Activations,
        "lowrank": shared.Correction,
        "experts": shared.ExpertPruning,
    }
    return {name: typing.get_type_hints(cls) for name, cls in classes.items()}


def recipe(random: Random) -> dict[str, Any]:
    """Return a recipe."""
    made: dict[str, Any] = {}
    if random.random() < 0.85:
        made["quantize"] = _scheme(random)
    if random.random() < 0.5 or not made:
        made["kv_cache"] = _cache(random)
    if random.random() < 0.5:
        made["calibration"] = _settings(_parts()["calibration"], random)
    if random.random() < 0.4:
        names = [random.choice(_plugins("transform")) for _ in range(random.choice([1, 1, 2, 3]))]
        made["transform"] = [{"method": name, **_settings(_hints("transform", name), random)} for name in names]
    if random.random() < 0.4:
        made["rules"] = [_rule(random) for _ in range(random.choice([1, 2, 4]))]
    if random.random() < 0.3:
        made["ignore"] = random.sample(PATTERNS, random.choice([0, 1, 2]))
    if random.random() < 0.35:
        made["allocate"] = _allocate(random)
    if random.random() < 0.2:
        made["experts"] = _settings(_parts()["experts"], random)
    return made


def _scheme(random: Random) -> dict[str, Any]:
    name = random.choice(_plugins("quant"))
    made = {"method": name, **_settings(_hints("quant", name), random)}
    if random.random() < 0.2:
        made["incoherence"] = random.choice([True, False])
    for part in ("activations", "lowrank"):
        if random.random() < 0.2:
            made[part] = _settings(_parts()[part], random)
    return made


def _rule(random: Random) -> dict[str, Any]:
    pattern = random.choice(PATTERNS)
    match: dict[str, Any] = random.choice([{"match": pattern}, {"match_any": [pattern, random.choice(PATTERNS)]}])
    return {**match, **random.choice([{"keep": True}, {"bits": random.choice(SMALL)}, _scheme(random)])}


def _allocate(random: Random) -> dict[str, Any]:
    name = random.choice(_plugins("allocate"))
    made = {"method": name, **_settings(_hints("allocate", name), random)}
    made["target"] = random.choice(
        ["3bpw", "2.5bpw", "0.05kl", "1GiB", "100KiB", "3", "-1bpw", "1e9bpw", "99bpw", "0bpw"]
    )
    made["units"] = random.choice(["fused", "linear", "expert", "block", "x"])
    if random.random() < 0.6:
        options: list[Any] = [{"bits": 2}, {"bits": 4}, {"keep": True}, {}, {"bits": 2}, {"method": "rtn"}]
        made["options"] = [random.choice([*options, _scheme(random)]) for _ in range(random.choice([0, 1, 2, 4]))]
    if random.random() < 0.3:
        made["context"] = random.choice([1, 1024, 2**40, 0])
        made["cache_bits"] = random.choice([[2, 4], [], [0], [2.125], [99], [4, 4]])
    if random.random() < 0.2:
        offers: list[Any] = [{"bits": 2}, {"bits": 4}, {"bits": 2.5}, {"method": "fp8"}, {"sink": 0}, {}]
        made["cache_options"] = [random.choice([*offers, _cache(random)]) for _ in range(random.choice([0, 1, 2, 4]))]
    return made


def _cache(random: Random) -> dict[str, Any]:
    name = random.choice(_plugins("kv"))
    made: dict[str, Any] = {"method": name, **_settings(_hints("kv", name), random)}
    for kind in ("keys", "values"):
        if random.random() < 0.3:
            other = random.choice(_plugins("kv"))
            made[kind] = {"method": other, **_settings(_hints("kv", other), random)}
    if random.random() < 0.2:
        made["layers"] = [{"match": random.choice([0, [0, 1], 99, "all", -1]), "bits": random.choice(SMALL)}]
    for part in ("evict", "read"):
        if random.random() < 0.15:
            other = random.choice(_plugins(part))
            made[part] = {
                "method": other,
                **random.choice([{}, {"keep": 0.5}]),
                **_settings(_hints(part, other), random),
            }
    return made


def _settings(hints: dict[str, Any], random: Random) -> dict[str, Any]:
    """Return values of some of the settings."""
    return {name: _value(hint, random) for name, hint in hints.items() if random.random() < 0.3}


def _value(hint: Any, random: Random) -> Any:
    if random.random() < HOSTILE:
        return values.hostile(random)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(random.choice(arguments), random)
    if origin is typing.Literal:
        return random.choice(arguments)
    if origin is tuple:
        return [_value(arguments[0], random) for _ in range(random.choice([0, 1, 2, 3]))]
    plain: dict[Any, list[Any]] = {
        bool: [True, False],
        int: SMALL,
        float: [0.0, 0.5, 1.0, 0.01, 2.0, 2.125, 1e-9, 100.0, -1.0],
        str: values.STRINGS,
    }
    return random.choice(plain.get(hint, [None]))
