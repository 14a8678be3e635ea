"""Compile the trellis search for this CPU: the integers of compress/quant/viterbi.py, one sequence in each vector lane.

All lanes pass through the same states, so that a transition is one addition and one minimum of 16-bit vectors. What
it adds depends only on the input and on what its state emits: a step computes it once for every different emission
(`levels`), not for every state. With parts of a bit, the loop takes two or four steps at a time. Nothing is shuffled.
The oldest symbol of a transition is in the low bits of its cost, so that the minimum is the decision, too. At 2 bits,
a state takes 0.03 ns of one thread with AVX-512, a third of the time that it takes where the lanes of a vector are
states and costs have 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu.emitter import Emitter
from compress.kernels.loops.steps import Kind, kinds_of_steps, most_decisions

LANES = 16  # sequences searched together, or twice as many where that is faster
WIDE_COST = 1.6  # time of twice the lanes
WIDE_LEVELS = 512  # what more emissions add would not stay in the first cache
SQUARES = {LANES: "llvm.x86.avx2.pmul.hr.sw", 2 * LANES: "llvm.x86.avx512.pmul.hr.sw.512"}  # (a * b + 2^14) >> 15
UNROLLED = 8  # nodes of a pass over all costs
COMPILER = 64 << 20  # bytes that the compiler takes, and a process keeps


class Limits(NamedTuple):
    """How costs are kept within 16 bits."""

    most: int  # of what a transition adds
    knee: int  # of what a transition adds: the rest counts an eighth
    period: int  # steps between subtractions of the least cost
    far: int  # the cost of a node where a path must not start
    saturates: bool  # the costs of nodes that cannot be reached yet may exceed 16 bits


class CompiledSearch:
    """The search through one trellis as machine code."""

    def __init__(
        self, unit: float, levels: Tensor, index: Tensor, state_bits: int, symbol_bits: float, limits: Limits
    ) -> None:
        """Take one trellis; what is compiled is shared by trellises of one shape.

        unit: the factor that makes values integers. levels: [emissions, dim], integers of 16 bits.
        index: [2^state_bits] int64, which of them each state emits.
        """
        self.state_bits, self.symbol_bits, self.limits = state_bits, symbol_bits, limits
        self.count, self.dim = levels.shape
        self._unit = torch.tensor([unit], dtype=torch.float32, device="cpu")
        self._levels = torch.cat([levels.abs().amax(0, keepdim=True), levels]).to(torch.int16)
        kinds = kinds_of_steps(state_bits, symbol_bits)
        by_kind = [index.view(1 << kind.oldest_bits, kind.rest, kind.symbols) for kind in kinds]
        ordered = torch.cat([each.permute(1, 2, 0).flatten() for each in by_kind])  # remaining bits, new, oldest
        # lanes -> where in memory what a state emits is found: bytes from the first emission
        self._places = {lanes: (ordered * (2 * lanes)).to(torch.uint16).contiguous() for lanes in (LANES, 2 * LANES)}
        self._spaces: list[Tensor] = []  # not in use: fresh memory would be slow

    def _function(self, lanes: int) -> Callable[..., None]:
        return llvm.function(_SearchEmitter, self.state_bits, self.symbol_bits, self.dim, lanes, self.limits)

    def encode(self, values: Tensor, window: int) -> Tensor:
        """Return states [sequences, steps] int64 of closed paths; values [sequences, steps * dim] float32.

        window: steps on each side of the seam by which the node there is chosen.
        """
        values = values.contiguous()
        count, steps = len(values), values.shape[1] // self.dim
        lanes = best_lanes(count, self.count)
        groups = -(-count // lanes)
        states = torch.empty(groups * lanes, steps, dtype=torch.int64, device="cpu")
        function, places = self._function(lanes), self._places[lanes]

        def work(first: int, last: int) -> None:
            space = self._space(workspace(steps, self.state_bits, self.symbol_bits, self.count, lanes))
            pointers = [t.data_ptr() for t in (values, states, self._unit, self._levels, places, space)]
            function(*pointers, first, last, count, steps, window, self.count)
            self._spaces.append(space)

        llvm.parallel(work, groups)
        return states[:count]

    def _space(self, size: int) -> Tensor:
        try:
            space = self._spaces.pop()
        except IndexError:
            space = torch.empty(0, dtype=torch.uint8, device="cpu")
        return space if len(space) >= size else torch.empty(size, dtype=torch.uint8, device="cpu")


def best_lanes(sequences: int, levels: int) -> int:
    """Return how many sequences are best searched together, on the threads of torch."""
    if "avx512bw" not in llvm.features() or levels > WIDE_LEVELS:
        return LANES
    groups, wide = -(-sequences // LANES), -(-sequences // (2 * LANES))
    return 2 * LANES if wide >= torch.get_num_threads() and WIDE_COST * wide < groups else LANES


def workspace(steps: int, state_bits: int, symbol_bits: float, levels: int, lanes: int = 2 * LANES) -> int:
    """Return the bytes of a thread.

    The inputs (of at most two values a step) and a node, what emissions add, costs twice, the decisions of all steps.
    """
    kinds = kinds_of_steps(state_bits, symbol_bits)
    nodes = 1 << (state_bits - kinds[0].bits)
    return lanes * (2 * (2 * steps + 1) + 2 * levels + 4 * nodes + steps * most_decisions(kinds))


def compiled_search(
    unit: float, levels: Tensor, index: Tensor, state_bits: int, symbol_bits: float, limits: Limits
) -> CompiledSearch | None:
    """Return the compiled search, None where nothing can be compiled."""
    return CompiledSearch(unit, levels, index, state_bits, symbol_bits, limits) if llvm.available() else None


class _SearchEmitter(Emitter):
    """Writes the search of the groups of sequences from `first` to `last`.

    Of each group of sequences the window around the seam is searched first, from any node to any, then the whole from
    the node at the seam to itself. A cost is a multiple of 2^held_bits, which leaves room for the oldest symbol.
    """

    def __init__(self, state_bits: int, symbol_bits: float, dim: int, lanes: int, limits: Limits) -> None:
        integers = "first last sequences steps window emissions"
        super().__init__("paths", "values states unit levels places space", integers)
        self.dim, self.lanes, self.limits = dim, lanes, limits
        self.state_bits, self.kinds = state_bits, kinds_of_steps(state_bits, symbol_bits)
        self.held_bits = max(kind.bits for kind in self.kinds)
        self.nodes = 1 << (state_bits - self.kinds[0].bits)  # before the first step; before others there are not more
        self.values, self.states, self.unit, self.levels, self.places, self.space = self.pointers
        self.costs = self.vector(self.short, lanes)
        self._write()

    def _write(self) -> None:
        first, last, self.sequences, self.steps, self.window, self.count = self.integers
        self.least, self.where = self.variable(self.costs), self.variable(self.costs)
        b, cells = self.b, self.nodes * self.lanes
        self.inputs = self.space
        self.seam = self.at(self.inputs, self._row(b.mul(self.steps, self.i64(self.dim))), self.short)
        self.added = self.at(self.seam, self.i64(self.lanes), self.short)
        source = self.at(self.added, self._row(self.count), self.short)
        self.both = [source, self.at(source, self.i64(cells), self.short)]
        self.decisions = self.at(source, self.i64(2 * cells), self.short)
        with self.loop(last, first) as group:
            self.base = b.mul(group, self.i64(self.lanes))
            self._round_values()
            with self.loop(self.i64(2)) as whole:
                self._search(b.icmp_signed("!=", whole, self.i64(0)))
        b.ret_void()

    def _round_values(self) -> None:
        """Write the values of the group as integers, [steps, dim, lanes]; what is missing is the last sequence."""
        b, length = self.b, self.b.mul(self.steps, self.i64(self.dim))
        unit, most = self.load(self.unit, self.i64(0), self.float), (1 << 15) - 1
        final = b.sub(self.sequences, self.i64(1))
        with self.loop(self.i64(self.lanes)) as lane:
            sequence = b.add(self.base, lane)
            sequence = b.select(b.icmp_signed("<", sequence, final), sequence, final)
            with self.loop(length) as i:
                scaled = b.fmul(self.load(self.values, b.add(b.mul(sequence, length), i), self.float), unit)
                scaled = self._external("llvm.rint.f32", scaled)
                for outside, bound in ((">", most), ("<", -most)):
                    limit = self.float(bound)
                    scaled = b.select(b.fcmp_ordered(outside, scaled, limit), limit, scaled)
                self.store(b.fptosi(scaled, self.short), self.inputs, b.add(self._row(i), lane))

    def _search(self, whole: Any) -> None:
        """Write all steps of the group, and the way back; whole: not the window alone."""
        b = self.b
        steps = b.select(whole, self.steps, b.add(self.window, self.window))
        shift = b.select(whole, self.i64(0), b.sub(self.steps, self.window))
        self._start(self.both[0], whole)
        turns = self.i64(len(self.kinds))
        with self.loop(b.udiv(steps, turns)) as turn:
            for i, kind in enumerate(self.kinds):
                self._step(kind, b.add(b.mul(turn, turns), self.i64(i)), shift)
        with b.if_then(b.not_(whole)):
            self._find_least(b.select(b.trunc(steps, self.ir.IntType(1)), self.both[1], self.both[0]))
            self.store(b.load(self.where), self.seam, self.i64(0))
        self._back(steps, b.select(whole, self.steps, self.window))

    def _step(self, kind: Kind, t: Any, shift: Any) -> None:
        """Write step t of a search whose first step has the input `shift`."""
        b = self.b
        odd = b.trunc(t, self.ir.IntType(1))
        source, target = b.select(odd, self.both[1], self.both[0]), b.select(odd, self.both[0], self.both[1])
        place = b.add(t, shift)
        place = b.select(b.icmp_signed("<", place, self.steps), place, b.sub(place, self.steps))
        self._add(b.mul(place, self.i64(self.dim)))
        with self.loop(self.i64(kind.rest)) as low:
            self._transitions(kind, (source, target), t, low)
        last = b.icmp_signed("==", b.urem(t, self.i64(self.limits.period)), self.i64(self.limits.period - 1))
        with b.if_then(last):
            self._renormalize(target, kind.rest * kind.symbols)

    def _start(self, cost: Any, whole: Any) -> None:
        """Write the costs before the first step: 0, but `far` where a path must not start."""
        b = self.b
        fill = self.splat(b.select(whole, self.short(self.limits.far << self.held_bits), self.short(0)), self.lanes)
        with self.loop(self.i64(self.nodes)) as node:
            self.store(fill, cost, self._row(node))
        with b.if_then(whole), self.loop(self.i64(self.lanes)) as lane:
            seam = b.zext(self.load(self.seam, lane, self.short), self.index)
            self.store(self.short(0), cost, b.add(self._row(seam), lane))

    def _row(self, node: Any) -> Any:
        return self.b.mul(node, self.i64(self.lanes))

    def _splat(self, value: int) -> Any:
        return self.constant(self.short, self.lanes, value)

    def _add(self, place: Any) -> None:
        """Write what every emission adds: squared distances less the least that the input allows, at most `most`."""
        b, zero, limits = self.b, self._splat(0), self.limits
        inputs, least = [], []
        for v in range(self.dim):
            value = self.load(self.inputs, self._row(b.add(place, self.i64(v))), self.short, self.lanes)
            outside = self._saturating("ssub", self._larger(value, b.sub(zero, value)), self._level(0, v))
            inputs.append(value)
            least.append(self._square(self._larger(outside, zero)))
        with self.loop(self.count) as level:
            total: Any = None
            for v in range(self.dim):
                distance = self._saturating("ssub", self._level(b.add(level, self.i64(1)), v), inputs[v])
                square = b.sub(self._square(distance), least[v])
                if limits.knee < limits.most:
                    bent = b.lshr(b.add(square, self._splat(7 * limits.knee)), self._splat(3))
                    square = self._lesser(square, bent)
                square = self._at_most(square)
                total = square if total is None else self._at_most(b.add(total, square))
            self.store(b.shl(total, self._splat(self.held_bits)), self.added, self._row(level))

    def _level(self, level: Any, v: int) -> Any:
        """Return coordinate v of row `level` of the table, whose first row has the largest sizes, in all lanes."""
        row = self.i64(level) if isinstance(level, int) else level
        place = self.b.add(self.b.mul(row, self.i64(self.dim)), self.i64(v))
        return self.splat(self.load(self.levels, place, self.short), self.lanes)

    def _larger(self, a: Any, c: Any) -> Any:
        return self.b.select(self.b.icmp_signed(">", a, c), a, c)

    def _lesser(self, a: Any, c: Any) -> Any:
        return self.b.select(self.b.icmp_unsigned("<", c, a), c, a)

    def _at_most(self, a: Any) -> Any:
        return self._lesser(a, self._splat(self.limits.most))

    def _square(self, a: Any) -> Any:
        """Return (a^2 + 2^14) >> 15 as an unsigned number."""
        if ("avx2" if self.lanes == LANES else "avx512bw") in llvm.features():
            return self._external(SQUARES[self.lanes], a, a)
        b, wide = self.b, self.vector(self.word, self.lanes)
        whole = b.sext(a, wide)
        rounded = b.add(b.mul(whole, whole), self.constant(self.word, self.lanes, 1 << 14))
        return b.trunc(b.lshr(rounded, self.constant(self.word, self.lanes, 15)), self.costs)

    def _saturating(self, name: str, a: Any, c: Any) -> Any:
        return self._external(f"llvm.{name}.sat.v{self.lanes}i16", a, c)

    def _external(self, name: str, *arguments: Any) -> Any:
        kind = self.ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
        function = self.module.globals.get(name) or self.ir.Function(self.module, kind, name)
        return self.b.call(function, arguments)

    def _transitions(self, kind: Kind, costs: tuple[Any, Any], t: Any, low: Any) -> None:
        """Write the costs of the nodes that follow the remaining bits `low`, and the decisions that gave them.

        costs: of the nodes before and behind the step.
        """
        b, n, oldest = self.b, kind.symbols, 1 << kind.oldest_bits
        source, target = costs
        add = partial(self._saturating, "uadd") if self.limits.saturates else b.add
        first = self.kinds.index(kind) << self.state_bits  # of the places of this kind
        before = []
        for o in range(oldest):
            cost = self.load(source, self._row(b.add(low, self.i64(o * kind.rest))), self.short, self.lanes)
            before.append(b.or_(b.and_(cost, self._splat(-1 << self.held_bits)), self._splat(o)))
        least = []
        for s in range(n):
            totals = []
            for o in range(oldest):
                place = b.add(b.mul(low, self.i64(n * oldest)), self.i64(first + s * oldest + o))
                offset = b.zext(self.load(self.places, place, self.short), self.index)
                added = self.load(self.at(self.added, offset, self.byte), self.i64(0), self.short, self.lanes)
                totals.append(add(before[o], added))
            while len(totals) > 1:
                totals = [self._lesser(a, c) for a, c in zip(totals[::2], totals[1::2], strict=True)]
            self.store(totals[0], target, self._row(b.add(b.mul(low, self.i64(n)), self.i64(s))))
            least.append(totals[0])
        for i in range(kind.rows):
            place = self._row(self._decision(kind, t, low, self.i64(i)))
            together = least[i * kind.decisions_per_byte : (i + 1) * kind.decisions_per_byte]
            self.store(self._in_bytes(together, kind.oldest_bits), self.decisions, place)

    def _decision(self, kind: Kind, t: Any, low: Any, part: Any) -> Any:
        """Return the row of decisions of step t, remaining bits `low` and a part of the new symbols."""
        b = self.b
        first = b.mul(t, self.i64(most_decisions(self.kinds)))
        return b.add(b.add(first, b.mul(low, self.i64(kind.rows))), part)

    def _in_bytes(self, least: list[Any], bits: int) -> Any:
        """Return the low `bits` of several vectors side by side, the first lowest, as bytes."""
        b, held = self.b, bits
        vectors = [b.shl(v, self._splat(i * bits)) if i else v for i, v in enumerate(least)]
        while len(vectors) > 1:
            pairs = enumerate(zip(vectors[::2], vectors[1::2], strict=True))
            masks = [((1 << held) - 1) << (2 * held * i) for i in range(len(vectors) // 2)]
            vectors = [
                b.or_(b.and_(a, self._splat(masks[i])), b.and_(c, self._splat(~masks[i]))) for i, (a, c) in pairs
            ]
            held *= 2
        return b.trunc(vectors[0], self.vector(self.byte, self.lanes))

    def _pass(self, cost: Any, nodes: int, write: Any) -> None:
        """Write write(node, its costs, their place) for all nodes in order."""
        b, several = self.b, min(UNROLLED, nodes)
        with self.loop(self.i64(nodes // several)) as part:
            for i in range(several):
                node = b.add(b.mul(part, self.i64(several)), self.i64(i))
                write(node, self.load(cost, self._row(node), self.short, self.lanes), self._row(node))

    def _renormalize(self, cost: Any, nodes: int) -> None:
        b = self.b

        def smaller(_: Any, value: Any, __: Any) -> None:
            b.store(self._lesser(b.load(self.least), value), self.least)

        b.store(self._splat(-1), self.least)
        self._pass(cost, nodes, smaller)
        least = b.and_(b.load(self.least), self._splat(-1 << self.held_bits))
        self._pass(cost, nodes, lambda _, value, place: self.store(b.sub(value, least), cost, place))

    def _find_least(self, cost: Any) -> None:
        """Put the first node that has the least cost into `where`."""
        b = self.b

        def smaller(node: Any, value: Any, _: Any) -> None:
            value, least = b.and_(value, self._splat(-1 << self.held_bits)), b.load(self.least)
            better = b.icmp_unsigned("<", value, least)
            b.store(b.select(better, value, least), self.least)
            b.store(b.select(better, self.splat(b.trunc(node, self.short), self.lanes), b.load(self.where)), self.where)

        b.store(self._splat(-1), self.least)
        b.store(self._splat(0), self.where)
        self._pass(cost, self.nodes, smaller)

    def _back(self, steps: Any, traced: Any) -> None:
        """Write the states of the best paths to the nodes at `seam`, and there the nodes before; all lanes at once."""
        b = self.b
        turns = self.i64(len(self.kinds))
        with self.loop(b.udiv(traced, turns)) as done, self.loop(self.i64(self.lanes)) as lane:
            first = b.sub(steps, b.mul(b.add(done, self.i64(1)), turns))
            for i, kind in reversed(list(enumerate(self.kinds))):
                t = b.add(first, self.i64(i))
                node = b.zext(self.load(self.seam, lane, self.short), self.index)
                oldest = self._oldest(kind, t, node, lane)
                state = b.or_(b.shl(oldest, self.i64(self.state_bits - kind.oldest_bits)), node)
                self.store(state, self.states, b.add(b.mul(b.add(self.base, lane), self.steps), t))
                self.store(b.trunc(b.lshr(state, self.i64(kind.bits)), self.short), self.seam, lane)

    def _oldest(self, kind: Kind, t: Any, node: Any, lane: Any) -> Any:
        """Return the oldest symbol of the transition to a node that won."""
        b = self.b
        new, low = b.and_(node, self.i64(kind.symbols - 1)), b.lshr(node, self.i64(kind.bits))
        row = self._decision(kind, t, low, b.udiv(new, self.i64(kind.decisions_per_byte)))
        held = b.zext(self.load(self.decisions, b.add(self._row(row), lane), self.byte), self.index)
        place = b.mul(b.urem(new, self.i64(kind.decisions_per_byte)), self.i64(kind.oldest_bits))
        return b.and_(b.lshr(held, place), self.i64((1 << kind.oldest_bits) - 1))
