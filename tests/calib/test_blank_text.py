"""Text that is no text: blank lines, and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.calib.data import Calibration, calibration
from compress.errors import CalibrationError
from helpers.pico import VOCAB_SIZE, pico_tokenizer


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _calibration(source: Path, samples: int, seq_len: int) -> Calibration:
    return calibration(source, pico_tokenizer(), samples, seq_len, 0, VOCAB_SIZE)


@pytest.mark.parametrize("filled", ["", "word", "日本"])
def test_blank_text_is_no_text(filled: str, tmp_path: Path) -> None:
    """Blank lines give tokens, too: with fewer other bytes than a sample has tokens there is nothing to learn from."""
    source = _written(tmp_path / "a.txt", "\n \t\n" * 100 + filled)
    with pytest.raises(CalibrationError, match=rf"hardly more than blank lines: {len(filled.encode())} bytes"):
        _calibration(source, 2, 10)
    assert len(_calibration(_written(tmp_path / "b.txt", "\n" * 100 + "ten letters"), 2, 10).tokens) == 2


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.xlsx"])
def test_tables_are_not_taken_for_text(name: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=f"{name} is a table, .* into a .jsonl file"):
        _calibration(_written(tmp_path / name, "text,label\n" * 100), 2, 10)
