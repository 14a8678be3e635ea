"""Class "gguf": a GGUF file whose header is damaged: sizes, shapes, types, places of tensors, keys of the metadata.

A case is {"base": NAME, "edits": [...], "words": [...]}, a command line with {model} and {place} in it.
"""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from fuzz import edits, litter, values, verdicts
from fuzz.sandbox import Case
from fuzz.verdicts import Verdict

FILE = "m.gguf"
BASES = ("llama", "qwen2")
COMMANDS: tuple[list[str], ...] = (
    ["quantize", "{model}", "--recipe", "int8", "--out", "{place}/out"],
    ["plan", "{model}", "--recipe", "int8"],
    ["generate", "{model}", "--prompt", "once", "--max-new-tokens", "2"],
)
NUMBERS = (0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 127, 128, 255, 1000, 10**6, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
WIDE = (1 << 33, 1 << 62, (1 << 64) - 1, (1 << 64) - 32)


def prepare(folder: Path, name: str) -> Path:
    """Return a directory with a file, written the first time."""
    return _prepared(folder, name)


@functools.cache
def _prepared(folder: Path, name: str) -> Path:
    from helpers import gguf_files, pico

    directory = folder / f"base-gguf-{name}"
    directory.mkdir()
    gguf_files.write(pico.build(name), directory / FILE, name, ("F16", "Q8_0"))
    return edits.sealed(directory)


@functools.cache
def _fields(path: Path) -> tuple[tuple[int, int], ...]:
    """Return where the numbers of the header lie, and how many bytes each has: of tensors, and of whole keys."""
    from compress.importers import gguf_header

    raw, header = path.read_bytes(), gguf_header.read(path)
    found = [(8, 8), (16, 8)]  # how many tensors and keys
    for name, entry in header.tensors.items():
        place = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        sizes = [(place + 4 + 8 * index, 8) for index in range(len(entry.shape))]
        behind = place + 4 + 8 * len(entry.shape)
        found += [(place, 4), *sizes, (behind, 4), (behind + 4, 8), (behind + 4, 8)]
    for name, value in header.metadata.items():
        if type(value) is int and not name.startswith("tokenizer.ggml.tokens"):
            place = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
            found += [(place, 4), *[(place + 4, 4)] * 6]
    return tuple(found)


def make(random: Random, folder: Path, few: bool = False) -> Case:
    name = random.choice(BASES[: 1 if few else None])
    path = prepare(folder, name) / FILE
    changes = [_change(path, random) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    return {"base": name, "edits": changes, "words": random.choice(COMMANDS)}


def _change(path: Path, random: Random) -> dict[str, Any]:
    """Return a change of the file: of a number of its header, or of any byte of it."""
    raw = path.read_bytes()
    if random.random() < 0.2:
        return {"file": FILE, **values.damage(raw, random, max(place for place, _ in _fields(path)))}
    place, size = random.choice(_fields(path))
    own = int.from_bytes(raw[place : place + size], "little")
    near = [own + 1, max(0, own - 1), own + 32, max(0, own - 32), own * 2, own // 2]
    number = random.choice([*near, random.choice(NUMBERS), random.choice(NUMBERS if size == 4 else WIDE)])
    written = (number % (1 << 8 * size)).to_bytes(size, "little")
    return {"file": FILE, "bytes": [[place + index, f"{byte:02x}"] for index, byte in enumerate(written)]}


def judge(case: Case, folder: Path, place: Path) -> Verdict:
    """Run the command; what is refused leaves nothing behind."""
    directory = edits.linked(_prepared(folder, case["base"]), place / "model")
    edits.apply(directory, case["edits"])
    tempfile.tempdir = str(place)  # of this child: where a file gets a directory of its own
    known = {"model": str(directory / FILE), "place": str(place)}
    with litter.watched(place) as left:
        verdict = verdicts.command([word.format(**known) for word in case["words"]])
    return left(verdict)
