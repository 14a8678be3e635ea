"""Long documents are tokenized in pieces: to the same tokens, and within a bound of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from compress.calib import documents
from compress.calib.data import token_windows
from compress.model import load
from helpers.runs import environment

HERE = Path(__file__).parents[1]
BOOKS = HERE / "models" / "books-8m"
LONG = 6 << 20  # bytes of a document
BOUND = 320 << 20  # bytes that tokenizing it may take; whole it took more than 1 GiB
PROBE = """
import sys
from pathlib import Path
from compress import process_memory as memory
from compress.calib.data import token_windows
from compress.model import load

tokenizer = load.load_tokenizer(Path(sys.argv[1]))
token_windows(sys.argv[2], tokenizer, 1, 4096, 64)
memory.return_freed_memory()
memory.trim()
memory.reset_peak()
before = memory.resident()
windows, available = token_windows(sys.argv[2], tokenizer, 1, 4096)
print(available, memory.peak() - before)
"""


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    parquet.write_table(pyarrow.table({"text": texts}), path)
    return path


def books(count: int) -> str:
    return (HERE / "data" / "books_calib.txt").read_text(encoding="utf-8")[:count]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one\ntwo\nthree", ["one\ntwo\n", "three"]),
        ("one two three", ["one two", " three"]),
        ("one  two  three", ["one ", " two ", " three"]),
        ("12345678901", ["12345678", "901"]),
        ("\u20ac" * 5, ["\u20ac" * 2] * 2 + ["\u20ac"]),
        ("a\U0001f600\U0001f600", ["a\U0001f600", "\U0001f600"]),
        ("\ud800" * 3, ["\ud800" * 2, "\ud800"]),
    ],
)
def test_where_a_document_is_cut(text: str, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_NBYTES", 8)
    found = list(documents.cut_document(text.encode("utf-8", "surrogatepass")))
    assert max(map(len, found)) <= 8
    assert [part.decode("utf-8", "surrogatepass") for part in found] == parts


def test_pieces_are_gathered_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_NBYTES", 8)
    found = list(documents.piece_batches(["abc", "", "def", "ghi", "123456789", "x"]))
    assert found == [
        [("abc", True), ("def", True)],
        [("ghi", True)],
        [("12345678", True)],
        [("9", False), ("x", True)],
    ]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_long_document_gives_the_same_tokens(
    write: Callable[[Path, list[str]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load.load_tokenizer(BOOKS)
    source = write(tmp_path / ("a.jsonl" if write is write_jsonl else "a.parquet"), [books(40_000), "short", books(99)])
    whole, _ = token_windows(source, tokenizer, 1, 4096)
    monkeypatch.setattr(documents, "PIECE_NBYTES", 1001)
    assert torch.equal(token_windows(source, tokenizer, 1, 4096)[0], whole)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_long_document_takes_bounded_memory(write: Callable[[Path, list[str]], Path], tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not measure the peak of a part of a run")
    whole = books(1 << 20)
    source = write(
        tmp_path / ("a.jsonl" if write is write_jsonl else "a.parquet"), [whole * (LONG // len(whole.encode()) + 1)]
    )
    words = [sys.executable, "-c", PROBE, str(BOOKS), str(source)]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    available, taken = map(int, result.stdout.split())
    assert available > 1_000_000 and taken < BOUND
