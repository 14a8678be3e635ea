"""Run tests as on a processor with AVX2 and without AVX-512.

    PYTHONPATH=tests python -m pytest -p avx2_only tests/kernels

Libraries with compiled code of their own are told by their environment variables, before they are imported. What is
compiled here goes by the features that LLVM names, in this process only: a test that compares it with another process
is skipped. A whole processor of another kind is emulated by `qemu-x86_64 -cpu Haswell python -m pytest`, slowly.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2")

import pytest
import torch
from llvmlite import binding

MISSING = ("avx512", "avx10", "amx", "avxvnni", "avxneconvert", "avxifma", "vaes", "vpclmulqdq", "gfni")
ACROSS_PROCESSES = "test_another_process_loads_it"
_host_features = binding.get_host_cpu_features
_host_capabilities = torch.cpu.get_capabilities


def _lesser_features() -> Any:
    found = _host_features()
    found.update({name: False for name in found if name.startswith(MISSING)})
    return found


def _lesser_capabilities() -> Any:
    return {
        name: False if name.replace("_", "").startswith(MISSING) else value
        for name, value in _host_capabilities().items()
    }


setattr(binding, _host_features.__name__, _lesser_features)
setattr(torch.cpu, _host_capabilities.__name__, _lesser_capabilities)
setattr(binding, binding.get_host_cpu_name.__name__, lambda: "haswell")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what compares compiled code with that of a process that is not told."""
    for item in items:
        if item.name.startswith(ACROSS_PROCESSES):
            item.add_marker(pytest.mark.skip(reason="another process has all features"))
