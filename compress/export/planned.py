"""Check a plan against the export that its recipe names, before a weight is quantized."""

from __future__ import annotations

import copy

from torch import nn

from compress.export import convert, names
from compress.export.names import Published
from compress.export.source import Source
from compress.export.weights import Packed
from compress.run.job import Prepared
from compress.runtime import linears
from compress.types import LayerPlan


def check(prepared: Prepared, target: str) -> None:
    """Raise ExportError unless the target can hold all linears of a plan; embeddings and head may become plain.

    What depends on values, such as scales that float16 cannot hold, is found by the export itself.
    """
    skeleton, plan = prepared.skeleton, prepared.plan
    layers = (*plan.layers, *plan.tower_layers)
    published = names.published(skeleton.model, [layer.spec.name for layer in layers])
    packed = tuple(_weight(skeleton.model, published, layer) for layer in layers)
    directory, config = skeleton.checkpoint.directory, skeleton.checkpoint.config
    convert.prepare(Source(directory, config, packed, {}, skeleton.dtype, skeleton, frozenset(), ()), target)


def _weight(model: nn.Module, published: Published, layer: LayerPlan) -> Packed:
    spec = layer.spec
    is_turned = not spec.is_expert and _is_turned(model.get_submodule(spec.name))
    is_fused = spec.name.rsplit(".", 2)[0] in published.fused
    name = published.names[spec.name]
    return Packed(name, spec.shape, layer.stored, (), is_turned, spec.is_expert, is_fused, spec.name)


def _is_turned(module: nn.Module) -> bool:
    return linears.shape_of(module) is not None and isinstance(
        linears.as_linear(copy.deepcopy(module)), linears.TurnedLinear
    )
