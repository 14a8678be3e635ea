"""Put a model's tensors in front of pages that must not be touched: reading past the end of one is a signal."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PAGE = mmap.PAGESIZE
NO_ACCESS = 0


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy whose last byte is the last one of a page, with a page behind it that cannot be read."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0 or tensor.is_meta:
        return tensor
    pages = -(-nbytes // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages * PAGE), ctypes.c_size_t(PAGE), NO_ACCESS):
        raise OSError("mprotect")
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * PAGE - nbytes)
    return copy.view(tensor.shape).copy_(tensor)


def guard(model: nn.Module) -> None:
    """Move what packed linears store, in place."""
    from compress.runtime.linear import PackedLinear

    for module in model.modules():
        if isinstance(module, PackedLinear):
            for parameter in module.parameters(recurse=False):
                parameter.data = guarded(parameter.data)


@contextmanager
def guarded_cache() -> Iterator[None]:
    """Let the calibrated tensors of caches that are attached meanwhile be guarded ones."""
    from compress.kv import generation

    attach = generation.attach

    def attached(*arguments: Any, **named: Any) -> Any:
        return attach(*map(_guarded_table, arguments), **{key: _guarded_table(value) for key, value in named.items()})

    generation.attach = attached
    try:
        yield
    finally:
        generation.attach = attach


def _guarded_table(value: Any) -> Any:
    if isinstance(value, dict) and value and all(isinstance(tensor, Tensor) for tensor in value.values()):
        return {name: guarded(tensor) for name, tensor in value.items()}
    return value
