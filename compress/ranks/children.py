"""Keep worker processes from outliving the run, and from answering signals that it answers itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection
from typing import Final

SIGNALS: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def starting() -> Iterator[None]:
    """Hold signals back while processes are started: they inherit that, and stay quiet until `started`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started() -> None:
    """Prepare a worker process: Ctrl-C is for the run alone, and the end of the run is the end of the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def end(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool at once, whatever they are doing."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
