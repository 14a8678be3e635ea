"""Keep the keys and values of a plain cache in buffers that have room for more, so that new tokens move nothing.

The cache sees views of the buffers, longer by the new tokens of each pass. Who puts other tensors in their place (a
reordering, a pass of another kind) is noticed by the next pass: the buffers are then made anew from what is there. A
position that a view has shown is not written again, with one exception. What `crop` of the cache leaves is a part of
our own views; the tokens that were cropped away are written over, as speculative decoding needs in each round, where
nothing else refers to the memory: torch counts the tensors that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from compress.kernels.cpu.attention_tables import CACHE
from compress.runtime.step.memory import STARTS, TOKENS, Memory

LEAST_ROOM, ROOM = 64, 8  # tokens of room in a buffer: an eighth of what it holds
# Who refers to the memory of a buffer that only a cache sees: the buffer, views of keys and values, and who asks.
USERS = 4
# Counts who refers to memory; None in a torch without it, where buffers are made anew after a crop.
_count_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def layers_of(cache: Any, count: int) -> list[Any] | None:
    """Return the layers of a plain cache with tokens in each of its first `count` layers; None for any other."""
    if type(cache) is not DynamicCache or len(cache.layers) < count or getattr(cache, "offloading", False):
        return None
    layers: list[Any] = cache.layers[:count]
    is_plain = all(type(layer) is DynamicLayer or type(layer) is DynamicSlidingWindowLayer for layer in layers)
    return layers if is_plain and all(layer.is_initialized and layer.keys.numel() for layer in layers) else None


class _Layer:
    """The buffer of a layer, [2, batch, heads, room, width]: keys and values of tokens from `first` to `last`."""

    def __init__(self, layer: Any) -> None:
        self._fill(layer.keys, layer.values)

    def _fill(self, keys: Tensor, values: Tensor) -> None:
        batch, heads, count, width = keys.shape
        self.room = count + max(LEAST_ROOM, count // ROOM)
        self.buffer = torch.zeros(2, batch, heads, self.room, width, dtype=keys.dtype, device="cpu")
        self.buffer[0, :, :, :count], self.buffer[1, :, :, :count] = keys, values
        self.first, self.last, self.written = 0, count, count  # written: the rest are zeros
        self._step = self.buffer.stride(3) * self.buffer.element_size()
        self._begin = self.buffer.data_ptr()

    @property
    def place(self) -> tuple[int, int]:
        """Return where the first key is, and the room, on which the strides depend."""
        return self._begin + self.first * self._step, self.room

    def make_room(self, new: int) -> None:
        """Make room for new tokens."""
        if self.last + new > self.room:
            self._fill(*self.views())

    def append(self, new: int, layer: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values with the new tokens that were written behind the last one."""
        self.last += new
        self.written = max(self.written, self.last)
        if layer.is_sliding and not layer.record_past:
            self.first = max(self.first, self.last - (layer.sliding_window - 1))
        return self.views()

    def views(self) -> tuple[Tensor, Tensor]:
        keys, values = self.buffer.narrow(3, self.first, self.last - self.first).unbind(0)
        return keys, values

    def takes_back(self, layer: Any) -> bool:
        """Return whether the layer holds a part of this buffer, which nobody else sees. Then that is what is held."""
        keys, values, buffer = layer.keys, layer.values, self.buffer
        first, odd = divmod(keys.data_ptr() - self._begin, self._step)
        count = keys.shape[2]
        if odd or first < self.first or not 0 < count <= self.last - first or keys.dtype != buffer.dtype:
            return False
        own, size = (buffer.shape[1], buffer.shape[2], count, buffer.shape[4]), buffer.element_size()
        is_same = keys.shape == own and values.shape == own and keys.stride() == values.stride() == buffer.stride()[1:]
        if not is_same or values.data_ptr() != keys.data_ptr() + buffer.stride(0) * size:
            return False
        if _count_users is None or _count_users(buffer.untyped_storage()._cdata) != USERS:
            return False
        self.first, self.last = first, first + count
        return True

    def blank(self, new: int) -> None:
        """Put zeros where new tokens are about to be."""
        if self.written > self.last:
            self.buffer.narrow(3, self.last, new).zero_()

    def table(self, window: int) -> list[int]:
        """Return the row of CACHE."""
        buffer, size, begin = self.buffer, self.buffer.element_size(), self.place[0]
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
        """Return whether the layers hold what was put into them here, or what a crop has left of it."""
        held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        if len(held) == len(self.shown) and all(map(_is, held, self.shown)):
            return True
        is_whole = len(held) == len(self.shown)
        self.shown = []  # views that are gone for the cache
        if not is_whole or not all(own.takes_back(layer) for own, layer in zip(self.layers, layers, strict=True)):
            return False
        self.shown = held
        return True

    def prepare(self, memory: Memory, windows: list[int], pads: Tensor | None, seen: int) -> None:
        """Make room for new tokens, and write to the tables where they lie. pads: padding at the left, [batch]."""
        for own in self.layers:
            own.make_room(memory.new)
        places = [own.place for own in self.layers]
        if places != memory.places:
            memory.places = []
            rows = [own.table(window) for own, window in zip(self.layers, windows, strict=True)]
            memory.caches.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))
            memory.places = places
        tokens = [own.last - own.first + memory.new for own in self.layers]
        memory.states[:, TOKENS] = torch.tensor(tokens, device="cpu")
        if pads is None:
            memory.states[:, STARTS] = 0
            return
        for i, own in enumerate(self.layers):
            memory.starts[i] = (pads - (seen - (own.last - own.first))).clamp_(min=0)
            memory.states[i, STARTS] = memory.starts[i].data_ptr()

    def blank(self, numbers: Iterable[int], new: int) -> None:
        """Put zeros where new tokens of these layers are about to be, whose attention does not run."""
        for number in numbers:
            self.layers[number].blank(new)

    def append(self, layers: list[Any], new: int) -> None:
        """Show new tokens to the cache."""
        self.shown.clear()
        for own, layer in zip(self.layers, layers, strict=True):
            self._show(own.append(new, layer), layer)
            if layer.is_sliding:
                layer.cumulative_length += new

    def _show(self, views: tuple[Tensor, Tensor], layer: Any) -> None:
        layer.keys, layer.values = views
        self.shown += views

    @property
    def longest(self) -> int:
        """Return the most tokens that a buffer has room for."""
        return max(own.room for own in self.layers)


def _is(a: Any, b: Any) -> bool:
    return a is b
