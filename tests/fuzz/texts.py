"""Class "calibration": text files of every kind that are read to be calibrated on, or scored.

A case is {"name": FILE, "pieces": [...], "how": ...}; pieces are those of `values.text_bytes`. A .parquet file may be
{"columns": {...}} instead, which is written by pyarrow, and "edits" change its bytes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from random import Random
from typing import Any

from fuzz import directories, litter, values, verdicts
from fuzz.sandbox import Case
from fuzz.verdicts import Verdict

LINE = "It was the best of times, it was the worst of times, it was the age of wisdom. "
NAMES = ("t.txt", "t.jsonl", "t.json", "t.parquet", "t.TXT", "t", "t.md", "t.csv", "t.jsonl.gz", "t.yaml", "folder")
COMMANDS: tuple[list[str], ...] = (
    ["eval", "{model}", "--text", "{file}", "--seq-len", "16", "--max-tokens", "64"],
    ["quantize", "{model}", "--recipe", "int4", *directories.SMALL, "--set", "group_size=32", "--calib", "{file}"],
    [
        "kv",
        "bench",
        "{model}",
        "--kv",
        "kv4",
        "--text",
        "{file}",
        "--context",
        "64",
        "--max-tokens",
        "128",
        "--no-speed",
    ],
    ["plan", "{model}", "--recipe", "int4", "--calib", "{file}"],
)
CELLS: list[Any] = [LINE, LINE * 40, "", "a", None, "\x00", "é" * 99, 1, 2.5, True, b"\xff\xfe", [LINE], {"a": LINE}]
BYTES = ("ff", "fe", "00", "c0af", "eda080", "efbbbf", "fffe", "0a", "0d", "1b", "e2", "f4908080", "1f8b08", "504b0304")


def make(random: Random, folder: Path, few: bool = False) -> Case:
    directories.prepare(folder, "llama")
    name = random.choice((*NAMES[:4], *NAMES[:4], *NAMES))
    case: Case = {"name": name}
    if name.endswith(".parquet") and random.random() < 0.8:
        case["columns"] = _columns(random)
        if random.random() < 0.5:
            case["edits"] = [values.damage(b"0" * 900, random) for _ in range(random.choice([1, 2]))]
    elif "json" in name:
        case["pieces"] = [piece for _ in range(random.choice([1, 5, 30])) for piece in _json_line(random)]
    else:
        case["pieces"] = [_text_piece(random) for _ in range(random.choice([0, 1, 3, 10]))]
    case["how"] = random.choice(COMMANDS) if random.random() < 0.15 else ["read"]
    return case


def _text_piece(random: Random) -> Any:
    roll = random.random()
    if roll < 0.3:
        return [LINE, random.choice([1, 10, 100])]
    if roll < 0.5:
        return {"hex": random.choice(BYTES) * random.choice([1, 1, 4, 100])}
    if roll < 0.6:
        return [random.choice(["a", " ", "\n", "\u200b", "é", "<eos>"]), random.choice([1, 1000, 300_000, 3_000_000])]
    return random.choice(values.STRINGS)


def _json_line(random: Random) -> list[Any]:
    """Return the pieces of a line."""
    roll = random.random()
    if roll < 0.4:
        return [json.dumps({"text": LINE * random.choice([1, 5, 40])}), "\n"]
    if roll < 0.6:
        return [values.dumps({"text": values.hostile(random)}).decode("utf-8", "surrogatepass")[:9000], "\n"]
    if roll < 0.7:
        return [values.dumps(values.hostile(random)).decode("utf-8", "surrogatepass")[:9000], "\n"]
    if roll < 0.78:
        opening = random.choice(["[", '{"a":', '{"text":['])
        return [[opening, random.choice([10, 1000, 100_000])], random.choice(["\n", "1\n", "]\n"])]
    if roll < 0.84:
        return ['{"text": "', [LINE, random.choice([100, 1000, 20_000])], '"}', "\n"]
    if roll < 0.9:
        return ['{"text": ', ["9", random.choice([100, 4301, 6000, 500_000])], "}", "\n"]
    return [_text_piece(random), random.choice(["\n", "\r\n", ""])]


def _columns(random: Random) -> dict[str, Any]:
    names = random.choice([["text"], ["text", "id"], ["content"], ["text", "text "], [], ["TEXT"]])
    count = random.choice([0, 1, 3, 50])
    cell = random.choice(range(len(CELLS)))
    return {name: {"cell": cell, "count": count, "nulls": random.random() < 0.2} for name in names}


def judge(case: Case, folder: Path, place: Path) -> Verdict:
    """Read the file as calibration text, or give it to a command."""
    path = place / case["name"]
    if "columns" in case:
        _write_parquet(path, case["columns"])
        for edit in case.get("edits", []):
            path.write_bytes(values.damaged(path.read_bytes(), edit))
    elif case["name"] == "folder":
        path.mkdir()
        (path / "data.jsonl").write_bytes(values.text_bytes(case["pieces"]))
    else:
        path.write_bytes(values.text_bytes(case["pieces"]))
    model = directories.prepare(folder, "llama")
    if case["how"] == ["read"]:
        return verdicts.attempt(lambda: _read(path, model))[0]
    known = {"model": str(model), "file": str(path)}
    words = [word.format(**known) for word in case["how"]]
    with litter.watched(place) as left:
        verdict = verdicts.command([*words, *(["--out", str(place / "out")] if words[0] == "quantize" else [])])
    return left(verdict)


def _read(path: Path, model: Path) -> None:
    from compress.calib import data

    tokenizer = _tokenizer(model)
    data.calibration(str(path), tokenizer, 4, 32, 0, 264)
    data.token_windows(str(path), tokenizer, 16, 264, 64)


@functools.cache
def _tokenizer(model: Path) -> Any:
    from compress.model import load

    return load.load_tokenizer(model)


def _write_parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    tables = {
        name: [None if column["nulls"] and i % 2 else CELLS[column["cell"]] for i in range(column["count"])]
        for name, column in columns.items()
    }
    parquet.write_table(pyarrow.table(tables), path)
