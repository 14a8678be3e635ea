"""Find the names of the checkpoint's modules from the names that an engine's layers have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from compress.runtime.expert_layouts import PROJECTIONS


def linears(prefix: str, listed: Collection[str], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the linears of the checkpoint that the layer `prefix` of an engine holds, in its order.

    fused: last name of a layer -> those of the linears that the engine fuses in it. A layer that is listed itself was
    stored fused.
    """
    parent, _, last = prefix.rpartition(".")
    if prefix in listed or last not in fused:
        return [prefix]
    return [f"{parent}.{name}" if parent else name for name in fused[last]]


def experts(prefix: str, listed: Collection[str]) -> str | None:
    """Return the module of listed experts that the layer `prefix` of an engine computes; None: they are not packed.

    transformers has them at `mlp.experts` of a decoder block, whatever the model's own files, and with them the
    engine, call the module.
    """
    layer = prefix.removesuffix(".routed_experts")
    for name in (layer, f"{layer.rsplit('.', 2)[0]}.mlp.experts"):
        if any(each.startswith(f"{name}.") for each in listed):
            return name
    return None


def renamed_experts(module: str, prefix: str, projections: Sequence[str]) -> dict[str, str]:
    """Return regular expressions of stored names -> what the engine's loader looks for.

    module: that of the checkpoint; prefix: the engine's; projections: its names of gate, up and down. Empty if equal.
    """
    layer = prefix.removesuffix(".routed_experts")
    if module == layer and tuple(projections) == PROJECTIONS:
        return {}
    return {
        rf"^{re.escape(module)}\.(\d+)\.{ours}\.": rf"{layer}.\1.{theirs}."
        for ours, theirs in zip(PROJECTIONS, projections, strict=True)
    }


def tables(listed: Collection[str]) -> list[str]:
    """Return the listed modules outside of all decoder blocks: a table of embeddings, an output head."""
    return [name for name in listed if not any(word.isdecimal() for word in name.split("."))]
