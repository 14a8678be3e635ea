"""Multiply with the `lattice` format on a CPU: lattices act on the activations, once, and rows of integers remain.

A row times x is the sum over blocks of (G z) x = z (G^T x). So the activations are multiplied by the lattices of their
groups before, which costs as much as `dim` rows of the weight, and what is decoded near are the coordinates z times the
scale of their row. A decoder multiplies coordinates by lattices. Weights with curves, which no method writes now, are
decoded by their format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.calls import CompiledCall
from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter
from compress.kernels.cpu.decoded import DecodedProduct, Put, RowReader
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.unpack import field_codes
from compress.numerics.packing import FIELDS
from compress.papers.formats import lattice
from compress.papers.formats.lattice import PLANES, Params

MOST = 32  # rows up to which the product beats panels of bfloat16


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with a weight without curves, in groups of a power of two."""
    size = params.group_size
    can_read = not params.compand and size & (size - 1) == 0
    return _LatticeProduct(tensors, params, shape) if can_read and emitter.worthwhile(shape) else None


class _LatticeReader(RowReader):
    """Reads groups of columns, each in its number of bits: coordinates for a product, values for a decoder."""

    is_direct = False

    def __init__(self, e: emitter.Emitter, named: Mapping[str, Any], params: Params) -> None:
        super().__init__(e, named)
        self.params, self.groups = params, named["groups"]
        self.is_product = "x" in named
        size = params.group_size
        self.coordinates = e.at(self.space, e.b.mul(self.groups, e.i64(params.dim**2)), e.float)
        self.in_row = e.b.mul(self.groups, e.i64(size * params.bits // 16))  # words

    @staticmethod
    def arguments(params: Params) -> tuple[str, str]:
        scales = " row_scales" if params.row_scales else ""
        return f"words group_bits lattices scale{scales}", "features groups"

    def begin(self, start: Any) -> None:
        """Write the columns of all lattices to the space."""
        e, b, dim = self.e, self.b, self.params.dim
        if self.is_product:
            return
        with e.loop(self.groups) as group, e.loop(e.i64(dim)) as i, e.loop(e.i64(dim)) as k:
            first = b.mul(group, e.i64(dim**2))
            place = b.add(first, b.add(b.mul(i, e.i64(dim)), k))
            value = e.load_floats(self.named["lattices"], place, torch.float16)
            e.store(value, self.space, b.add(first, b.add(b.mul(k, e.i64(dim)), i)))

    def write(self, row: Any, features: Any, put: Put) -> None:
        e, b, params = self.e, self.b, self.params
        factor = e.load(self.named["scale"], e.i64(0), e.float)
        if params.row_scales:
            factor = b.fmul(factor, e.load_floats(self.named["row_scales"], row, torch.float16))
        at = e.variable(e.index)
        b.store(e.i64(0), at)
        with e.loop(self.groups) as group:
            bits = b.zext(e.load(self.named["group_bits"], group, e.byte), e.index)
            for width in (params.bits - 1, params.bits, params.bits + 1):
                with b.if_then(b.icmp_signed("==", bits, e.i64(width))):
                    words = params.group_size * width // 16
                    first = e.smaller(b.load(at), b.sub(self.in_row, e.i64(words)))  # of a damaged file
                    self._group(row, group, width, first, factor, put)
                    b.store(b.add(b.load(at), e.i64(words)), at)

    def _group(self, row: Any, group: Any, width: int, first: Any, factor: Any, put: Put) -> None:
        e, b, size = self.e, self.b, self.params.group_size
        column = b.mul(group, e.i64(size))
        for place, z in self._coordinates(row, width, first):
            if self.is_product:
                put(0, b.add(column, e.i64(place)), b.fmul(z, e.splat(factor, z.type.count)), None)
            else:
                e.store(z, self.coordinates, e.i64(place))
        if not self.is_product:
            dim = self.params.dim
            with e.loop(e.i64(size // dim)) as block:
                place = b.mul(block, e.i64(dim))
                values = b.fmul(self._point(group, place), e.splat(factor, dim))
                put(0, b.add(column, place), values, None)

    def _coordinates(self, row: Any, bits: int, first: Any) -> Iterator[tuple[int, Any]]:
        """The coordinates of a group whose words begin at `first` of a row: (column, vector)."""
        e, b, size = self.e, self.b, self.params.group_size
        fields = max(FIELDS[width] for width in PLANES[bits])
        lanes = min(size // fields, LANES)
        begins, start = [], b.add(b.mul(row, self.in_row), first)
        for width in PLANES[bits]:
            begins.append(start)
            start = b.add(start, e.i64(width * size // 16))
        for column in range(0, size, lanes):
            whole: Any = None
            for width, begin in zip(PLANES[bits], begins, strict=True):
                tile = size // FIELDS[width]
                field, word = divmod(column, tile)

                def load(index: int, begin: Any = begin, tile: int = tile, word: int = word) -> Any:
                    place = b.add(begin, e.i64(index * tile + word))
                    return e.load(self.named["words"], place, e.short, lanes)

                part = field_codes(e, width, field, load)
                if whole is not None:
                    part = b.or_(b.shl(whole, e.constant(e.short, lanes, width)), part)
                whole = part
            values = b.uitofp(whole, e.vector(e.float, lanes))
            yield column, b.fsub(values, e.constant(e.float, lanes, (2**bits - 1) / 2))

    def _point(self, group: Any, place: Any) -> Any:
        """The lattice of a group times the coordinates of a block, the terms summed in order."""
        e, b, dim = self.e, self.b, self.params.dim
        first, total = b.mul(group, e.i64(dim**2)), None
        for k in range(dim):
            column = e.load(self.space, b.add(first, e.i64(k * dim)), e.float, dim)
            z = e.splat(e.load(self.coordinates, b.add(place, e.i64(k)), e.float), dim)
            product = b.fmul(z, column)  # exact
            total = product if total is None else b.fadd(total, product)
        return total


class _LatticeProduct(DecodedProduct):
    reader = _LatticeReader
    arranges = True

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        count = lattice.groups(params, shape)
        space = count * params.dim**2 + params.group_size
        super().__init__(tensors, params, shape, (params,), {"groups": count}, space)
        self.columns = self.read = count * params.group_size

    def most_rows(self, dtype: torch.dtype) -> int:
        """Return more rows than others take: to decode a lattice costs more than to multiply with it."""
        return max(MOST, super().most_rows(dtype))

    def change(self, x: int, count: int) -> Iterator[CompiledCall]:
        """Yield what multiplies blocks of activations by the transposed lattices of their groups."""
        function = llvm.function(_Lattices, self.params.dim, self.params.group_size)
        yield CompiledCall(function, (x, self.stored["lattices"], count, self.sizes["groups"]))


class _Lattices(emitter.Emitter):
    """Replaces blocks of rows of activations by their products with lattices float16 [groups, dim, dim]."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__("lattices", "x lattices", "rows groups")
        x, lattices = self.pointers
        rows, groups = self.integers
        b = self.b
        with self.loop(rows) as row, self.loop(groups) as group, self.loop(self.i64(size // dim)) as block:
            column = b.mul(b.add(b.mul(row, groups), group), self.i64(size))
            place = b.add(column, b.mul(block, self.i64(dim)))
            total = self.constant(self.float, dim, 0.0)
            for i in range(dim):
                line = b.add(b.mul(group, self.i64(dim**2)), self.i64(i * dim))
                values = self.splat(self.load(x, b.add(place, self.i64(i)), self.float), dim)
                total = self.multiply_add(values, self.load_floats(lattices, line, torch.float16, dim), total)
            self.store(total, x, place)
        b.ret_void()
