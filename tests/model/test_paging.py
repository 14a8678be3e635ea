"""Hidden states on their way to a GPU and back, with streams and tensors that only say that they are of one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.model import paging
from compress.model.blockwise import FULL, QUANTIZED, HiddenStates
from helpers.pretend_gpu import DEVICE, Gpu, OnGpu

SAMPLES, BATCH = 7, 2


class Stream:
    """Notes what it is asked."""

    def __init__(self, device: Any = None) -> None:
        self.waits = 0

    def wait_stream(self, other: Stream) -> None:
        self.waits += 1

    def wait_event(self, event: Any) -> None:
        self.waits += 1

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.synchronized.append(1))

    synchronized: list[int] = []  # noqa: RUF012


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    current, calls = Stream(), []

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    def register(address: int, nbytes: int, flags: int) -> int:
        calls.append(nbytes)
        return 0

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    Stream.synchronized.clear()
    with Gpu() as found:
        yield found
    gc.collect()  # memory is let go of while all this stands in


def states(value: int) -> torch.Tensor:
    return torch.full((BATCH, 3, 4), float(value))


def filled(gpu: Gpu, sides: int = 1) -> HiddenStates:
    """Every sample holds its number."""
    made = HiddenStates(SAMPLES, None, sides)
    for side in range(sides):
        for start in range(0, SAMPLES, BATCH):
            numbers = torch.arange(start, min(start + BATCH, SAMPLES)) + 100 * side
            made.write(start, gpu.put(numbers.float()[:, None, None].expand(-1, 3, 4)), side)
    return made


def numbers(found: torch.Tensor) -> list[float]:
    assert isinstance(found, OnGpu)
    return found.cpu()[:, 0, 0].tolist()


def test_batches_come_in_turn_and_the_next_is_on_its_way(gpu: Gpu) -> None:
    made = filled(gpu, sides=2)
    assert type(made.tensor) is torch.Tensor
    for start in range(0, SAMPLES, BATCH):
        count = min(BATCH, SAMPLES - start)
        for side in (FULL, QUANTIZED):
            found = made.fetch(start, count, DEVICE, side)
            assert numbers(found) == [start + i + 100 * side for i in range(count)]
        assert made.pager is not None
        coming = sorted(made.pager.coming)
        behind = start + count, min(start + count + BATCH, SAMPLES)
        assert coming == ([behind, (SAMPLES + behind[0], SAMPLES + behind[1])] if behind[0] < SAMPLES else [])


def test_what_is_written_to_is_fetched_anew(gpu: Gpu) -> None:
    made = filled(gpu)
    made.fetch(0, BATCH, DEVICE)
    made.write(BATCH, gpu.put(states(50)))
    assert numbers(made.fetch(BATCH, BATCH, DEVICE)) == [50, 50]
    made.write(0, states(60))  # from the host
    assert numbers(made.fetch(0, BATCH, DEVICE)) == [60, 60]


def test_the_host_waits_for_what_comes_back(gpu: Gpu) -> None:
    made = filled(gpu)
    assert Stream.synchronized == []
    assert made.read(0, SAMPLES)[:, 0, 0].tolist() == list(range(SAMPLES))
    assert len(Stream.synchronized) == 1
    made.read(0, 1)
    assert len(Stream.synchronized) == 1


def test_a_file_is_read_when_it_is_asked_for(gpu: Gpu, tmp_path: Path) -> None:
    made = HiddenStates(SAMPLES, tmp_path / "states")
    made.write(0, gpu.put(states(3)))
    assert numbers(made.fetch(0, BATCH, DEVICE)) == [3, 3] and made.pager is None
    made.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    made = filled(gpu)
    assert made.written is None and numbers(made.fetch(0, BATCH, DEVICE)) == [0, 1]


def test_a_cpu_needs_none_of_this() -> None:
    made = HiddenStates(SAMPLES, None)
    made.write(0, states(1))
    found = made.fetch(0, BATCH, torch.device("cpu"))
    assert made.tensor is not None and found.data_ptr() == made.tensor.data_ptr() and made.pager is None
    assert paging.send_back(states(2), made.tensor[:BATCH]) is None and (found == 2).all()
