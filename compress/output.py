"""The output directory: one run at a time, resumable, in place only when complete.

A run into OUT works in the sibling OUT.partial:

    OUT.partial/lock        held (flock) while a run lives
    OUT.partial/run.json    what the run is: model, recipe, calibration, versions; how it was arranged
    OUT.partial/blocks/     one file for each finished block, written after its shard
    OUT.partial/model/      the checkpoint in the making; renamed to OUT last

Killed at any moment, the next run with the same settings goes on after the last finished block. Other settings are
refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from compress import memory
from compress.checkpoint import read_json, write_text
from compress.errors import CheckpointError, OutputError

SPARE = 64 << 20  # bytes that must stay free on the disk beside what the run writes


class Output:
    """The working directory of one run; use as a context manager, which holds the lock."""

    def __init__(self, out: Path, overwrite: bool = False, restart: bool = False) -> None:
        self.out, self.overwrite, self.restart = out, overwrite, restart
        self.work = out.with_name(out.name + ".partial")
        self.model = self.work / "model"
        self.blocks = self.work / "blocks"
        self._lock: int | None = None

    def __enter__(self) -> Output:
        if self.out.name in ("", ".."):
            raise OutputError(f"{self.out} cannot be an output directory; give --out a new name")
        with writing(self.work):
            if self.out.exists() and not self.overwrite:
                raise OutputError(f"{self.out} exists already; give another --out, or --overwrite to replace it")
            published = self.blocks.exists() and not self.model.exists()  # what a killed run was removing at its end
            self.blocks.mkdir(parents=True, exist_ok=True)
            self.model.mkdir(exist_ok=True)
            self._lock = os.open(self.work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = None
            raise OutputError(f"another run is writing {self.out}; wait for it, or give another --out") from error
        for part in [*self.model.glob("*.part"), *self.blocks.glob("*.part"), *self.work.glob("*.part")]:
            part.unlink()  # what a killed run was writing
        if self.restart or published:
            self._forget()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        os.close(self._lock)
        self._lock = None
        if kind is not None and not self.finished_blocks():
            shutil.rmtree(self.work, ignore_errors=True)  # nothing worth resuming

    def begin(self, identity: dict[str, Any], arrangement: dict[str, Any]) -> dict[str, Any]:
        """Start or resume: returns the arrangement to use, which is the first run's.

        identity: JSON values that must not change between a run and its resumption. Raises OutputError naming those
        that did.
        """
        path = self.work / "run.json"
        if not path.exists():
            with writing(self.work):
                write_text(path, json.dumps({"identity": identity, "arrangement": arrangement}, indent=1))
            return arrangement
        try:
            stored = read_json(path)
            known, first = dict(stored["identity"]), dict(stored["arrangement"])
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise OutputError(f"{path} is damaged; give --restart to start over") from error
        changed = sorted(k for k in {*known, *identity} if known.get(k) != identity.get(k))
        if changed:
            raise OutputError(
                f"{self.work} holds an unfinished run with another {', '.join(changed)}; give --restart to start over, "
                "or the former settings to resume"
            )
        return first

    def finished_blocks(self) -> list[dict[str, Any]]:
        """Records of the blocks that are done, from block 0 on without a gap."""
        found: list[dict[str, Any]] = []
        while (path := self._block(len(found))).is_file():
            try:
                found.append(read_json(path))
            except CheckpointError as error:
                raise OutputError(f"{path} is damaged; use --restart to start over") from error
        return found

    def finish_block(self, index: int, record: dict[str, Any]) -> None:
        """Record that a block's shard is complete on disk."""
        with writing(self.work):
            write_text(self._block(index), json.dumps(record))

    def written(self) -> int:
        """Bytes that an interrupted run has left."""
        return sum(path.stat().st_size for path in self.model.iterdir())

    def publish(self) -> None:
        """Put the finished model in place; the only moment at which OUT changes."""
        with writing(self.out):
            old = self.out.with_name(f"{self.out.name}.old-{os.getpid()}")
            if self.out.exists():
                os.rename(self.out, old)
            os.rename(self.model, self.out)
            if old.is_symlink() or old.is_file():
                old.unlink()
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(self.work, ignore_errors=True)

    def _block(self, index: int) -> Path:
        return self.blocks / f"{index:05d}.json"

    def _forget(self) -> None:
        for path in (self.work / "run.json", *self.blocks.iterdir(), *self.model.iterdir()):
            path.unlink(missing_ok=True)


def check_space(directory: Path, nbytes: int) -> None:
    """Raise OutputError if the disk of `directory` (or its nearest existing parent) has less than nbytes free."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < nbytes + SPARE:
        raise OutputError(
            f"the disk of {directory} has {memory.show(free)} free, the run needs {memory.show(nbytes + SPARE)}; free "
            "some space or give another --out"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write into one clear line."""
    reasons = {
        errno.ENOSPC: "the disk is full; free some space and run the same command to go on",
        errno.EDQUOT: "the disk quota is used up; free some space and run the same command to go on",
        errno.EROFS: "the file system is read-only; give another --out",
        errno.EACCES: "permission denied; give another --out",
        errno.EPERM: "permission denied; give another --out",
        errno.ENOTDIR: "a part of the path is a file; give another --out",
        errno.ENAMETOOLONG: "the name is too long; give another --out",
    }
    try:
        yield
    except OSError as error:
        reason = reasons.get(error.errno or 0)
        if reason is None:
            raise
        raise OutputError(f"cannot write {path}: {reason}") from error
