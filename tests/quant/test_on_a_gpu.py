"""Methods on tensors that say they are on a GPU: devices do not mix, and loops over columns do not wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress import formats, plugins
from compress.kernels.loops import columns as column_loops
from compress.quant import viterbi
from compress.types import PackedWeight, Stats
from helpers import problems
from helpers.pretend_gpu import Gpu, OnGpu

SETTINGS: dict[str, dict[str, Any]] = {
    "trellis": {"state_bits": 6, "tile_rows": 16, "sweeps": 1},
    "gptvq": {"bits": 3, "vector_dim": 2, "group_weights": 2048, "iterations": 3, "sweeps": 1},
    "vptq": {"bits": 4, "iterations": 3, "sweeps": 1},
}
LOOPS = (
    "feedback:_",
    "sweeps:_",
    "e8p:",
    "gptq:round",
    "gptvq:round",
    "vptq:round",
    "trellis:round",
    "viterbi:_s",
    "viterbi:_t",
)


@pytest.fixture(autouse=True)
def searched_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU to compile for."""
    monkeypatch.setattr(viterbi, "runs_on_gpu", lambda device: False)
    supports = column_loops.supports
    monkeypatch.setattr(column_loops, "supports", lambda weight: not weight.is_cuda and supports(weight))


def on_both(method: str, columns: int) -> tuple[PackedWeight, PackedWeight, Gpu]:
    """A weight quantized on the CPU and on the GPU, and what the GPU was asked."""
    plugin, weight = plugins.load("quant", method), problems.random(32, columns)
    stats, config = problems.stats(problems.inputs(2 * columns, columns)), plugin.Config(**SETTINGS.get(method, {}))
    plain = plugin.quantize(weight, Stats(stats.hessian.clone(), stats.count), config, 0).weight
    with Gpu() as gpu:
        given = Stats(gpu.put(stats.hessian), stats.count)
        return plain, plugin.quantize(gpu.put(weight), given, config, 0).weight, gpu


@pytest.mark.parametrize("method", plugins.names("quant"))
def test_devices_do_not_mix(method: str) -> None:
    plain, packed, gpu = on_both(method, 96)
    assert all(isinstance(tensor, OnGpu) for tensor in packed.tensors.values())
    with gpu:
        decoded = formats.decode(packed, torch.float32)
        assert isinstance(decoded, OnGpu) or not packed.tensors  # of zeros, which lie nowhere
        decoded = decoded.cpu()
    wanted = formats.decode(plain, torch.float32)
    assert (decoded - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("method", ["e8p", "gptq", "gptvq", "trellis", "vptq"])
def test_loops_over_columns_wait_for_nothing(method: str) -> None:
    _, _, gpu = on_both(method, 96)
    inside = {name: count for name, count in gpu.waits.items() if name.startswith(LOOPS)}
    assert inside == {}
    assert max(gpu.uploads.values(), default=0) <= 16, "tables are copied once"


def test_the_stand_in_refuses_to_mix_devices() -> None:
    with Gpu() as gpu:
        x = gpu.put(torch.ones(3))
        made = torch.zeros(3, device=x.device)
        assert isinstance(made, OnGpu) and (x + made).is_cuda and (2 * x).sum().item() == 6
        with pytest.raises(RuntimeError, match="tensors of a GPU and of the CPU"):
            x + torch.ones(3)
        assert not isinstance(x.cpu(), OnGpu) and isinstance(torch.ones(3).to(x.device), OnGpu)
