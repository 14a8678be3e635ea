"""Keep a study on disk.

    DIR/run.json              the model, the texts and what else all cells share; another study is refused
    DIR/lock                  held while a process writes run.json or the results of the whole study
    DIR/cells/KEY/asked.json  what the cell is; recipe.yaml beside it, with every default
    DIR/cells/KEY/lock        held by the process that measures the cell, and by the one that has started it
    DIR/cells/KEY/cell.json   the result, or why there is none; written last
    DIR/cells/KEY/log         what the cell's process has printed
    DIR/cells/KEY/checkpoint  and what an interrupted run leaves beside it; removed after scoring unless it is to stay
    DIR/answers/TASK.json     what the original has answered, where tasks are asked; DIR/answers/lock
    DIR/measured/KEY          what cells that differ in the target alone allocate their bits from (jobs.py)
    DIR/states/N-HASH.safetensors  the original's last hidden states on each text (kept_states.py)
    DIR/study.json, study.csv, study.html

Layouts of compress/storage/json_text.py say what each file holds: a damaged one, or one of another version, is refused.

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
from compress.errors import CheckpointError, OutputError, cut, shown
from compress.evaluate.items import Outcome, Task
from compress.model import fingerprint
from compress.storage.checkpoint import read_json, write_text
from compress.storage.files import lock_descriptor, make_folder, open_lock, open_new
from compress.storage.json_text import INTEGER, LINES, NUMBER, SOME, TEXT, Maybe, mismatch
from compress.storage.workdir import WorkDirectory, writing
from compress.study import grid
from compress.study.grid import Cell, Settings

ASKED, RECIPE, RESULT, LOG, CHECKPOINT = "asked.json", "recipe.yaml", "cell.json", "log", "checkpoint"
# What a folder of a study holds before it has settings.
FIRST_FILES = {"lock", "cells", "run.json.part"}
SETTINGS = {field.name for field in dataclasses.fields(Settings)}
DONE, FAILED = "done", "failed"
CELL_LAYOUT: Any = {
    **{"name": LINES, "label": LINES, "overrides": [LINES], "calib": Maybe(LINES)},
    **{"needs_text": (bool,), "cost": INTEGER, "has_recipe": (bool,)},
    "settings": {
        **{"model": LINES, "texts": [LINES], "dtype": TEXT, "device": TEXT, "keep": (bool,)},
        **dict.fromkeys(("window", "max_tokens", "seed"), INTEGER),
        **{"max_memory": Maybe(INTEGER), "speed": Maybe((bool,), True), "suite": Maybe(TEXT, True)},
        **{"tasks": Maybe([LINES], True), "quantize_dtype": Maybe(TEXT, True)},
    },
}
RUN_LAYOUT: Any = {"identity": {"model": TEXT}}
RESULT_LAYOUT: Any = {  # every result
    **{"version": INTEGER, "key": TEXT, "status": TEXT, "name": LINES, "label": LINES, "overrides": [LINES]},
    **{"calib": Maybe(LINES)},
}
CACHE_LAYOUT: Any = {"bytes_per_token": NUMBER, "exact_bytes_per_token": NUMBER, "context": INTEGER}
SCORES_LAYOUT: Any = [
    {
        **{"text": LINES, "tokens": INTEGER, "perplexity": NUMBER},
        **dict.fromkeys(("kl_mean", "kl_se", "kl_p99", "same_top1", "base_perplexity"), Maybe(NUMBER, True)),
    }
]
PAIRED_LAYOUT: Any = {
    **dict.fromkeys(("difference", "difference_low", "difference_high", "p_value"), NUMBER),
    **{"lost": INTEGER, "gained": INTEGER},
    **dict.fromkeys(("nll_difference", "nll_low", "nll_high"), Maybe(NUMBER)),
}
TASKS_LAYOUT: Any = [
    {
        **{"task": LINES, "score": NUMBER, "n": INTEGER, "paired": Maybe(PAIRED_LAYOUT)},
        **dict.fromkeys(("se", "base", "nll", "nll_se"), Maybe(NUMBER)),
    }
]
MEASURED_LAYOUT: Any = {  # a cell that was measured
    **{"is_cache_only": (bool,), "purpose": LINES, "nbytes": INTEGER, "texts": SCORES_LAYOUT, "versions": {str: LINES}},
    **{
        "suites": Maybe({str: TASKS_LAYOUT}, True),
        "parameters": Maybe(INTEGER, True),
        "positions": Maybe(INTEGER, True),
    },
    "speed": Maybe(
        {
            **{"device": TEXT, "threads": INTEGER, "prompt_tokens": INTEGER, "new_tokens": INTEGER},
            **dict.fromkeys(("prefill_tokens_per_s", "decode_tokens_per_s"), NUMBER),
        }
    ),
    "cost": {
        **{"scoring_seconds": NUMBER},
        **dict.fromkeys(("scoring_peak", "tasks_seconds"), Maybe(NUMBER, True)),
    },
}
QUANTIZED_LAYOUT: Any = {  # one with a recipe
    **{"bpw": Maybe(NUMBER), "whole_bpw": Maybe(NUMBER), "packed_share": Maybe(NUMBER, True)},
    **{"cache": Maybe(CACHE_LAYOUT), "notes": [LINES]},
    "calibration": Maybe(
        {**{"source": LINES, "num_samples": INTEGER, "seq_len": INTEGER}, "self_generated": (bool,)},
    ),
    "cost": {
        **MEASURED_LAYOUT["cost"],
        **{"seconds": NUMBER, "quantize_seconds": NUMBER, "resumed_blocks": INTEGER},
        **dict.fromkeys(("predicted_peak", "measured_peak"), Maybe(NUMBER)),
        "reused_measurements": Maybe((bool,), True),
    },
}
OUTCOME_LAYOUT: Any = {
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
            if not self.run.exists() and (others := sorted(set(os.listdir(self.folder)) - FIRST_FILES)):
                raise OutputError(f"{self.folder} holds {shown(others[0])} and no study; give another --out")
            make_folder(self.records)
            with self.hold_lock():
                self.begin(identity, {})

    @property
    def identity(self) -> dict[str, Any]:
        """What all cells of the study share."""
        shared: dict[str, Any] = self._read(self.run, RUN_LAYOUT)["identity"]
        return shared

    @contextmanager
    def hold_lock(self, name: str = "lock", wait: bool = True) -> Iterator[None]:
        """Hold the lock of the whole study, or of a part of it, once it is free.

        name: of a file in the directory. Without `wait` BlockingIOError is raised where it is not free.
        """
        file = self.folder / name
        with writing(self.folder, self.option):
            make_folder(file.parent)
            lock = open_lock(file)
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def is_locked(self, name: str) -> bool:
        """Return whether a process holds a lock."""
        try:
            with self.hold_lock(name, wait=False):
                return False
        except BlockingIOError:
            return True

    def cell(self, key: str) -> CellFolder:
        """Return the folder of a cell."""
        return CellFolder(self.records / key)

    def cells(self) -> list[CellFolder]:
        """Return the folders of all cells that were ever asked for, by name."""
        return [CellFolder(path.parent) for path in sorted(self.records.glob(f"*/{ASKED}"))]

    def answers(self, task: Task) -> list[Outcome] | None:
        """Return what the original has answered in a task; None before it was asked.

        Raises OutputError if that is damaged, or answers other questions.
        """
        path = self.answered / f"{task.name}.json"
        if not path.is_file():
            return None
        stored = self._read(path, {"questions": TEXT, "outcomes": [OUTCOME_LAYOUT]})
        if stored["questions"] != task.digest:
            raise OutputError(
                f"{path} answers other questions than task {task.name} asks now; its cells cannot be compared with new "
                "ones: give another --out"
            )
        return [Outcome(**outcome) for outcome in stored["outcomes"]]

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
    def request(self) -> dict[str, Any]:
        """What the cell is: name, label, overrides, calib, cost, has_recipe, and `settings`."""
        request = self._read(ASKED)
        wrong = mismatch(request, CELL_LAYOUT)
        if more := sorted(request["settings"].keys() - SETTINGS) if wrong is None else []:
            wrong = f"settings has {shown(more[0])}"
        return self._check(ASKED, request, wrong)

    @property
    def settings(self) -> Settings:
        """What the cell shares with the others."""
        values = {name: value for name, value in self.request["settings"].items() if value is not None}
        return Settings(**{**values, **{name: tuple(values.get(name, ())) for name in ("texts", "tasks")}})

    @property
    def result(self) -> dict[str, Any] | None:
        """The result; None until there is one."""
        if not (self.path / RESULT).is_file():
            return None
        result = self._read(RESULT)
        return self._check(RESULT, result, mismatch_of_result(result, self.key, grid.ORIGINAL))

    @property
    def checkpoint(self) -> Path:
        """Where the quantized model is written."""
        return self.path / CHECKPOINT

    def describe(self) -> dict[str, Any]:
        """Return what every result of the cell begins with."""
        request = self.request
        written_by = grid.SELF if request["needs_text"] else None
        return {
            "version": grid.VERSION,
            "key": self.key,
            **{name: request[name] for name in ("name", "label", "overrides")},
            "calib": grid.source_name(request["calib"]) if request["calib"] else written_by,
            "versions": fingerprint.versions(),
            "device": request["settings"]["device"],
            "seed": request["settings"]["seed"],
        }

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, whole or not at all."""
        with writing(self.path):
            write_text(self.path / RESULT, json.dumps(result, indent=1) + "\n")

    def forget_failure(self) -> None:
        """Remove the result of a cell that failed, unless another process is at it."""
        result = self.result
        if result is not None and result["status"] == FAILED and (lock := self.take()) is not None:
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

    def _check(self, name: str, content: dict[str, Any], wrong: str | None) -> dict[str, Any]:
        """Return what a file holds. Raises OutputError if something is wrong with it."""
        if wrong:
            raise OutputError(
                f"{self.path / name} is damaged, or of another version ({wrong}); delete {self.path} to measure it "
                "again"
            )
        return content


