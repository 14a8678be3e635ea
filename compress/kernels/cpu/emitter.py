"""Write pieces of compiled products of packed weights with few activations: activations as int16, sums in int32.

An activation is an int16 times a float32 scale for each span of columns, so that its error, 2^-16 of the largest of its
span, is below that of bfloat16 activations; a weight is a small integer times a scale. Pairs of products are summed in
int32 by one instruction on most CPUs (pmaddwd and its like), and a span's sum meets the scales once. Nothing is
approximated but the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F

from compress.kernels import llvm, measured

_INTRINSIC = {"half": "f16", "float": "f32"}  # types in names of intrinsics
LANES = 16  # of float32 or int32; vectors of int16 have twice as many
TOKENS = (4, 2, 1)  # rows of activations that a compiled product takes at once
PRODUCT = "x16 x_scales x_sums out space"  # the last pointers of a function that multiplies: see small_matmul.Product
LARGEST = 127 * 256.0 + 127  # the integer that an activation becomes at most: two bytes, see int_bytes.py
# Rows of activations up to which the kernels beat decoding and F.linear, 4096 x 4096, one thread: 12 of bfloat16 (24 of
# codebooks), and any number of float16, whose F.linear takes as long as three kernels on CPUs without such products.
MOST = 12
MOST_OF_INTEGERS = 32  # of the int format, where `widens`: the panels win from 48
MOST_OF_CODEBOOKS = 24
MOST_FLOAT16 = 1024
EVERY = 1 << 30  # any number
SMALL = 1 << 14  # weights, up to which a weight that is decoded once stays in the processor's cache
THREAD = 1 << 21  # products of a weight and an activation that are worth waking a thread


def worthwhile(shape: tuple[int, int]) -> bool:
    """Return whether code can be compiled here and a weight is so large that reading less of it saves time."""
    return shape[0] * shape[1] > SMALL and llvm.available()


def float32(value: float) -> float:
    """Return the nearest float32, which a constant of this type has to be."""
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def widens(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of `dtype`, bfloat16, faster as float32: measured once.

    Nothing is as slow as torch's products of bfloat16 on processors that have no instructions for them: 5 billion
    multiply-adds a second against 30 on one with AVX2. Where nothing can be measured, only AMX, AMD's AVX512-BF16 and
    ARM are taken to be faster than float32.
    """
    if dtype != torch.bfloat16:
        return False
    features = llvm.features() if llvm.available() else frozenset()
    is_fast = "avx512bf16" in features and llvm.processor_name().startswith("znver")
    is_fast |= "sse2" not in features or "amx-bf16" in features
    names = (torch.bfloat16, torch.float32) if is_fast else (torch.float32, torch.bfloat16)
    ways = {str(kind): _MatrixProduct(kind) for kind in names}
    return measured.fastest("a product of matrices for bfloat16 activations", ways) == str(torch.float32)


