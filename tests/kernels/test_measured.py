"""Choices that are measured: kept for all processes, never trusted without reason, and sound where nothing can be."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compress.kernels import llvm, measured
from compress.kernels.cpu import emitter

needs_compiler = pytest.mark.skipif(not llvm.available(), reason="nothing is kept where nothing can be compiled")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "_answers", {})
    return tmp_path / "compress" / "kernels"


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times of candidates by their names, to be set."""
    times: dict[str, float] = {}
    monkeypatch.setattr(measured, "times", lambda candidates: {name: times[name] for name in candidates})
    return times


def ask(*names: str, question: str = "which") -> str:
    return measured.fastest(question, {name: lambda: None for name in names})


@needs_compiler
def test_the_fastest_is_chosen_and_kept(spent: dict[str, float], folder: Path) -> None:
    spent |= {"slow": 3.0, "fast": 1.0, "other": 2.0}
    assert ask("slow", "fast", "other") == "fast"
    spent["fast"] = 9.0
    assert ask("slow", "fast", "other") == "fast", "asked once by a process"
    measured.forget()
    assert ask("slow", "fast", "other") == "fast", "and once for a machine"
    assert ask("slow", "fast", "other", question="another") == "other"
    assert ask("slow", "fast") == "slow", "other candidates are another question"
    assert len(list(folder.iterdir())) == 3


@needs_compiler
def test_the_first_stays_where_another_is_hardly_faster(spent: dict[str, float]) -> None:
    spent |= {"first": 1.0, "second": 0.95}
    assert ask("first", "second") == "first"


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "writable", "unknown"])
def test_an_answer_that_cannot_be_trusted_is_replaced(damage: str, spent: dict[str, float], folder: Path) -> None:
    spent |= {"slow": 3.0, "fast": 1.0}
    assert ask("slow", "fast") == "fast"
    (path,) = folder.iterdir()
    right = path.read_bytes()
    key = bytes.fromhex(path.stem)
    if damage == "cut":
        path.write_bytes(right[:-2])
    elif damage == "writable":
        path.chmod(0o622)
    else:
        llvm.store_object(key, b"gone")
    spent["slow"] = 0.1
    measured.forget()
    assert ask("slow", "fast") == "slow"
    assert llvm.load_object(key) == b"slow"


@needs_compiler
def test_the_process_that_is_first_answers_for_all(spent: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one keeps its answer while this one measures."""
    spent |= {"slow": 3.0, "fast": 1.0}
    choose = measured.choose

    def meanwhile(candidates: measured.Candidates) -> str:
        llvm.store_object(measured._key(("which", "slow", "fast")), b"slow")
        return choose(candidates)

    monkeypatch.setattr(measured, "choose", meanwhile)
    assert ask("slow", "fast") == "slow"


def test_nothing_is_asked_where_it_cannot_be_kept(
    spent: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of a run would find different answers: the first candidate is that of both."""
    spent |= {"slow": 3.0, "fast": 1.0}
    (tmp_path / "compress").write_text("not a folder")
    assert ask("slow", "fast") == "slow"
    (tmp_path / "compress").unlink()
    monkeypatch.setattr(llvm, "available", lambda: False)
    measured.forget()
    assert ask("slow", "fast") == "slow" and not (tmp_path / "compress").exists()


@needs_compiler
def test_nothing_is_measured_without_real_tensors(spent: dict[str, float], folder: Path) -> None:
    spent |= {"slow": 3.0, "fast": 1.0}
    with FakeTensorMode():
        assert ask("slow", "fast") == "slow"
    assert not folder.exists() and ask("slow", "fast") == "fast"


def test_candidates_take_turns_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, as often as a turn takes; times are those of a run."""
    runs: list[str] = []
    state: list[tuple[int, bool]] = []

    def spend(name: str, count: int) -> None:
        runs.append(name)
        state.append((torch.get_num_threads(), torch.is_grad_enabled()))
        end = time.thread_time() + count * 1e-4
        while time.thread_time() < end:
            pass

    monkeypatch.undo()
    candidates: dict[str, Callable[[], object]] = {"a": lambda: spend("a", 4), "b": lambda: spend("b", 1)}
    with torch.enable_grad():
        times = _times(candidates)
    assert set(state) == {(1, False)} and runs[:4] == ["a", "a", "b", "b"] and len(runs) < 8 * 12
    assert 1e5 <= times["b"] < times["a"]


def test_an_error_of_a_candidate_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        _times({"a": lambda: 1 // 0})


def test_products_of_matrices_can_be_measured() -> None:
    """The candidates of `emitter.widens` run."""
    times = _times({str(kind): emitter._MatrixProduct(kind) for kind in (torch.bfloat16, torch.float32)})
    assert min(times.values()) > 0


_times = measured.times  # as it is before the session's fixture
