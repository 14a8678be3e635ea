"""report.json: everything that happened in a run, from measured values only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress import formats, process_memory
from compress.errors import CheckpointError
from compress.formats import stored
from compress.run import expert_pruning, job, plan, prepare
from compress.runtime import integer
from compress.storage.checkpoint import open_checkpoint, read_json
from compress.types import LayerPlan, LayerReport, PackedWeight, Stats

MEASURED_ROWS = 512
WORST = 5  # layers listed as the worst ones
ROW = (  # keys of a layer in report.json, and of what is kept of it while a run goes on
    *("name", "shape", "method", "format", "params", "bpw", "nbytes", "weight_error", "output_error", "tokens"),
    *("seconds", "notes", "ops", "activations", "lowrank"),
)


def measure(
    layer: LayerPlan, weight: Tensor, packed: PackedWeight, stats: Stats | None, notes: tuple[str, ...]
) -> LayerReport:
    """Errors of one quantized weight [out, in] against the original, in float32; the caller fills in the seconds.

    output_error is tr(R H R^T) / tr(W H W^T) with the Hessian that was used, undamped, over at most MEASURED_ROWS rows
    spread evenly: over all rows it would cost as much as the rounding itself. Both errors are those against the
    original weight on the inputs that the quantized prefix gives: where calibration.asymmetric has moved the target,
    the intended shift is part of them.
    """
    original = weight.float()
    residual = original - formats.decode(packed, original.dtype)
    output_error = None
    if stats is not None and stats.count:
        rows = slice(None, None, -(-original.shape[0] // MEASURED_ROWS))
        whole = quadratic(original[rows], stats.hessian)
        output_error = quadratic(residual[rows], stats.hessian) / whole if whole > 0 else 0.0
    norm = original.square().sum().item()
    return LayerReport(
        name=layer.spec.name,
        shape=layer.spec.shape,
        method=layer.scheme.method,
        stored=packed.stored,
        bpw=packed.bpw,
        nbytes=packed.nbytes,
        weight_error=residual.square().sum().item() / norm if norm > 0 else 0.0,
        output_error=output_error,
        tokens=stats.count if stats is not None else 0,
        seconds=0.0,
        notes=notes,
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


def build(facts: job.Facts, total_seconds: float, self_check: str) -> dict[str, Any]:
    """The report as JSON values; self_check: the outcome of the check of the bytes that are published."""
    asked, prepared = facts.job, facts.prepared
    blocks = len(prepared.skeleton.blocks)
    sizes = prepared.skeleton.other_nbytes(prepared.plan.kept_nbytes)
    computed = facts.block_seconds
    return {
        "model": asked.model.rstrip("/").rsplit("/", 1)[-1],
        "recipe": asked.recipe.name,
        "bpw": prepared.plan.bpw,
        **({"allocation": dict(asked.allocation)} if asked.allocation is not None else {}),
        "nbytes": {"quantized linears": prepared.plan.quantized_nbytes, **sizes, "total": prepared.plan.nbytes},
        "source_nbytes": prepared.skeleton.checkpoint.nbytes,
        "calibration": facts.calibration.facts() if facts.calibration is not None else None,
        "seconds": {
            "total": round(total_seconds, 2),
            "quantize": round(sum(computed), 2),
            "predicted_quantize": round(computed[0] * len(computed), 2) if computed else None,
        },
        "memory": {
            "limit": asked.max_memory,
            "predicted_peak": prepared.arrangement.peak_nbytes,
            "measured_peak": process_memory.measured_peak(),  # None: of an earlier run, see there
        },
        "arrangement": dataclasses.asdict(prepared.arrangement),
        "blocks": blocks,
        "resumed_blocks": facts.replayed,
        "seed": asked.seed,
        "device": asked.device,
        "versions": prepare.versions(),
        "plan": [dataclasses.asdict(group) for group in plan.groups(prepared.plan)],
        "fallbacks": {row.name: list(row.notes) for row in facts.layers if row.notes},
        "notes": facts.notes,
        "products": products(facts.layers, asked.device),
        **({"experts": expert_pruning.rows(facts.experts, facts.prunings, facts.layers)} if facts.experts else {}),
        "kept": prepared.plan.kept,
        "layers": [to_dict(row) for row in facts.layers],
        "self_check": self_check,
    }


def products(layers: list[LayerReport], device: str) -> dict[str, int]:
    """How the layers with quantized inputs are multiplied on this kind of device -> how many of them."""
    found: Counter[str] = Counter()
    for row in layers:
        form = row.stored
        if form.activations is not None:
            found[integer.describe(form.format, form.params, row.shape, form.activations, torch.device(device))] += 1
    return dict(found)


def worst(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers of a report with the largest error: of the output where it was measured, else of the weight."""

    def error(row: dict[str, Any]) -> float:
        return float(row["weight_error"] if row["output_error"] is None else row["output_error"])

    return sorted(layers, key=error, reverse=True)[:WORST]


def quadratic(matrix: Tensor, hessian: Tensor) -> float:
    """tr(M H M^T)."""
    return (matrix @ hessian).mul_(matrix).sum(dtype=torch.float64).item()


def load(directory: Path) -> dict[str, Any]:
    """The report of a checkpoint that compress wrote; CheckpointError if there is none, or if the bytes are not its."""
    path = directory / "report.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no report.json; give a directory that `compress quantize` wrote")
    report, nbytes = read_json(path), open_checkpoint(directory).nbytes
    if nbytes != (said := report.get("nbytes", {}).get("total")):
        raise CheckpointError(
            f"{path} speaks of {said} bytes of tensors, {directory} has {nbytes}; it is of another model"
        )
    return report
