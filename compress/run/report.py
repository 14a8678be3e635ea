"""Build report.json: what happened in a run, from measured values only."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress import formats, process_memory
from compress.errors import CheckpointError, NumericalError, shown
from compress.formats import stored
from compress.model import fingerprint
from compress.model.skeleton import Skeleton
from compress.run import expert_pruning, plan_summary
from compress.run.job import RunState
from compress.runtime import integer
from compress.storage import json_text
from compress.storage.checkpoint import Checkpoint, open_checkpoint, read_json
from compress.storage.json_text import INTEGER, NUMBER, OBJECT, SOME, TEXT
from compress.storage.manifest import Manifest
from compress.types import LayerPlan, LayerReport, OutputMetric, PackedWeight, Plan, Stats

LOST_WEIGHT_ERROR = 0.9  # relative error from which on nothing is left of a weight; low bits on real ones reach 0.5
MAX_LOST_ROWS = 0.5  # share of the rows
SMALL_ROW = 1e-3  # norm of a row, as a share of the largest one
ROWS_PER_OUTPUT_ERROR = 512
WEIGHTS_PER_ERROR_CHUNK = 1 << 17  # weights whose errors are taken at a time
PACKED = ("quantized linears", "packed embeddings and head")  # among the bytes of a report
WORST = 5  # layers listed as the worst ones
ROW = (  # keys of a layer in report.json, and of what is kept of it while a run goes on
    *("name", "shape", "method", "format", "params", "bpw", "nbytes", "weight_error", "output_error", "tokens"),
    *("seconds", "notes", "ops", "activations", "lowrank"),
)

TWO_SIDED = "two_sided_error"  # a further key of a layer whose outputs do not count alike
BLOCK_RECORD = {  # the record of a finished block, with the rows of its layers
    **{"file": TEXT, "sha256": TEXT, "probe": TEXT, "notes": [TEXT], "experts": OBJECT},
    "layers": [
        {
            **{"name": TEXT, "method": TEXT, "format": TEXT, "params": OBJECT, "shape": [INTEGER], "notes": [TEXT]},
            **{"bpw": NUMBER, "nbytes": INTEGER, "tokens": INTEGER, "seconds": NUMBER},
            **{"weight_error": NUMBER, "output_error": SOME},
        }
    ],
}
OPTIONAL = {  # what not every report has
    "whole": {"bpw": NUMBER, "share": NUMBER, "parameters": INTEGER},  # of the whole model
    "calibration": {
        **{"source": TEXT, "num_samples": INTEGER, "seq_len": INTEGER, "tokens_available": INTEGER, "notes": [TEXT]}
    },
}
SHOWN_KEYS = {  # keys that are shown of a report
    "bpw": NUMBER,
    "source_nbytes": INTEGER,
    "nbytes": {"total": INTEGER, "quantized linears": INTEGER, str: INTEGER},
    "plan": [
        {
            **{"pattern": TEXT, "method": TEXT, "format": TEXT, "count": INTEGER, "nbytes": INTEGER, "bpw": NUMBER},
            "shape": [INTEGER],
        }
    ],
    "layers": [
        {
            **{"name": TEXT, "method": TEXT, "bpw": NUMBER, "weight_error": NUMBER, "notes": [TEXT]},
            "output_error": SOME,
        }
    ],
}
PAGE_KEYS = SHOWN_KEYS | {  # keys that a page shows
    **{"model": TEXT, "recipe": TEXT, "device": TEXT, "self_check": TEXT, "layers": BLOCK_RECORD["layers"]},
    **{"kept": {str: TEXT}, "fallbacks": {str: [TEXT]}, "notes": {str: [TEXT]}, "versions": {str: TEXT}},
    "seconds": {"total": NUMBER, "quantize": NUMBER, str: SOME},
    "memory": {"predicted_peak": NUMBER, str: SOME},
}


class WeightErrors(NamedTuple):
    """Errors of a quantized weight Q against the original W, with R = W - Q and the Hessian H of its inputs."""

    weight: float  # ||R||^2
    relative: float  # of ||W||^2
    hessian: float | None  # tr(R H R^T), None without statistics
    output: float | None  # of tr(W H W^T)
    two_sided: float | None = None  # tr(R H R^T G) of tr(W H W^T G), with G the Hessian of its outputs
    lost_rows: float = 0.0  # share of the rows that are not zero of which nothing is left, see `LayerReport`


def errors(
    weight: Tensor, packed: PackedWeight, stats: Stats | None, metric: OutputMetric | None = None
) -> WeightErrors:
    """Measure a quantized weight [out, in] in float32, against the original on the inputs that the prefix gives.

    metric: the Hessian of its outputs, where they do not count alike.

    The Hessian is used undamped, over at most MEASURED_ROWS rows spread evenly, scaled to all: over all rows it would
    cost as much as the rounding itself. Where target correction has moved the target, the intended shift is part of
    the errors.
    """
    unit = _unit(weight)
    residual = formats.decode(packed, torch.float32).to(weight.device)
    norms, rest_norms = list[Tensor](), list[Tensor]()
    for some, rest in zip(weight.split(_chunk(weight)), residual.split(_chunk(weight)), strict=True):
        original = some.float()
        torch.sub(original, rest, out=rest).mul_(unit)
        norms.append(_squares(original * unit if unit != 1 else original))
        rest_norms.append(_squares(rest))
    row_norm, row_error = torch.cat(norms), torch.cat(rest_norms)
    norm, error = row_norm.sum(dtype=torch.float64).item(), row_error.sum(dtype=torch.float64).item()
    hessian = output = two_sided = None
    if stats is not None and stats.count:
        rows = slice(None, None, -(-weight.shape[0] // ROWS_PER_OUTPUT_ERROR))
        matrices = weight[rows].float() * unit, residual[rows]
        whole, part = (_quadratic(matrix, stats.hessian) for matrix in matrices)
        hessian = part * (weight.shape[0] / weight[rows].shape[0]) / unit**2
        output = part / whole if whole > 0 else 0.0
        if metric is not None:
            block = metric.block(rows)
            whole, part = (_quadratic(matrix, stats.hessian, block) for matrix in matrices)
            two_sided = part / whole if whole > 0 else 0.0
    relative = error / norm if norm > 0 else float(error > 0)
    is_small = (row_norm > 0) & (row_norm < row_norm.max() * SMALL_ROW**2)
    lost_rows = float(
        (is_small & (row_error >= LOST_WEIGHT_ERROR * row_norm)).sum() / (row_norm > 0).sum().clamp(min=1)
    )
    return WeightErrors(error / unit**2, relative, hessian, output, two_sided, lost_rows)


def measure(
    layer: LayerPlan,
    weight: Tensor,
    packed: PackedWeight,
    stats: Stats | None,
    notes: tuple[str, ...],
    metric: OutputMetric | None = None,
) -> LayerReport:
    """Report on one quantized weight [out, in], as `errors` measures it; the caller fills in the seconds."""
    return row(layer, packed, errors(weight, packed, stats, metric), stats, notes)


def row(
    layer: LayerPlan, packed: PackedWeight, measured: WeightErrors, stats: Stats | None, notes: tuple[str, ...]
) -> LayerReport:
    """Report on one quantized weight whose errors are known; the caller fills in the seconds."""
    if measured.lost_rows:
        notes = (
            *notes,
            f"nothing is left of {measured.lost_rows:.1%} of the rows, less than 1/1000 of the largest one",
        )
    return LayerReport(
        name=layer.spec.name,
        shape=layer.spec.shape,
        method=layer.scheme.method,
        stored=packed.stored,
        bpw=packed.bpw,
        nbytes=packed.nbytes,
        weight_error=measured.relative,
        output_error=measured.output,
        two_sided_error=measured.two_sided,
        tokens=stats.count if stats is not None else 0,
        seconds=0.0,
        notes=notes,
        lost_rows=measured.lost_rows,
    )


def check_row(row: LayerReport, is_allowed: bool) -> LayerReport:
    """Return the report of a weight, with a note if what is stored keeps nothing; NumericalError unless `is_allowed`.

    Where its outputs are measured, they tell: a method may change weights that no input reads. What takes no bytes was
    dropped by the recipe.
    """
    if not row.nbytes:
        return row
    if not row.weight_error < LOST_WEIGHT_ERROR and (
        row.output_error is None or not row.output_error < LOST_WEIGHT_ERROR
    ):
        what = f"the packed weight is no likeness of the original (relative error {row.weight_error:.2f})"
    elif row.lost_rows >= MAX_LOST_ROWS:
        what = f"{row.lost_rows:.0%} of the rows are lost beside others that are over 1,000 times as large"
    else:
        return row
    if is_allowed:
        return dataclasses.replace(row, notes=(*row.notes, what))
    raise NumericalError(
        f"{row.name}: {what}; its numbers may be too large or too small for the scales of the format: give it another "
        "method by a rule, leave it as it is with ignore, or go on with --allow-partial"
    )


def to_dict(layer: LayerReport) -> dict[str, Any]:
    """Return a layer's row of report.json."""
    values = {**vars(layer), **stored.to_dict(layer.stored)}
    of_outputs = {} if layer.two_sided_error is None else {TWO_SIDED: layer.two_sided_error}
    return {key: values[key] for key in ROW} | of_outputs


