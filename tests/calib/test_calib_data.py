"""Calibration data: which tokens, in which order, from which source, and what every bad source says."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from compress.calib import data, documents
from compress.calib.data import calibration, token_windows
from compress.errors import CalibrationError, CheckpointError
from compress.model import load
from helpers.pico import EOS_ID, VOCAB_SIZE, pico_tokenizer

HERE = Path(__file__).parents[1]
BOOKS = HERE / "models" / "books-8m"
DOCUMENTS = [
    "The first document.",
    "",
    "A second one, with \u00fc and \u20ac.\nTwo lines.",
    "The third and last document.",
]
ReadOnly = Callable[..., Path]


@pytest.fixture(scope="module")
def books_text() -> str:
    with (HERE / "data" / "books_calib.txt").open(encoding="utf-8", newline="") as stream:
        return stream.read(40_000)


def pico_calibration(source: str | Path, num_samples: int = 4, seq_len: int = 8, seed: int = 0) -> data.Calibration:
    return calibration(source, pico_tokenizer(), num_samples, seq_len, seed, VOCAB_SIZE)


def pico_ids(text: str) -> list[int]:
    return pico_tokenizer()(text, add_special_tokens=False)["input_ids"]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_jsonl(path: Path, texts: list[str]) -> Path:
    return write(path, "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))


def joined(texts: list[str]) -> list[int]:
    """Tokens of the texts that are not empty, with the end-of-text token between them."""
    tokens: list[int] = []
    for text in filter(None, texts):
        tokens += ([EOS_ID] if tokens else []) + pico_ids(text)
    return tokens


def all_tokens(source: str | Path, limit: int | None = None) -> list[int]:
    return token_windows(source, pico_tokenizer(), 1, VOCAB_SIZE, limit)[0].flatten().tolist()


# files


def test_samples_are_distinct_windows_of_the_whole_text(tmp_path: Path, books_text: str) -> None:
    tokenizer = load.load_tokenizer(BOOKS)
    ids = tokenizer(books_text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = [tuple(ids[i : i + 64]) for i in range(0, len(ids) - 63, 64)]
    assert len(set(windows)) == len(windows) > 40

    found = calibration(write(tmp_path / "books.txt", books_text), tokenizer, 40, 64, 0, 4096)

    assert found.tokens.shape == (40, 64) and found.tokens.dtype == torch.int64
    rows = [tuple(row) for row in found.tokens.tolist()]
    assert len(set(rows)) == 40 and set(rows) <= set(windows)
    assert [windows.index(row) for row in rows] != sorted(windows.index(row) for row in rows)  # permuted
    assert found.tokens_available == len(ids) and found.notes == ()


def test_the_seed_decides(tmp_path: Path, books_text: str) -> None:
    source = write(tmp_path / "books.txt", books_text)
    first, again, other = (pico_calibration(source, 16, 32, seed) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens) and first.sha256 == again.sha256
    assert not torch.equal(first.tokens, other.tokens) and first.sha256 != other.sha256


def test_facts_name_no_path(tmp_path: Path) -> None:
    found = pico_calibration(write(tmp_path / "some.txt", "x" * 100), 2, 8)
    facts = json.loads(json.dumps(found.facts()))
    digest = hashlib.sha256(b"".join(int(i).to_bytes(8, "little") for i in found.tokens.flatten())).hexdigest()
    assert facts == {
        "source": "some.txt",
        "sha256": digest,
        "num_samples": 2,
        "seq_len": 8,
        "tokens_available": 100,
        "self_generated": False,
        "begins_with": "",
        "notes": [],
    }


def test_separators_in_a_text_are_tokens(tmp_path: Path) -> None:
    assert all_tokens(write(tmp_path / "a.txt", "one<eos>\ntwo")) == [*pico_ids("one"), EOS_ID, *pico_ids("\ntwo")]


def test_a_long_text_is_read_in_pieces_to_the_same_tokens(
    tmp_path: Path, books_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "books.txt", books_text)
    tokenizer = load.load_tokenizer(BOOKS)
    whole, _ = token_windows(source, tokenizer, 1, 4096)
    monkeypatch.setattr(documents, "PIECE_NBYTES", 1001)
    assert len(list(data.documents(source))) > 10
    assert "".join(data.documents(source)) == books_text
    assert torch.equal(token_windows(source, tokenizer, 1, 4096)[0], whole)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert all_tokens(write(tmp_path / "a.txt", b"\xef\xbb\xbfabc")) == pico_ids("abc")
    assert all_tokens(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "abc"}')) == pico_ids("abc")


def test_tokenizing_a_long_text_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load.load_tokenizer(BOOKS)
    logging.getLogger("transformers").addHandler(caplog.handler)  # its records do not reach the root logger
    try:
        calibration(write(tmp_path / "a.txt", "word " * 5000), tokenizer, 1, 8, 0, 4096)
        assert caplog.messages == []
        tokenizer("word " * 5000)
        assert "longer than the specified maximum" in caplog.text
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


# documents


def source_of(kind: str, folder: Path, texts: list[str]) -> str:
    """The texts as a file or data set of that kind."""
    if kind == "dataset":
        write_jsonl(folder / "train.jsonl", texts)
        write_jsonl(folder / "test.jsonl", ["not asked for"])
        return str(folder)
    if kind == "dataset split":
        write_jsonl(folder / "train.jsonl", ["not asked for"])
        write_jsonl(folder / "test.jsonl", texts)
        return f"{folder}::test"
    path = folder / f"texts.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path)
    else:
        write_jsonl(path, texts)
    return str(path)


KINDS = ["jsonl", "json", "parquet", "dataset", "dataset split"]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_joined_by_the_end_of_text(kind: str, tmp_path: Path) -> None:
    source = source_of(kind, tmp_path, DOCUMENTS)
    assert all_tokens(source) == joined(DOCUMENTS)
    assert all_tokens(source, limit=30) == joined(DOCUMENTS)[:30]


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_documents_are_read_than_needed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_NBYTES", 8)
    seen: list[str] = []
    real = data.documents

    def watched(source: str | Path, **options: Any) -> Iterator[str]:
        for text in real(source, **options):
            seen.append(text)
            yield text

    monkeypatch.setattr(data, "documents", watched)
    found = pico_calibration(source_of(kind, tmp_path, ["12345678"] * 50), 2, 10)
    assert found.tokens_available == 4 * 2 * 10
    assert len(seen) == 9  # 8 tokens, then 9 with each separator


@pytest.mark.parametrize(("floor", "available", "read"), [(900, 900, 50), (901, 900, 50), (450, 450, 25), (30, 80, 5)])
def test_a_text_file_is_read_up_to_a_generous_limit(
    floor: int, available: int, read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_NBYTES", 10)
    monkeypatch.setattr(data, "MIN_READ_TOKENS", floor)
    seen: list[str] = []
    real = data.documents

    def watched(source: str | Path, **options: Any) -> Iterator[str]:
        for text in real(source, **options):
            seen.append(text)
            yield text

    monkeypatch.setattr(data, "documents", watched)

    found = pico_calibration(write(tmp_path / "a.txt", "12345678\n" * 100), 2, 10)

    assert found.tokens_available == available and len(seen) == read  # of two lines each
    assert found.notes == (() if floor > 900 else (f"Of the calibration text the first {available} tokens were read.",))


def test_no_more_windows_of_a_text_file_are_read_than_asked_for(
    tmp_path: Path, books_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "books.txt", books_text.encode() + b"\xff")  # not reached
    monkeypatch.setattr(documents, "PIECE_NBYTES", 1000)
    windows, available = token_windows(source, pico_tokenizer(), 100, VOCAB_SIZE, 2050)
    assert available == 2050 and windows.dtype == torch.int64
    assert windows.flatten().tolist() == pico_ids(books_text)[:2000]


@pytest.mark.parametrize("text", ["a\u00fc\u20ac\U0001f600" * 50, "\U0001f600" * 50, "12\n" + "\u20ac" * 100])
@pytest.mark.parametrize("piece", [7, 8, 9, 10])
def test_a_line_without_end_is_cut_between_characters(
    text: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_NBYTES", piece)
    monkeypatch.setattr(documents, "LINE_NBYTES", 1)
    pieces = list(data.documents(write(tmp_path / "a.txt", text)))
    assert "".join(pieces) == text and max(len(part.encode()) for part in pieces) <= piece + 4


def test_a_text_file_is_tokenized_by_the_piece(
    tmp_path: Path, books_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_NBYTES", 1000)
    sizes: list[int] = []

    def tokenize(texts: list[str] | str, **settings: Any) -> Any:
        if isinstance(texts, list):  # not the sample that shows what begins a text
            sizes.append(sum(len(text) for text in texts))
        return pico_tokenizer()(texts, **settings)

    source = write(tmp_path / "books.txt", books_text[:9000])
    stand_in: Any = tokenize
    token_windows(source, stand_in, 1, VOCAB_SIZE)
    assert sizes == [len(piece) for piece in data.documents(source)] and len(sizes) > 3


def test_without_end_of_text_documents_just_follow_each_other(tmp_path: Path) -> None:
    tokenizer = pico_tokenizer()
    tokenizer.eos_token = None
    windows, _ = token_windows(write_jsonl(tmp_path / "a.jsonl", ["ab", "cd"]), tokenizer, 1, VOCAB_SIZE)
    assert windows.flatten().tolist() == pico_ids("abcd")


def test_a_data_set_shows_no_progress_and_keeps_the_setting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    shown: list[bool] = []
    real = datasets.load_dataset

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        shown.append(not datasets.utils.are_progress_bars_disabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    before = datasets.utils.are_progress_bars_disabled()
    all_tokens(source_of("dataset", tmp_path, DOCUMENTS))
    assert shown == [False] and datasets.utils.are_progress_bars_disabled() == before
    assert capfd.readouterr() == ("", "")


# too little, or unusable


def test_fewer_windows_than_asked_for_are_noted(tmp_path: Path) -> None:
    found = pico_calibration(write(tmp_path / "a.txt", "x" * 50), 9, 16)
    assert found.tokens.shape == (3, 16) and found.facts()["num_samples"] == 3
    assert found.notes == ("9 samples of 16 tokens were asked for, the calibration text has 3 (50 tokens).",)


@pytest.mark.parametrize(("content", "count"), [("x" * 10, 10), ("", 0)])
def test_less_than_one_window(tmp_path: Path, content: str, count: int) -> None:
    source = write(tmp_path / "a.txt", content)
    message = (
        f"calibration text {source} has only {count} tokens, one sample needs 512; "
        "give more text or lower calibration.seq_len"
    )
    with pytest.raises(CalibrationError, match=re.escape(message)):
        pico_calibration(source, 4, 512)


@pytest.mark.parametrize(("num_samples", "seq_len"), [(0, 8), (4, 0)])
def test_no_samples(num_samples: int, seq_len: int) -> None:
    with pytest.raises(CalibrationError, match="at least one sample of one token"):
        pico_calibration("never-read.txt", num_samples, seq_len)


def test_the_place_of_a_wrong_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_NBYTES", 4)
    source = write(tmp_path / "latin.txt", b"first\nsecond\nna\xefve\n")
    with pytest.raises(CalibrationError, match=rf"{re.escape(str(source))}: byte 15 is not UTF-8"):
        pico_calibration(source)
    source = write(tmp_path / "latin.jsonl", b'{"text": "x"}\n{"text": "na\xefve"}\n')
    with pytest.raises(CalibrationError, match="byte 26 is not UTF-8"):
        pico_calibration(source)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"content": "x", "url": "y"}', "line 2 has no field 'text'; its fields: content, url"),
        ('{"text": 5}', "line 2: field 'text' is int, not text"),
        ('{"text": ', "line 2 is not JSON"),
        ('["x"]', "line 2 is not a JSON object"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    source = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + "\n")
    with pytest.raises(CalibrationError, match=re.escape(f"{source}, {message}")):
        pico_calibration(source)


def test_bad_parquet(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"content": ["x"], "url": ["y"]}), source)
    with pytest.raises(CalibrationError, match="has no column 'text'; its columns: content, url"):
        pico_calibration(source)
    parquet.write_table(pyarrow.table({"text": ["x", None]}), source)
    with pytest.raises(CalibrationError, match="row 2: field .text. is NoneType, not text"):
        pico_calibration(source)
    with pytest.raises(CalibrationError, match="is not a readable parquet file"):
        pico_calibration(write(source, b"no parquet at all"))


@pytest.mark.parametrize("source", ["absent.txt", "absent.jsonl", "/absent/texts.parquet", "no-such-data-set", "a b!"])
def test_neither_a_file_nor_a_data_set(source: str) -> None:
    message = (
        f"{source} is neither a file nor a data set that can be reached; give --calib a .txt, .jsonl or .parquet file"
    )
    with pytest.raises(CalibrationError) as caught:
        pico_calibration(source)
    assert str(caught.value) == message


def test_a_missing_file_is_not_looked_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: pytest.fail("asked for a data set"))
    for name in ("absent.txt", "absent.JSONL", "absent.json", "absent.parquet"):
        with pytest.raises(CalibrationError, match="neither a file"):
            pico_calibration(name)


@pytest.mark.parametrize(
    ("suffix", "message"), [("::dev", "Bad split: dev"), (":small", "'small' not found"), (":a:b:c", "'a' not found")]
)
def test_no_such_split_or_configuration(tmp_path: Path, suffix: str, message: str) -> None:
    source = source_of("dataset", tmp_path, DOCUMENTS)
    with pytest.raises(CalibrationError, match=f"data set .* cannot be read: .*{message}") as caught:
        pico_calibration(source + suffix)
    assert "\n" not in str(caught.value)


def test_a_data_set_without_the_field(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", '{"content": "x"}\n')
    with pytest.raises(CalibrationError, match="has no field 'text'; its fields: content"):
        pico_calibration(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),  # of a null pyarrow would end the process
    [("null", "does not begin with a JSON object"), (" \n 3", "does not begin with"), ("", "cannot be read")],
)
def test_a_data_set_of_no_objects(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "train.jsonl", text)
    with pytest.raises(CalibrationError, match=message):
        pico_calibration(tmp_path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    source = write(tmp_path / "a.txt", "x")
    monkeypatch.setattr(documents, "open_regular", denied)
    with pytest.raises(CalibrationError, match=f"cannot read {re.escape(str(source))}: .*Permission denied"):
        pico_calibration(source)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "abc" * 20)
    highest = max(pico_ids("abc"))
    with pytest.raises(CheckpointError, match=f"gives token {highest}, the model knows {highest}"):
        calibration(source, pico_tokenizer(), 1, 8, 0, highest)
    assert calibration(source, pico_tokenizer(), 1, 8, 0, highest + 1).tokens.max() == highest
