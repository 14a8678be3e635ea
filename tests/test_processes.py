"""Processes that this package starts execute nothing that lies in the working directory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_layering import MODULES, parse

from helpers.pico import save_pico
from helpers.runs import TEXT, cli

STARTER = "compress.ranks.children"
BECOMES_ENGINE = "compress.cli.write"  # `compress serve` gives its process to the engine (exec)
STARTING = {"subprocess", "multiprocessing", "ProcessPoolExecutor", "pty", "spawn", "pexpect"}
OF_OS = {"fork", "forkpty", "popen", "system", "posix_spawn", "posix_spawnp", "startfile"}
TYPES = {"Popen", "ProcessPoolExecutor", "BrokenProcessPool"}  # which may be imported to be named
HOSTILE = ("torch", "pickle", "yaml", "json", "signal", "socket", "runpy", "multiprocessing", "subprocess", "numpy")
ANSWERING = """
import os, sys
from compress.ranks import children
children.HAS_SAFE_PATH = {has_safe_path}
if __name__ == "__main__":
    pool = children.pool(2, children.prepare_worker, ())
    with children.starting():
        tasks = [pool.submit(os.getcwd) for _ in range(2)]
    assert [task.result() for task in tasks] == [os.getcwd()] * 2
    children.end(pool)
    reading, lock = os.pipe()
    log = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    process = children.start(children.module_command("compress.process_memory"), log, dict(os.environ), lock)
    assert process.wait() == 0
"""


def starts_processes(tree: ast.Module) -> list[str]:
    """Lines that start a process, or import what does."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_of_os = ast.unparse(node.value) in ("os", "_os") and node.attr.startswith((*OF_OS, "exec", "spawn"))
            if is_of_os or ast.unparse(node).startswith(("torch.multiprocessing", "asyncio.create_subprocess")):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Import):
            names = {part for alias in node.names for part in alias.name.split(".")}
            found += [f"line {node.lineno}: {name}" for name in sorted(names & STARTING)]
        elif isinstance(node, ast.ImportFrom):
            names = {*(node.module or "").split("."), *(alias.name for alias in node.names)} & {*STARTING, *OF_OS}
            is_type = {alias.name for alias in node.names} <= TYPES
            found += [] if is_type else [f"line {node.lineno}: {name}" for name in sorted(names)]
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TYPES:
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


def test_one_module_starts_processes() -> None:
    assert {name for name in MODULES if starts_processes(parse(name))} == {STARTER, BECOMES_ENGINE}


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess",
        "import multiprocessing.pool",
        "from multiprocessing import Pool",
        "os.fork()",
        "os.execvp('a', [])",
        "os.system('a')",
        "torch.multiprocessing.spawn(f)",
        "ProcessPoolExecutor(2)",
        "from os import posix_spawn",
    ],
)
def test_check_of_starting(source: str) -> None:
    assert starts_processes(ast.parse(source)) != []
    assert starts_processes(ast.parse("from subprocess import Popen\nx: Popen[bytes]\nos.getpid()")) == []


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory whose modules leave a mark when they are executed."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r} + ' ')\n")
    return folder


def executed(hostile: Path) -> str:
    mark = hostile.parent / "executed"
    return mark.read_text() if mark.exists() else ""


def test_the_marks_are_left(hostile: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    subprocess.run([sys.executable, "-c", "import yaml"], cwd=hostile, env=environment, check=True)
    assert executed(hostile) == "yaml "


@pytest.mark.parametrize("has_safe_path", [sys.version_info >= (3, 11), False])
def test_children_execute_nothing_of_the_working_directory(hostile: Path, has_safe_path: bool) -> None:
    """By the environment variable of later versions of Python, and without it."""
    script = hostile.parent / "script.py"
    script.write_text(ANSWERING.format(has_safe_path=has_safe_path))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    log = hostile.parent / "log"
    subprocess.run([sys.executable, str(script), str(log)], cwd=hostile, env=environment, check=True, timeout=60)
    assert executed(hostile) == "" and log.read_text() == ""


@pytest.mark.slow
def test_a_study_executes_nothing_of_the_working_directory(hostile: Path) -> None:
    model = save_pico("llama", hostile / "model")
    words = ["--recipes", "int8", "--text", str(TEXT), "--window", "64", "--max-tokens", "64", "--out", "st"]
    done = cli("study", str(model), *words, cwd=hostile)
    assert done.code == 0, done.err
    assert executed(hostile) == ""


def test_workers_of_a_measurement_execute_nothing_of_the_working_directory(hostile: Path) -> None:
    model = save_pico("llama", hostile / "model")
    small = ["--set", "calibration.num_samples=2", "--set", "calibration.seq_len=32"]
    done = cli(
        "allocate",
        "--measure",
        str(model),
        "--recipe",
        "mixed3bit",
        *small,
        "--calib",
        str(TEXT),
        "--processes",
        "2",
        cwd=hostile,
    )
    assert done.code == 0, done.err
    assert executed(hostile) == ""


@pytest.mark.slow
def test_torchrun_executes_nothing_of_the_working_directory_by_the_documented_line(hostile: Path) -> None:
    """With -m it does, by Python's own rule."""
    commands = {
        "": ["--no-python", str(Path(sys.executable).with_name("compress")), "--version"],
        "torch": ["-m", "compress.study.cell"],
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    for expected, words in commands.items():
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2", *words]
        done = subprocess.run(torchrun, cwd=hostile, env=environment, capture_output=True, text=True, check=False)
        assert expected in executed(hostile) and bool(executed(hostile)) == bool(expected), done.stderr
