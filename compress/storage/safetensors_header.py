"""Read the header of a safetensors file. What the safetensors library refuses is refused here, too.

The library's rules are strict so that one file cannot be two models for two readers: tensors lie one after another
without a hole, no byte belongs to two of them or to none, and no name stands twice.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from compress.errors import CheckpointError, first_line, shown
from compress.storage import json_text, layout
from compress.storage.files import open_regular

HEADER_LIMIT = 100_000_000  # bytes; the library's
COUNT_LIMIT = 1 << 64  # the library counts in 64 bits
METADATA = "__metadata__"
ENTRY = {"dtype": json_text.TEXT, "shape": [json_text.INTEGER], "data_offsets": [json_text.INTEGER]}


class Entry(NamedTuple):
    """What a header says of a tensor; `start` and `stop` are counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The header of a file."""

    metadata: dict[str, str]
    entries: list[Entry]


def read(path: Path) -> Header:
    """Return the header of a file, compared with the file's size. Raises CheckpointError."""
    if not os.path.isfile(path):  # False for a name that no file can have, too
        raise CheckpointError(f"shard {path} is missing; download the checkpoint again")
    size = path.stat().st_size
    with open_regular(path) as stream:
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else 0
        if not 0 < length <= min(HEADER_LIMIT, size - 8):
            raise CheckpointError(
                f"{path} is not a safetensors file, or is truncated ({size} bytes); download it again"
            )
        raw = stream.read(length)
    first = 8 + length
    try:
        header = json_text.loads(raw, is_strict=True)
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        metadata = _metadata(header.pop(METADATA, None))
        entries = [_entry(name, value, first) for name, value in header.items()]
    except ValueError as error:
        raise malformed(path, error) from error
    spans = [layout.Span(entry.name, entry.start, entry.stop) for entry in entries]
    if wrong := layout.fault(spans, first, size):
        raise CheckpointError(f"{path} {wrong}; download it again")
    return Header(metadata, entries)


def malformed(path: Path, error: Exception) -> CheckpointError:
    """Return the error that says what is wrong with a header."""
    return CheckpointError(f"{path} has a malformed safetensors header ({first_line(error)}); download it again")


def _metadata(value: Any) -> dict[str, str]:
    """Return the metadata; ValueError for what is not text under names."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError(f"its {METADATA} is {shown(value)}, not text under names")
    return value


def _entry(name: str, value: Any, first: int) -> Entry:
    """Return an entry; ValueError for sizes that are none. first: the place of the first tensor."""
    if wrong := json_text.mismatch(value, ENTRY, f"tensor {shown(name)}"):
        raise ValueError(wrong)
    shape, offsets = value["shape"], value["data_offsets"]
    is_sized = all(number >= 0 for number in (*shape, *offsets)) and len(offsets) == 2 and offsets[0] <= offsets[1]
    counts = [math.prod(shape[:end]) for end in range(len(shape) + 1)] if len(shape) <= 64 else [COUNT_LIMIT]
    if not is_sized or max((*counts, *shape, *offsets)) >= COUNT_LIMIT:
        raise ValueError(f"tensor {shown(name)} has a shape or offsets that are no sizes")
    return Entry(name, value["dtype"], tuple(shape), first + offsets[0], first + offsets[1])
