"""Write files whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path`, which takes its place at the end."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
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
