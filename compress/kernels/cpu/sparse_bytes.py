"""Multiply 2:4 codes of 2 and 4 bits with one row of activations as bytes: AVX-512 with VBMI and VNNI.

As in int_bytes.py, activations are two planes of bytes, and a vector of 64 codes holds two runs of 32 kept weights.
Each run meets 64 columns: one register of activations. The patterns of both runs become the places of what is kept
among 128 columns, and one permutation of two registers brings those bytes to the codes. The zero point, which is
2^(bits - 1) of symmetric weights, is taken off the sums of codes: as often as the sum of what was kept says.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product as pairs
from typing import Any

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats.sparse import PATTERNS, Params
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import decoded, int_bytes
from compress.kernels.cpu.byte_products import LARGEST_BYTE, ByteProducts
from compress.kernels.cpu.int_bytes import EIGHT, IntBytes
from compress.kernels.cpu.small_matmul import Product, ProductSizes
from compress.kernels.cpu.sparse_rows import GROUP
from compress.kernels.cpu.unpack import SHORTS, words

SIZE = 64  # bytes of a register, and columns that a run of 32 kept weights meets
NEEDED = ("avx512bw", "avx512vbmi", "avx512vnni", "avx512vl")


def reads(params: int_format.Params, columns: int, span: int) -> bool:
    """Return whether rows of so many kept codes are those of this kernel, and the processor has its instructions."""
    is_whole = params.tile_words >= SHORTS and span % SHORTS == 0 and columns % params.tile_columns == 0
    is_fast = params.bits in int_bytes.BYTE_BITS and all(each in llvm.features() for each in NEEDED)
    return is_whole and is_fast and params.symmetric


class PatternCodes(Product):
    """A 2:4 weight of symmetric codes of 2 or 4 bits; rows of activations are multiplied one by one."""

    most = decoded.MOST

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape, near: Any, span: int) -> None:
        """near: the product of the same weight whose decoder is taken; span: kept weights that share a scale."""
        kept, sizes = params.inner_params, near.sizes
        assert isinstance(kept, int_format.Params)
        spans = -(-params.kept_shape(shape)[1] // span)
        columns, tiles = 2 * spans * span, sizes["tiles"]
        space = max(int_bytes.count_floats(kept.bits, kept.tile_words, span, columns, tiles, 0), 32 * spans)
        layout = ProductSizes(shape[1], shape[0], columns, sizes["rows"], 2 * span, SHORTS, space)
        stored = {name: tensors[name].data_ptr() for name in ("mask", *words(kept.bits).split(), "scales")}
        super().__init__(
            tensors, params, shape, layout, {**stored, "zeros": 0}, {**sizes, "spans": spans, "outputs": shape[0]}
        )
        self._near, self._settings = near, (kept.bits, kept.tile_words, span, True, kept.scale_dtype, False, 1)

    def together(self, tokens: int) -> int:
        return 1

    def kernel(self, tokens: int) -> llvm.Function:
        return llvm.function(_PatternBytes, *self._settings)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        decode: Decoder = self._near.decoder(dtype)
        return decode


class _PatternBytes(IntBytes):
    """Sums rows of the weight times one row of activations."""

    more_pointers, more_integers = "mask", "pitch outputs"

    def _runs(self, word: int, i: int) -> list[int]:
        """The first kept weights of the two runs of a vector, within a tile."""
        return [field * self.tile_words + word for field in int_bytes.fields(self.bits)[i]]

    def _split_inputs(self, tile: Any) -> None:
        """Write the bytes of the columns that each vector meets: low ones of both runs, then high ones."""
        b, octets = self.b, self.vector(self.byte, SIZE)
        for number, word, i in self.places:
            for side, first in enumerate(self._runs(word, i)):
                offset = b.add(b.mul(tile, self.i64(2 * self.columns)), self.i64(2 * first))
                x = self.load(self.x16, offset, self.short, SIZE)
                middle, eight = (self.constant(self.short, SIZE, value) for value in (LARGEST_BYTE, 8))
                for plane, value in enumerate((x, b.ashr(b.add(x, middle), eight))):
                    self.store(b.trunc(value, octets), self.bytes, self._bytes_place(tile, number, plane, side))

    def _bytes_place(self, tile: Any, number: int, plane: int, side: int) -> Any:
        inside = self.i64(((number * 2 + plane) * 2 + side) * SIZE)
        return self.b.add(self.b.mul(tile, self.i64(4 * self.columns)), inside)

    def _sum(self, tile: Any, number: Any, owner: tuple[int, ...]) -> list[Any]:
        b, codes, kept = self.b, list[ByteProducts](), list[ByteProducts]()
        for sums, largest in ((codes, 2**self.bits - 1), (kept, 1)):
            sums += [ByteProducts(self, SIZE, largest) for _ in range(2)]
        vectors: dict[int, Any] = {}
        for n, word, i in self.places:
            if self.owners[i] != owner:
                continue
            if word not in vectors:
                vectors[word] = self._words(tile, number, word)
            order = self._order(tile, number, word, i)
            for plane, (code_sum, kept_sum) in enumerate(zip(codes, kept, strict=True)):
                columns = [self.load(self.bytes, self._bytes_place(tile, n, plane, s), self.byte, SIZE) for s in (0, 1)]
                x = self.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", order.type, columns[0], order, columns[1])
                code_sum.add(self._codes(vectors[word], i), x)
                kept_sum.add(self.constant(self.byte, SIZE, 1), x)
        eight, shift = (self.constant(self.word, SIZE // 4, value) for value in (8, self.bits - 1))
        of_codes, of_kept = (b.add(low.total(), b.shl(high.total(), eight)) for low, high in (codes, kept))
        return [b.sub(of_codes, b.shl(of_kept, shift))]

    def _order(self, tile: Any, row: Any, word: int, i: int) -> Any:
        """The places of 64 kept columns among the 128 that a vector meets, in the order of its codes.

        Eight bytes hold eight kept weights of one run, four patterns; the next eight are of the other run.
        """
        b, octets = self.b, self.vector(self.byte, SIZE)
        both = self.vector(self.index, 2)(self.ir.Undefined)
        row = self.clamped(row, self.named["outputs"])
        line = b.add(b.mul(row, self.named["pitch"]), b.mul(tile, self.i64(self.columns // 16 * 3)))
        for side, first in enumerate(self._runs(word, i)):  # sixteen patterns, six bytes: nothing is read behind them
            place = self.at(self.named["mask"], b.add(line, self.i64(first // 16 * 3)), self.byte)
            patterns = b.load(place, typ=self.ir.IntType(48), align=1)
            both = b.insert_element(both, b.zext(patterns, self.index), self.word(side))
        bits = b.bitcast(self.shuffled(both, both, [0, 1] * (SIZE // 16)), octets)
        of_bytes = list(pairs(range(SIZE // 16), (0, 1), range(EIGHT)))  # four patterns of a run, the run, kept weight
        control = self._constants_of(3 * (4 * four + j // 2) for four, _, j in of_bytes)
        fields = self.intrinsic("llvm.x86.avx512.pmultishift.qb.512", octets, control, bits)
        parity = self._constants_of(EIGHT * (j % 2) for _, _, j in of_bytes)
        codes = b.or_(b.and_(fields, self.constant(self.byte, SIZE, 7)), parity)
        table = [PATTERNS[code % len(PATTERNS)][n] for n in (0, 1) for code in range(EIGHT)]
        inside = self.intrinsic("llvm.x86.avx512.pshuf.b.512", octets, self._constants_of(table * (SIZE // 16)), codes)
        base = self._constants_of(SIZE * side + GROUP * (4 * four + j // 2) for four, side, j in of_bytes)
        return b.or_(inside, base)

    def _constants_of(self, values: Any) -> Any:
        return self.ir.Constant(self.vector(self.byte, SIZE), list(values))

    def _zero(self, start: Any, u: Any) -> Any:
        """Nothing, which has been taken off already."""
        return self.constant(self.float, int_bytes.BLOCK_ROWS, 0.0)
