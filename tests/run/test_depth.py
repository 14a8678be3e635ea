"""How deep a method lies below the command line: what a reader of a traceback has to go through."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import compress
from compress.__main__ import main
from compress.cli import interruption
from compress.progress import NOTES
from helpers import fake_methods
from helpers.runs import TEXT

MAX_FRAMES_TO_METHOD = 8
MAX_FRAMES_TO_COLUMNS = 11

SOURCE = """'''A method that writes down the frames above it and above its column loop, the outermost first.'''
import sys
from dataclasses import dataclass
from pathlib import Path
from compress.quant import feedback, gptq, rtn
FORMAT, NEEDS, INCOHERENCE = "int", frozenset(), False
plan_params, workspace = rtn.plan_params, rtn.workspace
@dataclass(frozen=True)
class Config(rtn.Config):
    pass
def trace(name):
    frame, frames = sys._getframe(1), []
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    Path(name).write_text("\\n".join(reversed(frames)))
def quantize(weight, stats, config, seed=0):
    trace("method.txt")
    return rtn.quantize(weight, stats, config, seed)
"""


def frames(name: str) -> list[str]:
    """The frames of our own files from `main` on; those of typer, click, torch and contextlib are not ours."""
    root = Path(compress.__file__).parents[1]
    folders = tuple(f"{root / folder}/" for folder in ("compress", "calib"))
    ours = [line for line in Path(name).read_text().splitlines() if line.startswith(folders)]
    return [line.removeprefix(f"{root}/") for line in ours]


@pytest.fixture(autouse=True)
def undo_main() -> Iterator[None]:
    """Give the signals and the notes back that `main` changes for its whole process."""
    signals = {number: signal.getsignal(number) for number in interruption.SIGNALS}
    handlers = list(NOTES.handlers)
    yield
    NOTES.handlers[:] = handlers
    for number, answer in signals.items():
        signal.signal(number, answer)


def run_quantize(model: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.yaml").write_text(recipe)
    words = ["quantize", str(model), "--recipe", "mine.yaml", "--out", "out", "--calib", str(TEXT)]
    monkeypatch.setattr(sys, "argv", ["compress", *words, "--set", "calibration.num_samples=2"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


def test_few_frames_lie_between_the_command_line_and_a_method(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both `main` and the method's `quantize` count, whose file lies elsewhere."""
    fake_methods.install(monkeypatch, tmp_path, tracing=SOURCE)
    monkeypatch.chdir(tmp_path)
    run_quantize(pico_dir("llama"), "quantize: {method: tracing}\n", monkeypatch)
    chain = [*frames("method.txt"), "tracing.py:quantize"]
    assert chain[0] == "compress/__main__.py:main" and chain[-2] == "compress/run/quantize_linear.py:_quantize_part", (
        chain
    )
    assert len(chain) <= MAX_FRAMES_TO_METHOD, chain


def test_few_frames_lie_between_the_command_line_and_the_column_loop(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both `main` and the loop's `run` count."""
    from compress.quant import feedback

    real, chains = feedback.run, list[list[str]]()

    def run(*args: object, **options: object) -> object:
        frame, found = sys._getframe(1), list[str]()
        while frame is not None:
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
        Path("columns.txt").write_text("\n".join(reversed(found)))
        chains.append([*frames("columns.txt"), "compress/quant/feedback.py:run"])
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(feedback, "run", run)
    monkeypatch.chdir(tmp_path)
    run_quantize(pico_dir("llama"), "quantize: {method: gptq}\ncalibration: {importance: none}\n", monkeypatch)
    assert chains and all(len(chain) <= MAX_FRAMES_TO_COLUMNS for chain in chains), chains[0]
