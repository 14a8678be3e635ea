"""Open files in folders that others may have made.

A checkpoint that was downloaded brings links and pipes along. So only regular files are read, where a pipe would block
for ever, and what is written is a new file, never what a link leads to. Everything outside of the folders of this
package's own opens files here.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO

CHUNK = 16 << 20  # bytes copied at a time


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes; raise OSError for what is no regular file, such as a pipe or a device."""
    return open(_regular(path, os.O_RDONLY, errno.EINVAL), "rb")


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a regular file, with line ends as `Path.read_text` gives them."""
    with open_regular(path) as stream:
        text = stream.read().decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def open_new(path: Path) -> BinaryIO:
    """Open a new file to write bytes, in place of any file or link of its name; nothing follows a link."""
    return open(new_descriptor(path), "wb")


def new_descriptor(path: Path, mode: int = 0o666) -> int:
    """Return the descriptor of such a file, to write and read."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)


def open_lock(path: Path) -> FileIO:
    """Open the file of a lock, which is made where there is none; raise OSError for a link, a pipe or a device."""
    return open(lock_descriptor(path), "r+b", buffering=0)


def lock_descriptor(path: Path) -> int:
    """Return the descriptor of such a file."""
    return _regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, errno.EEXIST)


def _regular(path: Path, flags: int, refusal: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)  # a pipe is opened at once, too
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(refusal, "it is no regular file", str(path))
    return descriptor


def make_folder(path: Path) -> None:
    """Make a folder inside of one that others may have made; raise OSError where a link is in its place."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def is_of_another_user(folder: Path) -> bool:
    """Return whether a folder, or the link to it, was made by another user than this process makes files as."""
    owners = {folder.stat().st_uid, folder.lstat().st_uid}
    if owners == {os.geteuid()}:
        return False
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:  # a mounted store may give all files one owner
        return owners != {os.fstat(probe.fileno()).st_uid}
    return True


def copy(source: Path, target: Path) -> int:
    """Copy a regular file into a new one; return the bytes that were copied."""
    with open_regular(source) as read, open_new(target) as written:
        shutil.copyfileobj(read, written, CHUNK)
        sync(written)
        return written.tell()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path`, which takes its place at the end."""
    part = path.with_name(path.name + ".part")
    with open_new(part) as stream:
        yield stream
        sync(stream)
    os.replace(part, path)
    sync_directory(path.parent)


def sync(stream: BinaryIO) -> None:
    """Force a file to disk before it is renamed into place."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to disk, so that what was renamed stays so after a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)
