"""Keep a study on disk.

    DIR/run.json              the model, the texts and what else all cells share; another study is refused
    DIR/lock                  held while a process writes run.json or the results of the whole study
    DIR/cells/KEY/asked.json  what the cell is; recipe.yaml beside it, with every default
    DIR/cells/KEY/lock        held by the process that measures the cell, and by the one that has started it
    DIR/cells/KEY/cell.json   the result, or why there is none; written last
    DIR/cells/KEY/log         what the cell's process has printed
    DIR/cells/KEY/checkpoint  and what an interrupted run leaves beside it; removed after scoring unless it is to stay
    DIR/answers/TASK.json     what the original has answered, where tasks are asked; DIR/answers/lock
    DIR/study.json, study.csv, study.html

Locks are those of the kernel (flock): they end with their process, so that nothing stale is left by one that was
killed, and on a network file system that knows them they hold between machines.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compress import recipe
from compress.errors import CheckpointError, OutputError, shown
from compress.evaluate.items import Outcome, Task
from compress.storage import json_text
from compress.storage.checkpoint import read_json, write_text
from compress.storage.files import lock_descriptor, make_folder, open_lock, open_new
from compress.storage.json_text import LINES, NUMBER, SOME, TEXT
from compress.storage.workdir import WorkDirectory, writing
from compress.study import grid, layouts
from compress.study.grid import Cell, Settings
from compress.study.layouts import FAILED

ASKED, RECIPE, RESULT, LOG, CHECKPOINT = "asked.json", "recipe.yaml", "cell.json", "log", "checkpoint"
BEGUN = {"lock", "cells", "run.json.part"}  # in the folder of a study that has no settings yet
SETTINGS = {field.name for field in dataclasses.fields(Settings)}
OUTCOME: Any = {
    **{"name": LINES, "chosen": LINES, "right": (bool,), "right_by_bytes": (bool, type(None))},
    **{"nll": SOME, "tokens_right": SOME, "kl": SOME, "figures": {str: NUMBER}},
}


class StudyFolder(WorkDirectory):
    """The directory of a study, which any number of processes may use at a time."""

    option = "--out"
    holds = "holds a study with"
    start_over = "give another --out"
    keep = "the former settings"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "cells")
        self.answered = folder / "answers"

    def open(self, identity: dict[str, Any]) -> None:
        """Make the directory, or check that the study in it is this one. Raises OutputError, for other files, too."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.run.exists() and (others := sorted(set(os.listdir(self.folder)) - BEGUN)):
                raise OutputError(f"{self.folder} holds {shown(others[0])} and no study; give another --out")
            make_folder(self.records)
            with self.locked():
                self.begin(identity, {})

    @property
    def identity(self) -> dict[str, Any]:
        """What all cells of the study share."""
        found: dict[str, Any] = self._read(self.run, layouts.RUN)["identity"]
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the whole study, once it is free."""
        with writing(self.folder, self.option):
            lock = open_lock(self.folder / "lock")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def cell(self, key: str) -> CellFolder:
        """Return the folder of a cell."""
        return CellFolder(self.records / key)

    def cells(self) -> list[CellFolder]:
        """Return the folders of all cells that were ever asked for, by name."""
        return [CellFolder(path.parent) for path in sorted(self.records.glob(f"*/{ASKED}"))]

    @contextmanager
    def locked_answers(self) -> Iterator[None]:
        """Hold the lock of the original's answers, once it is free."""
        with writing(self.answered):
            make_folder(self.answered)
            lock = open_lock(self.answered / "lock")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def answers(self, task: Task) -> list[Outcome] | None:
        """Return what the original has answered in a task; None before it was asked.

        Raises OutputError if that is damaged, or answers other questions.
        """
        path = self.answered / f"{task.name}.json"
        if not path.is_file():
            return None
        found = self._read(path, {"questions": TEXT, "outcomes": [OUTCOME]})
        if found["questions"] != task.digest:
            raise OutputError(
                f"{path} answers other questions than task {task.name} asks now; its cells cannot be compared with new "
                "ones: give another --out"
            )
        return [Outcome(**outcome) for outcome in found["outcomes"]]

    def keep_answers(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        """Write what the original has answered in a task, whole or not at all."""
        kept = {"questions": task.digest, "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes]}
        with writing(self.answered):
            write_text(self.answered / f"{task.name}.json", json.dumps(kept) + "\n")

    def ask(self, cell: Cell, settings: Settings, identity: dict[str, Any]) -> CellFolder:
        """Return the folder of a cell, with what is asked of it written down."""
        folder = self.cell(cell.key(identity))
        with writing(folder.path):
            make_folder(folder.path)
            if not (folder.path / RESULT).is_file():
                if cell.recipe is not None:
                    _put(folder.path / RECIPE, recipe.dump(cell.recipe))
                _put(folder.path / ASKED, json.dumps(_plain(cell, settings), indent=1) + "\n")
        return folder


class CellFolder:
    """The directory of one cell."""

    def __init__(self, path: Path) -> None:
        self.path, self.key = path, path.name

    @property
    def study(self) -> StudyFolder:
        """The study that the cell is of."""
        return StudyFolder(self.path.parent.parent)

    @property
    def asked(self) -> dict[str, Any]:
        """What the cell is: name, label, overrides, calib, cost, has_recipe, and `settings`."""
        found = self._read(ASKED)
        wrong = json_text.mismatch(found, layouts.ASKED)
        if more := sorted(found["settings"].keys() - SETTINGS) if wrong is None else []:
            wrong = f"settings has {shown(more[0])}"
        return self._checked(ASKED, found, wrong)

    @property
    def settings(self) -> Settings:
        """What the cell shares with the others."""
        values = {name: value for name, value in self.asked["settings"].items() if value is not None}
        return Settings(**{**values, **{name: tuple(values.get(name, ())) for name in ("texts", "tasks")}})

    @property
    def result(self) -> dict[str, Any] | None:
        """The result; None until there is one."""
        if not (self.path / RESULT).is_file():
            return None
        found = self._read(RESULT)
        return self._checked(RESULT, found, layouts.of_result(found, self.key, grid.ORIGINAL))

    @property
    def checkpoint(self) -> Path:
        """Where the quantized model is written."""
        return self.path / CHECKPOINT

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, whole or not at all."""
        with writing(self.path):
            write_text(self.path / RESULT, json.dumps(result, indent=1) + "\n")

    def forget_failure(self) -> None:
        """Remove the result of a cell that failed, unless another process is at it."""
        found = self.result
        if found is not None and found["status"] == FAILED and (lock := self.take()) is not None:
            with suppress(FileNotFoundError):
                (self.path / RESULT).unlink()
            os.close(lock)

    def take(self) -> int | None:
        """Return the descriptor of the cell's lock, None while another process has it. Closing it frees the cell."""
        with writing(self.path):
            lock = lock_descriptor(self.path / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def clear(self, keep: bool = False) -> None:
        """Remove what was measured for the checkpoint, and that itself unless it is to be kept."""
        for path in self.path.iterdir():
            if path.is_dir() and not (keep and path == self.checkpoint):
                shutil.rmtree(path, ignore_errors=True)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self.path / name)
        except CheckpointError as error:
            raise OutputError(f"{self.path / name} is damaged; delete {self.path} to measure it again") from error

    def _checked(self, name: str, found: dict[str, Any], wrong: str | None) -> dict[str, Any]:
        """Return what a file holds. Raises OutputError if something is wrong with it."""
        if wrong:
            raise OutputError(
                f"{self.path / name} is damaged, or of another version ({wrong}); delete {self.path} to measure it "
                "again"
            )
        return found


ANSWERS = 2  # version of how tasks are asked; 2: through the cache of a cell that has one


def identity(settings: Settings, model: str, begins_with: str = "") -> dict[str, Any]:
    """Return what all cells of a study share and what decides their figures; model: its fingerprint.

    begins_with: what each scored window begins with, or that it does not. It, a suite, tasks and a type to quantize in
    stand in it only where there are any: cells without them keep their names.
    """
    has_tasks = settings.suite is not None or bool(settings.tasks)
    parts = [each.partition("=") for each in settings.tasks]
    asked = {
        "answers": ANSWERS if has_tasks else None,
        "suite": settings.suite,
        "begins with": begins_with,
        "quantize type": settings.quantize_dtype,
        "tasks": sorted(f"{name}{sign}{grid.hashed(file)}" for name, sign, file in parts),
    }
    return {
        **{key: value for key, value in asked.items() if value},
        "version": grid.VERSION,
        "model": model,
        "texts": [grid.hashed(text) for text in settings.texts],
        "window": settings.window,
        "tokens": settings.max_tokens,
        "type": settings.dtype,
        "seed": settings.seed,
        "device": settings.device,
    }


def _plain(cell: Cell, settings: Settings) -> dict[str, Any]:
    return {
        "name": cell.name,
        "label": cell.label,
        "overrides": list(cell.overrides),
        "calib": cell.calib,
        "needs_text": cell.needs_text,
        "cost": cell.cost,
        "has_recipe": cell.recipe is not None,
        "settings": dataclasses.asdict(settings),
    }


def _put(path: Path, text: str) -> None:
    """Write a file whole or not at all, whoever else does the same."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    with open_new(part) as stream:
        stream.write(text.encode())
    os.replace(part, path)
