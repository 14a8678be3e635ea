"""What methods say they need beside weight and Hessian, against what the operating system saw them take.

The budget of --max-memory is kept by these predictions: too low, and a run dies; far too high, and it is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compress import process_memory
from helpers.runs import environment

SEED_ONLY = {"bits": 9, "iterations": 0, "sweeps": 0}
CASES: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("gptvq", SEED_ONLY, (512, 512)),  # many entries, chosen one by one
    ("gptvq", {"iterations": 2, "sweeps": 1}, (768, 512)),
    ("gptq", {"sweeps": 1}, (768, 512)),
    ("gptq", {"sweeps": 1, "group_size": -1}, (1024, 768)),  # a group is the whole matrix
    ("gptq", {"sweeps": 1, "group_size": -1}, (1536, 1536)),  # and the factor of the Hessian is as large
    ("trellis", {"state_bits": 8, "sweeps": 0}, (768, 512)),
    ("trellis", {"bits": 3.5, "state_bits": 12, "sweeps": 0}, (768, 512)),
    ("e8p", {"sweeps": 1}, (768, 512)),
    ("e8p", {"bits": 4, "row_scales": True, "sweeps": 0}, (256, 512)),
    ("kquant", {"sweeps": 1}, (768, 512)),
    ("grid_rtn", {}, (768, 512)),
    ("grid_rtn", {"type": "fp8"}, (2048, 1024)),  # no scale is searched
    ("grid_rtn", {"type": "fp8-block"}, (512, 3072)),
    ("grid_rtn", {"type": "fp8-block"}, (8, 512)),  # a block is filled up
    ("grid_rtn", {"type": "nf4"}, (768, 512)),
    ("grid_gptq", {}, (768, 512)),
    ("grid_gptq", {"type": "fp8"}, (5000, 256)),  # more rows than a tile has
    ("grid_gptq", {"type": "fp8-block"}, (768, 512)),
    ("grid_gptq", {"type": "fp8-channel"}, (4096, 512)),  # a block is the whole row
    ("grid_gptq", {"type": "nf4"}, (768, 512)),
    ("lossless", {}, (768, 512)),
    ("lossless", {"coding": "ranked"}, (768, 512)),
]
TWO_SIDED: list[tuple[str, dict[str, Any], tuple[int, int]]] = [  # with a metric of the outputs
    ("gptq", {"sweeps": 1}, (1024, 512)),
    ("gptq", {"sweeps": 0, "static_groups": False}, (2048, 256)),  # G is larger than the weight
    ("trellis", {"state_bits": 8, "sweeps": 0}, (1024, 512)),
    ("trellis", {"state_bits": 8, "row_scales": True}, (2048, 256)),
    ("kquant", {"sweeps": 1}, (1024, 512)),
    ("e8p", {"sweeps": 1}, (768, 512)),
    ("gptvq", {"iterations": 2, "sweeps": 1}, (1024, 512)),
    ("grid_gptq", {}, (1024, 512)),
    ("grid_gptq", {"type": "fp8-channel"}, (2048, 256)),
]
ABSURD = 4, 100 << 20  # times what is taken, and bytes more

# One process for all cases; each method first works on a small layer, so that its tables and libraries are loaded.
PROBE = """
import json, sys
import torch
from compress import plugins, process_memory as memory
from compress.quant import two_sided
from compress.types import OutputMetric, Stats

def layer(rows, columns, given):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * columns, columns, generator=generator)
    g = torch.randn(rows, rows, generator=generator).tril_()
    moments = g @ g.T / rows + torch.eye(rows)
    output = OutputMetric(lambda rows: moments[rows, rows].clone())
    weight = torch.randn(rows, columns, generator=generator).bfloat16().float()  # as it is in most checkpoints
    return weight, Stats(x.T @ x, 2 * columns, None, output if given else None)

torch.set_num_threads(1)
memory.return_freed_memory()
for name, settings, shape, given in json.loads(sys.argv[1]):
    method = plugins.load("quant", name)
    config = method.Config(**settings)
    method.quantize(*layer(32, 256, given), config)
    weight, stats = layer(*shape, given)
    for attempt in range(20):  # pages of libraries that the system took away count when they come back
        memory.trim()
        memory.reset_peak()
        before = memory.resident()
        result = method.quantize(weight, stats, config)
        taken = memory.peak() - before
        said = method.workspace(config, tuple(shape)) + result.weight.nbytes
        said += two_sided.workspace(tuple(shape)) if given else 0
        del result
        if taken <= said:
            break
    print(json.dumps([taken, said]), flush=True)
    del weight, stats
"""


@pytest.mark.slow
def test_workspace_is_what_is_taken() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not measure the peak of a part of a run")
    cases = [(*case, given) for given in (False, True) for case in (TWO_SIDED if given else CASES)]
    words = [sys.executable, "-c", PROBE, json.dumps(cases)]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    wrong = []
    for case, line in zip(cases, result.stdout.splitlines(), strict=True):
        taken, said = json.loads(line)
        factor, more = ABSURD
        if not taken <= said <= factor * taken + more:
            wrong.append(f"{case}: took {process_memory.show(taken)}, said {process_memory.show(said)}")
    assert not wrong, "\n".join(wrong)
