"""Keep object code on disk, so that a process does not compile what another one has compiled.

A file has the name of its key, which is a hash of all that the code depends on, and holds a mark, the key, the hash of
the object code and the object code. Anything else is as good as no file: cut off, damaged, put under another name.

Object code is run. A folder or a file that belongs to another user, or that others may write, is not read.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = b"compress object code 1\n"
LIMIT = 256 << 20  # bytes of all files
SUFFIX = ".object"
HASH = 32  # bytes
OTHERS = stat.S_IWGRP | stat.S_IWOTH
# How a file is opened: a link is not followed, and a pipe does not block; 0 where a system has no such flag.
UNFOLLOWED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def key(parts: Iterable[str]) -> bytes:
    """Return the hash of these texts, which are told apart: no two lists of texts have the same key."""
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def load(key: bytes) -> bytes | None:
    """Return the object code that was stored under a key; None if there is none that can be trusted."""
    try:
        folder = _folder()
        if folder is None or not _is_ours(os.stat(folder)):
            return None
        path = folder / (key.hex() + SUFFIX)
        with open(os.open(path, os.O_RDONLY | UNFOLLOWED), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                return None
            content = file.read()
    except OSError:
        return None
    head, code = content[: len(MARK) + 2 * HASH], content[len(MARK) + 2 * HASH :]
    if head != MARK + key + hashlib.sha256(code).digest():
        return None
    with suppress(OSError):  # the folder may be read-only
        os.utime(path)  # the oldest go first
    return code


def store(key: bytes, code: bytes) -> None:
    """Keep object code under a key; nothing happens where that cannot be done."""
    with suppress(OSError):
        folder = _folder()
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(os.stat(folder)):
            return
        _write(folder / (key.hex() + SUFFIX), MARK + key + hashlib.sha256(code).digest() + code)
        _shrink(folder)


def _folder() -> Path | None:
    """Return where object code is kept; None for a user without a home."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # other values are to be ignored, says the standard
        return Path(base) / "compress" / "kernels"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "compress" / "kernels"


def _is_ours(status: os.stat_result) -> bool:
    """Return whether this user owns a file or folder and nobody else may write it; yes where rights are unknown."""
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & OTHERS)


def _write(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent)  # which nobody else can read or write
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise


def _shrink(folder: Path) -> None:
    """Delete the files that were used the longest time ago until the rest is within the limit."""
    files = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another process may delete it
            status = entry.stat(follow_symlinks=False)
            files.append((status.st_mtime_ns, entry.path, status.st_size))
    total = sum(size for _, _, size in files)
    for _, path, size in sorted(files):
        if total <= LIMIT:
            return
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
