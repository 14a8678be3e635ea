"""Quantize one linear: rotate its weight, call its method, correct it by a low-rank part, add what is stored around."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress import formats, plugins
from compress.calib import stats as calib_stats
from compress.calib.output_gradients import OutputGradients
from compress.errors import NumericalError
from compress.formats import columns, dense
from compress.lowrank import correct
from compress.quant import feedback, incoherence, parts, target_correction
from compress.run import sizes
from compress.types import (
    IN_SCALE,
    Fisher,
    LayerPlan,
    LinearSpec,
    OutputMetric,
    OutScales,
    PackedWeight,
    Quantized,
    SparseInputs,
    Stats,
    WeightTransforms,
)

ROWS_PER_CHECK = 4096  # so many rows of a weight are searched for NaN at a time


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of one shared input; without any, a method works on the weight alone."""

    stats: Stats | None = None  # in the basis of the input itself
    correction: Tensor | None = None  # [in, in] float32, of target correction
    notes: tuple[str, ...] = ()  # for the report of every linear
    seed: int = 0
    rotated: dict[tuple[str, ...], Stats] = field(default_factory=dict)  # input operations -> statistics behind them

    def for_layer(self, layer: LayerPlan) -> Stats | None:
        """Return the statistics in the basis that the layer is quantized in; each basis is made once."""
        if self.stats is None or not layer.stored.ops:
            return self.stats
        if layer.stored.ops.input not in self.rotated:
            self.rotated[layer.stored.ops.input] = incoherence.rotated_stats(self.stats, layer, self.seed)
        return self.rotated[layer.stored.ops.input]

    def target(self, weight: Tensor) -> Tensor:
        """Return what a method approximates in place of a weight [out, in]."""
        return weight if self.correction is None else target_correction.target(weight, self.correction)


NO_STATISTICS = InputStatistics()


