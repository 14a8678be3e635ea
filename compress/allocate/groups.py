"""Group linears into units that get one option together: those that an engine fuses or that share a stored tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from compress.model.skeleton import Skeleton
from compress.recipe.schema import Units
from compress.types import LinearSpec


class LinearGroup(NamedTuple):
    """The linears of a unit of an allocation."""

    name: str  # model.layers.0.self_attn.{q_proj,k_proj,v_proj}
    members: tuple[LinearSpec, ...]


def groups(skeleton: Skeleton, specs: Sequence[LinearSpec], units: Units) -> list[LinearGroup]:
    """Return the linears in groups, in model order.

    fused: linears of one module that read the same input (q, k, v; gate, up), and all experts of a module. expert: the
    same, but each expert by itself, its inputs and its output together. linear: each by itself. block: all of a block.
    Linears that are made of the same stored tensor are always together (but for experts, which share theirs).
    """
    keys: dict[Units, Callable[[LinearSpec], str]] = {
        "linear": lambda spec: spec.name,
        "fused": lambda spec: _above(spec.name, 2) if spec.is_expert else f"{_above(spec.name)} {spec.input_key}",
        "expert": lambda spec: _above(spec.name) if spec.is_expert else f"{_above(spec.name)} {spec.input_key}",
        "block": lambda spec: str(spec.block),
    }
    by_key: dict[str, list[LinearSpec]] = {}
    shared: dict[str, str] = {}  # stored tensor -> the key of the first linear that is made of it
    for spec in specs:
        key = keys[units](spec)
        if not spec.is_expert:
            for stored in skeleton.weight_sources(spec):
                key = shared.setdefault(stored.name, key)
        by_key.setdefault(key, []).append(spec)
    return [LinearGroup(_name([spec.name for spec in members]), tuple(members)) for members in by_key.values()]


def _above(name: str, steps: int = 1) -> str:
    """Return the name of the module that holds a linear, or of one further up."""
    return name.rsplit(".", steps)[0]


def _name(names: Sequence[str]) -> str:
    """Return one name for all: their common path, and what differs in braces where that stays short."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(part) > common and part[common] == parts[0][common] for part in parts):
        common += 1
    path = ".".join(parts[0][:common])
    leaves = list(dict.fromkeys(part[-1] for part in parts))
    depth = {len(part) - common for part in parts}
    return f"{path}.{{{','.join(leaves)}}}" if depth == {1} else path