class _MatrixProduct:
    """A product of bfloat16 activations with a panel of a decoded weight, in one type or another."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self) -> torch.Tensor:
        x, panel = self._operands
        return F.linear(x.to(self.dtype), panel).to(x.dtype)

    @cached_property
    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(64, 1024, dtype=torch.bfloat16, device="cpu")
        return x, torch.ones(256, 1024, dtype=self.dtype, device="cpu")


def most_rows(dtype: torch.dtype, bfloat16: int = MOST) -> int:
    slow = dtype == torch.float16 and "avx512fp16" not in llvm.features()
    return MOST_FLOAT16 if slow else bfloat16


class Emitter:
    """Writes one function: llvmlite's builder with what kernels need over and over.

    Offsets count elements of the type that is loaded or stored. Nothing is assumed about alignment but that of an
    element: tensors are views of files.
    """

    def __init__(self, name: str, pointers: str | int, integers: str | int) -> None:
        """Begin void name(pointers, 64-bit integers): their names, or how many; no pointer aliases another."""
        from llvmlite import ir

        self.ir, self.pointer = ir, ir.PointerType()
        self.byte, self.short, self.word, self.index = (ir.IntType(bits) for bits in (8, 16, 32, 64))
        self.half, self.float, self.bfloat = ir.HalfType(), ir.FloatType(), _bfloat()
        self.signature = llvm.Signature(name, _names("pointer", pointers), _names("integer", integers))
        count = len(self.signature.pointers)
        kind = ir.FunctionType(ir.VoidType(), [self.pointer] * count + [self.index] * len(self.signature.integers))
        self.module = ir.Module(context=ir.Context())  # a context of its own: types of the shared one would pile up
        function = ir.Function(self.module, kind, name)
        for argument in function.args[:count]:
            argument.add_attribute("noalias")
        self.pointers, self.integers = function.args[:count], function.args[count:]
        names = (*self.signature.pointers, *self.signature.integers)
        self.named: dict[str, Any] = dict(zip(names, function.args, strict=True))
        self.b = ir.IRBuilder(function.append_basic_block())
        self._entry = self.b.block
        self._constants: dict[tuple[Any, ...], Any] = {}

    def i64(self, value: int) -> Any:
        return self.index(value)

    def vector(self, kind: Any, lanes: int) -> Any:
        return self.ir.VectorType(kind, lanes)

    def variable(self, kind: Any) -> Any:
        """Take memory for one value of the function, which LLVM turns into a register; made in the first block."""
        with self.b.goto_block(self._entry):
            return self.b.alloca(kind)

    def at(self, pointer: Any, offset: Any, kind: Any) -> Any:
        return self.b.gep(pointer, [offset], source_etype=kind)

    def load(self, pointer: Any, offset: Any, kind: Any, lanes: int = 0) -> Any:
        """Load the element, or `lanes` of them as a vector."""
        loaded = self.vector(kind, lanes) if lanes else kind
        return self.b.load(self.at(pointer, offset, kind), typ=loaded, align=_bytes(kind))

    def store(self, value: Any, pointer: Any, offset: Any) -> None:
        kind = getattr(value.type, "element", value.type)
        self.b.store(value, self.at(pointer, offset, kind), align=_bytes(kind))

    def constant(self, kind: Any, lanes: int, value: float) -> Any:
        known = str(kind), lanes, repr(value)  # to make and to write a vector takes long
        if known not in self._constants:
            self._constants[known] = self.ir.Constant(self.vector(kind, lanes), [value] * lanes)
        return self._constants[known]

    def splat(self, value: Any, lanes: int) -> Any:
        kind = self.vector(value.type, lanes)
        single = self.b.insert_element(kind(self.ir.Undefined), value, self.word(0))
        return self.b.shuffle_vector(single, kind(self.ir.Undefined), self.constant(self.word, lanes, 0))

    def shuffled(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        """Return elements of a, then b, in this order."""
        known = "order", *order
        if known not in self._constants:
            self._constants[known] = self.ir.Constant(self.vector(self.word, len(order)), list(order))
        return self.b.shuffle_vector(a, b, self._constants[known])

    def smaller(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    @contextmanager
    def loop(self, stop: Any, start: Any = None) -> Iterator[Any]:
        """Loop over range(start, stop): the index is the value of the block; what follows comes after the loop."""
        b, before = self.b, self.b.block
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(self.index)
        index.add_incoming(start if start is not None else self.i64(0), before)
        b.cbranch(b.icmp_signed("<", index, stop), body, done)
        b.position_at_end(body)
        yield index
        index.add_incoming(b.add(index, self.i64(1)), b.block)
        b.branch(head)
        b.position_at_end(done)

    def pair_sums(self, a: Any, b: Any) -> Any:
        """Return the sums of the products of neighbours of two int16 vectors, as int32 vector of half the length."""
        kind = self.vector(self.word, a.type.count)
        product = self.b.mul(self.b.sext(a, kind), self.b.sext(b, kind))
        even, odd = (range(first, a.type.count, 2) for first in (0, 1))
        return self.b.add(self.shuffled(product, product, list(even)), self.shuffled(product, product, list(odd)))

    def total(self, vector: Any) -> Any:
        """Return the sum of a float vector's elements, in a fixed order."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            low = self.shuffled(vector, vector, list(range(lanes)))
            vector = self.b.fadd(low, self.shuffled(vector, vector, list(range(lanes, 2 * lanes))))
        return self.b.extract_element(vector, self.word(0))

    def scaled_sums(self, scales: Any, sums: Any, m: Any, spans: Any) -> Any:
        """Return the sum over all spans of scale times sum of the activations of row m, a value."""
        b, total = self.b, self.variable(self.float)
        b.store(self.float(0.0), total)
        with self.loop(spans) as u:
            cell = b.add(b.mul(spans, m), u)
            product = b.fmul(self.load(scales, cell, self.float), self.load(sums, cell, self.float))
            b.store(b.fadd(b.load(total), product), total)
        return b.load(total)

    def byte_pairs(self, words: Any) -> Any:
        """Return the sums of the first and the second two bytes of int32 words, as int16 vector of twice the length."""
        b, lanes = self.b, words.type.count
        shorts, octets = self.vector(self.short, 2 * lanes), self.vector(self.byte, 4 * lanes)
        if lanes == LANES and "avx512bw" in llvm.features():
            ones = self.constant(self.byte, 4 * lanes, 1)
            return self.intrinsic("llvm.x86.avx512.pmaddubs.w.512", shorts, b.bitcast(words, octets), ones)
        if lanes == LANES and "avx2" in llvm.features():
            ones, both = self.constant(self.byte, 2 * lanes, 1), b.bitcast(words, octets)
            parts = [self.shuffled(both, both, range(start, start + 2 * lanes)) for start in (0, 2 * lanes)]
            half = self.vector(self.short, lanes)
            low, high = (self.intrinsic("llvm.x86.avx2.pmadd.ub.sw", half, part, ones) for part in parts)
            return self.shuffled(low, high, range(2 * lanes))
        low = self.constant(self.word, lanes, 0x00FF00FF)
        high = b.and_(b.lshr(words, self.constant(self.word, lanes, 8)), low)
        return b.bitcast(b.add(b.and_(words, low), high), shorts)

    def load_floats(self, pointer: Any, offset: Any, dtype: torch.dtype, lanes: int = 0, count: Any = None) -> Any:
        """Load the element, or `lanes` of them, of this type as float32; with `count` so many, 0 for the others."""
        kind = {torch.float32: self.float, torch.float16: self.half, torch.bfloat16: self.short}[dtype]
        value = self.load_some(pointer, offset, kind, lanes, count) if lanes else self.load(pointer, offset, kind)
        if dtype == torch.float32:
            return value
        if dtype == torch.float16:
            return self.b.fpext(value, self.vector(self.float, lanes) if lanes else self.float)
        word, sixteen = (
            (self.vector(self.word, lanes), self.constant(self.word, lanes, 16))
            if lanes
            else (self.word, self.word(16))
        )
        high = self.b.shl(self.b.zext(value, word), sixteen)
        return self.b.bitcast(high, self.vector(self.float, lanes) if lanes else self.float)

    def load_some(self, pointer: Any, offset: Any, kind: Any, lanes: int, count: Any) -> Any:
        """Return the first `count` of `lanes` elements, 0 for the others, whose memory is not touched; None: all."""
        if count is None:
            return self.load(pointer, offset, kind, lanes)
        b, vector = self.b, self.vector(kind, lanes)
        places = self.ir.Constant(self.vector(self.word, lanes), list(range(lanes)))
        mask = b.icmp_signed("<", places, self.splat(b.trunc(count, self.word), lanes))
        zeros = self.constant(kind, lanes, 0)
        name = f"llvm.masked.load.v{lanes}{_INTRINSIC.get(str(kind), str(kind))}.p0"
        here = self.at(pointer, offset, kind)
        if llvm.llvm_version() < (22, 0):
            return self.intrinsic(name, vector, here, self.word(1), mask, zeros)
        return self.intrinsic(name, vector, here, mask, zeros)

    def store_some(self, value: Any, pointer: Any, offset: Any, count: Any) -> None:
        """Store the first `count` elements of a vector, none if it is negative, and touch no others; None: all."""
        if count is None:
            self.store(value, pointer, offset)
            return
        b, kind, lanes = self.b, value.type.element, value.type.count
        places = self.ir.Constant(self.vector(self.index, lanes), list(range(lanes)))
        mask = b.icmp_signed("<", places, self.splat(count, lanes))
        name = f"llvm.masked.store.v{lanes}{_INTRINSIC.get(str(kind), str(kind))}.p0"
        here = self.at(pointer, offset, kind)
        if llvm.llvm_version() < (22, 0):
            self.intrinsic(name, self.ir.VoidType(), value, here, self.word(1), mask)
        else:
            self.intrinsic(name, self.ir.VoidType(), value, here, mask)

    def in_chunks(self, count: Any, size: int, body: Callable[[Any, Any], None]) -> None:
        """Write body(first, None) for whole chunks of `size` out of range(count), then body(first, rest) for the rest.

        `rest`, a value, is what `load_some` and `store_some` take as count.
        """
        b = self.b
        whole, rest = b.udiv(count, self.i64(size)), b.urem(count, self.i64(size))
        with self.loop(whole) as chunk:
            body(b.mul(chunk, self.i64(size)), None)
        with b.if_then(b.icmp_signed(">", rest, self.i64(0))):
            body(b.mul(whole, self.i64(size)), rest)

    def clamped(self, index: Any, size: Any) -> Any:
        """Return a stored index, unsigned, as an offset below size: a damaged file leads nowhere out of a tensor."""
        b, last = self.b, self.b.sub(size, self.i64(1))
        wide = index if index.type == self.index else b.zext(index, self.index)
        return b.select(b.icmp_unsigned("<", wide, last), wide, last)

    def bit_field(self, stream: Any, index: Any, bits: int) -> Any:
        """Return the field `index` of 1 to 8 bits of a little-endian bit stream, as int32."""
        b = self.b
        first = b.mul(index, self.i64(bits))
        ends = [b.lshr(place, self.i64(3)) for place in (first, b.add(first, self.i64(bits - 1)))]
        low, high = (b.zext(self.load(stream, end, self.byte), self.word) for end in ends)
        both = b.or_(low, b.shl(high, self.word(8)))  # twice the same byte: the second is not reached
        shift = b.trunc(b.and_(first, self.i64(7)), self.word)
        return b.and_(b.lshr(both, shift), self.word(2**bits - 1))

    def bit_fields(self, stream: Any, offset: Any, bits: int) -> Any:
        """Return sixteen fields of 2 to 8 bits of a little-endian bit stream, from a whole byte on, as floats."""
        b, halves = self.b, []
        for half in range(2):
            pointer = self.at(stream, b.add(offset, self.i64(half * bits)), self.byte)
            packed = b.load(pointer, typ=self.ir.IntType(8 * bits), align=1)
            wide = self.splat(packed if bits == 8 else b.zext(packed, self.index), LANES // 2)
            places = self.ir.Constant(self.vector(self.index, LANES // 2), [bits * i for i in range(LANES // 2)])
            halves.append(b.and_(b.lshr(wide, places), self.constant(self.index, LANES // 2, 2**bits - 1)))
        low, high = halves
        return b.uitofp(self.shuffled(low, high, list(range(LANES))), self.vector(self.float, LANES))

    def intrinsic(self, name: str, result: Any, *values: Any) -> Any:
        kind = self.ir.FunctionType(result, [value.type for value in values])
        function = self.module.globals.get(name) or self.ir.Function(self.module, kind, name)
        return self.b.call(function, values)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c of float vectors, in one instruction where there is one."""
        return self.intrinsic(f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)

    def prefetch(self, pointer: Any, offset: Any, kind: Any) -> None:
        """Ask for a line of memory that is read soon; an address past the end does no harm."""
        here = self.at(pointer, offset, kind)
        self.intrinsic("llvm.prefetch.p0", self.ir.VoidType(), here, self.word(0), self.word(3), self.word(1))

    def barrier(self) -> None:
        """Have memory read anew from here on, so that values are not kept in registers that are needed for others."""
        self.b.asm(self.ir.FunctionType(self.ir.VoidType(), []), "", "~{memory}", [], True)

    def floats(self, value: float) -> Any:
        return self.constant(self.float, LANES, value)


class Writer(Emitter):
    """Pieces of functions that write floating-point numbers of one type."""

    def __init__(self, name: str, pointers: str | int, integers: str | int, dtype: torch.dtype) -> None:
        super().__init__(name, pointers, integers)
        self.dtype = dtype

    def rounded(self, values: Any) -> Any:
        """A float32 vector in the type that is written, bfloat16 as int16."""
        if self.dtype == torch.float32:
            return values
        b, lanes = self.b, values.type.count
        if self.dtype == torch.float16:
            return b.fptrunc(values, self.vector(self.half, lanes))
        if "avx512bf16" in llvm.features():  # numbers below 2^-126 become 0, as in the products of such CPUs
            return b.bitcast(b.fptrunc(values, self.vector(self.bfloat, lanes)), self.vector(self.short, lanes))
        words = b.bitcast(values, self.vector(self.word, lanes))
        sixteen = self.constant(self.word, lanes, 16)
        odd = b.and_(b.lshr(words, sixteen), self.constant(self.word, lanes, 1))
        up = b.add(words, b.add(odd, self.constant(self.word, lanes, 0x7FFF)))  # to the nearest, to even in the middle
        up = b.select(b.fcmp_unordered("uno", values, values), self.constant(self.word, lanes, 0x7FC00000), up)
        return b.trunc(b.lshr(up, sixteen), self.vector(self.short, lanes))

    @contextmanager
    def rows_between(self, first: Any, last: Any, stop: Any) -> Iterator[Any]:
        """for row in the blocks of sixteen from first to last, without those from `stop` on."""
        begin, end = (self.b.mul(block, self.i64(LANES)) for block in (first, last))
        with self.loop(self.smaller(end, stop), begin) as row:
            yield row


@cache
def _bfloat() -> Any:
    """Return LLVM's type, which llvmlite does not have."""
    from llvmlite import ir

    class BFloat(ir.Type):
        def _to_string(self) -> str:
            return "bfloat"

    return BFloat()


def _bytes(kind: Any) -> int:
    """Return the bytes of an element."""
    return {"half": 2, "float": 4}.get(str(kind)) or kind.width // 8


def _names(kind: str, arguments: str | int) -> tuple[str, ...]:
    """Return the names of arguments, made up where only their number is known."""
    return tuple(arguments.split()) if isinstance(arguments, str) else tuple(f"{kind}{i}" for i in range(arguments))
