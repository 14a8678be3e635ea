"""Multiply several stored weights with the same activations, in one call where their kernels can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from compress.kernels import dispatch
from compress.kernels.contract import Joined, Prepared
from compress.kernels.dispatch import Weight


class Weights:
    """Stored weights [out, in] of the same inputs, on a CPU."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = list(weights)
        self.shape = (sum(each.shape[0] for each in weights), weights[0].shape[1])
        self._kernels: list[ref[Prepared]] = []  # those that `_run` is for; each weight alone keeps its own alive
        self._run: Joined | None = None

    def __reduce__(self) -> Any:
        return Weights, (self.weights,)  # addresses do not go into copies

    def product(self, x: Tensor, tables: Sequence[Mapping[str, Tensor | None]]) -> Tensor | None:
        """Return x [..., in] times all weights, outputs behind each other; None: they have to be multiplied singly.

        tables: the tensors of each weight, by name.
        """
        if not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
            return None
        kernels: list[Prepared] = []
        for each, tensors in zip(self.weights, tables, strict=True):
            kernel = each.prepared(x, tensors)
            if kernel is None:
                return None
            kernels.append(kernel)
        known = [ref(kernel) for kernel in kernels]
        if known != self._kernels:
            self._kernels, self._run = known, kernels[0].fuse(kernels[1:])
        x = x.contiguous()
        if self._run is not None and all(each.takes(x) for each in self.weights):
            return self._run(kernels, x)
        y, first, wide = x.new_empty(*x.shape[:-1], self.shape[0]), 0, x
        for each, kernel in zip(self.weights, kernels, strict=True):
            part = y[..., first : first + each.shape[0]]
            if each.takes(x):
                part.copy_(kernel(x))
            else:
                wide = wide.to(kernel.panel_type(x.dtype))  # once for all, and exact
                dispatch.decoded_product(kernel, wide, part)
            first += each.shape[0]
        return y