def failure(reason: str) -> dict[str, Any]:
    """Return the result of a cell that could not be measured, and why, in one line."""
    return {"status": FAILED, "reason": cut(reason, 300)}


def mismatch_of_result(result: Any, key: str, original: str) -> str | None:
    """Return what is wrong with the result of the cell `key`, None if nothing is. original: the name of that cell."""
    if wrong := mismatch(result, RESULT_LAYOUT):
        return wrong
    layouts: dict[str, Any] = {
        FAILED: {"reason": LINES},
        DONE: MEASURED_LAYOUT if result["name"] == original else {**MEASURED_LAYOUT, **QUANTIZED_LAYOUT},
    }
    if result["status"] not in layouts:
        return f"status is {result['status']}"
    if result["key"] != key:
        return f"it is of the cell {result['key']}"
    return mismatch(result, layouts[result["status"]])


# Version of how tasks are asked; 2: through the cache of a cell that has one.
ANSWERS_VERSION = 2


def identity(settings: Settings, model: str, begins_with: str = "") -> dict[str, Any]:
    """Return what all cells of a study share and what decides their figures; model: its fingerprint.

    begins_with: what each scored window begins with, or that it does not. It, a suite, tasks and a type to quantize in
    stand in it only where there are any: cells without them keep their names.
    """
    has_tasks = settings.suite is not None or bool(settings.tasks)
    parts = [each.partition("=") for each in settings.tasks]
    asked = {
        "answers": ANSWERS_VERSION if has_tasks else None,
        "suite": settings.suite,
        "begins with": begins_with,
        "quantize type": settings.quantize_dtype,
        "tasks": sorted(f"{name}{sign}{grid.identify_source(file)}" for name, sign, file in parts),
    }
    return {
        **{key: value for key, value in asked.items() if value},
        "version": grid.VERSION,
        "model": model,
        "texts": [grid.identify_source(text) for text in settings.texts],
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
