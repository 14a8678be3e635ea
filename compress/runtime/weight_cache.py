"""Keep tensors that are derived from the stored ones of modules, up to a limit in bytes of the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

CACHE_LIMIT_NBYTES = 1 << 30
Derived = tuple[Tensor, ...]


class _Entry(NamedTuple):
    built_from: Hashable  # the state of the tensors of the module
    derived: Derived
    nbytes: int


class WeightCache:
    """Tensors derived from the stored tensors of modules, at most `limit` bytes together.

    Admits until it is full and never evicts: every forward pass reads the weights in the same cycle, so that dropping
    the oldest entry would drop the one needed next. An entry dies with its module and is rebuilt when the stored
    tensors have moved or changed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: dict[ref[nn.Module], dict[Hashable, _Entry]] = {}
        self._total = 0  # bytes of all entries, and of those in `_freed`
        self._freed: deque[int] = deque()  # bytes that died with their module, which may be in the middle of anything
        self._lock = threading.RLock()  # a server may run a model in several threads

    @property
    def nbytes(self) -> int:
        with self._lock:
            while self._freed:
                self._total -= self._freed.popleft()
            return self._total

    def get(self, module: nn.Module, key: Hashable, build: Callable[[], Derived]) -> Derived:
        """The entry `key` of the module, built if it is absent or stale, kept if it fits."""
        own = module._parameters.values()  # module.parameters() costs more than a small product
        state = tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in own if t is not None)
        cached = self._entries.get(ref(module), {}).get(key)
        if cached is not None and cached.built_from == state:
            return cached.derived
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode cannot be trained through
            derived = build()
        entry = _Entry(state, derived, sum(t.nbytes for t in derived))
        with self._lock:
            stale = self._entries.get(ref(module), {}).pop(key, None)
            self._total -= 0 if stale is None else stale.nbytes
            if self.nbytes + entry.nbytes <= self.limit:
                self._entries.setdefault(ref(module, self._died), {})[key] = entry
                self._total += entry.nbytes
        return derived

    def _died(self, module: ref[nn.Module]) -> None:
        """Free the entries of a module; called when it dies, in any thread and between any two steps of another."""
        if (entries := self._entries.pop(module, None)) is not None:
            self._freed.append(sum(entry.nbytes for entry in entries.values()))

    def _drop(self, module: ref[nn.Module]) -> None:
        entries = self._entries.pop(module, {})
        self._total -= sum(entry.nbytes for entry in entries.values())

    def drop(self, module: nn.Module) -> None:
        with self._lock:
            self._drop(ref(module))

    def clear(self) -> None:
        with self._lock:
            for module in list(self._entries):  # one by one: what dies meanwhile is taken off once
                self._drop(module)


CACHE = WeightCache(CACHE_LIMIT_NBYTES)


def set_cache_limit(nbytes: int) -> None:
    """Bytes that all packed layers of the process may keep decoded; 0 keeps nothing. Empties the cache."""
    if nbytes < 0:
        raise ValueError(f"cache limit {nbytes} is negative; give bytes, 0 to keep nothing")
    CACHE.clear()
    CACHE.limit = nbytes
