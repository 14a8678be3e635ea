"""Give runs of `compress quantize` what they need of exports: checks of plans, sizes, a model to merge an adapter into.

A recipe may name the export that its result must fit. A target in bytes is then one for the file that is exported,
where the format says how large that is. A packed checkpoint is decoded beside OUT for a run that merges
an adapter into it and writes OUT.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from compress.errors import BudgetError, CheckpointError
from compress.export import convert, place
from compress.export.source import PackedSource, PublishedNames, open_source, published_names
from compress.export.weights import StoredWeight
from compress.importers import lora
from compress.model import towers
from compress.progress import Progress
from compress.recipe.schema import Target
from compress.run import prepare
from compress.run.job import Job, Prepared
from compress.runtime import linears
from compress.storage.workdir import WorkDirectory, writing
from compress.types import LayerPlan

Decided = TypeVar("Decided")  # a job, or what is known where nothing has been measured
MAX_ALLOCATIONS = 6  # each with a corrected number of bytes


def check_plan(prepared: Prepared, target: str) -> None:
    """Raise ExportError unless the target can hold all linears of a plan; embeddings and head may become plain.

    What depends on values, such as scales that float16 cannot hold, is found by the export itself.
    """
    _planned_export(prepared, target)


def fit_target(job: Job, decide: Callable[[Job], Decided]) -> Decided | Job:
    """Return the job with its bits allocated by `decide` so that the exported file takes at most the job's target.

    Left to `decide` alone are jobs without a target in bytes, or with an export that does not know its size beforehand,
    and what it gives where nothing is measured. Raises BudgetError for a target that no choice reaches.
    """
    first, allocation, export = decide(job), job.recipe.allocate, job.recipe.export
    target = None if allocation is None else allocation.target
    if export is None or allocation is None or target is None or not target.is_size or allocation.context is not None:
        return first
    decided: Decided | Job = first
    room = target.nbytes
    for _ in range(MAX_ALLOCATIONS):
        if not isinstance(decided, Job) or decided.allocation is None or (size := file_nbytes(decided, export)) is None:
            return decided
        if decided is not first and size <= target.nbytes:
            line = f"the {export} file takes at most {size:,} of {target.nbytes:,} bytes"
            facts = {"target": target.text, "notes": [*decided.allocation["notes"], line]}
            return dataclasses.replace(decided, allocation={**decided.allocation, **facts})
        beside = size - int(decided.allocation["nbytes"])  # first: what the file has beside what is counted
        room = target.nbytes - beside if decided is first else room - (size - target.nbytes)
        inner = dataclasses.replace(allocation, target=Target(f"{max(room, 1)}B"))
        decided = decide(dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, allocate=inner)))
    raise BudgetError(f"no choice of types was within {target.text} as {export}; raise the target")


def check_place(job: Job, out: Path | None) -> None:
    """Raise OutputError for a place of the export of a job's result that would be refused after hours of work."""
    if out is not None and job.recipe.export is not None:
        place.check(out, convert.target_named(job.recipe.export).SUFFIX, job.overwrite)


def export_result(job: Job, out: Path, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint of a job in the format that its recipe names; return path, bytes and notes."""
    assert job.recipe.export is not None
    result = convert.export(job.out, job.recipe.export, out, overwrite=job.overwrite, progress=progress)
    return {"out": str(out), "nbytes": result.nbytes, "notes": list(result.notes)}


def file_nbytes(job: Job, target: str) -> int | None:
    """Return the most bytes that the export of a job's result takes; None for a target that does not say."""
    module = convert.target_named(target)
    if not hasattr(module, "file_nbytes"):
        return None
    return int(module.file_nbytes(_planned_export(prepare.prepare(job), target)))


def _planned_export(prepared: Prepared, target: str) -> convert.Export:
    """Return what an export of a plan's result would have to write; ExportError for what the target cannot hold."""
    skeleton, plan = prepared.skeleton, prepared.plan
    layers = (*plan.layers, *plan.tower_layers)
    published = published_names(skeleton.model, [layer.spec.name for layer in (*layers, *plan.tables)])
    tables = {table.spec.name: table for table in towers.find_tables(skeleton)}
    packed = [_weight(skeleton.model, published, layer) for layer in layers]
    for layer in plan.tables:
        table = tables[layer.spec.name]
        packed.append(
            dataclasses.replace(
                _weight(skeleton.model, published, layer), roles=table.roles, tied="".join(table.names[1:2])
            )
        )
    plain = {name: stored for name, stored in skeleton.checkpoint.tensors.items() if name in plan.kept_nbytes}
    directory, config = skeleton.checkpoint.directory, skeleton.checkpoint.config
    source = PackedSource(directory, config, tuple(packed), plain, skeleton.dtype, skeleton, published.fused, ())
    return convert.prepare(source, target)


def _weight(model: nn.Module, published: PublishedNames, layer: LayerPlan) -> StoredWeight:
    spec = layer.spec
    is_turned = not spec.is_expert and _is_turned(model.get_submodule(spec.name))
    is_fused = spec.name.rsplit(".", 2)[0] in published.fused
    name = published.names[spec.name]
    return StoredWeight(name, spec.shape, layer.stored, (), is_turned, spec.is_expert, is_fused, spec.name)


def _is_turned(module: nn.Module) -> bool:
    return linears.shape_of(module) is not None and isinstance(
        linears.as_linear(copy.deepcopy(module)), linears.TurnedLinear
    )


class DecodedCheckpoint(WorkDirectory):
    """OUT.decoded, with the decoded checkpoint; a context manager that holds the lock, and leaves nothing behind.

    What a killed run has left there is written again by the next one.
    """

    option = "--out"
    holds = "holds"
    start_over = "remove it"
    keep = "another --out"

    def __init__(self, directory: Path, out: Path) -> None:
        super().__init__(out.with_name(f"{out.name}.decoded"), "none")
        self.directory, self.out = directory, out
        self.model = self.folder / directory.resolve().name
        self.unfinished = place.unfinished_path(self.model)
        self._lock: ExitStack | None = None

    def __enter__(self) -> DecodedCheckpoint:
        """Raise OutputError if OUT.decoded is not ours, or another run holds it."""
        with writing(self.folder):
            self._lock = self._take_lock(f"another run is writing {self.out}; wait for it, or give another --out")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        with self._lock, suppress(OSError):
            for path in (self.model, self.unfinished):
                shutil.rmtree(path, ignore_errors=True)
            (self.folder / "lock").unlink()
            self.folder.rmdir()

    def write(self, progress: Progress) -> Path:
        """Decode the checkpoint, and return where it lies; errors as those of the export to dense."""
        convert.export(self.directory, "dense", self.model, overwrite=True, progress=progress)
        return self.model

    def _check_folder(self) -> None:
        names = set(os.listdir(self.folder))
        self._check_names({"lock", self.model.name, self.unfinished.name} if "lock" in names else ())


def check_merge(directory: Path, adapter: Path) -> None:
    """Raise CheckpointError for a checkpoint with nothing packed, and for an adapter that cannot be merged."""
    lora.check(adapter)
    if not open_source(directory).packed:
        raise CheckpointError(
            f"{directory} holds no packed weights; merge into a plain model with: "
            f"compress quantize {directory} --adapter {adapter}"
        )
