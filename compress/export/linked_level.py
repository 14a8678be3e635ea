"""Write a directory that is a level of a packed checkpoint and shares the checkpoint's files.

Its config.json names the level (compress/runtime/levels.py); weights, tokenizer and all else are hard links, so that it
takes a few kilobytes. from_pretrained loads it as that level; an engine takes it as the draft model of the whole, and
then holds no tensor twice (compress/serving/sharing.py). The report stays behind, whose figures are those of the whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from compress.errors import OutputError
from compress.export.level import with_drafts_below
from compress.export.place import ExportPlace
from compress.runtime import hf
from compress.storage import manifest
from compress.storage.checkpoint import CONFIG, MANIFEST, read_json, write_text


def link(directory: Path, level: int, out: Path, overwrite: bool = False) -> int:
    """Write a directory `out` that is a level of a checkpoint of ours, whole or not at all; return the bytes it takes.

    Raises CheckpointError for a level that the checkpoint does not have, OutputError for what is in the way, and where
    the files cannot be linked.
    """
    config = with_drafts_below(hf.with_level(read_json(directory / CONFIG), level), level)
    names = [path.name for path in directory.iterdir() if _is_linked(path)] + manifest.inner_files(directory)
    with ExportPlace(out, "", overwrite) as place:
        place.new.mkdir()
        for name in names:
            _link(directory / name, place.new / name)
        write_text(place.new / CONFIG, json.dumps(config, indent=2) + "\n")
        write_text(
            place.new / MANIFEST, json.dumps({**_manifest_of(directory, place.new), "level": level}, indent=1) + "\n"
        )
        nbytes = sum((place.new / name).stat().st_size for name in (CONFIG, MANIFEST))
        place.publish()
    return nbytes


def _is_linked(path: Path) -> bool:
    """Return whether a file beside a checkpoint belongs to it, and to a level of it, too."""
    is_own = path.name in (CONFIG, MANIFEST, manifest.REPORT)
    return manifest.is_published(path.name) and not is_own and manifest.is_inside(path)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source.resolve(), target)  # of the hub's cache the file itself
    except OSError as error:
        raise OutputError(
            f"{target.name} of {source.parent} cannot be linked ({error.strerror}); give an --out on the same disk, or "
            "leave --link out, which copies the level"
        ) from error


def _manifest_of(directory: Path, linked: Path) -> dict[str, dict[str, object]]:
    """Return what the manifest says about the files: what that of the checkpoint says, which need not be read again."""
    known = manifest.Manifest.read(directory)
    if known is None:
        return manifest.entries(linked)
    config = linked / CONFIG
    files = {name: digest for name, digest in known.files.items() if (linked / name).is_file()}
    sizes = {name: (linked / name).stat().st_size for name in files}
    return {"files": {**files, CONFIG: manifest.sha256(config)}, "sizes": {**sizes, CONFIG: config.stat().st_size}}
