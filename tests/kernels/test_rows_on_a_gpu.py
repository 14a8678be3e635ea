"""Rows looked up on a GPU are to the bit those of the format on a CPU, in CUDA graphs too.

The kernels run in a process of their own, because the tests of this one run those of Triton in its interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
SHAPE = (300, 1184)
TYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_rows_on_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "compared 168 look-ups and 14 graphs"


def compare() -> str:
    """Compare all widths, kinds of groups and types; every table also in a captured graph."""
    from compress.formats import int as int_format
    from compress.kernels import dispatch
    from compress.kernels.triton import int as int_kernel
    from helpers.stored import random_weight

    looked, graphs = 0, 0
    first, second = (torch.randint(SHAPE[0], (67,), generator=torch.Generator().manual_seed(i)) for i in range(2))
    for bits in range(2, 9):
        for symmetric in (True, False):
            for group in (-1, 24, 32, 128):
                params = int_format.params_for(bits, group, symmetric, SHAPE[1])
                tensors = random_weight("int", params, SHAPE).tensors
                on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
                for dtype in TYPES:
                    wanted = int_format.decode_rows(tensors, params, SHAPE, first, dtype)
                    found = int_kernel.look_up(on_gpu, params, SHAPE, first.cuda(), dtype)
                    assert found is not None and torch.equal(found.cpu(), wanted), (bits, symmetric, group, dtype)
                    looked += 1
            ids, graph = first.cuda(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                rows = dispatch.rows(ids, on_gpu, "int", params, SHAPE, torch.bfloat16)
            ids.copy_(second)
            graph.replay()
            assert torch.equal(rows.cpu(), int_format.decode_rows(tensors, params, SHAPE, second, torch.bfloat16))
            graphs += 1
    return f"compared {looked} look-ups and {graphs} graphs"


if __name__ == "__main__":
    print(compare())
