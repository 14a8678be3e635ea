"""One linear from its statistics to its report on tensors that say they are on a GPU: devices do not mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.calib.stats import HessianSum
from compress.kernels.loops import columns as column_loops
from compress.quant import viterbi
from compress.run import prepare, quantize_linear, report
from compress.run.quantize_linear import LinearTask, finish_statistics
from helpers import problems
from helpers.pretend_gpu import DEVICE, Gpu, OnGpu
from helpers.runs import Setup, job

TOKENS = 256


@pytest.mark.parametrize("setup", [Setup("vq2bit", ("state_bits=6",)), Setup("int3-eora")])
def test_a_linear_stays_on_the_device(
    setup: Setup, pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated or corrected by a low-rank part, towards a target that drift has moved."""
    monkeypatch.setattr(viterbi, "runs_on_gpu", lambda device: False)
    supports = column_loops.supports
    monkeypatch.setattr(column_loops, "supports", lambda weight: not weight.is_cuda and supports(weight))
    prepared = prepare.prepare(job(pico_dir("llama"), setup, tmp_path / "out"))
    layer = next(x for x in prepared.plan.layers if x.spec.name.endswith("gate_proj"))
    columns = layer.spec.shape[1]
    weight, inputs = problems.random(*layer.spec.shape), problems.inputs(TOKENS, columns).float()
    errors = []
    for device in (torch.device("cpu"), DEVICE):
        with Gpu() as gpu:
            put = gpu.put if device == DEVICE else torch.clone
            total = HessianSum(columns, device, True)
            total.expect(put(inputs * 1.01))
            total.add(put(inputs), 64)
            statistics = finish_statistics(total, "key", 0.25, TOKENS, 0)
            task = LinearTask(layer, "", put(weight), statistics, None, None)
            result = quantize_linear.quantize(task, 0)
            row = report.measure(layer, task.weight, result.weight, statistics.stats, result.notes)
        assert all(isinstance(x, OnGpu) == (device == DEVICE) for x in result.weight.tensors.values())
        errors.append((row.weight_error, row.output_error))
    assert errors[0] == errors[1]
