"""Check where the tensors of a file lie: one after another, without a shared byte, a hole, or bytes behind the last.

A file that holds bytes twice or bytes of no tensor can be read in two ways by two readers. All readers of files with
tensors (safetensors, GGUF) check their layout here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from compress.errors import shown


class Span(NamedTuple):
    """The bytes of a tensor, counted from the start of the file."""

    name: str
    start: int
    stop: int


def fault(spans: Iterable[Span], first: int, size: int, alignment: int = 1) -> str | None:
    """Return what is wrong with the layout of a file, as the end of a sentence about it; None if nothing is.

    first: the place of the first tensor; size: of the file, both in bytes. Every tensor begins at the next multiple of
    `alignment` behind the one before it. Behind the last there may be as much padding.
    """
    end, before = first, ""
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        due = _rounded_up(end, alignment)
        if span.start < due:
            return f"is damaged: tensor {shown(span.name)} begins at byte {span.start}, inside of what is before it" + (
                f" ({shown(before)})" if before else ""
            )
        if span.start > due:
            return f"is damaged: {span.start - due} bytes in front of tensor {shown(span.name)} belong to no tensor"
        end, before = span.stop, span.name
    if size < end:
        return f"is truncated: {size} bytes of {end}"
    if size > (due := _rounded_up(end, alignment)):
        return f"is damaged: {size - due} bytes behind its last tensor belong to no tensor"
    return None


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
