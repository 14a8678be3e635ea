"""Keep the keys and values of a plain cache in buffers that have room for more, so that a new token moves nothing.

The cache sees views of the buffers, longer by one with each token. Who puts other tensors in their place (a crop, a
reordering, a pass of another kind) is noticed by the next token: the buffers are then made anew from what is there. A
position that a view has shown is never written again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from compress.kernels.cpu.attention_tables import CACHE
from compress.runtime.step.memory import STARTS, TOKENS, Memory

LEAST_ROOM, ROOM = 64, 8  # tokens of room in a buffer: an eighth of what it holds


def layers_of(cache: Any, count: int) -> list[Any] | None:
    """Return the layers of a plain cache with tokens in each of its first `count` layers; None for any other."""
    if type(cache) is not DynamicCache or len(cache.layers) < count or getattr(cache, "offloading", False):
        return None
    layers: list[Any] = cache.layers[:count]
    is_plain = all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and not layer.record_past)
        for layer in layers
    )
    return layers if is_plain and all(layer.is_initialized and layer.keys.numel() for layer in layers) else None


class _Layer:
    """The buffer of a layer, [2, batch, heads, room, width]: keys and values of tokens from `first` to `last`."""

    def __init__(self, layer: Any) -> None:
        self.most = layer.sliding_window - 1 if layer.is_sliding else 0  # tokens that are kept; 0: all
        self._fill(layer.keys, layer.values)

    def _fill(self, keys: Tensor, values: Tensor) -> None:
        batch, heads, count, width = keys.shape
        room = count + max(LEAST_ROOM, count // ROOM)
        self.buffer = torch.zeros(2, batch, heads, room, width, dtype=keys.dtype, device="cpu")
        self.buffer[0, :, :, :count], self.buffer[1, :, :, :count] = keys, values
        self.first, self.last, self.room = 0, count, room

    def make_room(self) -> bool:
        """Make room for one more token; return whether the buffer has moved."""
        if self.last < self.room:
            return False
        keys, values = self.views()
        self._fill(keys, values)
        return True

    def append(self) -> tuple[Tensor, Tensor]:
        """Return keys and values with the token that was written behind the last one."""
        self.last += 1
        if self.most and self.last - self.first > self.most:
            self.first = self.last - self.most
        return self.views()

    def views(self) -> tuple[Tensor, Tensor]:
        keys, values = self.buffer.narrow(3, self.first, self.last - self.first).unbind(0)
        return keys, values

    def table(self, window: int) -> list[int]:
        """Return the row of CACHE."""
        buffer, size = self.buffer, self.buffer.element_size()
        begin = buffer.data_ptr() + self.first * buffer.stride(3) * size
        strides = buffer.stride()[1:4]
        held = begin, begin + buffer.stride(0) * size, *strides, *strides, window, 0
        assert len(held) == len(CACHE)
        return list(held)


class Held:
    """The buffers of one cache."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = [_Layer(layer) for layer in layers]
        self.shown: list[Tensor] = []  # what the cache holds, as long as nobody else has changed it
        for own, layer in zip(self.layers, layers, strict=True):
            self._show(own.views(), layer)

    def is_of(self, layers: list[Any]) -> bool:
        """Return whether the layers hold what was put into them here."""
        held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return len(held) == len(self.shown) and all(map(_is, held, self.shown))

    def fill_tables(self, memory: Memory, windows: list[int]) -> None:
        """Write where everything lies."""
        rows = [own.table(window) for own, window in zip(self.layers, windows, strict=True)]
        memory.caches.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        memory.states[:, TOKENS] = torch.tensor([own.last - own.first for own in self.layers], device="cpu")

    def prepare(self, memory: Memory, windows: list[int], pads: Tensor | None, seen: int, is_new: bool) -> None:
        """Make room for a token, and write to the tables what has changed. pads: padding at the left, [batch]."""
        moved = [own.make_room() for own in self.layers]
        if is_new or any(moved) or any(own.most for own in self.layers):
            self.fill_tables(memory, windows)
        memory.states[:, TOKENS] += 1
        if pads is None:
            memory.states[:, STARTS] = 0
            return
        for i, own in enumerate(self.layers):
            memory.starts[i] = (pads - (seen - (own.last - own.first))).clamp_(min=0)
            memory.states[i, STARTS] = memory.starts[i].data_ptr()

    def append(self, layers: list[Any]) -> None:
        """Show the new token to the cache."""
        self.shown.clear()
        for own, layer in zip(self.layers, layers, strict=True):
            self._show(own.append(), layer)
            if layer.is_sliding:
                layer.cumulative_length += 1

    def _show(self, views: tuple[Tensor, Tensor], layer: Any) -> None:
        layer.keys, layer.values = views
        self.shown += views

    @property
    def longest(self) -> int:
        """Return the most tokens that a buffer has room for."""
        return max(own.room for own in self.layers)


def _is(a: Any, b: Any) -> bool:
    return a is b
