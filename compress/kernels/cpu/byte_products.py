"""Sum products of codes and bytes of activations, four neighbours in each sum of 32 bits, exactly.

An activation x of 16 bits is two bytes, x = 256 high + low, whose products with codes are summed apart: by instructions
that take twice as many bytes as int16, vpmaddubsw or vpdpbusd, where the processor has one.
"""

from __future__ import annotations

from typing import Any

from compress.kernels import llvm
from compress.kernels.cpu.emitter import Emitter

LARGEST_BYTE = 128  # magnitude of the bytes of activations


def as_it_is(e: Emitter, vector: Any) -> Any:
    """Return a vector that LLVM makes nothing else of, where it is a whole register of x86.

    Chains of additions become trees otherwise, which take more registers than there are, and three times a byte becomes
    a product of int16, which is slower than two additions.
    """
    features, kind = llvm.features(), vector.type
    size = kind.count * kind.element.width
    if "avx2" not in features or size != (512 if "avx512bw" in features else 256):
        return vector
    return e.b.asm(e.ir.FunctionType(kind, [kind]), "", "=v,0" if size == 512 else "=x,0", [vector], False)


class ByteProducts:
    """A sum of products of vectors of `size` bytes, codes up to `largest` times signed bytes.

    in_order: products are added up in the order in which they come.
    """

    def __init__(self, e: Emitter, size: int, largest: int, in_order: bool = False) -> None:
        self.e, self.size, self.in_order = e, size, in_order
        self.words = e.vector(e.word, size // 4)
        self.whole: Any = None  # int32
        self.part: Any = None  # int16; of processors without such instructions int32, for neighbours
        self.count, self.most = 0, 32767 // (2 * largest * LARGEST_BYTE)  # products in `part`

    def add(self, codes: Any, x: Any) -> None:
        """Add the products of codes and bytes."""
        e, wide = self.e, self.size == 64
        if "avx512vnni" in llvm.features() and "avx512vl" in llvm.features():
            before = e.constant(e.word, self.size // 4, 0) if self.whole is None else self.whole
            kind = self.words if llvm.llvm_version() < (22, 0) else codes.type
            given = (before, e.b.bitcast(codes, kind), e.b.bitcast(x, kind))
            self.whole = e.intrinsic(f"llvm.x86.avx512.vpdpbusd.{8 * self.size}", self.words, *given)
            return
        if "avx2" not in llvm.features():
            shorts = e.vector(e.short, self.size)
            product = e.pair_sums(e.b.zext(codes, shorts), e.b.sext(x, shorts))
        else:
            if self.count == self.most:
                self.whole, self.part, self.count = self.total(), None, 0
            name = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
            product = e.intrinsic(name, e.vector(e.short, self.size // 2), codes, x)
        self.part = product if self.part is None else e.b.add(self.part, product)
        if self.in_order:
            self.part = as_it_is(e, self.part)
        self.count += 1

    def total(self) -> Any:
        """Return the sum, a vector of int32."""
        if self.part is None:
            return self.whole
        e, wide = self.e, self.size == 64
        if "avx2" not in llvm.features():
            even, odd = (range(first, self.size // 2, 2) for first in (0, 1))
            return e.b.add(e.shuffled(self.part, self.part, even), e.shuffled(self.part, self.part, odd))
        name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
        pairs = e.intrinsic(name, self.words, self.part, e.constant(e.short, self.size // 2, 1))
        return pairs if self.whole is None else e.b.add(self.whole, pairs)