def from_dict(values: Mapping[str, Any]) -> LayerReport:
    """Return the report of a layer from its row."""
    facts = {key: values[key] for key in ROW if key not in stored.KEYS} | {TWO_SIDED: values.get(TWO_SIDED)}
    if len(facts["shape"]) != 2:
        raise CheckpointError(f"{values['name']} has the shape {shown(facts['shape'])}; use --restart")
    form = stored.from_dict({key: values[key] for key in stored.KEYS if key in values}, values["name"])
    return LayerReport(**{**facts, "stored": form, "shape": tuple(facts["shape"]), "notes": tuple(facts["notes"])})


def build(run: RunState, total_seconds: float, self_check: str) -> dict[str, Any]:
    """Return the report as JSON values; self_check: the outcome of the check of the bytes that are published."""
    job, prepared = run.job, run.prepared
    blocks = len(prepared.skeleton.blocks)
    computed = run.block_seconds
    return {
        "model": job.model_name,
        "base": prepared.skeleton.checkpoint.base or None,  # how another tool has stored the original
        "recipe": job.recipe.name,
        "dtype": str(prepared.skeleton.dtype).removeprefix("torch."),  # that it was calibrated in, and loads in
        **plan_facts(prepared.plan, prepared.skeleton),
        **({"allocation": dict(job.allocation)} if job.allocation is not None else {}),
        **({"quick": True} if job.quick else {}),
        **({"unused": prepared.plan.unused_nbytes} if prepared.plan.unused_nbytes else {}),
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
        "versions": fingerprint.versions(),
        "fallbacks": {row.name: list(row.notes) for row in run.layers if row.notes},
        "notes": run.notes,
        "products": products(run.layers, job.device),
        **({"experts": expert_pruning.rows(run.experts, run.prunings, run.layers)} if run.experts else {}),
        "kept": prepared.plan.kept_reasons,
        "layers": [to_dict(row) for row in run.layers],
        "self_check": self_check,
    }


