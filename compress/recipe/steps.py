"""Read the sections of a recipe that change a model beside its quantization: transforms, and tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from yaml import SequenceNode

from compress import plugins
from compress.recipe.blocks import built, method
from compress.recipe.schema import Step
from compress.recipe.yaml import Entries, error_at, mapping, sequence, value

TUNED = {"block": "blocks", "model": "the whole model"}  # scope of a step of tuning -> what it tunes


def transforms(entries: Entries) -> tuple[Step, ...]:
    """Return the transforms; one of the whole model comes first and once: it would undo those of blocks."""
    steps: list[Step] = []
    scopes: list[str] = []
    for node in sequence(entries, "transform"):
        block = mapping(node, "a transform")
        if "method" not in block:
            raise error_at(node, f"a transform needs a method, one of {', '.join(plugins.names('transform'))}")
        module = method(block, "transform")
        name = plugins.current("transform", value(block, "method", str), block)
        if module.SCOPE == "model" and scopes:
            raise error_at(
                node, f"{name} must be the first transform: a scale that is folded into a norm before it has no effect"
            )
        rest = {key: entry for key, entry in block.items() if key != "method"}
        steps.append(Step(name, built(rest, node, f"transform ({name})", module.Config(), ("method",))))
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
        steps[scope] = Step(name, built(rest, part, f"tune ({name})", module.Config(), ("method",)))
    return tuple(steps.values())


def plain_tuning(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the section `tune` of a recipe: one step as a block, several as a list, nothing without any."""
    plain = [plain_step(step) for step in steps]
    return {"tune": plain if len(plain) > 1 else plain[0]} if plain else {}


def plain_step(step: Step) -> dict[str, Any]:
    """Return a step in the layout of its YAML."""
    return {"method": step.method, **dataclasses.asdict(step.config)}
