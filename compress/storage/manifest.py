"""Compare the files of a checkpoint with its manifest, which holds the hash and the size of each.

    {"files": {"config.json": "<sha256>", ...}, "sizes": {"config.json": <bytes>, ...}, ...}

Manifests of older versions have no sizes. A checkpoint that was saved by other software has no manifest, or the one of
an earlier save, whose hashes say nothing about the present files.

When a model is loaded, the sizes of its weight files are compared, and their hashes where that takes little beside
loading: up to HASHED_NBYTES together. COMPRESS_VERIFY=1 compares the hash of every listed file that is there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compress.errors import CheckpointError, shown
from compress.storage.checkpoint import CONFIG, INDEX, MANIFEST, read_json, sha256

ASKED = "COMPRESS_VERIFY"
HASHED_NBYTES = 64 << 20  # weight files up to this are hashed by default: 0.07 s on one core, a load takes 0.2 s
RECIPE = "recipe.yaml"
PAGE, SCORES = "report.html", "scores.json"  # beside a checkpoint and no part of it: later commands change them
_is_unfinished = ContextVar("is_unfinished", default=False)

READ = (  # files that decide what is loaded: one that is not listed is an error
    *("*.safetensors", "*.safetensors.index.json", CONFIG, "generation_config.json", RECIPE, "report.json"),
    *("tokenizer*", "*.model", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("*processor_config.json", "adapter_*"),
)


@dataclass(frozen=True)
class Manifest:
    """The files of a directory as they were written."""

    directory: Path
    files: dict[str, str]  # name -> sha256
    sizes: dict[str, int]  # name -> bytes; {} in older manifests

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Return the manifest of a directory, None without one; raise CheckpointError for one that is damaged."""
        path = directory / MANIFEST
        if not path.is_file():
            return None
        values = read_json(path)
        files, sizes = values.get("files"), values.get("sizes", {})
        listed = isinstance(files, dict) and files and all(_is_entry(name, value) for name, value in files.items())
        if not isinstance(files, dict) or not listed:
            raise CheckpointError(f"{path} lists no files; download or write the checkpoint again")
        if not isinstance(sizes, dict) or any(type(size) is not int for size in sizes.values()):
            raise CheckpointError(f"{path} has sizes that are no numbers; download or write the checkpoint again")
        return cls(directory, files, sizes)

    def check_listed(self, names: Collection[str]) -> None:
        """Raise CheckpointError for the first of these files that has no hash."""
        for name in sorted(names):
            if name not in self.files:
                raise CheckpointError(
                    f"{self.directory / name} is not listed in {MANIFEST}; remove it if it was added later, or "
                    "download or write the checkpoint again"
                )

    def check_size(self, name: str) -> None:
        """Raise CheckpointError for a listed file that is missing, or has another size than was written."""
        path = self.directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; download or write the checkpoint again")
        size = path.stat().st_size
        if size != (written := self.sizes.get(name, size)):
            raise CheckpointError(f"{path} is not the file that was written: {size} bytes of {written}; {self._advice}")

    def check_hash(self, name: str) -> None:
        """Raise CheckpointError for a listed file with other bytes than were written."""
        if not self._is_as_written(name):
            raise CheckpointError(f"{self.directory / name} is not the file that was written; {self._advice}")

    @property
    def _advice(self) -> str:
        return f"download or write the checkpoint again, or remove {MANIFEST} if you changed the file yourself"

    def _is_as_written(self, name: str) -> bool:
        path = self.directory / name
        return path.is_file() and sha256(path) == self.files.get(name)

    def is_of_earlier_save(self, weights: Collection[str]) -> bool:
        """Tell whether the directory was saved anew since, as `save_pretrained` does, which writes no manifest.

        That writes another config.json, and another index or weight files of other names. A single file that is
        damaged is therefore none.
        """
        if CONFIG not in self.files or self._is_as_written(CONFIG):
            return False
        return not (set(weights) <= self.files.keys() and self._is_as_written(INDEX))

    def unlisted(self) -> tuple[list[str], list[str]]:
        """Return the files that lie beside the listed ones: those that loading may read, and the others."""
        present = {path.name for path in self.directory.iterdir() if path.is_file()} - self.files.keys() - {MANIFEST}
        read = {name for name in present if any(fnmatchcase(name, pattern) for pattern in READ)}
        return sorted(read), sorted(present - read)


def _is_entry(name: object, value: object) -> bool:
    """Tell whether a manifest's entry is the name of a file in its own directory, and a hash."""
    is_name = isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")
    return is_name and isinstance(value, str)


def entries(directory: Path) -> dict[str, Any]:
    """Return what a manifest says about the files of a finished directory; its page and its scores are not listed."""
    paths = sorted(path for path in directory.iterdir() if path.name not in (MANIFEST, PAGE, SCORES))
    return {
        "files": {path.name: sha256(path) for path in paths},
        "sizes": {path.name: path.stat().st_size for path in paths},
    }


@contextmanager
def without_hashes() -> Iterator[None]:
    """Ask for no hashes meanwhile: what is loaded is being written, and has no manifest yet."""
    token = _is_unfinished.set(True)
    try:
        yield
    finally:
        _is_unfinished.reset(token)


def is_asked() -> bool:
    """Tell whether the environment asks for hashes; raise CheckpointError for a value that has no meaning."""
    value = "" if _is_unfinished.get() else os.environ.get(ASKED, "")
    if value not in ("", "0", "1"):
        raise CheckpointError(f"{ASKED} is {shown(value)}; set it to 1 to compare hashes when loading, or unset it")
    return value == "1"


def check_loaded(directory: Path, weights: Collection[str], verify: bool) -> None:
    """Compare the weight files (names) that are about to be loaded with the manifest, and with `verify` all files.

    Raises CheckpointError for a file that is not as it was written, and with `verify` where there are no hashes to
    compare with.
    """
    manifest = Manifest.read(directory)
    if manifest is None:
        if verify:
            raise CheckpointError(
                f"{directory} has no {MANIFEST}, so there are no hashes to compare with; fetch that file too, or load "
                "without verification"
            )
        return
    try:
        _check(manifest, weights, verify)
    except CheckpointError:
        if not manifest.is_of_earlier_save(weights):
            raise
        if verify:
            raise CheckpointError(
                f"{directory / MANIFEST} is of an earlier save, so there are no hashes to compare with; load without "
                "verification"
            ) from None


def _check(manifest: Manifest, weights: Collection[str], verify: bool) -> None:
    if verify:
        manifest.check_listed({*weights, CONFIG})
    names = [name for name in manifest.files if name in weights or (verify and (manifest.directory / name).is_file())]
    for name in names:
        manifest.check_size(name)
    if verify or sum((manifest.directory / name).stat().st_size for name in names) <= HASHED_NBYTES:
        for name in names:
            manifest.check_hash(name)
