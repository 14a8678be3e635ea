"""Runs whose tokens are weighed by attention, in the pass that collects statistics or in one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress import api
from compress.calib import token_importance
from compress.run.calibration_stream import CalibrationStream
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, Setup, contents, job

TEXT = ("calibration.num_samples=10", "calibration.seq_len=32", "calibration.importance=attention")
EVEN = Setup("int3", (*KEEP_TABLES, *TEXT, "calibration.importance_min=0.3"))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_one_pass_gives_the_bytes_of_two(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_importance, "_computes_plainly", lambda *_: False)  # which rounds otherwise
    model, found = save_pico(name, tmp_path / "model"), list[bool]()
    weigh = CalibrationStream._weigh

    def noted(*args: object) -> object:
        found.append((weights := weigh(*args)) is not None)  # type: ignore[arg-type]
        return weights

    monkeypatch.setattr(CalibrationStream, "_weigh", noted)
    api.quantize(job(model, EVEN, tmp_path / "one"))
    assert found and all(found)
    monkeypatch.setattr(CalibrationStream, "_weigh", lambda *_: None)
    api.quantize(job(model, EVEN, tmp_path / "two"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_weights_that_have_to_be_evened_out_are_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = save_pico("llama", tmp_path / "model"), list[int]()
    weigh = CalibrationStream._weigh
    monkeypatch.setattr(CalibrationStream, "_weigh", lambda *args: calls.append(args[1]) or weigh(*args))
    monkeypatch.setattr(token_importance, "INPUTS_PER_TOKEN", 0.5)
    report = api.quantize(job(model, EVEN, tmp_path / "out"))
    notes = [note for lines in report["notes"].values() for note in lines if "importance_min raised" in note]
    assert len(notes) > 1 and calls == [0]  # the second block does not try
