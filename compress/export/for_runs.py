"""Give runs of `compress quantize` what they need of exports: a check of their plan, a model to merge an adapter into.

A recipe may name the export that its result must fit. A packed checkpoint is decoded beside OUT for a run that merges
an adapter into it and writes OUT.
"""

from __future__ import annotations

import copy
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from torch import nn

from compress.errors import CheckpointError
from compress.export import convert, place
from compress.export.source import PackedSource, PublishedNames, open_source, published_names
from compress.export.weights import StoredWeight
from compress.importers import lora
from compress.progress import Progress
from compress.run.job import Prepared
from compress.runtime import linears
from compress.storage.workdir import WorkDirectory, writing
from compress.types import LayerPlan


def check_plan(prepared: Prepared, target: str) -> None:
    """Raise ExportError unless the target can hold all linears of a plan; embeddings and head may become plain.

    What depends on values, such as scales that float16 cannot hold, is found by the export itself.
    """
    skeleton, plan = prepared.skeleton, prepared.plan
    layers = (*plan.layers, *plan.tower_layers)
    published = published_names(skeleton.model, [layer.spec.name for layer in layers])
    packed = tuple(_weight(skeleton.model, published, layer) for layer in layers)
    directory, config = skeleton.checkpoint.directory, skeleton.checkpoint.config
    convert.prepare(PackedSource(directory, config, packed, {}, skeleton.dtype, skeleton, frozenset(), ()), target)


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
