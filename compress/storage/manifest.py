"""Compare the files of a checkpoint with its manifest, which holds the hash and the size of each.

    {"files": {"config.json": "<sha256>", ...}, "sizes": {"config.json": <bytes>, ...}, ...}

Manifests of older versions have no sizes. A checkpoint that was saved by other software has no manifest, or the one of
an earlier save, whose hashes say nothing about the present files.

When a model is loaded, the sizes of its weight files are compared, and their hashes where that takes little beside
loading: up to HASHED_NBYTES together. COMPRESS_VERIFY=1 compares the hash of every listed file that is there.

The files of a model that go along into what is made of it, and to the hub, are known by their names: those that
transformers' tokenizers and processors save, those of licenses, and those that this package writes. What else lies
beside a model may be anybody's: keys, logs, data.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compress.errors import CheckpointError, shown
from compress.storage.checkpoint import INDEX, MANIFEST, read_json, sha256, write_text
from compress.storage.paths import CONFIG, EXPORTED

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
MODULES = "modules.json"  # the list of layers that make embeddings of a model's outputs
COPIED = (
    *("tokenizer*", "vocab*", "merges*", "added_tokens.json", "special_tokens_map.json", "chat_template*"),
    *("generation_config.json", "*processor_config.json", "feature_extractor*_config.json"),
    *("audio_tokenizer_config.json", "*.tokenizer"),
    *("spiece.model", "sentencepiece*.model", "spm*.model", "bpe.model", "source.spm", "target.spm"),
    *("*.tiktoken", "tekken.json", "bpe.codes", "dict.txt", "emoji.json", "normalizer.json", "entity_vocab.json"),
    *("target_vocab.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json"),
    *(MODULES, "sentence_*_config.json", "config_sentence_transformers.json"),
)
INNER = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # what makes embeddings of a model's outputs, by name
LEGAL_PATTERNS = (
    "license*",
    "licence*",
    "model_license*",
    "use_policy*",
    "notice*",
    "copying*",
)  # and the same in capitals
CARD, REPORT = "README.md", "report.json"
WRITTEN_PATTERNS = (
    CONFIG,
    "*.safetensors",
    "*.safetensors.index.json",
    MANIFEST,
    RECIPE,
    REPORT,
    CARD,
)  # a run writes these
WEIGHTS = (".safetensors", ".index.json", ".gguf", ".onnx", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz")
CODE = (".py", ".pkl", ".pickle", ".sh")
# Files that say how the model was stored, or what was measured of it: a run writes its own, or none.
OF_SOURCE = {CONFIG, MANIFEST, RECIPE, REPORT, CARD, PAGE, SCORES, EXPORTED}
OF_SOURCE |= {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
HUB_FILE = re.compile(r"(.*/models--[^/]+)/snapshots/[^/]+(/\d+_\w+)?")  # the folder of a model in the hub's cache


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
    """Tell whether a manifest's entry is the name of a file in its own directory, or of an inner one, and a hash."""
    is_flat = isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")
    is_name = is_flat or (isinstance(name, str) and INNER.fullmatch(name) is not None)
    return is_name and isinstance(value, str)


def entries(directory: Path) -> dict[str, Any]:
    """Return what a manifest says about the files of a finished directory; its page and its scores are not listed."""
    names = [path.name for path in directory.iterdir() if path.name not in (MANIFEST, PAGE, SCORES) and path.is_file()]
    names = sorted([*names, *inner_files(directory)])
    return {
        "files": {name: sha256(directory / name) for name in names},
        "sizes": {name: (directory / name).stat().st_size for name in names},
    }


def replace(directory: Path, name: str, content: str) -> None:
    """Write a listed file of a directory anew, with its hash and size in the manifest."""
    write_text(directory / name, content)
    listed = read_json(directory / MANIFEST)
    listed["files"][name] = sha256(directory / name)
    listed.setdefault("sizes", {})[name] = (directory / name).stat().st_size
    write_text(directory / MANIFEST, json.dumps(listed, indent=1) + "\n")


def inner_files(directory: Path) -> list[str]:
    """Return the files in folders of a directory that make embeddings of its model's outputs: names from there.

    There are none without the list of such layers.
    """
    if not (directory / MODULES).is_file():
        return []
    names = sorted(path.relative_to(directory).as_posix() for path in directory.glob("[0-9]*_*/*.*"))
    return [name for name in names if INNER.fullmatch(name) and (directory / name).is_file()]


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


def is_copied(name: str) -> bool:
    """Return whether a file beside a model has the name of one that belongs to it, and holds no weights and no code."""
    if INNER.fullmatch(name):
        return True
    if name.lower().endswith((*WEIGHTS, *CODE)):
        return False
    is_legal = any(fnmatchcase(name.lower(), pattern) for pattern in LEGAL_PATTERNS)
    return is_legal or any(fnmatchcase(name, pattern) for pattern in COPIED)


def is_of_source(name: str) -> bool:
    """Return whether a file holds a model's weights, or what a run writes anew: nobody misses it in a copy."""
    return name.startswith(".") or name in OF_SOURCE or name.lower().endswith(WEIGHTS)


def is_published(name: str) -> bool:
    """Return whether a file of a finished checkpoint has the name of one that belongs to it."""
    return is_copied(name) or any(fnmatchcase(name, pattern) for pattern in WRITTEN_PATTERNS)


def is_inside(path: Path) -> bool:
    """Return whether a path is a regular file of its own folder, or a link to one.

    A file in the hub's cache is a link into the blobs of the same model, which belong to it.
    """
    if not os.path.isfile(path):
        return False
    folder, real = path.parent.resolve(), path.resolve()
    cached = HUB_FILE.fullmatch(str(folder))
    return real.parent == folder or (cached is not None and str(real.parent) == f"{cached[1]}/blobs")
