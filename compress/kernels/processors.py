"""Tell processors apart by what the choice of a kernel depends on: their type, what a GPU can do, what a CPU has."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch

from compress.kernels import llvm

LEAST_CAPABILITY = (8, 0)  # products in bfloat16


class Processor(NamedTuple):
    """The properties of a device that the choice of a kernel depends on."""

    type: str
    capability: tuple[int, int] | None = None  # of an NVIDIA GPU; None where there is none: Triton's interpreter
    features: frozenset[str] = frozenset()  # of a CPU


def processor(device: torch.device | str) -> Processor:
    """Return the processor behind a device; a type alone stands for the current device of that type."""
    device = torch.device(device) if isinstance(device, str) else device
    if device.type == "cpu":
        return Processor("cpu", features=llvm.features() if llvm.available() else frozenset())
    if device.type != "cuda":
        return Processor(device.type)
    if device.index is not None:
        return _gpu(device.index)
    return _gpu(torch.cuda.current_device()) if torch.cuda.device_count() else Processor("cuda")


@cache
def _gpu(index: int) -> Processor:
    """Return the processor of a GPU, looked up once: it keeps its index for as long as a process lives."""
    return Processor("cuda", torch.cuda.get_device_capability(index))


@cache
def has_triton(on: Processor) -> bool:
    """Return whether kernels for this GPU of NVIDIA can be compiled; AMD's go by the same name."""
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return on.capability is None or on.capability >= LEAST_CAPABILITY


def forget() -> None:
    """Look anew from now on: at GPUs, and for Triton."""
    has_triton.cache_clear()
    _gpu.cache_clear()
