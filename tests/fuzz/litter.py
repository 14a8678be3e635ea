"""Check that what is refused leaves nothing behind, and nothing changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzz.verdicts import Verdict


@contextmanager
def watched(place: Path) -> Iterator[Callable[[Verdict], Verdict]]:
    """Give a function that turns the verdict "refused" into "litter" where `place` is not as it was before."""
    before = _contents(place)

    def left(verdict: Verdict) -> Verdict:
        if verdict.kind != "refused":
            return verdict
        after = _contents(place)
        if changed := sorted(path for path, state in before.items() if after.get(path) != state):
            return Verdict("litter", f"changed {changed[0]}, after: {verdict.detail[:200]}")
        if partial := sorted(path for path in after if path not in before and _is_useless(place / path)):
            return Verdict("litter", f"left {partial[0]}, after: {verdict.detail[:200]}")
        return verdict

    yield left


def _is_useless(path: Path) -> bool:
    """Return whether this is a folder of unfinished work without anything finished in it."""
    return (
        path.suffix == ".partial"
        and path.is_dir()
        and not [p for p in path.glob("*/*.json") if p.parent.name != "model"]
    )


def _contents(place: Path) -> dict[str, tuple[int, int, int]]:
    """Path -> size, time and inode of every file below."""
    found = {}
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = Path(folder, name)
            state = path.lstat()
            facts = (state.st_size, state.st_mtime_ns, state.st_ino) if stat.S_ISREG(state.st_mode) else (0, 0, 0)
            found[str(path.relative_to(place))] = facts
    return found
