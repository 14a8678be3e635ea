"""Build report.json: what happened in a run, from measured values only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress import formats, process_memory
from compress.errors import CheckpointError
from compress.formats import stored
from compress.run import expert_pruning, identity, plan
from compress.run.job import RunState
from compress.runtime import integer
from compress.storage.checkpoint import open_checkpoint, read_json
from compress.types import LayerPlan, LayerReport, PackedWeight, Stats

MEASURED_ROWS = 512
WORST = 5  # layers listed as the worst ones
ROW = (  # keys of a layer in report.json, and of what is kept of it while a run goes on
    *("name", "shape", "method", "format", "params", "bpw", "nbytes", "weight_error", "output_error", "tokens"),
    *("seconds", "notes", "ops", "activations", "lowrank"),
)


class WeightErrors(NamedTuple):
    """Errors of a quantized weight Q against the original W, with R = W - Q and the Hessian H of its inputs."""

    weight: float  # ||R||^2
    relative: float  # of ||W||^2
    hessian: float | None  # tr(R H R^T), None without statistics
    output: float | None  # of tr(W H W^T)


def errors(weight: Tensor, packed: PackedWeight, stats: Stats | None) -> WeightErrors:
    """Measure a quantized weight [out, in] in float32, against the original on the inputs that the prefix gives.

    The Hessian is used undamped, over at most MEASURED_ROWS rows spread evenly, scaled to all: over all rows it would
    cost as much as the rounding itself. Where target correction has moved the target, the intended shift is part of
    the errors.
    """
    original = weight.float()
    residual = original - formats.decode(packed, original.dtype)
    norm, error = (matrix.square().sum(dtype=torch.float64).item() for matrix in (original, residual))
    hessian = output = None
    if stats is not None and stats.count:
        rows = slice(None, None, -(-original.shape[0] // MEASURED_ROWS))
        whole, part = (_quadratic(matrix[rows], stats.hessian) for matrix in (original, residual))
        hessian = part * (original.shape[0] / original[rows].shape[0])
        output = part / whole if whole > 0 else 0.0
    return WeightErrors(error, error / norm if norm > 0 else 0.0, hessian, output)


def measure(
    layer: LayerPlan, weight: Tensor, packed: PackedWeight, stats: Stats | None, notes: tuple[str, ...]
) -> LayerReport:
    """Report on one quantized weight [out, in]; the caller fills in the seconds."""
    measured = errors(weight, packed, stats)
    return LayerReport(
        name=layer.spec.name,
        shape=layer.spec.shape,
        method=layer.scheme.method,
        stored=packed.stored,
        bpw=packed.bpw,
        nbytes=packed.nbytes,
        weight_error=measured.relative,
        output_error=measured.output,
        tokens=stats.count if stats is not None else 0,
        seconds=0.0,
        notes=notes,
    )


ROW = (  # keys of a layer in report.json, and of what is kept of it while a run goes on
    *("name", "shape", "method", "format", "params", "bpw", "nbytes", "weight_error", "output_error", "tokens"),
    *("seconds", "notes", "ops", "activations", "lowrank"),
)


def to_dict(layer: LayerReport) -> dict[str, Any]:
    """Return a layer's row of report.json."""
    values = {**vars(layer), **stored.to_dict(layer.stored)}
    return {key: values[key] for key in ROW}


def from_dict(values: Mapping[str, Any]) -> LayerReport:
    """Return the report of a layer from its row."""
    facts = {key: value for key, value in values.items() if key not in stored.KEYS}
    form = stored.from_dict({key: values[key] for key in stored.KEYS if key in values}, values["name"])
    return LayerReport(**{**facts, "stored": form, "shape": tuple(facts["shape"]), "notes": tuple(facts["notes"])})


def build(run: RunState, total_seconds: float, self_check: str) -> dict[str, Any]:
    """Return the report as JSON values; self_check: the outcome of the check of the bytes that are published."""
    job, prepared = run.job, run.prepared
    blocks = len(prepared.skeleton.blocks)
    sizes = prepared.skeleton.other_nbytes(prepared.plan.kept_nbytes)
    computed = run.block_seconds
    return {
        "model": job.model.rstrip("/").rsplit("/", 1)[-1],
        "recipe": job.recipe.name,
        "bpw": prepared.plan.bpw,
        **({"allocation": dict(job.allocation)} if job.allocation is not None else {}),
        "nbytes": {"quantized linears": prepared.plan.quantized_nbytes, **sizes, "total": prepared.plan.nbytes},
        "source_nbytes": prepared.skeleton.checkpoint.nbytes,
        "calibration": run.calibration.facts() if run.calibration is not None else None,
        "seconds": {
            "total": round(total_seconds, 2),
            "quantize": round(sum(computed), 2),
            "predicted_quantize": round(computed[0] * len(computed), 2) if computed else None,
        },
        "memory": {
            "limit": job.max_memory,
            "predicted_peak": max(prepared.arrangement.peak_nbytes, (job.allocation or {}).get("predicted_peak", 0)),
            "measured_peak": process_memory.measured_peak(),  # None: of an earlier run, see there
        },
        "arrangement": dataclasses.asdict(prepared.arrangement),
        "blocks": blocks,
        "resumed_blocks": run.replayed,
        "seed": job.seed,
        "device": job.device,
        "versions": identity.versions(),
        "plan": [dataclasses.asdict(group) for group in plan.groups(prepared.plan)],
        "fallbacks": {row.name: list(row.notes) for row in run.layers if row.notes},
        "notes": run.notes,
        "products": products(run.layers, job.device),
        **({"experts": expert_pruning.rows(run.experts, run.prunings, run.layers)} if run.experts else {}),
        "kept": prepared.plan.kept,
        "layers": [to_dict(row) for row in run.layers],
        "self_check": self_check,
    }


def products(layers: list[LayerReport], device: str) -> dict[str, int]:
    """Return how the layers with quantized inputs are multiplied on this kind of device -> how many of them."""
    counts: Counter[str] = Counter()
    for row in layers:
        form = row.stored
        if form.activations is not None:
            counts[integer.describe(form.format, form.params, row.shape, form.activations, torch.device(device))] += 1
    return dict(counts)


def worst(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the layers of a report with the largest error: of the output where it was measured, else of the weight."""

    def error(row: dict[str, Any]) -> float:
        return float(row["weight_error"] if row["output_error"] is None else row["output_error"])

    return sorted(layers, key=error, reverse=True)[:WORST]


def _quadratic(matrix: Tensor, hessian: Tensor) -> float:
    """Return tr(M H M^T) of a matrix [rows, in] and a Hessian [in, in]."""
    return (matrix @ hessian).mul_(matrix).sum(dtype=torch.float64).item()


def load(directory: Path) -> dict[str, Any]:
    """Return the report of a checkpoint; CheckpointError if there is none, or if it is of other bytes."""
    path = directory / "report.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no report.json; give a directory that `compress quantize` wrote")
    report, nbytes = read_json(path), open_checkpoint(directory).nbytes
    if nbytes != (said := report.get("nbytes", {}).get("total")):
        raise CheckpointError(
            f"{path} speaks of {said} bytes of tensors, {directory} has {nbytes}; it is of another model"
        )
    return report
