"""Hostile values, and random changes of JSON documents, texts and bytes, each as plain JSON that can be kept.

What JSON cannot hold, or what would be too long to keep, stands as a marker:

    {"$digits": 6000}           a number of so many digits
    {"$nested": 5000}           so many lists in each other
    {"$long": 100000}           so many characters
    {"$raw": "NaN"}             the text as it is
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

Path = list[Any]  # keys and indices from the root of a document

NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 64, 127, 128, 255, 256, 1000, 65536),
    *(2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63)),
    *(0.5, -0.5, 1.5, 1e-9, 1e9, 1e308, 5e-324, -0.0, 1e999, -1e999, float("nan")),
]
STRINGS = [
    *("", " ", "a", "int", "gptq", "4", "-1", "1e3", "true", "null", "auto", "cpu", "none", "*", "**", "[", "a.b.c"),
    *(
        "__init__",
        "__class__",
        "__main__",
        "packing",
        "stored",
        "../x",
        "../../etc/passwd",
        "/etc/passwd",
        ".",
        "..",
        "/",
    ),
    *("model.layers.0", "model.layers.99.self_attn.q_proj", "lm_head", "model.embed_tokens", "%s%n{}", "${HOME}", "~"),
    *(
        "\x00",
        "a\nb",
        "a\rb",
        "\x1b[31mred",
        "\u202e",
        "\ud800",
        "\udcff",
        "é",
        "漢字",
        "\U0001f600",
        "\u0661",
        "٣",
        "½",
    ),
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [0], [1, 2], ["a"], {"a": 1}, {"": None}, [None]]
MARKERS: list[Any] = [{"$digits": 6000}, {"$nested": 100}, {"$nested": 100_000}, {"$long": 100_000}, {"$raw": "1.0.0"}]


def hostile(random: Random) -> Any:
    """Return a value that a careless program does not expect."""
    roll = random.random()
    if roll < 0.4:
        return random.choice(NUMBERS)
    if roll < 0.7:
        return random.choice(STRINGS)
    if roll < 0.95:
        return copy.deepcopy(random.choice(OTHERS))
    return copy.deepcopy(random.choice(MARKERS))


def paths(document: Any, at: Path | None = None) -> Iterator[Path]:
    """Yield the place of every value of a document, the document's own first."""
    at = at or []
    yield at
    if isinstance(document, dict | list):
        for key, inner in document.items() if isinstance(document, dict) else enumerate(document):
            yield from paths(inner, [*at, key])


def get(document: Any, at: Path) -> Any:
    for key in at:
        document = document[key]
    return document


def put(document: Any, at: Path, value: Any) -> Any:
    """Return the document with the value in that place; places that have gone are left out."""
    if not at:
        return value
    try:
        holder = get(document, at[:-1])
        if isinstance(holder, list) and at[-1] == len(holder):
            holder.append(value)
        else:
            holder[at[-1]] = value
    except (KeyError, IndexError, TypeError):
        return document
    return document


def remove(document: Any, at: Path) -> Any:
    """Return the document without what is in that place."""
    try:
        del get(document, at[:-1])[at[-1]]
    except (KeyError, IndexError, TypeError):
        return document
    return document


def change(document: Any, random: Random) -> dict[str, Any]:
    """Return one change of a document: {"at": path, "value": value} or {"at": path, "delete": true}."""
    everywhere = list(paths(document))
    at = random.choice(everywhere[1:] or everywhere)
    value = get(document, at)
    roll = random.random()
    if roll < 0.12 and at:
        return {"at": at, "delete": True}
    if roll < 0.2:
        return {"at": at, "value": copy.deepcopy(get(document, random.choice(everywhere)))}
    if roll < 0.28 and isinstance(value, dict):
        return {"at": [*at, random.choice(STRINGS)], "value": hostile(random)}
    if roll < 0.55:
        return {"at": at, "value": near(value, random)}
    return {"at": at, "value": hostile(random)}


def near(value: Any, random: Random) -> Any:
    """Return a value that is nearly the given one."""
    if isinstance(value, bool) or value is None:
        return random.choice([True, False, None, 0, 1, "true"])
    if isinstance(value, int):
        return random.choice([value + 1, value - 1, -value, value * 2, value // 2, float(value), str(value), [value]])
    if isinstance(value, float):
        return random.choice([-value, value * 1e6, int(value) if abs(value) < 1e18 else 0, str(value), [value]])
    if isinstance(value, str):
        index = random.randrange(len(value) + 1)
        return random.choice([value[:index], value + "x", value.upper(), value[:index] + "0" + value[index:], [value]])
    if isinstance(value, list):
        return random.choice([value * 2, value[:-1], value[::-1], [*value, *value[:1]], {}, [value]])
    return random.choice([[value], list(value), {}, {**value, "x": 1}])


COUNTED = ("$digits", "$nested", "$long")  # markers that say how many of a character


def dumps(document: Any) -> bytes:
    """Return the JSON of a document, with markers put in as text."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            key = next(iter(value), None)
            if len(value) == 1 and (key == "$raw" or (key in COUNTED and isinstance(value[key], int))):
                raw.append(marker(key, value[key]))
                return f"@@{len(raw) - 1}@@"
            return {key: marked(inner) for key, inner in value.items()}
        return [marked(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(marked(document))
    return re.sub(r'"@@(\d+)@@"', lambda found: raw[int(found[1])], text).encode("utf-8", "surrogatepass")


def marker(key: str, value: Any) -> str:
    """Return the text that a marker stands for."""
    if key == "$raw":
        return str(value)
    if key == "$nested":
        return "[" * value + "]" * value
    return "9" * value if key == "$digits" else '"' + "x" * value + '"'


def text_bytes(pieces: list[Any]) -> bytes:
    """Return the bytes of a text kept as pieces: strings, [string, times], or {"hex": bytes}."""
    data = b""
    for piece in pieces:
        if isinstance(piece, dict):
            data += bytes.fromhex(piece["hex"])
        elif isinstance(piece, list):
            data += piece[0].encode("utf-8", "surrogatepass") * piece[1]
        else:
            data += piece.encode("utf-8", "surrogatepass")
    return data


def damage(data: bytes, random: Random, limit: int | None = None) -> dict[str, Any]:
    """Return one change of a file's bytes: {"bytes": [[offset, hex]]}, {"truncate": n}, {"append": hex} ..."""
    size = max(1, min(len(data), limit or len(data)))
    roll = random.random()
    if roll < 0.15:
        return {"truncate": random.choice([0, 1, 7, 8, 9, random.randrange(size), max(0, len(data) - 1)])}
    if roll < 0.25:
        return {"append": random.choice(["00", "0a", "ff" * 9, "7b7d", "00" * 4096])}
    if roll < 0.35:
        return {"insert": [random.randrange(size), random.choice(["00", "22", "5b", "7b", "ff", "2d", "0a", "09"])]}
    count = random.choice([1, 1, 1, 2, 8])
    return {"bytes": [[random.randrange(size), f"{random.randrange(256):02x}"] for _ in range(count)]}


def damaged(data: bytes, edit: dict[str, Any]) -> bytes:
    """Return the bytes after such a change."""
    if "truncate" in edit:
        return data[: edit["truncate"]]
    if "append" in edit:
        return data + bytes.fromhex(edit["append"])
    if "insert" in edit:
        offset, added = edit["insert"]
        return data[:offset] + bytes.fromhex(added) + data[offset:]
    changed = bytearray(data)
    for offset, byte in edit["bytes"]:
        if offset < len(changed):
            changed[offset : offset + 1] = bytes.fromhex(byte)
    return bytes(changed)
