"""Compile the inner loops of the trellis search for this CPU: the integers of compress/quant/viterbi.py, only faster.

Where torch walks over the costs of all transitions several times a step, here one pass loads a transition's two table
entries once for several sequences, adds, and keeps the minimum in registers; a decision is one byte. A state then takes
0.035 ns on two threads at 2 bits, a tenth of torch's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm

LANES = 16  # of a vector of int32 costs
VECTORS = 16  # of costs held in registers: sequences searched together times symbols
CELLS = 1 << 16  # most nodes of the sequences searched together: bounds a thread's memory
SHORT_PRODUCT = "llvm.x86.avx512.pmaddw.d.512"  # vpmaddwd
COMPILER = 64 << 20  # bytes that the compiler takes, and a process keeps


class CompiledSearch:
    """The search through one shape of trellis as machine code."""

    def __init__(self, state_bits: int, symbol_bits: int, dim: int, far: int, period: int, is_short: bool) -> None:
        """Compile; far: the cost of a forbidden node; period: steps between subtractions of the least cost.

        is_short: values and slopes have at most 16 bits.
        """
        self.symbols, self.nodes, self.dim = 1 << symbol_bits, 1 << (state_bits - symbol_bits), dim
        self.together = max(1, min(VECTORS // self.symbols, CELLS // self.nodes))
        emitter = _SearchEmitter(state_bits, symbol_bits, dim, self.together, is_short)
        emitter.write(far, period)
        self._function = llvm.compiled(emitter)

    def search(self, values: Tensor, seam: Tensor | None, fixed: Tensor, slope: Tensor) -> Tensor:
        """Return states [sequences, steps]; values [sequences, steps, dim] int32, seam [sequences] int64 or None."""
        count, steps, _ = values.shape
        groups = -(-count // self.together)
        padded = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, groups * self.together - count)).contiguous()
        seams = torch.zeros(groups * self.together, dtype=torch.int64, device="cpu")
        if seam is not None:
            seams[:count] = seam
        states = torch.empty(groups * self.together, steps, dtype=torch.int64, device="cpu")

        def work(first: int, last: int) -> None:
            cells = self.together * self.nodes
            space = torch.empty(cells * (8 + steps), dtype=torch.uint8, device="cpu")  # costs twice, decisions
            pointers = [t.data_ptr() for t in (padded, seams, states, fixed, slope, space)]
            self._function(*pointers, first, last, steps, seam is not None)

        llvm.parallel(work, groups)
        return states[:count]


@cache
def compiled_search(
    state_bits: int, symbol_bits: int, dim: int, far: int, period: int, is_short: bool
) -> CompiledSearch | None:
    """Return the compiled search, None where nothing can be compiled."""
    return CompiledSearch(state_bits, symbol_bits, dim, far, period, is_short) if llvm.available() else None


class _SearchEmitter(llvm.Emitter):
    """Write void paths(values, seam, states, fixed, slope, space, first group, last group, steps, has seam)."""

    def __init__(self, state_bits: int, symbol_bits: int, dim: int, together: int, is_short: bool) -> None:
        super().__init__("paths", 6, 4)
        self.dim, self.together = dim, together
        self.kv, self.n, self.nodes = symbol_bits, 1 << symbol_bits, 1 << (state_bits - symbol_bits)
        self.rest = self.nodes // self.n
        self.lanes = min(LANES, self.rest)
        self.has_short_product = is_short and self.lanes == LANES and "avx512bw" in llvm.features()
        self.values, self.seam, self.states, self.fixed, self.slope, self.space = self.pointers

    def write(self, far: int, period: int) -> None:
        """Write the function."""
        self.far, self.period = far, period
        first, last, self.steps, self.has_seam = self.integers
        self.held, self.where = self.variable(self.word), self.variable(self.index)
        with self.loop(last, first) as group:
            self.base = self.b.mul(group, self.i64(self.together))
            self._group()
        self.b.ret_void()

    def _group(self) -> None:
        """Write all steps of the sequences that are searched together, and the way back."""
        b, cells = self.b, self.together * self.nodes
        costs = [self.space, self.at(self.space, self.i64(cells), self.word)]
        decisions = self.at(self.space, self.i64(2 * cells), self.word)
        self._start(costs[0])
        with self.loop(self.steps) as t:
            odd = b.trunc(t, self.ir.IntType(1))
            source, target = b.select(odd, costs[1], costs[0]), b.select(odd, costs[0], costs[1])
            here = self.at(decisions, b.mul(t, self.i64(cells)), self.byte)
            inputs = [[self._input(u, t, v) for v in range(self.dim)] for u in range(self.together)]
            with self.loop(self.i64(self.rest // self.lanes)) as chunk:
                self._transitions(source, target, here, b.mul(chunk, self.i64(self.lanes)), inputs)
            last = b.icmp_signed("==", b.urem(t, self.i64(self.period)), self.i64(self.period - 1))
            with b.if_then(last):
                for u in range(self.together):
                    self._renormalize(self.at(target, self.i64(u * self.nodes), self.word))
        final = b.select(b.trunc(self.steps, self.ir.IntType(1)), costs[1], costs[0])
        for u in range(self.together):
            self._back(self.at(final, self.i64(u * self.nodes), self.word), decisions, u)

    def _start(self, cost: Any) -> None:
        b = self.b
        seamed = b.icmp_signed("!=", self.has_seam, self.i64(0))
        fill = b.select(seamed, self.word(self.far), self.word(0))
        with self.loop(self.i64(self.together * self.nodes)) as node:
            self.store(fill, cost, node)
        with b.if_then(seamed):
            for u in range(self.together):
                seam = self.load(self.seam, b.add(self.base, self.i64(u)), self.index)
                self.store(self.word(0), cost, b.add(seam, self.i64(u * self.nodes)))

    def _input(self, u: int, t: Any, v: int) -> Any:
        b = self.b
        step = b.add(b.mul(b.add(self.base, self.i64(u)), self.steps), t)
        value = self.load(self.values, b.add(b.mul(step, self.i64(self.dim)), self.i64(v)), self.word)
        if self.has_short_product:
            value = b.and_(value, self.word(0xFFFF))
        return self.splat(value, self.lanes)

    def _product(self, slopes: Any, value: Any) -> Any:
        """Return the products; of 16-bit factors by an instruction that takes half the time of a 32-bit product.

        It multiplies 16-bit halves of both and adds the two products: the upper half of every value is 0.
        """
        if not self.has_short_product:
            return self.b.mul(slopes, value)
        halves, words = self.vector(self.short, 2 * self.lanes), self.vector(self.word, self.lanes)
        kind = self.ir.FunctionType(words, [halves, halves])
        function = self.module.globals.get(SHORT_PRODUCT) or self.ir.Function(self.module, kind, SHORT_PRODUCT)
        return self.b.call(function, [self.b.bitcast(slopes, halves), self.b.bitcast(value, halves)])

    def _costs(self, table: Any, place: Any) -> Any:
        return self.load(table, place, self.word, self.lanes)

    def _transitions(self, source: Any, target: Any, decisions: Any, low: Any, inputs: Sequence[Sequence[Any]]) -> None:
        """Write the new costs of `lanes` remainders, for every new symbol, and the oldest symbols that gave them."""
        b = self.b
        before = [
            [self._costs(source, b.add(low, self.i64(u * self.nodes + o * self.rest))) for o in range(self.n)]
            for u in range(self.together)
        ]
        best: list[list[Any]] = [[] for _ in range(self.together)]
        for s in range(self.n):
            least: list[Any] = [None] * self.together
            for o in range(self.n):
                place = b.add(low, self.i64(s * self.nodes + o * self.rest))
                fixed = self._costs(self.fixed, place)
                slopes = [
                    self._costs(self.slope, b.add(place, self.i64(v * self.n * self.nodes))) for v in range(self.dim)
                ]
                for u in range(self.together):
                    total = b.add(before[u][o], fixed)
                    for v in range(self.dim):
                        total = b.add(total, self._product(slopes[v], inputs[u][v]))
                    least[u] = total if least[u] is None else self.smaller(total, least[u])
            for u in range(self.together):
                self._decide(decisions, b.add(low, self.i64(u * self.nodes + s * self.rest)), least[u])
                best[u].append(b.and_(least[u], self.constant(self.word, self.lanes, -self.n)))
        for u in range(self.together):
            for i, vector in enumerate(self._interleaved(best[u])):
                offset = b.add(b.mul(low, self.i64(self.n)), self.i64(u * self.nodes + i * self.lanes))
                self.store(vector, target, offset)

    def _decide(self, decisions: Any, offset: Any, least: Any) -> None:
        b = self.b
        oldest = b.and_(least, self.constant(self.word, self.lanes, self.n - 1))
        self.store(b.trunc(oldest, self.vector(self.byte, self.lanes)), decisions, offset)

    def _interleaved(self, vectors: list[Any]) -> list[Any]:
        """Interleave the lanes of vectors a, b, c, d to a0 b0 c0 d0 a1 b1 ..., as many vectors as there are."""
        if len(vectors) == 1:
            return vectors
        pairs = [lane // 2 + self.lanes * (lane % 2) for lane in range(2 * self.lanes)]
        halves = pairs[: self.lanes], pairs[self.lanes :]
        evens, odds = self._interleaved(vectors[0::2]), self._interleaved(vectors[1::2])
        return [self.shuffled(a, c, half) for a, c in zip(evens, odds, strict=True) for half in halves]

    def _renormalize(self, cost: Any) -> None:
        self._least(cost)
        least = self.b.load(self.held)
        with self.loop(self.i64(self.nodes)) as node:
            self.store(self.b.sub(self.load(cost, node, self.word), least), cost, node)

    def _least(self, cost: Any) -> None:
        """Put the least of the costs into `held`, and the first node that has it into `where`."""
        b = self.b
        b.store(self.load(cost, self.i64(0), self.word), self.held)
        b.store(self.i64(0), self.where)
        with self.loop(self.i64(self.nodes)) as node:
            value, least = self.load(cost, node, self.word), b.load(self.held)
            better = b.icmp_signed("<", value, least)
            b.store(b.select(better, value, least), self.held)
            b.store(b.select(better, node, b.load(self.where)), self.where)

    def _back(self, cost: Any, decisions: Any, u: int) -> None:
        """Write the states of the best path of sequence u, from the last step to the first."""
        b, rest = self.b, self.i64(self.rest)
        self._least(cost)
        sequence = b.add(self.base, self.i64(u))
        seam = self.load(self.seam, sequence, self.index)
        end = b.select(b.icmp_signed("!=", self.has_seam, self.i64(0)), seam, b.load(self.where))
        b.store(self._place(end), self.where)
        row = self.at(self.states, b.mul(sequence, self.steps), self.index)
        with self.loop(self.steps) as done:
            t = b.sub(b.sub(self.steps, self.i64(1)), done)
            place = b.load(self.where)
            cell = b.add(b.mul(t, self.i64(self.together * self.nodes)), b.add(place, self.i64(u * self.nodes)))
            oldest = b.zext(self.load(decisions, cell, self.byte), self.index)
            before = b.add(b.mul(oldest, rest), b.urem(place, rest))
            state = b.or_(b.shl(before, self.i64(self.kv)), b.udiv(place, rest))
            self.store(state, row, t)
            b.store(self._place(before), self.where)

    def _place(self, node: Any) -> Any:
        """Return the place of a node in the decisions: new symbol * rest + remaining bits."""
        b = self.b
        symbol = b.and_(node, self.i64(self.n - 1))
        return b.add(b.mul(symbol, self.i64(self.rest)), b.lshr(node, self.i64(self.kv)))
