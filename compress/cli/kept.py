"""Keep what a command has measured beside the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compress.cli.options import note
from compress.errors import CompressError, first_line


def keep(directory: Path, add: Callable[[], object]) -> None:
    """Call what adds a result to scores.json of a checkpoint that compress wrote, and bring its page up to date.

    A checkpoint that may only be read, or whose scores.json is damaged, is measured all the same: a note says that the
    result is not kept.
    """
    from compress.evaluate import page, record

    if not record.is_kept(directory):
        return
    try:
        add()
        page.refresh(directory)
    except (CompressError, OSError) as error:
        note(f"what was measured is not kept beside {directory}: {first_line(error)}")