def with_sizes(plan: Plan, rows: Sequence[LayerReport]) -> Plan:
    """Return the plan with the bytes that were stored in the place of those that were estimated."""
    known = {each.name: each for each in rows}

    def settle(layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        return tuple(
            dataclasses.replace(layer, stored=made.stored, nbytes=made.nbytes)
            if (made := known.get(layer.spec.name)) is not None and formats.is_estimated(layer.stored)
            else layer
            for layer in layers
        )

    return dataclasses.replace(
        plan,
        layers=settle(plan.layers),
        tower_layers=settle(plan.tower_layers),
        draft_layers=settle(plan.draft_layers),
        tables=settle(plan.tables),
    )


def plan_facts(plan: Plan, skeleton: Skeleton) -> dict[str, Any]:
    """Return what a plan stores, as JSON values: bits, bytes by kind, and rows of linears that are stored alike."""
    return {
        "bpw": plan.bpw,
        "whole": whole(plan),
        "nbytes": {**packed_nbytes(plan), **skeleton.other_nbytes(plan.kept_nbytes), "total": plan.nbytes},
        "plan": [dataclasses.asdict(group) for group in plan_summary.groups(plan)],
    }


def packed_nbytes(plan: Plan) -> dict[str, int]:
    """Return the bytes of what is packed: linears of the blocks, and tables outside of them if there are any."""
    tables = sum(table.nbytes for table in plan.tables)
    linears = {PACKED[0]: plan.quantized_nbytes - tables}
    return {**linears, PACKED[1]: tables} if plan.tables else linears


def whole(plan: Plan) -> dict[str, float]:
    """Return the bits of all that is stored per parameter of the original, and the share of parameters packed."""
    return {"bpw": plan.whole_bpw, "share": plan.share, "parameters": plan.numel}


def products(layers: list[LayerReport], device: str) -> dict[str, int]:
    """Return how the layers with quantized inputs are multiplied on this kind of device -> how many of them."""
    counts: Counter[str] = Counter()
    for row in layers:
        form = row.stored
        if form.activations is not None:
            counts[integer.describe(form.format, form.params, row.shape, form.activations, torch.device(device))] += 1
    return dict(counts)


def worst(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the layers of a report with the largest error: the two-sided, that of the output, or of the weight.

    It is the first of these that was measured.
    """

    def error(row: dict[str, Any]) -> float:
        errors = (row.get(TWO_SIDED), row["output_error"], row["weight_error"])
        return float(next(each for each in errors if each is not None))

    return sorted(layers, key=error, reverse=True)[:WORST]


def _quadratic(matrix: Tensor, hessian: Tensor, of_rows: Tensor | None = None) -> float:
    """Return tr(M H M^T G) of a matrix [rows, in], a Hessian [in, in] and G [rows, rows], None for the identity."""
    weighed = matrix if of_rows is None else of_rows @ matrix
    return (matrix @ hessian).mul_(weighed).sum(1).sum(dtype=torch.float64).item()


def _chunk(weight: Tensor) -> int:
    """Return the rows that are measured at a time."""
    return max(1, WEIGHTS_PER_ERROR_CHUNK // max(1, weight.shape[1]))


def _squares(matrix: Tensor) -> Tensor:
    """Return the sum of squares of each row of a matrix [rows, in] float32."""
    return matrix.square().sum(1)


def _unit(weight: Tensor) -> float:
    """Return the power of two by which squares of a weight stay in the range of float32; 1 for all usual weights."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not 0 < largest < math.inf or 1e-6 < largest < 1e6:
        return 1.0
    return 2.0 ** -min(100, max(-100, math.frexp(largest)[1]))


def load(directory: Path, layout: dict[str, Any] = SHOWN_KEYS) -> dict[str, Any]:
    """Return the report of a checkpoint; what its headers say if there is none, or if that is of an earlier save.

    layout: what it must have, see `json_text.mismatch`; what its headers say if it has not.
    """
    path, checkpoint = directory / "report.json", open_checkpoint(directory)
    if not path.is_file():
        return from_headers(checkpoint, "there is no report.json")
    report, listed = read_json(path), Manifest.read(directory)
    layout = layout | {key: inner for key, inner in OPTIONAL.items() if report.get(key) is not None}
    if wrong := json_text.mismatch(report, layout):
        return from_headers(checkpoint, f"report.json is damaged, or of another version ({wrong})")
    weights = {file.name for file in checkpoint.files}
    is_of_these = report["nbytes"]["total"] == checkpoint.nbytes
    if not is_of_these or (listed is not None and listed.is_of_earlier_save(weights)):
        return from_headers(checkpoint, "report.json is of an earlier save, or of another model")
    return report


def from_headers(checkpoint: Checkpoint, why: str) -> dict[str, Any]:
    """Return the part of a report that config.json and the headers give; `why` there is no more.

    "incomplete" says what is not known. Raises CheckpointError for a checkpoint without packed linears.
    """
    skeleton = Skeleton(checkpoint)
    skeleton.check_tensors()
    plan = plan_summary.plan_of_packed(skeleton)
    rows = (
        {"name": x.spec.name, "shape": x.spec.shape, **stored.to_dict(x.stored), "bpw": x.bpw, "nbytes": x.nbytes}
        for x in plan.packed
    )
    return {
        **plan_facts(plan, skeleton),
        "source_nbytes": None,
        "layers": list(rows),
        "incomplete": f"from config.json and the headers of the files, because {why}; methods and errors are not known",
    }
