"""Read the header of a safetensors file, and check where the tensors of any file lie.

What the safetensors library refuses is refused here, too. Its rules are strict so that one file cannot be two models
for two readers: tensors lie one after another without a hole, no byte belongs to two of them or to none, none follows
the last, and no name stands twice. Readers of other files with tensors (GGUF) check their layout by `layout_fault`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from compress.errors import CheckpointError, first_line, shown
from compress.storage import json_text
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
        raise malformed_error(path, error) from error
    spans = [Span(entry.name, entry.start, entry.stop) for entry in entries]
    if wrong := layout_fault(spans, first, size):
        raise CheckpointError(f"{path} {wrong}; download it again")
    return Header(metadata, entries)


def malformed_error(path: Path, error: Exception) -> CheckpointError:
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


class Span(NamedTuple):
    """The bytes of a tensor, counted from the start of the file."""

    name: str
    start: int
    stop: int


def layout_fault(spans: Iterable[Span], first: int, size: int, alignment: int = 1) -> str | None:
    """Return what is wrong with the layout of a file, as the end of a sentence about it; None if nothing is.

    first: the place of the first tensor; size: of the file, both in bytes. Every tensor begins at the next multiple of
    `alignment` behind the one before it. Behind the last there may be as much padding.
    """
    end, before = first, ""
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        due = _round_up(end, alignment)
        if span.start < due:
            return f"is damaged: tensor {shown(span.name)} begins at byte {span.start}, inside of what is before it" + (
                f" ({shown(before)})" if before else ""
            )
        if span.start > due:
            return f"is damaged: {span.start - due} bytes in front of tensor {shown(span.name)} belong to no tensor"
        end, before = span.stop, span.name
    if size < end:
        return f"is truncated: {size} bytes of {end}"
    if size > (due := _round_up(end, alignment)):
        return f"is damaged: {size - due} bytes behind its last tensor belong to no tensor"
    return None


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
