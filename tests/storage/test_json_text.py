"""JSON of others: what is not JSON, or more than anything needs, is a reason in one line and costs little."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CheckpointError
from compress.storage import json_text
from compress.storage.checkpoint import INDEX, open_checkpoint, read_header, read_json
from compress.storage.json_text import INTEGER, LINES, NUMBER, OBJECT, SOME, TEXT, mismatch

HOSTILE = {
    "[" * 100_000: "nested more than 64 deep",
    '{"a":' * 100_000 + "1" + "}" * 100_000: "nested more than 64 deep",
    "[" * 65 + "]" * 65: "nested more than 64 deep",
    '{"a": ' + "1" * 6000 + "}": "an integer of 6000 digits",
    '{"a": -' + "1" * 41 + "}": "an integer of 42 digits",
    '{"a": "\\ud800"}': "surrogates not allowed",
    '{"\\udfff": 1}': "surrogates not allowed",
    "root:x:0:0:secret\nsecond line": "Expecting value: line 1 column 1 (char 0)",
    '{"a": "\x01"}': "Invalid control character",
    "": "Expecting value",
    "\x00" * 10: "Expecting value",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_what_cannot_be_read_is_one_short_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    line = str(caught.value)
    assert line.startswith(f"{path} is not valid JSON (") and line.endswith("); download it again")
    assert HOSTILE[text] in line and "secret" not in line and len(line) < 400
    assert time.process_time() - started < 2


@pytest.mark.parametrize("raw", [b"\xff\xfe", b'{"a": "\xed\xa0\x80"}'])
def test_bytes_that_are_no_unicode(raw: bytes) -> None:
    with pytest.raises(ValueError, match="utf-8"):
        json_text.loads(raw)


def test_too_much_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "CONTAINERS", 100)
    monkeypatch.setattr(json_text, "TEXT_LIMIT", 1000)
    assert len(json_text.loads("[" + "{}," * 98 + "{}]")) == 99
    with pytest.raises(ValueError, match="more than 100 lists and objects"):
        json_text.loads("[" + "{}," * 99 + "{}]")
    with pytest.raises(ValueError, match="more than 0 MiB"):
        json_text.loads(" " * 1001)


@pytest.mark.parametrize(
    "text", ["[" * 64 + "]" * 64, '{"model_max_length": 1000000000000000019884624838656}', '"\\ud83d\\ude00"', "1e400"]
)
def test_what_others_write_is_read(text: str) -> None:
    assert json_text.loads(text) is not None


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_a_header_like_that(text: str, tmp_path: Path) -> None:
    raw = text.encode() or b" "
    (tmp_path / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(CheckpointError, match=r"x\.safetensors has a malformed safetensors header \(.*\); download it"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("file", ["a" * 300, "a\x00b", "b\nc"])
def test_a_shard_of_an_impossible_name(file: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / INDEX).write_text(json_text.json.dumps({"weight_map": {"t": file}}))
    with pytest.raises(CheckpointError, match="is missing; download") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).isprintable()


LAYOUT = {"name": TEXT, "sizes": [INTEGER], "error": SOME, "said": LINES, "by unit": {str: [NUMBER]}, "rest": OBJECT}
GOOD: dict[str, Any] = {
    "name": "a",
    "sizes": [1, 2],
    "error": None,
    "said": "a\n\x1b",
    "by unit": {"u": [1, 2.5]},
    "rest": {"x": 1},
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("name", 3, "'name' is 3"),
        ("name", "a\x1b[31m", "'name' is 'a\\x1b[31m'"),
        ("sizes", [True], "'sizes' is True"),
        ("sizes", {"a": 1}, "'sizes' is no list"),
        ("error", "x", "'error' is 'x'"),
        ("said", 3, "'said' is 3"),
        ("by unit", [], "'by unit' is no object"),
        ("by unit", {"u": [None]}, "'u' is None"),
        ("rest", [], "'rest' is no object"),
    ],
)
def test_a_mismatch_says_where(key: str, value: object, expected: str) -> None:
    assert mismatch(GOOD, LAYOUT) is None
    assert mismatch({**GOOD, key: value}, LAYOUT) == expected
    assert mismatch({other: GOOD[other] for other in GOOD if other != key}, LAYOUT) == f"it has no {key}"
