"""What all tests share: no network, one thread, caches and pico checkpoints that are written once a session."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too: two workers have two cores
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, by torch.compile for one
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers and commands inherit it: each function is compiled once a session
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="compress-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import pytest
import torch

torch.set_num_threads(1)
for number in (signal.SIGINT, signal.SIGHUP):  # nohup and jobs in the background ignore them, and so would commands
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
os.fsync = lambda descriptor: None  # tests end processes, not machines; the disk takes 7 ms each time


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases slow that slow_cases.txt names. Raises UsageError for one that is not there."""
    lines = Path(__file__).with_name("slow_cases.txt").read_text().splitlines()
    named = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in named:
            item.add_marker(pytest.mark.slow)
    files = {item.nodeid.split("::")[0] for item in items}
    missing = {name for name in named if name.split("::")[0] in files} - {item.nodeid for item in items}
    is_whole = not (config.getoption("lf", False) or any("::" in argument for argument in config.args))
    if missing and is_whole:
        raise pytest.UsageError(f"tests/slow_cases.txt names {min(missing)}, which is not there")


def pytest_collection_finish() -> None:
    """Exempt what was imported and collected from garbage collections, which would walk it again and again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_measured() -> None:
    """Leave choices between kernels with the first of the candidates, whatever else the machine does."""
    from compress.kernels import measured

    measured.times = lambda candidates: dict.fromkeys(candidates, 1.0)


@pytest.fixture(scope="session")
def pico_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """pico_dir(name, shards=False, dtype=torch.float32) -> a checkpoint, written once: no test writes into it."""
    from helpers.pico import save_pico

    written: dict[tuple[str, bool, torch.dtype], Path] = {}
    files: dict[Path, list[str]] = {}

    def directory(name: str, shards: bool = False, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, shards, dtype)
        if key not in written:
            written[key] = save_pico(name, tmp_path_factory.mktemp(name), shards, dtype)
            files[written[key]] = sorted(os.listdir(written[key]))
        return written[key]

    yield directory
    changed = [str(path) for path, names in files.items() if sorted(os.listdir(path)) != names]
    assert not changed, f"a test has written into {', '.join(changed)}"


@pytest.fixture
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU kernels take weights of any size."""
    from compress.kernels import dispatch
    from compress.kernels.cpu import emitter

    monkeypatch.setattr(emitter, "SMALL", 0)
    dispatch.forget()
    yield
    dispatch.forget()
