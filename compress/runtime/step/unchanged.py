"""Tell cheaply whether modules are what they were: the same children and parameters in the same places, no hooks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, compress
from typing import Any
from weakref import ref

from torch import Tensor, nn

from compress.runtime.linear import PackedLinear

# Hooks that do nothing in a pass that is not told to collect outputs, or has no compressed cache.
IDLE = ("transformers.utils.output_capturing", "compress.kv")


_values: Any = dict.values


def _contents(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._modules, module._buffers


class Unchanged:
    """What some modules were when this was made. It keeps none of their tensors alive, once they are replaced."""

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[dict[str, Any]] = ()) -> None:
        """others: tables whose values have to stay what they are."""
        known = list(modules)
        self._parts: list[dict[str, Any]] = [held for each in known for held in _contents(each) if held]
        self._parts += others
        self._hooks = [hooks for each in known for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._own = [vars(each) for each in known]
        self._sized: list[dict[Any, Any]] = [*self._own, *self._hooks]  # what is added to them shows in their lengths
        self._sizes, self._has_idle = list(map(len, self._sized)), any(self._hooks)
        self._ids, self._is_tensor, self._addresses = self._look(None)
        self._packed = [each for each in known if isinstance(each, PackedLinear)]
        self._kernels: dict[int, Any] = {}
        self.note_kernels()
        self._sparse = [vars(each) for each in self._packed if each.sparsity is not None]
        self._reads_all = self._look_at_sparse()
        self.is_plain = self._has_no_hooks() and all(tensor.is_cpu for tensor in self._tensors())

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        sizes = list(map(len, self._sized))
        if (sizes != self._sizes or self._has_idle) and not self._has_no_hooks():
            return False
        self._sizes = sizes  # of attributes that others have marked modules with
        ids, _, addresses = self._look(self._is_tensor)
        is_same = ids == self._ids and addresses == self._addresses and self._reads_all == self._look_at_sparse()
        return is_same and None not in [kernel() for kernel in self._kernels.values()]

    def note_kernels(self) -> None:
        """Add the kernels of packed linears at their present levels to what must not go."""
        for each in self._packed:
            if (kernel := each._weight._kernel) is not None:
                self._kernels[id(kernel)] = ref(kernel)

    def _look(self, is_tensor: list[bool] | None) -> tuple[list[int], list[bool], list[int]]:
        values: list[Any] = list(chain.from_iterable(map(_values, self._parts)))
        if is_tensor is None or len(is_tensor) != len(values):
            is_tensor = [isinstance(value, Tensor) for value in values]
        try:
            return list(map(id, values)), is_tensor, list(map(Tensor.data_ptr, compress(values, is_tensor)))
        except TypeError:  # no tensor any more
            return [], is_tensor, []

    def _look_at_sparse(self) -> list[bool]:
        """Return which linears with sparsity were told to read all inputs."""
        return [own["sparse_tokens"] is None for own in self._sparse]

    def _tensors(self) -> list[Tensor]:
        values = chain.from_iterable(map(_values, self._parts))
        return [value for value in values if isinstance(value, Tensor)]

    def _has_no_hooks(self) -> bool:
        if any("forward" in own for own in self._own):
            return False
        return not any(self._hooks) or all(
            getattr(hook, "__module__", "").startswith(IDLE) for hooks in self._hooks for hook in hooks.values()
        )
