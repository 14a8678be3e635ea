"""SIGTERM and SIGHUP say what SIGINT says, in every command, and leave no process and nothing but what resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.runs import GPTQ, TEXT, cli, command, contents, interrupt, one_line

RESUME = "interrupted; run the same command again to go on after the last finished block"
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}

# Three signals: one as a weight is quantized, one as the first is answered, one as the command ends.
THRICE = (
    interrupt("compress.quant.gptq", "quantize_rows", 10, "SIGTERM")
    + """
from compress.cli import interruption
from compress.storage.workdir import Output
leave, code = Output._leave, interruption.exit_code
Output._leave = lambda output: (os.kill(os.getpid(), signal.SIGINT), leave(output))
interruption.exit_code = lambda: (os.kill(os.getpid(), signal.SIGTERM), code())[1]
"""
)

# When two child processes are there, their numbers are written down and the run gets a signal.
WITH_CHILDREN = """
import multiprocessing, os, signal, threading, time
from pathlib import Path
def wait():
    while len(children := multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    time.sleep({seconds})
    Path({path!r}).write_text(" ".join(str(child.pid) for child in children))
    os.kill(os.getpid(), signal.{how})
threading.Thread(target=wait, daemon=True).start()
"""


@pytest.fixture(scope="module")
def expected(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    assert cli(*command(pico_dir("llama"), GPTQ, out)).code == 0
    return contents(out)


@pytest.mark.parametrize("prepare", ["SIGTERM", "SIGHUP", "three"])
def test_a_signal_is_answered_as_ctrl_c_is(
    prepare: str, pico_dir: Callable[..., Path], expected: dict[str, bytes], tmp_path: Path
) -> None:
    words = command(pico_dir("llama"), GPTQ, tmp_path / "out")
    source = interrupt("compress.quant.gptq", "quantize_rows", 10, prepare) if prepare in CODES else THRICE
    result = cli(*words, prepare=source)
    assert result.code == CODES.get(prepare, 143) and one_line(result) == RESUME
    assert (tmp_path / "out.partial" / "blocks" / "00000.json").is_file() and not (tmp_path / "out").exists()
    assert cli(*words).code == 0
    assert contents(tmp_path / "out") == expected and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_turned_off_stays_off(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """By nohup, for one."""
    source = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    source += interrupt("compress.quant.gptq", "quantize_rows", 10, "SIGHUP")
    assert cli(*command(pico_dir("llama"), GPTQ, tmp_path / "out"), prepare=source).code == 0


def test_every_command(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = str(pico_dir("llama"))
    for words, says in {
        ("quantize", model): RESUME,
        ("transform", model, "--recipe", "quarot4bit"): RESUME,
        ("allocate", "--measure", model): RESUME,
        ("allocate", model): "interrupted; run the same command again to go on",
        ("plan", model): "interrupted",
        ("inspect", model): "interrupted",
        ("verify", model): "interrupted",
        ("bench", model): "interrupted",
        ("eval", model, "--text", str(TEXT)): "interrupted",
        ("generate", model, "--prompt", "x"): "interrupted",
        ("kv", "bench", model, "--text", str(TEXT)): "interrupted",
    }.items():
        source = interrupt("compress.storage.paths", "check_checkpoint", 1, "SIGTERM")
        result = cli(*words, prepare=source, cwd=tmp_path)
        assert result.code == 143 and one_line(result) == says, words
    assert not list(tmp_path.iterdir())


def ended(pid: int, seconds: float = 600) -> bool:
    """Tell whether a process is gone, or only its parent has not asked yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_child_processes_end_with_the_run(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """In the middle of their work, and right after their start when the run itself is killed; measuring then goes on.

    A process that was told to end prints nothing: there is one line.
    """
    sets = ["num_samples=4", "seq_len=24"]
    words = ["allocate", "--measure", str(pico_dir("llama")), "--calib", str(TEXT)]
    words += ["--measurements", str(tmp_path / "m"), "--set", "quantize.group_size=32", "--set", "allocate.samples=2"]
    words += [word for each in sets for word in ("--set", f"calibration.{each}")]
    for how, seconds in {"SIGTERM": 4, "SIGKILL": 0}.items():
        source = WITH_CHILDREN.format(path=str(tmp_path / "pids"), how=how, seconds=seconds)
        result = cli(*words, "--processes", "2", prepare=source)
        if how == "SIGKILL":
            assert (result.code, result.err) == (-signal.SIGKILL, "")
        else:
            assert (result.code, one_line(result)) == (CODES[how], RESUME)
            assert not list((tmp_path / "m").glob("candidates-*"))
        pids = list(map(int, (tmp_path / "pids").read_text().split()))
        assert len(pids) == 2 and all(map(ended, pids)), [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    result = cli(*words)
    assert result.code == 0 and "5 options" in result.out


def test_a_signal_before_the_command_has_begun() -> None:
    early = """
import os, signal
from compress.cli import lists
lists.errors = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
"""
    result = cli("recipes", prepare=early)
    assert result.code == 143 and one_line(result) == "interrupted"


# Where a signal may come before a command has begun -> source that sends it there.
EARLY = {
    "as signals begin to be answered": "from compress.cli import interruption as module; name = 'install'",
    "as the notes are set up": "from compress.cli import options as module; name = 'NotePrinter'",
    "as the commands are put together": "import typer.main as module; name = 'get_command'",
    "as all is done": "from compress.cli import interruption as module; name = 'finish'",
}


@pytest.mark.parametrize("how", sorted(CODES))
@pytest.mark.parametrize("place", EARLY)
def test_a_signal_in_the_first_and_last_moments(place: str, how: str) -> None:
    source = f"""
import os, signal
{EARLY[place]}
real, sent = getattr(module, name), []
def hit(*words):
    found = real(*words) if name == "install" else None
    if not sent:
        sent.append(os.kill(os.getpid(), signal.{how}))
    return real(*words) if name != "install" else found
setattr(module, name, hit)
"""
    result = cli("methods", prepare=source)
    assert result.code == CODES[how] and result.err == "compress: interrupted\n", result


IMPORTED = """
import importlib.abc, os, runpy, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "compress.cli.lists":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["compress", "methods"]
runpy.run_module("compress", run_name="__main__")
"""


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "compress: interrupted\n")
