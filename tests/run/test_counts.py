"""What a run takes, predicted from counts: nothing is timed, and what is not counted says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress.progress import Meter
from compress.recipe import load
from compress.run import counts, predict, prepare
from compress.run.job import Job
from helpers.pico import save_pico

CALIB = str(Path(__file__).parents[1] / "data" / "books_calib.txt")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(counts, "speeds_of_machine", lambda dtype: counts.Speeds(1e9, 1e9, 1e9, 1e9))
    recipe = load("int4", ["calibration.num_samples=4", "calibration.seq_len=32"])
    return Job(model=str(save_pico("llama", tmp_path / "m")), recipe=recipe, out=tmp_path / "out", calib=CALIB)


def seconds(job: Job, *overrides: str, recipe: str = "int4") -> counts.Seconds | None:
    import dataclasses

    chosen = load(recipe, ["calibration.num_samples=4", "calibration.seq_len=32", *overrides])
    job = dataclasses.replace(job, recipe=chosen)
    return counts.predict(job, prepare.prepare(job))


def test_more_work_takes_longer(job: Job) -> None:
    base, more, one_sided = (
        seconds(job, *each) for each in ((), ("calibration.num_samples=16",), ("quantize.two_sided=false",))
    )
    assert base is not None and more is not None and one_sided is not None
    assert more.blocks > base.blocks > one_sided.blocks
    assert base.before > one_sided.before == counts.STARTING


def test_what_is_not_counted(job: Job) -> None:
    assert seconds(job, recipe="int8") is not None
    assert seconds(job, recipe="awq4bit") is None  # which searches


def test_plan_times_no_block(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "predict_seconds", lambda *_: pytest.fail("a block was timed"))
    _, total = predict.prepare_and_time(job, lambda *_: None, lambda _: None)
    assert total > 0


def test_speeds_are_kept_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    known = counts.Speeds(1.0, 2.0, 3.0, 4.0)
    assert counts._read_speeds(b'{"block": 1, "float32": 2, "attention": 3, "steps": 4}') == known
    for content in (None, b"", b"[]", b'{"block": 1}', b'{"block": 0, "float32": 2, "attention": 3, "steps": 4}'):
        assert counts._read_speeds(content) is None
    assert all(value > 0 for value in vars(counts.measure_speeds(torch.float32)).values())


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("compress.progress.time.monotonic", lambda: now[0])
    said = list[str]()
    meter = Meter(lambda text, done, total: said.append(text), 4, before=10.0, expected=40.0)
    now[0] = 4.0
    assert meter.seconds_left(0) == 46
    now[0] = 20.0
    meter.begin(0, 2)
    assert meter.seconds_left(0) == 40
    now[0] = 40.0  # a block has taken 20 seconds, not 10
    assert meter.seconds_left(1) == 60
    meter.say("working")
    assert said[-1].endswith(" left")
    assert Meter(lambda *_: None, 4).seconds_left(0) == 0
