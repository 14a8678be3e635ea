"""Make a process ready to fork children that judge: no network, one thread, everything imported once."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # the usual one has a thread, which a fork loses
}
MEMORY = Path("/dev/shm")


@contextmanager
def workplace() -> Iterator[Path]:
    """Give a folder, in memory where that is possible; caches of compiled code and of data sets lie in it too."""
    folder = Path(tempfile.mkdtemp(prefix="compress-fuzz-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    for name in ("cache", "home"):
        (folder / name).mkdir()
    os.environ.update(ENVIRONMENT, XDG_CACHE_HOME=str(folder / "cache"), HOME=str(folder / "home"))
    os.environ.update(HF_HOME=str(folder / "home" / "hf"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def imports() -> None:
    """Import what cases use, and quantize once, so that children find it there."""
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch
    from transformers.utils import logging

    import compress.api
    import compress.cli.app
    import compress.cli.tables
    import compress.evaluate  # noqa: F401

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    sys.setrecursionlimit(1000)
