"""How deep a method lies below the command line: what a reader of a traceback has to go through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fake_methods
from compress.cli import app
from runs import TEXT

MOST = 7

SOURCE = """'''A method that writes down who has called it, the nearest first.'''
import sys
from dataclasses import dataclass
from pathlib import Path
from compress.quant import rtn
from compress.quant.rtn import plan_params, workspace
FORMAT, NEEDS, INCOHERENCE = "int", frozenset(), False
@dataclass(frozen=True)
class Config(rtn.Config):
    pass
def quantize(weight, stats, config, seed=0):
    frame, callers = sys._getframe(1), []
    while frame is not None:
        callers.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    Path("callers.txt").write_text("\\n".join(callers))
    return rtn.quantize(weight, stats, config, seed)
"""


def test_few_frames_lie_between_the_command_line_and_a_method(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted are the frames of our own files above `main` and below the method's `quantize`, neither included.

    Frames of typer, click, torch and contextlib between them are not ours.
    """
    fake_methods.install(monkeypatch, tmp_path, tracing=SOURCE)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("quantize: {method: tracing}\n")
    words = ["quantize", str(pico_dir("llama")), "--recipe", "mine.yaml", "--out", "out", "--calib", str(TEXT)]
    monkeypatch.setattr(sys, "argv", ["compress", *words])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert not end.value.code
    root = Path(app.__file__).parents[2]
    folders = tuple(f"{root / name}/" for name in ("compress", "calib"))
    ours = [line for line in Path("callers.txt").read_text().splitlines() if line.startswith(folders)]
    between = ours[: next(i for i, line in enumerate(ours) if line.endswith("cli/app.py:main"))]
    assert "quantize_linear.py:quantize" in between[0] and len(between) <= MOST, between
