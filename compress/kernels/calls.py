"""Compiled functions with all of their arguments: what a product does, as data that is run or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from compress.kernels import llvm
from compress.kernels.llvm import Function

Take = Callable[[int], int]  # bytes -> the address of memory that lives as long as the calls


class ActivationRows(NamedTuple):
    """Rows of activations of one type that something reads, and where it writes; addresses."""

    count: int  # type: ignore[assignment]  # it hides the function of tuples
    dtype: torch.dtype
    source: int  # [count, inputs], contiguous
    target: int  # [count, outputs] in rows of `width` numbers
    width: int

    def part(self, first: int, last: int, inputs: int) -> ActivationRows:
        """Return the rows from first to last; `inputs`: numbers of a row of the source."""
        size = self.dtype.itemsize
        source, target = self.source + first * inputs * size, self.target + first * self.width * size
        return ActivationRows(last - first, self.dtype, source, target, self.width)


class CompiledCall(NamedTuple):
    """One call of a compiled function. Its work may be divided into ranges that threads take."""

    function: Function
    arguments: tuple[int, ...]  # those of a range, and of memory of a thread, are right for one thread that does all
    total: int = 0  # of what is divided; 0: nothing is
    least: int = 1  # that is worth waking a thread
    first: int = 0  # which argument the beginning of a range is; the next one is its end
    space: int = -1  # which argument is the address of memory that each thread has of its own
    nbytes: int = 0  # of this memory

    def run(self) -> None:
        """Call the function, on the threads of torch where its work is divided."""
        if self.total < 2 * self.least or torch.get_num_threads() == 1:
            self.function(*self.arguments)
            return
        before, behind = self.arguments[: self.first], self.arguments[self.first + 2 :]

        def work(first: int, last: int) -> None:
            arguments = [*before, first, last, *behind]
            if first and self.space >= 0:
                own = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
                arguments[self.space] = own.data_ptr()
            self.function(*arguments)

        llvm.parallel(work, self.total, self.least)


def run(calls: Iterator[CompiledCall]) -> None:
    """Run calls one after the other, each as soon as it is made."""
    for call in calls:
        call.run()
