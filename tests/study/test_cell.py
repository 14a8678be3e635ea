"""One cell, measured in this process: its figures are those of a run and of its scores, and errors are its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress import api
from compress import evaluate as evaluation
from compress.errors import BudgetError, NumericalError
from compress.study import cell, grid, summary
from compress.study.folder import CellFolder, StudyFolder
from compress.study.grid import Axes, Settings
from helpers.runs import TEXT

HELD_OUT = TEXT.with_name("books_heldout.txt")


@pytest.fixture
def study(pico_dir: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[StudyFolder, dict[str, CellFolder]]]:
    def ask(*names: str, calib: str = grid.SELF, **more: Any) -> tuple[StudyFolder, dict[str, CellFolder]]:
        found = StudyFolder(tmp_path / "study")
        found.open({"model": "m"})
        settings = Settings(str(pico_dir("llama")), (str(HELD_OUT),), window=64, max_tokens=512, **more)
        axes = Axes(names, calib=(calib,), samples=(8,), seq_len=(32,))
        return found, {each.name: found.ask(each, settings, {"model": "m"}) for each in grid.cells(axes)}

    return ask


def test_figures_are_those_of_the_checkpoint(
    study: Callable[..., tuple[StudyFolder, dict[str, CellFolder]]], pico_dir: Callable[..., Path]
) -> None:
    folder, cells = study("int8", "kv4", keep=True)
    for each in cells.values():
        cell.run(each)
    plain, cached, original = (cells[name].result for name in ("int8", "kv4", grid.ORIGINAL))
    assert plain and cached and original
    direct = evaluation.evaluate(cells["int8"].checkpoint, HELD_OUT, pico_dir("llama"), 64, 512)
    assert plain["texts"][0]["kl_mean"] == direct.kl_mean > 0 and plain["texts"][0]["tokens"] == direct.tokens
    assert original["texts"][0]["perplexity"] == pytest.approx(direct.base_perplexity)  # type: ignore[attr-defined]
    weights = sum(path.stat().st_size for path in cells["int8"].checkpoint.glob("*.safetensors"))
    assert 0 <= weights - plain["nbytes"] < 20_000  # headers
    assert plain["cost"]["predicted_peak"] > 0 and plain["cost"]["measured_peak"] and plain["speed"] is None
    assert cached["is_cache_only"] and cached["bpw"] is None and cached["nbytes"] == original["nbytes"]
    assert cached["cache"]["bytes_per_token"] < cached["cache"]["exact_bytes_per_token"]
    found = summary.write(folder)
    assert [row["name"] for row in found["cells"]] == ["int8", "kv4"] and found["original"]["parameters"] > 0
    assert found["settings"]["texts"] == ["books_heldout.txt"]
    assert (folder.folder / "study.csv").read_text().count("\n") == 4
    assert "<svg" in (folder.folder / "study.html").read_text()


def test_cells_are_quantized_in_the_type_that_is_given(
    study: Callable[..., tuple[StudyFolder, dict[str, CellFolder]]],
) -> None:
    _, cells = study("int8", keep=True, quantize_dtype="bfloat16")
    cell.run(cells["int8"])
    assert (found := cells["int8"].result) and found["status"] == "done", found
    assert json.loads((cells["int8"].checkpoint / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_the_model_writes_its_text_once(study: Callable[..., tuple[StudyFolder, dict[str, CellFolder]]]) -> None:
    folder, cells = study("int4", "int3")
    for name in ("int4", "int3"):
        cell.run(cells[name])
    (written,) = (path for path in (folder.folder / "self-written").iterdir() if path.is_dir())
    facts = json.loads((written / "calibration.json").read_text())
    hashes = {result["calibration"]["sha256"] for each in cells.values() if (result := each.result)}
    assert len(hashes) == 1 and hashes.pop() in json.dumps(facts)
    assert not any(path.is_dir() for path in cells["int4"].path.iterdir())  # no checkpoint is kept


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BudgetError("needs 9 GiB"), "needs 9 GiB"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ValueError("wrong\nshape"), "ValueError: wrong"),
        (NumericalError("quantize with --dtype float32"), "quantize with --quantize-dtype float32"),
    ],
)
def test_an_error_is_the_result(
    study: Callable[..., tuple[StudyFolder, dict[str, CellFolder]]],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    def fail(job: object) -> None:
        raise error

    monkeypatch.setattr(api, "quantize", fail)
    folder, cells = study("int8")
    cell.run(cells["int8"])
    (failed,) = summary.write(folder)["failed"]
    assert failed["reason"] == reason and failed["name"] == "int8"
