"""Put a finished checkpoint where nothing can be renamed or appended to, as on a mounted object store.

Files are copied one after the other, each written once from start to end. `config.json` comes last but one, so that
nothing loads what is incomplete, and the manifest last: it is what makes the directory a checkpoint. Until then the
directory holds a file UNFINISHED, by which the next run knows it for what it is and goes on with it.
"""

from __future__ import annotations

import os
from pathlib import Path

from compress.errors import OutputError
from compress.storage import files
from compress.storage.checkpoint import CONFIG, MANIFEST
from compress.storage.files import open_new
from compress.storage.paths import UNFINISHED

LAST = (CONFIG, MANIFEST)


def put(model: Path, out: Path) -> None:
    """Copy the files of a checkpoint, remove others in `out`. Raises OutputError for a copy that is not whole.

    The caller has made sure that `out` may be replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    open_new(out / UNFINISHED).close()
    names = sorted((name for name in os.listdir(model)), key=lambda name: (name in LAST, LAST[-1] == name, name))
    others = sorted(set(os.listdir(out)) - {*names, UNFINISHED})
    for name in (*LAST[::-1], *others):
        if (out / name).is_file():
            (out / name).unlink()
    for name in names:
        copy(model / name, out / name)
    (out / UNFINISHED).unlink()


def copy(source: Path, target: Path) -> None:
    """Copy one file. Raises OutputError if the copy has another size."""
    files.copy(source, target)
    if target.stat().st_size != source.stat().st_size:
        raise OutputError(f"{target} has {target.stat().st_size} bytes, not {source.stat().st_size}; run this again")
