"""Products of bytes that saturate on some CPUs are not taken for products of integers."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from compress.formats import int as int_format
from compress.runtime import integer
from compress.runtime.linear import PackedLinear
from compress.types import Activations, PackedWeight, Stored
params = int_format.Params(8, -1, True, 128)
weight = int_format.pack(torch.full((64, 256), 255, dtype=torch.uint8), torch.ones(64, 1), None, params)
layer = PackedLinear.from_packed(PackedWeight(Stored("int", params, activations=Activations()), weight, (64, 256)))
print(integer.describe("int", params, (64, 256), Activations(), "cpu"))
print(layer(torch.full((3, 256), 2.0)).unique().tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the setting is one of x86")
def test_a_cpu_whose_byte_products_saturate_is_found_out() -> None:
    for setting, name in ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "fake: int8 products are not exact"), ({}, ""):
        environment = {**os.environ, **setting, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True
        )
        described, values = done.stdout.splitlines()
        assert described.startswith(name)
        (value,) = json.loads(values)
        assert abs(value - 256 * 2 * 127) < 0.1
