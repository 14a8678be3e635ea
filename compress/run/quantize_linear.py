"""One linear: from its weight, and what is known of its inputs, to what is stored and what the report says of it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from torch import Tensor

from compress import plugins
from compress.errors import NumericalError
from compress.formats import dense
from compress.lowrank import correct
from compress.quant import incoherence, target_correction
from compress.run import report
from compress.types import IN_SCALE, Fisher, LayerPlan, LayerReport, PackedWeight, Quantized, Stats


@dataclass(frozen=True)
class Given:
    """What the readers of one shared input are given."""

    stats: Stats | None = None
    rotated: Stats | None = None  # the statistics in the rotated basis of those layers that have one
    correction: Tensor | None = None  # [in, in], of asymmetric calibration
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Own:
    """What one linear is given for itself."""

    in_scale: Tensor | None = None  # float32 [1], where its activations need one
    fisher: Fisher | None = None  # where its low-rank part does


def linear(layer: LayerPlan, weight: Tensor, given: Given, own: Own, seed: int) -> tuple[PackedWeight, LayerReport]:
    """Quantize and measure one weight [out, in]."""
    started = time.monotonic()
    name, notes = layer.spec.name, given.notes
    if layer.scheme.config is None:
        packed = PackedWeight(layer.stored, dense.pack(weight, layer.stored.params), layer.spec.shape)
    else:
        target = weight if given.correction is None else target_correction.target(weight, given.correction)
        result = _rounded(layer, target, given.rotated if layer.stored.ops else given.stats, own, seed)
        del target
        packed, notes = result.weight, (*notes, *result.notes)
    if layer.stored.activations is not None:
        scale = {IN_SCALE: own.in_scale} if own.in_scale is not None else {}
        stored = dataclasses.replace(packed.stored, activations=layer.stored.activations)
        packed = PackedWeight(stored, {**packed.tensors, **scale}, packed.shape)
    assert packed.nbytes == layer.nbytes, f"{name}: {packed.nbytes} bytes stored, {layer.nbytes} planned"
    row = report.measure(layer, weight, packed, given.stats, notes)
    return packed, dataclasses.replace(row, seconds=round(time.monotonic() - started, 4))


def _rounded(layer: LayerPlan, weight: Tensor, stats: Stats | None, own: Own, seed: int) -> Quantized:
    """What the layer's method makes of a weight [out, in], in the rotated basis if the layer has one.

    A low-rank part is found in the same basis, and lies inside of the operations that turn it back.
    """
    name = layer.spec.name
    given = incoherence.rotated_weight(weight, layer, seed) if layer.stored.ops else weight
    method, drawn = plugins.load("quant", layer.scheme.method), incoherence.derived_seed(seed, "method", name)

    def rounded(target: Tensor) -> Quantized:
        return method.quantize(target, stats, layer.scheme.config, drawn)

    try:
        if layer.scheme.lowrank is None:
            result = rounded(given)
        else:
            result = correct.corrected(given, own.fisher or stats, layer.scheme.lowrank, rounded, drawn)
    except NumericalError as error:
        raise NumericalError(f"{name}: {error}; more calibration text or a larger damp may help") from error
    if not layer.stored.ops:
        return result
    return Quantized(incoherence.wrapped(result.weight, layer, seed), (*incoherence.notes(layer), *result.notes))
