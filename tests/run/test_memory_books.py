"""Predictions against peaks on a model with a real tokenizer, without a limit and under the tightest one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from compress.process_memory import parse_size
from helpers.runs import Setup, cli, report_of

HERE = Path(__file__).parents[1]
BOOKS, TEXT = HERE / "models" / "books-8m", HERE / "data" / "books_calib.txt"
TEXTS = ("calibration.num_samples=16", "calibration.seq_len=256")
TUNED = Setup("int4", (*TEXTS, "tune={method: end_to_end, steps: 1, batch_tokens: 1024}"))
SETUPS = [
    Setup("int4", (*TEXTS, "sweeps=1", "two_sided=false")),
    Setup("vq2bit-lrec", ("state_bits=8", *TEXTS)),
    Setup("int8"),
    TUNED,
]
HIGH = 1.15  # times what is measured that a prediction may be
SPARE = 8 << 20  # bytes: no two processes are equally large


def words(setup: Setup, out: Path, *more: str, calib: Path = TEXT) -> list[str]:
    return ["quantize", str(BOOKS), *setup.options(), "--calib", str(calib), "--out", str(out), *more]


@pytest.mark.parametrize(
    "setup",
    [pytest.param(setup, id=setup.name, marks=[] if setup == SETUPS[0] else pytest.mark.slow) for setup in SETUPS],
)
def test_a_prediction_is_close_to_the_peak_and_not_below(setup: Setup, tmp_path: Path) -> None:
    result = cli(*words(setup, tmp_path / "out"))
    assert result.code == 0, result.err
    used = report_of(tmp_path / "out")["memory"]
    assert used["measured_peak"] is not None
    assert used["measured_peak"] <= used["predicted_peak"] <= HIGH * used["measured_peak"]


@pytest.mark.slow
def test_the_least_that_a_refusal_names_is_kept(tmp_path: Path) -> None:
    refused = cli(*words(SETUPS[0], tmp_path / "out", "--max-memory", "1MiB"))
    named = re.search(r"needs at least (\d+ MiB)", refused.err)
    assert refused.code == 1 and named
    limit = parse_size(named[1]) + SPARE
    result = cli(*words(SETUPS[0], tmp_path / "out", "--max-memory", str(limit)))
    assert result.code == 0, result.err
    used = report_of(tmp_path / "out")["memory"]
    assert used["measured_peak"] <= used["predicted_peak"] <= used["limit"] == limit


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [pytest.param(".jsonl", marks=pytest.mark.slow), ".parquet"])
def test_one_long_document_is_within_the_prediction(suffix: str, tmp_path: Path) -> None:
    """Its pieces are tokenized one by one; what reads parquet files is counted."""
    document, source = 3 * TEXT.read_text(), tmp_path / f"long{suffix}"
    if suffix == ".jsonl":
        source.write_text(json.dumps({"text": document}))
    else:
        parquet.write_table(pyarrow.table({"text": [document]}), source)
    result = cli(*words(SETUPS[0], tmp_path / "out", calib=source))
    assert result.code == 0, result.err
    used = report_of(tmp_path / "out")["memory"]
    assert used["measured_peak"] <= used["predicted_peak"] <= HIGH * used["measured_peak"]
