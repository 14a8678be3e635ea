"""How much calibration text a job takes, by its recipe and its model, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compress import api
from compress.calib import enough
from compress.run import prepare
from compress.run.job import Prepared
from helpers.runs import GPTQ, KEEP_TABLES, RTN, Setup, job

OPEN = Setup("int4", (*KEEP_TABLES, "group_size=32", "two_sided=false", "calibration.importance=none"))


def _prepared(model: Path, setup: Setup, tmp_path: Path) -> Prepared:
    return prepare.prepare(job(model, setup, tmp_path / "out"))


def test_what_a_recipe_leaves_open_is_chosen_and_said(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    prepared = _prepared(pico_dir("llama"), OPEN, tmp_path)
    assert prepared.samples * prepared.seq_len >= enough.LEAST_TOKENS
    assert prepared.seq_len <= enough.SEQ_LEN
    counted = f"calibration takes {prepared.samples * prepared.seq_len:,} tokens"
    assert [line for line in prepared.messages if line.startswith(counted)] == [prepared.text_choice]
    assert "\n" not in prepared.text_choice and "enough for inputs of" in prepared.text_choice


@pytest.mark.parametrize(
    ("settings", "samples", "seq_len"),
    [
        (("calibration.num_samples=3", "calibration.seq_len=24"), 3, 24),
        (("calibration.tokens=100", "calibration.seq_len=24"), 5, 24),
        (("calibration.tokens=24", "calibration.seq_len=24"), 1, 24),
        (("calibration.num_samples=3",), 3, None),
    ],
)
def test_what_a_recipe_says_is_taken(
    settings: tuple[str, ...], samples: int, seq_len: int | None, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    prepared = _prepared(pico_dir("llama"), OPEN.set(*settings), tmp_path)
    assert prepared.samples == samples and seq_len in (None, prepared.seq_len) and not prepared.text_choice


def test_a_recipe_without_data_takes_none(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    prepared = _prepared(pico_dir("llama"), RTN, tmp_path)
    assert (prepared.samples, prepared.text_choice) == (0, "")


def test_experts_take_more_than_the_same_linears_without_routing(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    dense, routed = (_prepared(pico_dir(name), OPEN, tmp_path) for name in ("llama", "mixtral"))
    assert routed.samples > dense.samples
    assert "experts that see" in routed.text_choice


def test_methods_that_need_more_say_so_themselves(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    plain = _prepared(pico_dir("llama"), OPEN, tmp_path)
    tuned = _prepared(pico_dir("llama"), OPEN.set("tune={method: blockwise, steps: 1}"), tmp_path)
    assert tuned.samples > plain.samples and "blockwise" in tuned.text_choice


def test_the_report_says_it_too(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    few = job(pico_dir("llama"), OPEN, tmp_path / "out")
    report = api.quantize(few)
    (said,) = [note for note in report["calibration"]["notes"] if note.startswith("Calibration takes")]
    assert said.endswith(".") and f"{enough.LEAST_TOKENS:,} tokens" in said
    assert api.quantize(job(pico_dir("llama"), GPTQ, tmp_path / "given"))["calibration"]["num_samples"] == 8