class LargestWeights:
    """The largest magnitudes of the weights of a block that read one input, for methods that ask for them.

    They are those of the weights alone, so that every process has the same numbers, whichever linears are its own.
    """

    def __init__(self, layers: Sequence[LayerPlan], read: Callable[[str], Tensor], seed: int) -> None:
        self.seed, self.read = seed, read  # linear -> its weight [out, in]
        self.readers: dict[str, dict[str, LinearSpec]] = {}  # input -> the linears that read it
        for layer in layers:
            self.readers.setdefault(layer.spec.input_key, {})[layer.spec.name] = layer.spec
        self.known: dict[tuple[str, WeightTransforms, OutScales], Tensor] = {}

    def of(self, layer: LayerPlan, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Return what a linear's method is told, float32 []; None if it does not ask.

        weights: of linears, among them all that read its input and are not as they were read; used instead.
        """
        if not sizes.needs_largest_weight(layer):
            return None
        key = layer.spec.input_key, layer.stored.ops, layer.scheme.out_scales
        if key not in self.known:
            readers = self.readers[layer.spec.input_key].values()
            given = [(spec, weights[spec.name] if spec.name in weights else self.read(spec.name)) for spec in readers]
            alike = [(dataclasses.replace(layer, spec=spec), weight) for spec, weight in given]
            self.known[key] = torch.stack([largest_magnitude(one, weight, self.seed) for one, weight in alike]).amax()
        return self.known[key]


def largest_magnitude(layer: LayerPlan, weight: Tensor, seed: int) -> Tensor:
    """Return the largest magnitude of a weight [out, in] behind the operations of a layer, float32 []."""
    if layer.stored.ops:
        weight = incoherence.rotated_weight(weight, layer, incoherence.surroundings(layer, seed, weight))
    low, high = torch.aminmax(weight)
    return torch.maximum(-low, high).float()


def check_finite(name: str, weight: Tensor) -> None:
    """Raise NumericalError for a weight [out, in] that no method can quantize; some rows are looked at at a time."""
    if not all(torch.isfinite(rows).all() for rows in weight.split(ROWS_PER_CHECK)):
        raise NumericalError(f"the weight of {name} has NaN or infinite values; repair the checkpoint")


def check_nbytes(layer: LayerPlan, packed: PackedWeight) -> None:
    """Assert that what is stored has as many bytes as were planned, where that is no estimate."""
    is_planned = packed.nbytes == layer.nbytes or formats.is_estimated(layer.stored)
    assert is_planned, f"{layer.spec.name}: {packed.nbytes} bytes stored, {layer.nbytes} planned"


def finish_statistics(
    total: calib_stats.HessianSum, key: str, alpha: float | None, tokens: int, seed: int
) -> InputStatistics:
    """Finish the sums of the input `key`; alpha: share of the target correction, None where no drift was summed.

    tokens: those of the whole calibration text.
    """
    stats, note = calib_stats.shrink(total.finish(key))
    correction, correction_note = None, None
    if alpha is not None:
        correction, correction_note = target_correction.correction(stats, alpha, tokens)
    notes = tuple(filter(None, (note, correction_note)))
    kept = Stats(stats.hessian, stats.count, largest_inputs=stats.largest_inputs)
    return InputStatistics(kept, correction, notes, seed)


class LinearTask(NamedTuple):
    """One linear to be quantized at one option, and what is known of it."""

    layer: LayerPlan
    option: str
    weight: Tensor  # [out, in], the original
    statistics: InputStatistics  # of its shared input, whether its method needs them or not
    fisher: Fisher | None  # where its low-rank part, or tuning, goes by the loss's gradients
    in_scale: Tensor | None  # float32 [1], where its inputs have a static scale
    output_gradients: OutputGradients | None = None  # where its scheme needs the loss's gradients at its outputs
    largest_weight: Tensor | None = (
        None  # float32 [], of all weights that read its input; None: where that is not needed
    )
    sparse: SparseInputs | None = None  # where it leaves inputs unread


def output_metric(task: LinearTask, change_rows: Callable[[Tensor], Tensor] | None = None) -> OutputMetric | None:
    """Return the Hessian of a linear's outputs if its errors go by it, else None.

    change_rows: takes gradients to the basis of the rows that are rounded; None: that of the outputs themselves.
    """
    if task.output_gradients is None or not task.layer.scheme.two_sided:
        return None
    moment = task.output_gradients.in_basis(change_rows) if change_rows else task.output_gradients.in_basis()
    return OutputMetric(moment.block)


def quantize(task: LinearTask, seed: int) -> Quantized:
    """Quantize a linear with its method, in the rotated basis if it has one; notes are for the report.

    A low-rank part is found in the same basis, and lies inside of the operations that turn it back.
    """
    layer = task.layer
    if layer.scheme.config is None:
        stored = dense.pack(task.weight, layer.stored.params)
        return _with_surroundings(task, Quantized(PackedWeight(layer.stored, stored, layer.spec.shape)), {})
    problem = _method_inputs(task, seed)
    first, *others = (dataclasses.replace(layer, scheme=scheme) for scheme in parts.schemes(layer.scheme))
    with _naming(layer):
        result = _quantize_part(task, first, problem)
        if layer.scheme.nested:
            stats = None if problem.stats is None else dataclasses.replace(problem.stats, largest_weight=None)

            def quantize_part(number: int, rest: Tensor) -> Quantized:
                inputs = problem._replace(target=rest, stats=stats, seed=problem.seed + number)
                return _quantize_part(task, others[number - 1], inputs)

            original = task.weight.to(layer.spec.dtype)
            result = parts.add(layer.scheme, result, _plain_target(task, problem), original, quantize_part)
    return _with_surroundings(task, result, problem.around)


def _quantize_part(task: LinearTask, layer: LayerPlan, problem: _Problem) -> Quantized:
    """Quantize a linear, or one part of it, by the scheme of `layer`, with its low-rank part if that has one."""
    target, stats, seed, _ = problem
    method, config, lowrank = plugins.load("quant", layer.scheme.method), layer.scheme.config, layer.scheme.lowrank
    quantize_target = partial(_quantize_by_tiles, layer) if hasattr(method, "quantize_rows") else method.quantize
    if lowrank is None:
        quantized: Quantized = quantize_target(target, stats, config, seed)
        return quantized
    known = (task.fisher if sizes.needs_gradients(layer) else None) or stats
    return correct.quantize_with_part(
        target, known, lowrank, lambda rest: quantize_target(rest, stats, config, seed), seed
    )


def _quantize_by_tiles(layer: LayerPlan, target: Tensor, stats: Stats | None, config: Any, seed: int) -> Quantized:
    """Do what a method's `quantize` does, one tile of rows after the other."""
    method = plugins.load("quant", layer.scheme.method)
    rounding = method.prepare(target, stats, config)
    tiles = [method.quantize_rows(rounding, rows) for rows in sizes.row_tiles(layer)]
    rounding.release()
    quantized: Quantized = method.join(rounding, tiles)
    return quantized


class Tiles(NamedTuple):
    """Some tiles of a linear, and what all of them have in common."""

    parts: list[Any]
    seconds: float
    rounding: feedback.Rounding
    around: dict[str, Tensor]  # stored tensors of the operations


def quantize_tiles(task: LinearTask, numbers: slice, seed: int) -> Tiles:
    """Quantize these of the tiles of a linear."""
    begun, layer = time.monotonic(), task.layer
    target, stats, _, around = _method_inputs(task, seed)
    method = plugins.load("quant", layer.scheme.method)
    with _naming(layer):
        rounding = method.prepare(target, stats, layer.scheme.config)
        parts = [method.quantize_rows(rounding, rows) for rows in sizes.spans(layer)[numbers]]
    rounding.release()
    return Tiles(parts, time.monotonic() - begun, rounding, around)


def join_tiles(task: LinearTask, tiles: Tiles, parts: Sequence[Any]) -> Quantized:
    """Return a linear, whose `parts` are its tiles in order; tiles: some of them."""
    method = plugins.load("quant", task.layer.scheme.method)
    return _with_surroundings(task, method.join(tiles.rounding, parts), tiles.around)


def _statistics(task: LinearTask) -> InputStatistics:
    """Return the statistics that a linear is quantized with."""
    return task.statistics if sizes.needs_statistics(task.layer) else NO_STATISTICS


class _Problem(NamedTuple):
    """What the method of a linear is given, and the stored tensors of the operations that it does not see."""

    target: Tensor  # [out, in]
    stats: Stats | None
    seed: int
    around: dict[str, Tensor]


def _method_inputs(task: LinearTask, seed: int) -> _Problem:
    layer, given = task.layer, _statistics(task)
    target, stats, around = given.target(task.weight), given.for_layer(layer), dict[str, Tensor]()
    change = None
    if layer.stored.ops:
        gradients = task.output_gradients if layer.scheme.out_scales == "sensitivity" else None
        sensitivities = None if gradients is None else gradients.in_basis().diagonal()
        around = incoherence.surroundings(layer, seed, target, sensitivities)
        target = incoherence.rotated_weight(target, layer, around)
        change = partial(incoherence.rotated_gradients, layer=layer, around=around)
    if stats is None and task.largest_weight is not None:
        stats = Stats(task.largest_weight.new_empty(0, 0), 0)
    if stats is not None:
        stats = dataclasses.replace(stats, output=output_metric(task, change), largest_weight=task.largest_weight)
    return _Problem(target, stats, incoherence.derived_seed(seed, "method", layer.spec.name), around)


def _plain_target(task: LinearTask, problem: _Problem) -> Tensor:
    """Return the weight [out, in] in the basis of the method's target, without target correction."""
    if _statistics(task).correction is None:
        return problem.target
    layer = task.layer
    return incoherence.rotated_weight(task.weight, layer, problem.around) if layer.stored.ops else task.weight


@contextmanager
def _naming(layer: LayerPlan) -> Iterator[None]:
    """Name the linear in errors of numbers."""
    try:
        yield
    except NumericalError as error:
        message = f"{layer.spec.name}: {error}; more calibration text or a larger damp may help"
        raise NumericalError(message) from error


def _with_surroundings(task: LinearTask, result: Quantized, around: dict[str, Tensor]) -> Quantized:
    """Return what is stored of a quantized linear, with what lies around it, and all notes."""
    layer, packed, notes = task.layer, result.weight, result.notes
    if layer.stored.ops and layer.scheme.config is not None:
        packed, notes = incoherence.wrap(packed, layer, around), (*incoherence.notes(layer), *notes)
        if layer.scheme.out_scales == "sensitivity" and task.output_gradients is None:
            notes = (*notes, "no gradients of its outputs are known: their scales go by its weights alone")
    if layer.scheme.two_sided and task.output_gradients is not None and task.output_gradients.is_zero:
        notes = (*notes, "no gradient of the loss reaches its outputs: rounded one-sided")
    if layer.stored.activations is not None:
        scale = {IN_SCALE: task.in_scale} if task.in_scale is not None else {}
        stored = dataclasses.replace(packed.stored, activations=layer.stored.activations)
        packed = PackedWeight(stored, {**packed.tensors, **scale}, packed.shape)
    if task.sparse is not None and layer.stored.sparsity is not None:
        tensors = {**packed.tensors, **{name: each.cpu() for name, each in task.sparse.tensors.items()}}
        part = task.sparse.lowrank or packed.stored.lowrank
        stored = dataclasses.replace(packed.stored, sparsity=task.sparse.sparsity, lowrank=part)
        packed = columns.repack(PackedWeight(stored, tensors, packed.shape))
    check_nbytes(layer, packed)
    return Quantized(packed, (*_statistics(task).notes, *notes))
