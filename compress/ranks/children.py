"""Start Python processes, the only place of this package that does, so that none imports from the working directory.

`python -m`, `python -c` and what multiprocessing starts put the working directory first in sys.path: whoever stands in
the folder of a downloaded model would run what is called torch there. Workers also do not outlive the run, and leave
to it the signals that it answers itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, Final

SIGNALS: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
SAFE_PATH: Final = "PYTHONSAFEPATH"  # read by Python 3.11 and later
HAS_SAFE_PATH: Final = sys.version_info >= (3, 11)
PACKAGES: Final = str(Path(__file__).parents[2])  # the folder that this package was imported from
RUN_MODULE: Final = (  # works in every version; sys is built in, and "" is the working directory
    "import sys; sys.path[:] = [path for path in sys.path if path]; sys.path.append(sys.argv.pop(1)); del sys.argv[0]; "
    "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(module: str) -> tuple[str, ...]:
    """Return the words that run a module as `python -m` does, without the working directory in sys.path."""
    return (sys.executable, "-c", RUN_MODULE, PACKAGES, module)


def start(command: Sequence[str], log: int, environment: dict[str, str], lock: int) -> subprocess.Popen[bytes]:
    """Start a process that hears neither Ctrl-C nor what is typed.

    log: descriptor for all that it prints. lock: descriptor that it inherits.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**environment, SAFE_PATH: "1"},
        pass_fds=(lock,),
        start_new_session=True,
    )


def start_answering(command: Sequence[str], log: IO[str]) -> subprocess.Popen[str]:
    """Start a process that is asked and answers in lines of text; log: where it writes errors."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, SAFE_PATH: "1"},
    )


def wait(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait for the end of a process, and end it where it takes longer."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def pool(processes: int, initializer: Callable[..., None], arguments: tuple[Any, ...]) -> ProcessPoolExecutor:
    """Return a pool of fresh processes, which start while tasks are submitted inside of `starting`."""
    here = os.getcwd()
    with starting():  # the locks of a pool start the resource tracker, a process too
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(here, initializer, *arguments))


def _begin(directory: str, initializer: Callable[..., None], *arguments: Any) -> None:
    """Prepare a process of a pool, in the working directory of the one that starts it."""
    os.chdir(directory)
    initializer(*arguments)


@contextmanager
def starting() -> Iterator[None]:
    """Start processes that import nothing of the working directory, and are deaf to signals until `prepare_worker`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with _safe_path() if HAS_SAFE_PATH else _elsewhere():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Let processes that start meanwhile leave the working directory out of sys.path."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Let processes start in the folder of Python."""
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.chdir(sys.prefix)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def prepare_worker() -> None:
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
