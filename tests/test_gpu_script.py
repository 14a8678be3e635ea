"""benchmarks/gpu.py: its cheapest sections on a CPU, and what it does with cases that fail, die or hang."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bare_tests  # noqa: E402
import gpu  # noqa: E402

CHILD = """
import json, os, sys, time
rows = sys.argv[3]
lines = open(rows).readlines() if os.path.exists(rows) else []
known = {json.loads(line).get("case") for line in lines}
def write(row):
    with open(rows, "a") as stream:
        stream.write(json.dumps(row) + "\\n")
names = ["right", "dies", "right after it", "hangs", "behind it"]
if not known:
    write({"cases": names})
for name in names:
    if name in known:
        continue
    write({"case": name, "state": "began"})
    if name == "dies":
        print("a reason")
        sys.stdout.flush()
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    write({"case": name, "state": "passed"})
"""


def test_cases_that_die_or_hang_stop_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(gpu, "CHILD", child)
    found = gpu.run_section(gpu.Section("kernels", 3), "cpu", tmp_path, time.monotonic() + 8)  # time for two of them
    assert {row["case"]: row["state"] for row in found["rows"]} == {
        **{"right": "passed", "dies": "failed", "right after it": "passed"},
        **{"hangs": "killed", "behind it": "not reached"},
    }
    assert found["rows"][1]["error"] == "ended with 9: a reason"
    assert found["counts"] == {"passed": 2, "failed": 1, "killed": 1, "not reached": 1}


def test_a_child_that_cannot_start_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child.py"
    child.write_text("raise SystemExit('no torch')")
    monkeypatch.setattr(gpu, "CHILD", child)
    found = gpu.run_section(gpu.Section("kernels", 600, 2), "cpu", tmp_path, time.monotonic() + 600)
    assert found["rows"] == 2 * [{"case": "start", "state": "failed", "error": "no torch"}]


def test_limits_fit_into_nine_minutes() -> None:
    assert sum(section.limit for section in gpu.SECTIONS["cuda"]) <= 540
    assert [section.name for section in gpu.SECTIONS["cpu"]] == [section.name for section in gpu.SECTIONS["cuda"]]


@pytest.mark.slow
def test_every_test_of_a_gpu_is_found_without_pytest(tmp_path: Path) -> None:
    """In a process of its own, where a stand-in takes the place of pytest: all are skipped for want of a GPU."""
    source = """
import json, sys
import bare_tests, gpu_child
found = {}
for name, test in bare_tests.collected():
    try:
        test()
        found[name] = "ran"
    except bare_tests.SkippedError as why:
        found[name] = str(why)
print(json.dumps(found))
"""
    paths = f"import sys; sys.path[:0] = {[str(ROOT / 'benchmarks'), str(ROOT), str(ROOT / 'tests')]}\n"
    done = subprocess.run([sys.executable, "-c", paths + source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name.partition("::")[0] for name in found} == {path.stem for path in bare_tests.files()}
    assert len(found) > 40 and ("ran" in found.values() or set(found.values()) == {"no GPU"})


@pytest.mark.slow
def test_a_section_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--sections", "tests", "speed", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert {*found["facts"]} > {"torch", "triton", "device", "cores"}
    ((row,),) = ([row] for row in found["sections"]["speed"]["rows"])
    assert row["state"] == "passed" and row["rows"][0]["seconds"] > 0
    assert found["sections"]["tests"]["counts"] in ({"skipped": 1}, {"passed": 1})
