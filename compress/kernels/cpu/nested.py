"""Multiply with sums of stored weights (compress/formats/nested.py) on a CPU: activations become integers once.

The kernels of all parts read the same integers, each writes sums of its own in float32, and the pass that rounds
outputs adds these. A part that reads other integers than those before it, because its spans are others, has activations
made integers for it, too. So a weight of 4 + 4 bits takes the time of two of 4 bits, less the quantization of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.formats import nested
from compress.formats.nested import Params
from compress.kernels import dispatch, llvm
from compress.kernels.calls import ActivationRows, CompiledCall
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu.activations import Finish
from compress.kernels.cpu.small_matmul import ALIGNED, OUT, Product, _Steps


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> NestedProduct | None:
    """Return the product; None where a part has no kernel that reads integers of activations."""
    parts = []
    for part in nested.summands(tensors, params, shape):
        kernel = dispatch.prepare_part("cpu", part)
        if not isinstance(kernel, Product):
            return None
        parts.append(kernel)
    return NestedProduct(tensors, params, shape, parts)


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the rows ids [n] of a table, [n, in]; the parts of a row are added in float32, and rounded once."""
    first, *rest = nested.summands(tensors, params, shape)
    total = dispatch.rows(ids, first.tensors, first.format, first.params, shape, torch.float32)
    for part in rest:
        total += dispatch.rows(ids, part.tensors, part.format, part.params, shape, torch.float32)
    return total.to(dtype)


class _Buffers(NamedTuple):
    """Where a part works, in bytes from the beginning."""

    integers: int  # of the activations that it reads, and what lies around them
    out: int
    is_first: bool  # of those that read these integers


class NestedProduct(Product):
    """A sum of weights whose kernels read integers of activations."""

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape, parts: list[Product]) -> None:
        super().__init__(tensors, params, shape, parts[0].layout, {}, {})
        self.parts = parts
        self._known: dict[tuple[int, torch.dtype], tuple[list[_Buffers], llvm.Function]] = {}

    def most_rows(self, dtype: torch.dtype) -> int:
        return min(part.most_rows(dtype) for part in self.parts)

    def together(self, tokens: int) -> int:
        return min(part.together(tokens) for part in self.parts)

    def kernel(self, tokens: int) -> llvm.Function:
        return self.parts[0].kernel(tokens)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        first, *rest = [part.decoder(torch.float32) for part in self.parts]

        def decode(out: Tensor, start: int) -> None:
            total = out if dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device="cpu")
            part = torch.empty_like(total)
            first(total, start)
            for write in rest:
                write(part, start)
                total += part
            if total is not out:
                out.copy_(total)

        return decode

    @property
    def _activations(self) -> tuple[Any, ...]:
        """What the integers of all parts depend on: with one kind, that of a weight of such a part alone."""
        kinds = dict.fromkeys(part._activations for part in self.parts)
        return next(iter(kinds)) if len(kinds) == 1 else tuple(kinds)

    def quantize(self, rows: ActivationRows, base: int) -> Iterator[CompiledCall]:
        for part, place in zip(self.parts, self._places(rows.count, rows.dtype)[0], strict=True):
            if place.is_first:
                yield from part.quantize(rows, base + place.integers)

    def multiply(self, rows: ActivationRows, base: int) -> Iterator[CompiledCall]:
        places, finish = self._places(rows.count, rows.dtype)
        arguments: list[int] = []
        for part, place in zip(self.parts, places, strict=True):
            yield from part.sum(rows, base + place.integers, base + place.out)
            arguments += base + place.out, part.factors.scale, part.factors.rows
        layout = self.layout
        sizes = rows.count, layout.rows, layout.outputs, rows.width
        yield CompiledCall(finish, (*arguments, rows.target, *sizes))

    def _prepare(self, tokens: int, dtype: torch.dtype) -> _Steps:
        """Give each kind of integers the memory of its parts, and each part but the first of a kind its own sums."""
        steps = [part.steps(tokens, dtype) for part in self.parts]
        kinds: dict[Any, list[int]] = {}
        for k, part in enumerate(self.parts):
            kinds.setdefault(part._activations, []).append(k)
        places, end = {}, 0
        for members in kinds.values():
            integers, end = end, end + max(steps[k].nbytes for k in members)
            places[members[0]] = _Buffers(integers, integers + steps[members[0]].offsets[OUT], True)
            for k in members[1:]:
                places[k] = _Buffers(integers, end, False)
                end += -(-4 * self.layout.rows * tokens // ALIGNED) * ALIGNED
        finish = llvm.function(Finish, dtype, *(part.factors.kind for part in self.parts))
        self._known[tokens, dtype] = [places[k] for k in range(len(self.parts))], finish
        self._steps[tokens, dtype] = made = steps[0]._replace(nbytes=end)
        return made

    def _places(self, tokens: int, dtype: torch.dtype) -> tuple[list[_Buffers], llvm.Function]:
        """Return where each part works, and what rounds the sum of all."""
        self.steps(tokens, dtype)
        return self._known[tokens, dtype]
