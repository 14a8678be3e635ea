"""Check the paths that a user gives, without importing anything heavy: what cannot be is answered at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from compress.errors import CalibrationError, CheckpointError, OutputError
from compress.storage import json_text
from compress.storage.files import open_regular

CONFIG = "config.json"
GGUF, PROJECTOR = ".gguf", "mmproj"  # the second begins the name of a tower for images
CHAT_TEMPLATES = "additional_chat_templates"  # a folder in a model's, which transformers reads
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
MODELOPT_SETTINGS = "hf_quant_config.json"  # the settings of modelopt, beside a section of config.json or alone
MANIFEST = "compress_manifest.json"
UNFINISHED = "compress_unfinished"  # a file: a checkpoint is being copied here
EXPORTED = "compress_export.json"  # names what an exported directory was made from
SAVED_CACHE = "compress_kv"  # a key of the header of the cache of a prompt
MAX_CONFIG_NBYTES = 16 << 20  # no more is read of a configuration
METHOD = "compress"  # quant_method of packed checkpoints
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
MAX_CHECKED_NBYTES = 1 << 20  # no more of a text is looked at before anything else is done
TABLE_SUFFIXES = (".csv", ".tsv", ".xls", ".xlsx")  # no reader of ours reads them
TEXT_SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
SELF = "self"  # this source of calibration text is what the model writes itself


def default_text() -> Path:
    """Return the calibration text that compress comes with; calib/text/README.md says what is in it."""
    return Path(__file__).parents[1] / "calib" / "text" / "compress_text.jsonl"


def local_model(model: str) -> Path | None:
    """Return the path of a model that is here, None for a hub id; CheckpointError for what is neither."""
    if _exists(model):
        return Path(model)
    if model.lower().endswith(GGUF):
        raise CheckpointError(f"{model} is not there; give the path of a GGUF file")
    if model.startswith(".") or not HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model} is neither a directory nor a hub id of the form owner/name")
    return None


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that is meant by a path: itself, or the only one (the first part) of a directory.

    A tower for images beside it (PROJECTOR) is no model. None for a directory with safetensors files, or without GGUF
    files. Raises CheckpointError for several of them.
    """
    if path.name.lower().endswith(GGUF) and os.path.isfile(path):
        return path
    if not os.path.isdir(path) or any(path.glob("*.safetensors")):
        return None
    files = sorted(each for each in path.iterdir() if each.name.lower().endswith(GGUF) and each.is_file())
    files = [each for each in files if not each.name.lower().startswith(PROJECTOR)]
    first = [each for each in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", each.name)]
    if len(first) > 1:
        raise CheckpointError(f"{path} holds {len(first)} GGUF models, {first[0].name} and others; give one of them")
    return first[0] if first else None


def check_checkpoint(directory: Path) -> None:
    """Raise CheckpointError for what is no directory, or holds no config.json."""
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory} is not a directory; give a Hugging Face checkpoint directory or a hub id")
    if not os.path.isfile(directory / CONFIG):
        reason = "is it a Hugging Face checkpoint directory?"
        if not os.access(directory, os.X_OK):
            reason = "or you may not read it"
        raise CheckpointError(f"{directory} has no {CONFIG}; {reason}")
    _check_files(directory)


def _check_files(directory: Path) -> None:
    """Raise CheckpointError for a pipe, socket or device among the files of a model: who reads it waits for ever."""
    names = os.listdir(directory) if os.access(directory, os.R_OK) else []
    for path in (*(directory / name for name in names), *(directory / CHAT_TEMPLATES).glob("*")):
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise CheckpointError(f"{path} is no file but a pipe, a socket or a device; remove it")


def check_adapter(adapter: Path) -> None:
    """Raise CheckpointError for what is no directory with the settings and the weights of an adapter."""
    if not os.path.isfile(adapter / ADAPTER_CONFIG):
        raise CheckpointError(f"{adapter} has no {ADAPTER_CONFIG}; give the directory of a LoRA, as PEFT saves it")
    if not os.path.isfile(adapter / ADAPTER):
        raise CheckpointError(f"{adapter} has no {ADAPTER}; save the adapter as safetensors (pickles are not read)")


def check_text(source: str) -> None:
    """Raise CalibrationError for a source of text that is not there, empty, or a directory with the name of a file.

    The name of a data set, and a directory that holds one, are left to those who read them.
    """
    if not _exists(source):
        is_path = source.startswith((".", "/", "~")) or source.lower().endswith(TEXT_SUFFIXES)
        if is_path or not source:
            raise CalibrationError(f"{source} is neither a file nor a data set; give a .txt, .jsonl or .parquet file")
    elif os.path.isdir(source):
        if source.lower().endswith(TEXT_SUFFIXES):
            raise CalibrationError(f"{source} is a directory; give a .txt, .jsonl or .parquet file in it")
    elif not os.access(source, os.R_OK):
        raise CalibrationError(f"cannot read {source}: permission denied")
    elif os.path.isfile(source) and not os.path.getsize(source):
        raise CalibrationError(f"{source} is empty; give a file with text")


