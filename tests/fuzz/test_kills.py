"""A few killed runs in every test run; `make kills` does hundreds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fuzz import faults, kill_runs

HERE = Path(__file__).parent


def kills(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])}
    command = [sys.executable, "-m", "fuzz.kills", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_few_kills() -> None:
    only = [word for name in ("cache", "gptq", "overwrite") for word in ("--only", name)]
    ran = kills("--kills", "2", *only)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert "different" in ran.stdout.splitlines()[0]


def test_times_do_not_count_and_all_else_does(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    hashes = []
    for text in ('{"seconds": 1, "bpw": 2}', '{"bpw": 2, "seconds": 5}', '{"bpw": 3, "seconds": 1}', "{"):
        report.write_text(text)
        hashes.append(kill_runs.left(tmp_path)["report.json"])
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_a_fault_strikes_at_the_call_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, function in faults.PROBES.values():
        monkeypatch.setattr(module, function, getattr(module, function))  # puts them back
    faults.install({"how": "ENOSPC", "at": "mkdir", "call": 2})
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    assert faults.counts["mkdir"] == 3
    assert Counter(path.name for path in tmp_path.iterdir()) == {"a": 1, "c": 1}
