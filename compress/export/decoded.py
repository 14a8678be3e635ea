"""Decode a packed checkpoint beside OUT, while another run reads it to write OUT."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from compress.errors import CheckpointError
from compress.export import convert, place
from compress.export.source import open_source
from compress.importers import lora
from compress.progress import Progress
from compress.storage.workdir import WorkDirectory, writing


class Decoded(WorkDirectory):
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
        self.unfinished = place.unfinished(self.model)
        self._lock: ExitStack | None = None

    def __enter__(self) -> Decoded:
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
        found = set(os.listdir(self.folder))
        self._check_names({"lock", self.model.name, self.unfinished.name} if "lock" in found else ())


def check(directory: Path, adapter: Path) -> None:
    """Raise CheckpointError for a checkpoint with nothing packed, and for an adapter that cannot be merged."""
    lora.check(adapter)
    if not open_source(directory).packed:
        raise CheckpointError(
            f"{directory} holds no packed weights; merge into a plain model with: "
            f"compress quantize {directory} --adapter {adapter}"
        )
