"""Define the contract of a kernel file: `prepare` for a stored weight, and the `Prepared` that it returns.

A kernel for a format on a device is the file `compress/kernels/<folder of the device>/<format>.py` with one function,

    prepare(tensors, params, shape) -> Prepared | None

None means that the weight has to be decoded by its format. The file is found by its name: a kernel for an existing
format is one new file and no changed line elsewhere (tests/kernels/test_kernel_contract.py adds one).

Where a kernel looks single rows of a weight up, the file has one more function,

    look_up(tensors, params, shape, ids, dtype) -> Tensor | None

It returns the rows ids [n], contiguous and of any integer type, as [n, in] of `dtype`, to the bit what `decode_rows` of
the format gives. None means that the format has to decode them.

`prepare` must not read the elements of the tensors. They may be on the meta device, where dispatch asks what a kernel
would do, and their elements may change afterwards as long as they stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

Shape = tuple[int, int]  # of a weight, [out, in]
Decoder = Callable[[Tensor, int], None]  # (rows [n, in] to write, contiguous; the first of them, see PANEL_ROWS)
Joined = Callable[[Sequence[Any], Tensor], Tensor]  # (kernels, activations as `__call__` takes them)
PANEL_ROWS = 16  # a decoder begins at multiples of it


class Prepared(ABC):
    """A stored weight [out, in] that a kernel reads, as long as its tensors stay where they are."""

    types: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)  # of activations and decoded weights
    most_rank: ClassVar[int] = 0  # of a low-rank part that `plus` adds faster than a second product

    def __init__(self, tensors: Mapping[str, Tensor], params: Any, shape: Shape) -> None:
        self.tensors, self.params, self.shape = tensors, params, shape

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., in], contiguous and of one of `types`, times the weight: [..., out] of the same type."""

    @abstractmethod
    def most_rows(self, dtype: torch.dtype) -> int:
        """Return up to how many rows of activations a call beats decoding the weight and F.linear."""

    @abstractmethod
    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] of one of `types`."""

    def decoder(self, dtype: torch.dtype) -> Decoder | None:
        """Return a function that writes some rows of the weight, columns ordered as `arranged` does; None: `decode`."""
        return None

    def panel_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which decoded rows are multiplied with activations of `dtype`: the faster one here."""
        return dtype

    def arranged(self, x: Tensor) -> Tensor:
        """Return x [..., in] with its columns in the order in which `decoder` writes those of the weight."""
        return x

    def fuse(self, others: Sequence[Prepared]) -> Joined | None:
        """Return what multiplies with this weight and then others in one call; None: there is nothing that does.

        It is given these kernels in this order, and keeps none of them. It returns outputs behind each other.
        """
        return None

    def plus(self, x: Tensor, hidden: Tensor, factor: Tensor) -> Tensor:
        """Return the product with x, plus hidden [..., rank] times factor [rank, out] for a rank up to `most_rank`."""
        return self(x) + hidden @ factor
