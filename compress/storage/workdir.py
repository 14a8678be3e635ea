"""Keep the work of a run on disk: one run at a time, resumable, and an output that is in place only when complete.

`WorkDirectory` is what every folder of unfinished work has:

    DIR/lock          held (flock) while a run lives; made first
    DIR/run.json      what the run is (model, recipe, calibration, versions) and how its first run was arranged
    DIR/<records>/    00000.json, 00001.json ...: one file for each finished block, written after its tensors

`Output` is that of a run into OUT, which works in the sibling OUT.partial:

    OUT.partial/blocks/     the records; and one file for each finished stage: what was done to all blocks together
    OUT.partial/model/      the checkpoint in the making; renamed to OUT last
    OUT.partial/calibration text that the model wrote to be calibrated on; kept for the next run
    OUT.partial/rotation    the rotation that was searched or learned
    OUT.partial/stream      hidden states that do not fit into memory; OUT.partial/gradients and cache-states likewise
    OUT.partial/old         the former OUT, while the new one takes its place

With a folder for unfinished work OUT.partial lies in that, and the checkpoint is copied to OUT, not renamed: OUT may be
a mounted object store, where nothing can be renamed or appended to. Files are copied one after the other, each written
once from start to end; `config.json` last but one, so that nothing loads what is incomplete, and the manifest last: it
is what makes the directory a checkpoint. Until then OUT holds a file UNFINISHED, by which the next run knows it.

Killed at any moment, the next run with the same settings goes on after the last finished block. Other settings are
refused. Nothing but these names is ever removed, and OUT itself only if --overwrite was given and it is a checkpoint
of ours, or empty.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from compress import process_memory
from compress.errors import CheckpointError, OutputError
from compress.storage import files, json_text, paths
from compress.storage.checkpoint import CONFIG, MANIFEST, read_json, write_text
from compress.storage.files import open_new, sync_directory
from compress.storage.paths import UNFINISHED

SPARE = 64 << 20  # bytes that must stay free on the disk beside what the run writes
NAMES = {"lock", "run.json", "run.json.part", "blocks", "model", "stream", "calibration", "old"}
RESHAPED = ("kv-heads", "reshaped")  # folders of what transforms of the whole model have measured and fitted
NAMES |= {"rotation", "rotation.part", *RESHAPED, "gradients", "cache-states"}


class WorkDirectory:
    """A folder of unfinished work, filled by one run at a time; its records say which blocks are done."""

    option: ClassVar[str]  # that gives another folder
    holds: ClassVar[str]  # "<folder> <holds> another recipe"
    start_over: str  # what to do to give up what is in the folder
    keep: ClassVar[str]  # what to give to keep it

    def __init__(self, folder: Path, records: str) -> None:
        self.folder, self.records, self.run = folder, folder / records, folder / "run.json"

    @property
    def is_begun(self) -> bool:
        """True once a run has begun here."""
        return self.run.is_file()

    def finished(self) -> int:
        """Return the number of blocks that are done, from block 0 on without a gap."""
        return next(index for index in count() if not self._block(index).is_file())

    def begin(self, identity: dict[str, Any], arrangement: dict[str, Any]) -> dict[str, Any]:
        """Start or resume: return the arrangement to use, which is the first run's.

        identity: JSON values that must not change between a run and its resumption. Raises OutputError naming those
        that did.
        """
        if not self.run.exists():
            with writing(self.folder, self.option):
                write_text(self.run, json.dumps({"identity": identity, "arrangement": arrangement}, indent=1))
            return arrangement
        stored = self._read(self.run)
        known, first = stored.get("identity"), stored.get("arrangement")
        if not isinstance(known, dict) or first is None or not _is_like(first, arrangement):
            raise OutputError(f"{self.run} is damaged, or of another version; {self.start_over}")
        if changed := sorted(name for name in {*known, *identity} if known.get(name) != identity.get(name)):
            raise OutputError(
                f"{self.folder} {self.holds} another {', '.join(changed)}; {self.start_over}, or give {self.keep}"
            )
        return first

    def finish_block(self, index: int, record: dict[str, Any]) -> None:
        """Record that a block's tensors are complete on disk."""
        with writing(self.folder, self.option):
            write_text(self._block(index), json.dumps(record))

    def _block(self, index: int) -> Path:
        return self.records / f"{index:05d}.json"

    def _read(self, path: Path, layout: Any = json_text.OBJECT) -> dict[str, Any]:
        try:
            record = read_json(path)
        except CheckpointError as error:
            raise OutputError(f"{path} is damaged; {self.start_over}") from error
        if wrong := json_text.mismatch(record, layout):
            raise OutputError(f"{path} is damaged, or of another version ({wrong}); {self.start_over}")
        return record

    def _take_lock(self, busy: str) -> ExitStack:
        """Return the lock, held until it is closed, or raise OutputError(busy)."""
        for _ in range(100):  # a run that ends may remove the lock or the directory between any two steps
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError), ExitStack() as opened:
                check_owner(self.folder, self.option)
                self._check_folder()
                lock = opened.enter_context(files.open_lock(self.folder / "lock"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    break
                if os.path.samestat(os.fstat(lock.fileno()), (self.folder / "lock").stat()):
                    return opened.pop_all()
        raise OutputError(busy)

    def _check_folder(self) -> None:
        """Raise OutputError for a folder that is not ours, before anything is written into it."""

    def _check_names(self, names: Collection[str]) -> None:
        """Raise OutputError if there are files of other names in the folder."""
        if not set(os.listdir(self.folder)).issubset(names):
            raise OutputError(
                f"{self.folder} holds files that are not ours; move them away, or give another {self.option}"
            )

    def _remove_parts(self, *folders: Path) -> None:
        """Remove the files that a killed run was writing."""
        for folder in folders:
            for part in folder.glob("*.part"):
                part.unlink()


class Output(WorkDirectory):
    """The working directory of one run; use as a context manager, which holds the lock."""

    option = "--out"
    holds = "holds an unfinished run with"
    start_over = "give --restart to start over"
    keep = "the former settings to resume"

    def __init__(self, out: Path, overwrite: bool = False, restart: bool = False, work: Path | None = None) -> None:
        """Name the directories; work: the folder for OUT.partial, whose files are then copied; None: that of OUT."""
        super().__init__((work or out.parent) / f"{out.name}.partial", "blocks")
        self.out, self.overwrite, self.restart, self.is_copied = out, overwrite, restart, work is not None
        self.work, self.blocks = self.folder, self.records
        self.model, self.old, self.calibration = (self.work / name for name in ("model", "old", "calibration"))
        self._lock: ExitStack | None = None  # closes it

    def __enter__(self) -> Output:
        """Raise OutputError if OUT must not be replaced, OUT.partial is not ours, or another run lives."""
        paths.check_name(self.out)
        with writing(self.work):
            self._lock = self._take_lock(f"another run is writing {self.out}; wait for it, or give another --out")
        try:
            with writing(self.work):
                self._settle()
                paths.check_out(self.out, self.overwrite)
                if self.restart:
                    self._remove(self.calibration)
                if self.restart or not self._resumable():
                    self._forget()
                files.make_folder(self.blocks)
                files.make_folder(self.model)
                self._remove_parts(self.model, self.blocks)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def finished_blocks(self, layout: Any = json_text.OBJECT) -> list[dict[str, Any]]:
        """Return the records of the blocks that are done, from block 0 on without a gap.

        layout: of a record (compress/storage/json_text.py). Raises OutputError for one that is not like that.
        """
        return [self._read(self._block(index), layout) for index in range(self.finished())]

    def finished_stage(self, name: str, layout: Any = json_text.OBJECT) -> dict[str, Any] | None:
        """Return the record of a stage, None where it is not done; layout and errors as for blocks."""
        path = self.blocks / f"{name}.json"
        return self._read(path, layout) if path.is_file() else None

    def finish_stage(self, name: str, record: dict[str, Any]) -> None:
        """Record that a stage is done; `name` is letters, so that `forget_from` takes it for later than any block."""
        with writing(self.work):
            write_text(self.blocks / f"{name}.json", json.dumps(record))

    def forget_from(self, index: int) -> None:
        """Drop the records of all stages and of the blocks from `index` on, which are then computed again."""
        with writing(self.work):
            for path in sorted(self.blocks.glob("*.json"), reverse=True):  # the last first: never a gap
                if path >= self._block(index):
                    path.unlink()
            if self.blocks.exists():
                sync_directory(self.blocks)

    def written(self) -> int:
        """Return the bytes that an interrupted run has left: of the model, and beside its records."""
        folders = [folder for folder in (self.model, self.blocks) if folder.is_dir()]
        return sum(path.stat().st_size for folder in folders for path in folder.iterdir())

    def copied(self) -> int:
        """Return the bytes that are in OUT, which copies replace."""
        return sum(path.stat().st_size for path in self.out.iterdir()) if self.out.is_dir() else 0

    def publish(self) -> None:
        """Put the finished model in place; the only moment at which OUT changes.

        Raises OutputError if OUT has appeared since the start; the finished work stays for the next run.
        """
        with writing(self.out):
            paths.check_out(self.out, self.overwrite)
            if self.is_copied:
                put_copies(self.model, self.out)
                self._remove(self.model)
                self._remove(self.calibration)
                return
            try:
                if os.path.lexists(self.out):
                    os.rename(self.out, self.old)
                os.rename(self.model, self.out)
                sync_directory(self.work)
                sync_directory(self.out.parent)
                self._remove(self.calibration)
            finally:
                self._settle()

    def _resumable(self) -> bool:
        """Return True if there is work to go on with; a run that has published has no model left."""
        begun = self._block(0).is_file() or any((self.work / name).exists() for name in ("rotation", *RESHAPED))
        return begun and self.is_begun and self.model.is_dir()

    def _check_folder(self) -> None:
        """Refuse a directory that has the name of ours by chance."""
        names = set(os.listdir(self.work))
        if names and self.run.name not in names:
            self._check_names(NAMES if "lock" in names else ())

    def _settle(self) -> None:
        """Put the former output back if the new one has not taken its place (the model is still here), else drop it."""
        if self.model.exists() and os.path.lexists(self.old) and not os.path.lexists(self.out):
            os.rename(self.old, self.out)
        elif self.old.is_symlink():
            self.old.unlink()
        elif self.old.exists():
            shutil.rmtree(self.old)

    def _forget(self) -> None:
        """Start over; records go first and the identity last, so that no run takes them for its own."""
        self.forget_from(0)
        for directory in (self.blocks, self.model, *(self.work / name for name in RESHAPED)):
            self._remove(directory)
        for name in ("stream", "gradients", "cache-states", "rotation", "rotation.part", "run.json.part", "run.json"):
            (self.work / name).unlink(missing_ok=True)

    def _remove(self, directory: Path) -> None:
        if directory.is_symlink():
            directory.unlink()
        elif directory.exists():
            shutil.rmtree(directory)

    def _leave(self) -> None:
        """Remove what is not worth resuming, then let the lock go; what cannot be removed is left to the next run."""
        if self._lock is None:
            return
        with self._lock:
            self._lock = None
            if not self._resumable() and not any(self.calibration.glob("*.json")):
                with suppress(OSError, OutputError):
                    self._settle()
                    self._forget()
                    self._remove(self.calibration)
                    (self.work / "lock").unlink()
                    self.work.rmdir()


def check_owner(folder: Path, option: str) -> None:
    """Raise OutputError for a folder of another user, who decides what its records say; option: that changes it."""
    if files.is_of_another_user(folder):
        raise OutputError(f"{folder} belongs to another user; remove it, or give another {option}")


def _is_like(stored: dict[str, Any], arrangement: dict[str, Any]) -> bool:
    """Return whether a stored arrangement has the keys of one, whole numbers, and none that must not be 0."""
    if json_text.mismatch(stored, {key: (type(value),) for key, value in arrangement.items()}):
        return False
    return stored.keys() == arrangement.keys() and all(
        stored[key] >= min(value, 1) for key, value in arrangement.items() if isinstance(value, int)
    )


def check_space(
    directory: Path,
    nbytes: int,
    needs: str = "the run needs",
    advice: str = "free some space or give another --out",
) -> None:
    """Raise OutputError if the disk of `directory` (or its nearest existing parent) has less than nbytes free.

    A mounted store may not know its size, which is then 0. needs, advice: words of the error.
    """
    while not directory.exists():
        directory = directory.parent
    total, _, free = shutil.disk_usage(directory)
    if total and free < nbytes + SPARE:
        raise OutputError(
            f"the disk of {directory} has {process_memory.show(free)} free, {needs} "
            f"{process_memory.show(nbytes + SPARE)}; {advice}"
        )


@contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Turn the system's errors into one clear line; `option`: the one that changes the path.

    What has no number is no error of the system; output that nobody reads and memory have answers of their own.
    """
    reasons = {
        errno.ENOSPC: "the disk is full; free some space and run the same command to go on",
        errno.EDQUOT: "the disk quota is used up; free some space and run the same command to go on",
        errno.EFBIG: "a file is larger than is allowed; raise ulimit -f and run the same command to go on",
        errno.EROFS: f"the file system is read-only; make it writable and run this again, or give another {option}",
        errno.EIO: "the disk reports an error; run the same command to go on once it is mended",
        errno.EACCES: f"permission denied; give another {option}",
        errno.EPERM: f"permission denied; give another {option}",
        errno.EEXIST: f"a file of this name is in the way; give another {option}",
        errno.ENOTEMPTY: "something has appeared there; move it away and run the same command to go on",
        errno.EBUSY: f"it is a mount point or in use; give another {option}",
        errno.ELOOP: f"a link is in its place; remove it, or give another {option}",
        errno.ENOTDIR: f"a part of the path is a file; give another {option}",
        errno.ENAMETOOLONG: f"the name is too long; give another {option}",
        errno.ENOENT: f"it is gone, or cannot be made there; run the same command again, or give another {option}",
    }
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in (errno.EPIPE, errno.ENOMEM):
            raise
        reason = reasons.get(error.errno) or f"{os.strerror(error.errno)}; mend that, or give another {option}"
        place = str(error.filename or path)
        if not Path(place).is_relative_to(path):  # it was not written
            raise OutputError(
                f"{place}: {os.strerror(error.errno)}; mend that and run the same command again"
            ) from error
        raise OutputError(f"cannot write {path}: {reason}") from error


COPIED_LAST = (CONFIG, MANIFEST)


def put_copies(model: Path, out: Path) -> None:
    """Copy the files of a checkpoint, remove others in `out`. Raises OutputError for a copy that is not whole.

    The caller has made sure that `out` may be replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    open_new(out / UNFINISHED).close()
    names = sorted(
        (name for name in os.listdir(model)), key=lambda name: (name in COPIED_LAST, COPIED_LAST[-1] == name, name)
    )
    others = sorted(set(os.listdir(out)) - {*names, UNFINISHED})
    for name in (*COPIED_LAST[::-1], *others):
        if (out / name).is_file():
            (out / name).unlink()
    for name in names:
        copy_whole(model / name, out / name)
    (out / UNFINISHED).unlink()


def copy_whole(source: Path, target: Path) -> None:
    """Copy one file. Raises OutputError if the copy has another size."""
    files.copy(source, target)
    if target.stat().st_size != source.stat().st_size:
        raise OutputError(f"{target} has {target.stat().st_size} bytes, not {source.stat().st_size}; run this again")
