"""Multiply rows of activations with the stored weights of experts in one call, each row with those of its own expert.

The kernel of a device is the file `compress/kernels/<folder of the device>/grouped.py` with one function,

    prepare(experts, dtype) -> ExpertKernel | None

It is given the weights of each expert, one or several that read the same inputs, and the type of activations. None
means that there is no such kernel: experts are multiplied one by one.

No shape depends on where tokens go, and nothing waits for a GPU, so that torch.compile and CUDA graphs hold a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from compress.kernels import dispatch
from compress.types import PackedWeight

Experts = Sequence[Sequence[PackedWeight]]  # of each expert the matrices, with nothing around them


class ExpertKernel(Protocol):
    """The weights of experts as a kernel reads them, valid as long as their tensors stay where they are."""

    width: int  # outputs of all weights of an expert, side by side
    stacks: list[dict[str, Tensor]]  # tensors that it has copied, [experts, ...]: by weights of an expert and names

    def route(self, ids: Tensor) -> list[Tensor]:
        """Return what `product` of any group of as many experts needs to know of ids; no shape depends on them."""
        ...

    def product(self, x: Tensor, ids: Tensor, route: list[Tensor]) -> Tensor:
        """Return the products [pairs, width] of rows with the weights of their experts, 0 for an id of no expert.

        x [rows, in], contiguous; ids int64 [pairs], contiguous: pairs i n to i n + n - 1 read row i, n = pairs / rows.
        """
        ...


_GROUPS: WeakValueDictionary[int, ExpertKernel] = WeakValueDictionary()
_NUMBERS = count()


def prepare(experts: Experts, dtype: torch.dtype) -> tuple[int, ExpertKernel] | None:
    """Return a kernel for the weights and its number, which `product` takes; None if there is none. Keep the kernel."""
    device = next(iter(experts[0][0].tensors.values())).device
    kernels = dispatch.experts(device)
    group = None if kernels is None else kernels.prepare(experts, dtype)
    if group is None:
        return None
    number = next(_NUMBERS)
    _GROUPS[number] = group
    return number, group


@torch.library.custom_op("compress::grouped", mutates_args=())
def product(x: Tensor, ids: Tensor, route: list[Tensor], group: int, width: int) -> Tensor:
    """Run `ExpertKernel.product` of the group of this number, as an operator; x [rows, in], ids int64 [pairs]."""
    return multiply(_GROUPS[group], x, ids, route)


@product.register_fake
def _(x: Tensor, ids: Tensor, route: list[Tensor], group: int, width: int) -> Tensor:
    return x.new_empty(ids.shape[0], width)


def multiply(group: ExpertKernel, x: Tensor, ids: Tensor, route: list[Tensor]) -> Tensor:
    """Run `ExpertKernel.product`; no pairs are no work."""
    if not ids.shape[0]:
        return x.new_empty(0, group.width)
    with dispatch.current(x.device):
        return group.product(x.contiguous(), ids.contiguous(), route)
