"""Cells are shared out, measured once each and taken over from the dead. Children are stand-ins that import nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.errors import OutputError
from compress.study import folder, grid, runner, summary
from compress.study.folder import CellFolder, StudyFolder
from compress.study.grid import Axes, Settings
from compress.study.runner import RunLimits

IDENTITY = {"model": "fingerprint"}
CHILD = """
import json, os, sys, threading, time
from pathlib import Path
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
own = Path(sys.argv[1])
asked = json.loads((own / "asked.json").read_text())
with (own.parents[1] / "begun").open("a") as begun:
    begun.write(own.name + "\\n")
time.sleep(float(asked["settings"]["dtype"]))
if asked["name"] == "int8":
    print("no such kernel")
    sys.exit(3)
if asked["name"] == "kv4":
    os.kill(os.getpid(), 9)
row = {"text": "text", "tokens": 10, "perplexity": 2.0, "kl_mean": len(own.name) / 1e3, "kl_se": None}
found = {"version": 1, "key": own.name, "status": "done", "nbytes": len(own.name), "is_cache_only": False, "bpw": 2.0,
         "whole_bpw": 3.0, "cache": None, "texts": [row], "purpose": "weights", "calibration": None, "suites": {},
         "notes": [], "versions": {}, "calib": None, "speed": None, "cost": {"seconds": time.time(),
         "quantize_seconds": 0, "resumed_blocks": 0, "predicted_peak": 0, "measured_peak": 0, "scoring_seconds": 0,
         "scoring_peak": 0}, **{key: asked[key] for key in ("name", "label", "overrides")}}
part = own / "cell.json.new"
part.write_text(json.dumps(found))
part.rename(own / "cell.json")
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-S", str(path)))
    return path


def asked(out: Path, seconds: float, axes: Axes) -> tuple[StudyFolder, list[CellFolder]]:
    """A study whose cells take so long each: the stand-in reads that where the type of the scores is."""
    study = StudyFolder(out)
    study.open(IDENTITY)
    settings = Settings("model", ("text",), dtype=str(seconds))
    return study, [study.ask(cell, settings, IDENTITY) for cell in grid.cells(axes)]


BITS = Axes(("int4",), bits=("2", "3", "4", "5"))


def begun(out: Path) -> list[str]:
    return (out / "begun").read_text().split()


def plain(study: StudyFolder) -> dict[str, object]:
    """Everything but times and memory."""
    found = summary.write(study)
    assert found == json.loads((study.folder / "study.json").read_text())
    cells = [{key: value for key, value in cell.items() if key != "cost"} for cell in found["cells"]]
    return {**found, "cells": cells, "original": None, "settings": None}


def started(study: StudyFolder) -> int:
    """Start another runner as a copy of this process; it notes what it has measured in a file of its number."""
    if pid := os.fork():
        return pid
    try:
        with (study.folder / f"by-{os.getpid()}").open("w", buffering=1) as said:
            runner.run(study.cells(), RunLimits(), lambda cell: print(cell.key, file=said))
    finally:
        os._exit(0)


def measured_by(study: StudyFolder, pid: int) -> list[str]:
    path = study.folder / f"by-{pid}"
    return path.read_text().split() if path.is_file() else []


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_cell_is_measured_once_and_failures_are_rows(tmp_path: Path, child: Path) -> None:
    study, cells = asked(tmp_path / "s", 0.0, Axes(("int4", "int8", "kv4")))
    seen: list[str] = []
    runner.run(cells, RunLimits(jobs=2), lambda cell: seen.append(cell.key))
    assert sorted(seen) == sorted(begun(study.folder)) == sorted(cell.key for cell in cells)
    found = summary.write(study)
    assert {row["name"]: row["reason"] for row in found["failed"]} == {
        "int8": "no such kernel",
        "kv4": "killed by the system, which was out of memory",
    }
    assert [row["name"] for row in found["cells"]] == ["int4"] and found["original"] and not found["pending"]
    runner.run(cells, RunLimits(), lambda cell: seen.append(cell.key))
    assert len(seen) == len(cells)  # nothing is measured again
    for cell in cells:
        cell.forget_failure()
    runner.run(cells, RunLimits(), lambda cell: seen.append(cell.key))
    assert len(seen) == len(cells) + 2


def test_a_cell_without_memory_says_so_in_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Traceback (most recent call last):\n  File ...\nMemoryError\n")
    assert runner._reason(1, tmp_path / "log") == "out of memory"


def test_a_killed_study_goes_on_and_gives_the_same(tmp_path: Path, child: Path) -> None:
    whole, cells = asked(tmp_path / "whole", 0.0, BITS)
    runner.run(cells, RunLimits(), lambda cell: None)
    study, cells = asked(tmp_path / "killed", 0.4, BITS)
    pid = started(study)
    wait_until(lambda: len(measured_by(study, pid)) > 0 and len(begun(study.folder)) > 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(summary.gather(study)["pending"]) == len(cells) - 1
    runner.run(cells, RunLimits(), lambda cell: None)
    assert len(begun(study.folder)) == len(cells) + 1  # the one that was interrupted is begun twice
    assert plain(study) == plain(whole)


def test_two_runners_share_the_cells(tmp_path: Path, child: Path) -> None:
    study, cells = asked(tmp_path / "s", 0.3, BITS)
    pids = [started(study) for _ in range(2)]
    for pid in pids:
        os.waitpid(pid, 0)
    shares = [measured_by(study, pid) for pid in pids]
    assert all(shares) and sorted(shares[0] + shares[1]) == sorted(begun(study.folder)) == [
        c.key for c in sorted_(cells)
    ]


def test_a_runner_takes_over_from_a_dead_one(tmp_path: Path, child: Path) -> None:
    study, cells = asked(tmp_path / "s", 0.5, Axes(("int4",)))
    first = started(study)
    wait_until((study.folder / "begun").is_file)
    second = started(study)
    os.kill(first, signal.SIGKILL)
    for pid in (first, second):
        os.waitpid(pid, 0)
    assert [cell.key for cell in sorted_(cells)] == sorted(measured_by(study, second))


def sorted_(cells: list[CellFolder]) -> list[CellFolder]:
    return sorted(cells, key=lambda cell: cell.key)


def test_what_takes_too_long_has_failed(tmp_path: Path, child: Path) -> None:
    study, cells = asked(tmp_path / "s", 30.0, Axes(("int8",)))
    runner.run(cells, RunLimits(jobs=2, seconds=0.2), lambda cell: None)
    assert [row["reason"] for row in summary.write(study)["failed"]] == ["took longer than 0 s"] * 2


def test_a_lock_is_held_by_one_and_ends_with_it(tmp_path: Path) -> None:
    _, (cell, *_) = asked(tmp_path / "s", 0.0, Axes(("int8",)))
    lock = cell.take()
    assert lock is not None and cell.take() is None
    os.close(lock)
    again = cell.take()
    assert again is not None
    os.close(again)


def test_another_study_is_refused(tmp_path: Path) -> None:
    StudyFolder(tmp_path / "s").open({"model": "a", "texts": []})
    with pytest.raises(OutputError, match="holds a study with another model; give another --out"):
        StudyFolder(tmp_path / "s").open({"model": "b", "texts": []})


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    _, (cell, *_) = asked(tmp_path / "s", 0.0, Axes(("int8",)))
    (cell.path / folder.RESULT).write_text("{")
    with pytest.raises(OutputError, match="is damaged; delete"):
        _ = cell.result
