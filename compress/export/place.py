"""Put an export in place: whole or not at all, and over nothing but what compress wrote.

The export is made in the sibling OUT.exporting, locked, and renamed last. What a killed export has left there is
removed by the next one.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from compress.errors import CheckpointError, OutputError
from compress.importers import gguf_header
from compress.storage import paths
from compress.storage.files import sync_directory
from compress.storage.workdir import WorkDirectory, writing
from compress.version import __version__

RECORD = paths.EXPORTED
MARK = {"compress.version": __version__}  # the same in the header of a GGUF file
NAMES = {"lock", "new", "old"}


def unfinished_path(out: Path) -> Path:
    """Return where an export to `out` is made."""
    return out.with_name(f"{out.name}.exporting")


def check(out: Path, suffix: str, overwrite: bool) -> None:
    """Raise OutputError if an export must not be written to `out`, because of its name or of what is there.

    suffix: of the file that is written; "" for a directory.
    """
    paths.check_name(out)
    if suffix and out.suffix != suffix:
        raise OutputError(f"{out} is to be one file; give a name that ends in {suffix}")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise OutputError(f"{out} exists already; give another --out, or --overwrite to replace it")
    if suffix:
        is_replaceable = out.is_file() and _is_marked(out)
    else:
        is_ours = any((out / name).is_file() for name in (RECORD, paths.MANIFEST))
        is_replaceable = out.is_dir() and (is_ours or not os.listdir(out))
    if not is_replaceable:
        what = "file" if suffix else "checkpoint"
        raise OutputError(f"{out} is not a {what} that compress wrote; delete it yourself or give another --out")


def _is_marked(file: Path) -> bool:
    try:
        return MARK.keys() <= gguf_header.read(file).metadata.keys()
    except CheckpointError:
        return False


class ExportPlace(WorkDirectory):
    """The place where one export is made; a context manager that holds the lock, and leaves nothing behind."""

    option = "--out"
    holds = "holds"
    start_over = "remove it"
    keep = "another --out"

    def __init__(self, out: Path, suffix: str, overwrite: bool) -> None:
        super().__init__(unfinished_path(out), "none")
        self.out, self.suffix, self.overwrite = out, suffix, overwrite
        self.new, self.old = self.folder / "new", self.folder / "old"
        self._lock: ExitStack | None = None

    def __enter__(self) -> ExportPlace:
        """Raise OutputError if `out` must not be replaced, or another export is writing it."""
        check(self.out, self.suffix, self.overwrite)
        with writing(self.folder):
            self._lock = self._take_lock(f"another export is writing {self.out}; wait for it, or give another --out")
            try:
                self._settle()
            except BaseException:
                self._lock.close()
                raise
        return self

    def publish(self) -> None:
        """Rename what was written at `new` to its place; the only moment at which that changes."""
        with writing(self.out):
            check(self.out, self.suffix, self.overwrite)
            if os.path.lexists(self.out):
                os.rename(self.out, self.old)
            os.rename(self.new, self.out)
            sync_directory(self.out.parent)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        with self._lock:
            self._settle()
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()

    def _check_folder(self) -> None:
        self._check_names(NAMES)

    def _settle(self) -> None:
        """Put the former output back if nothing has taken its place, and remove what is left."""
        if os.path.lexists(self.old) and not os.path.lexists(self.out):
            os.rename(self.old, self.out)
        for path in (self.new, self.old):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
