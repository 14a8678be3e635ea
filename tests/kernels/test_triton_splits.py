"""The memory in which the parts of split products meet, with streams that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from compress.kernels.triton import products


class Streams:
    """The current stream of each device, and whether it is captured."""

    def __init__(self) -> None:
        self.current, self.capturing, self.waited = 0, False, 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    found, allocated = Streams(), products._allocate
    now = lambda _: SimpleNamespace(cuda_stream=found.current, synchronize=found.synchronize)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(products, "_allocate", lambda _: allocated(torch.device("cpu")))
    products.forget()
    yield found
    products.forget()


FIRST, SECOND = (torch.device("cuda", index) for index in range(2))


def test_every_stream_of_every_device_has_a_workspace_of_its_own(streams: Streams) -> None:
    found = []
    for device in (FIRST, SECOND):
        for streams.current in (0, 7):
            found.append(products.workspace(device))
            assert products.workspace(device) is found[-1]
    assert len({workspace.partials.data_ptr() for workspace in found}) == 4
    assert len({workspace.counters.data_ptr() for workspace in found}) == 4


def test_graphs_share_one_that_no_stream_has(streams: Streams) -> None:
    eager = products.workspace(FIRST)
    streams.capturing = True
    graphs = products.workspace(FIRST)
    streams.current = 7
    assert products.workspace(FIRST) is graphs and graphs.partials.data_ptr() != eager.partials.data_ptr()
    streams.capturing = False
    assert products.workspace(FIRST) is not graphs
    assert streams.waited == 1, "its zeros are there before any other stream may run a graph"


def test_nothing_is_allocated_inside_of_a_graph(streams: Streams) -> None:
    streams.capturing = True
    with pytest.raises(RuntimeError, match="run one step before"):
        products.workspace(FIRST)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_streams_of_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first = products.workspace(device)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert products.workspace(device) is not first
    assert products.workspace(device) is first
