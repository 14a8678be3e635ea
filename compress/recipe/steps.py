"""Read the sections of a recipe that change a model beside its quantization: transforms, and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

from compress import plugins
from compress.recipe.blocks import built, method
from compress.recipe.schema import Step
from compress.recipe.yaml import Entries, error_at, mapping, sequence, value


def transforms(entries: Entries) -> tuple[Step, ...]:
    """Return the transforms; one of the whole model comes first and once: it would undo those of blocks."""
    steps: list[Step] = []
    scopes: list[str] = []
    for node in sequence(entries, "transform"):
        block = mapping(node, "a transform")
        if "method" not in block:
            raise error_at(node, f"a transform needs a method, one of {', '.join(plugins.names('transform'))}")
        module = method(block, "transform")
        name = value(block, "method", str)
        if module.SCOPE == "model" and scopes:
            raise error_at(
                node, f"{name} must be the first transform: a scale that is folded into a norm before it has no effect"
            )
        rest = {key: entry for key, entry in block.items() if key != "method"}
        steps.append(Step(name, built(rest, node, f"transform ({name})", module.Config(), ("method",))))
        scopes.append(module.SCOPE)
    return tuple(steps)


def tuning(entries: Entries) -> Step | None:
    """Return how blocks are tuned, None if they are not."""
    if "tune" not in entries:
        return None
    at, node = entries["tune"]
    if "quantize" not in entries:
        raise error_at(at, "tune needs quantize, which this recipe does not have")
    block = mapping(node, "tune")
    if "method" not in block:
        raise error_at(at, f"tune needs a method, one of {', '.join(plugins.names('tune'))}")
    module = method(block, "tune")
    rest = {key: entry for key, entry in block.items() if key != "method"}
    name = value(block, "method", str)
    return Step(name, built(rest, node, f"tune ({name})", module.Config(), ("method",)))


def plain_step(step: Step) -> dict[str, Any]:
    """Return a step in the layout of its YAML."""
    return {"method": step.method, **dataclasses.asdict(step.config)}
