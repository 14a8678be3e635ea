"""Limit what a chat template may cost: it is a program that a checkpoint brings along, run in the sandbox of jinja2.

The sandbox keeps templates from files and code. It limits a range to 100,000 numbers, and nothing else: loops in loops
run for ever, and texts that double fill the memory. Here the lines that a template runs are counted, and what the
process may allocate meanwhile is limited.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

LINES_LIMIT = 2_000_000  # of a chat; a long chat takes some 30 for each message
MEMORY_LIMIT = 512 << 20  # bytes beside what the process has
TEMPLATE, LIBRARY = "<template>", f"{os.sep}jinja2{os.sep}"  # files whose lines are counted


class TemplateLimitError(RuntimeError):
    """A template has run for too long."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise TemplateLimitError within for a template that runs too many lines, MemoryError for one that grows."""
    lines, former = 0, sys.gettrace()

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if event == "call" and frame.f_code.co_filename != TEMPLATE and LIBRARY not in frame.f_code.co_filename:
            return None
        lines += 1
        if lines > LINES_LIMIT:
            raise TemplateLimitError(f"it runs for more than {LINES_LIMIT:,} lines")
        return traced

    with _memory():
        sys.settrace(traced)
        try:
            yield
        finally:
            sys.settrace(former)


@contextmanager
def _memory() -> Iterator[None]:
    """Limit what the process may allocate, where the system says what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    has = None
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    if has is None or (soft != resource.RLIM_INFINITY and soft <= has + MEMORY_LIMIT):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY_LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
