"""Check a plan against the export that its recipe names, before a weight is quantized."""

from __future__ import annotations

from compress.export import convert
from compress.export.source import Source
from compress.export.weights import Packed
from compress.run.job import Prepared
from compress.types import LayerPlan


def check(prepared: Prepared, target: str) -> None:
    """Raise ExportError unless the target can hold all linears of a plan; embeddings and head may become plain.

    What depends on values, such as scales that float16 cannot hold, is found by the export itself.
    """
    skeleton, plan = prepared.skeleton, prepared.plan
    packed = tuple(map(_weight, (*plan.layers, *plan.beside)))
    directory, config = skeleton.checkpoint.directory, skeleton.checkpoint.config
    convert.prepare(Source(directory, config, packed, {}, skeleton.dtype, skeleton, frozenset(), ()), target)


def _weight(layer: LayerPlan) -> Packed:
    spec = layer.spec
    return Packed(spec.name, spec.shape, layer.stored, is_expert=spec.is_expert, module=spec.name)
