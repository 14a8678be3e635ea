"""Cells are shared out, measured once each and taken over from the dead. Children are stand-ins that import nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from compress.errors import OutputError
from compress.study import folder, grid, runner, summary
from compress.study.folder import CellFolder, StudyFolder
from compress.study.grid import Axes, Settings
from compress.study.runner import Effort

IDENTITY = {"model": "fingerprint"}
CHILD = """
import json, os, sys, threading, time
from pathlib import Path
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
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
RUNNER = """
import sys
from pathlib import Path
from compress.study import folder, runner
runner.COMMAND = (sys.executable, "-S", sys.argv[2])
study = folder.StudyFolder(Path(sys.argv[1]))
print("ready", flush=True)
runner.run(study.cells(), runner.Effort(int(sys.argv[3])), lambda cell: print(cell.key, flush=True))
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
    return {**found, "cells": cells, "original": None}


def started(out: Path, child: Path, jobs: int = 1) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RUNNER, str(out), str(child), str(jobs)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_each_cell_is_measured_once_and_failures_are_rows(tmp_path: Path, child: Path) -> None:
    study, cells = asked(tmp_path / "s", 0.0, Axes(("int4", "int8", "kv4")))
    seen: list[str] = []
    runner.run(cells, Effort(jobs=2), lambda cell: seen.append(cell.key))
    assert sorted(seen) == sorted(begun(study.folder)) == sorted(cell.key for cell in cells)
    found = summary.write(study)
    assert {row["name"]: row["reason"] for row in found["failed"]} == {
        "int8": "no such kernel",
        "kv4": "killed by the system, which was out of memory",
    }
    assert [row["name"] for row in found["cells"]] == ["int4"] and found["original"] and not found["pending"]
    runner.run(cells, Effort(), seen.append)  # type: ignore[arg-type]
    assert len(seen) == len(cells)  # nothing is measured again
    for cell in cells:
        cell.forget_failure()
    runner.run(cells, Effort(), lambda cell: seen.append(cell.key))
    assert len(seen) == len(cells) + 2


def test_a_killed_study_goes_on_and_gives_the_same(tmp_path: Path, child: Path) -> None:
    whole, cells = asked(tmp_path / "whole", 0.0, BITS)
    runner.run(cells, Effort(), lambda cell: None)
    study, cells = asked(tmp_path / "killed", 0.4, BITS)
    process = started(study.folder, child)
    assert process.stdout is not None
    first = process.stdout.readline().strip()
    while len(begun(study.folder)) < 2:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert len(summary.gather(study)["pending"]) == len(cells) - 1
    runner.run(cells, Effort(), lambda cell: None)
    assert begun(study.folder).count(first) == 1 and len(begun(study.folder)) == len(cells) + 1
    assert plain(study) == plain(whole)


def test_two_runners_share_the_cells_and_take_over_from_each_other(tmp_path: Path, child: Path) -> None:
    study, cells = asked(tmp_path / "s", 0.3, BITS)
    processes = [started(study.folder, child) for _ in range(2)]
    lines = [process.communicate(timeout=60)[0].split() for process in processes]
    assert all(lines) and sorted(lines[0] + lines[1]) == sorted(begun(study.folder)) == sorted(c.key for c in cells)
    study, cells = asked(tmp_path / "t", 0.3, BITS)
    first = started(study.folder, child)
    while not (study.folder / "begun").is_file():
        time.sleep(0.01)
    second = started(study.folder, child)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second.communicate(timeout=60)
    assert all(cell.result for cell in cells)


def test_what_takes_too_long_has_failed(tmp_path: Path, child: Path) -> None:
    study, cells = asked(tmp_path / "s", 30.0, Axes(("int8",)))
    runner.run(cells, Effort(jobs=2, seconds=0.2), lambda cell: None)
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