def check_corpus(source: str) -> None:
    """Raise CalibrationError for a source of text as `check_text`, and for a file that holds no text to learn from.

    That is one of another kind than its name says, a binary file, a pipe, and one of blank lines only.
    """
    check_text(source)
    if not os.path.isfile(source):
        if os.path.exists(source) and not os.path.isdir(source):
            raise CalibrationError(f"{source} is a pipe, a socket or a device; give a .txt, .jsonl or .parquet file")
        return
    path = Path(source)
    check_kind(path)
    suffix = path.suffix.lower()
    with open_regular(path) as stream:
        start = stream.read(MAX_CHECKED_NBYTES)
        if suffix == ".parquet":
            if not start.startswith(b"PAR1"):
                raise CalibrationError(f"{source} is not a readable parquet file; write it again, or give another kind")
            return
        if b"\0" in start:
            raise CalibrationError(f"{source} is a binary file, or text in UTF-16; give a text in UTF-8")
        filled, read = start.strip(), start
        while read and not filled:
            read = stream.read(MAX_CHECKED_NBYTES)
            filled = read.strip()
    if not filled.removeprefix(b"\xef\xbb\xbf").strip():
        raise CalibrationError(f"{source} holds blank lines only; give a file with text")


def check_kind(path: Path) -> None:
    """Raise CalibrationError for a table whose header and separators would be taken for text."""
    if path.suffix.lower() in TABLE_SUFFIXES:
        raise CalibrationError(
            f"{path} is a table, whose header and separators are no text; write the column of texts as lines of JSON, "
            '{"text": "..."}, into a .jsonl file'
        )


def check_saved_cache(file: Path) -> None:
    """Raise CheckpointError for a path that is no file."""
    if not os.path.isfile(file):
        reason = "is no regular file" if os.path.exists(file) else "is not there"
        reason = "is a directory" if os.path.isdir(file) else reason
        raise CheckpointError(f"{file} {reason}; give a file that compress kv save wrote")


def check_apart(out: Path, *sources: Path | None) -> None:
    """Raise OutputError for an output that lies in a folder that the run reads, or holds it."""
    for source in filter(None, sources):
        if holds(out, source):
            raise OutputError(f"the output {out} holds the model itself; give another --out")
    check_outside(out, "--out", *sources)


def check_outside(folder: Path, option: str, *sources: Path | None) -> None:
    """Raise OutputError for a folder, given as `option`, that lies in one that the run reads."""
    for source in filter(None, sources):
        if holds(source, folder):
            raise OutputError(f"{folder} lies inside of {source}, which is read; give another {option}, beside it")


def holds(folder: Path, path: Path) -> bool:
    """Tell whether a path is a folder, or lies in it, behind all links; links in a circle are no error here."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def exchange_note(model: str, base: str | None) -> str | None:
    """Return a note for a packed base of a model that is not packed: they may be exchanged; None for all others."""
    if base is None or not is_packed(Path(base)) or not _exists(model) or is_packed(Path(model)):
        return None
    return f"--base {base} is packed and {model} is not; if they are exchanged, give the original as --base"


def is_packed(directory: Path) -> bool:
    """Tell whether a checkpoint of ours with packed weights lies here, as far as its configuration can be read."""
    try:
        with open_regular(directory / CONFIG) as stream:
            config = json_text.loads(stream.read(MAX_CONFIG_NBYTES))
        return bool(config["quantization_config"]["quant_method"] == METHOD)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_name(out: Path) -> None:
    """Raise OutputError for the root, and for a path that ends in .., beside which nothing can be written."""
    if out.name in ("", ".."):
        raise OutputError(f"{out} cannot be an output directory; give another --out")


def check_out(out: Path, overwrite: bool) -> None:
    """Raise OutputError if a checkpoint must not be written to `out`, because of its name or of what is there."""
    check_name(out)
    if not os.path.lexists(out):
        return
    if os.path.isfile(out / UNFINISHED):
        return
    if not overwrite:
        raise OutputError(f"{out} exists already; give another --out, or --overwrite to replace it")
    if not os.path.isdir(out) or (os.listdir(out) and not os.path.isfile(out / MANIFEST)):
        raise OutputError(f"{out} is not a checkpoint that compress wrote; delete it yourself or give another --out")


def check_saved_cache_out(out: Path, overwrite: bool, read: Iterable[Path]) -> None:
    """Raise OutputError if the cache of a prompt must not be written to `out`; read: what the command reads.

    Only a file of the same kind is replaced, or any file with `overwrite`; never what is read, nor a link or a device.
    """
    if not os.path.isdir(out.parent):
        raise OutputError(f"{out.parent} is not there; make this folder, or give another --out")
    if not os.path.lexists(out):
        return
    if os.path.islink(out) or not os.path.isfile(out):
        raise OutputError(f"{out} is no regular file; give another --out")
    for path in read:
        if os.path.exists(path) and os.path.samefile(path, out.parent if os.path.isdir(path) else out):
            raise OutputError(f"{out} is read by this command; give another --out")
    if not overwrite and not _is_saved_cache(out):
        raise OutputError(f"{out} is not a cache that compress kv save wrote; give another --out, or --overwrite")


def _is_saved_cache(path: Path) -> bool:
    """Return whether the header of a safetensors file says that it is the cache of a prompt."""
    with suppress(OSError, ValueError, AttributeError), open_regular(path) as stream:
        header = stream.read(min(int.from_bytes(stream.read(8), "little"), json_text.TEXT_LIMIT))
        return SAVED_CACHE in json_text.loads(header).get("__metadata__", {})
    return False


def check_writable(folder: Path, option: str) -> None:
    """Raise OutputError where a folder cannot be made or written; `option`: the one that changes it."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not os.path.isdir(existing):
        reason = "a part of the path is a file"
    elif os.access(existing, os.W_OK | os.X_OK):
        return
    elif os.statvfs(existing).f_flag & os.ST_RDONLY:
        reason = "the file system is read-only"
    else:
        reason = "permission denied"
    raise OutputError(f"cannot write {folder}: {reason}; give another {option}")


def _exists(path: str) -> bool:
    """Tell whether there is such a path; what can be no path is none."""
    try:
        return os.path.exists(path)
    except ValueError:  # a zero byte
        return False
