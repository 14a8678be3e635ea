"""Find the best path through a bitshift trellis, for many short sequences at once (Viterbi's algorithm).

A state has `state_bits` bits; each step shifts a symbol of `symbol_bits` new bits in from the right and emits the
state's table entry, so that 2^symbol_bits states can precede a state and as many can follow. A sequence is tail-biting:
the state before its first step equals the state after its last, so that it takes exactly steps * symbol_bits bits. With
parts of a bit, steps of two numbers of bits take turns (`step_bits`). The common node is found by a first search over a
window around the seam of the sequence rolled by half (QTIP, arXiv 2406.11235; there the first search covers the whole
sequence), the second search is constrained to it.

Costs are integers: squared distances, less the least that the value allows, in small units. Up to 4 bits a step, costs
and decisions have 16 bits together, what states emit is rounded to some hundred levels, and a distance so large that
hardly any path takes it counts less than its square; paths are as good as with exact costs within 0.2% of the squared
error. Nothing depends on how sequences are batched, and every device finds the same path. The steps run compiled, on a
CPU (kernels/loops/viterbi.py) and on a GPU (kernels/triton/_viterbi.py), where that is possible, else in torch.
There, batches are bounded by `STATES` costs, because a step that stays in the cache is several times faster, and by
DECISIONS bytes for the decisions of all steps.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats.trellis import step_bits
from compress.kernels.loops import viterbi as viterbi_compiled
from compress.kernels.loops.viterbi import Limits
from compress.kernels.processors import LEAST_CAPABILITY

STATES = {"cpu": 1 << 18, "cuda": 1 << 26}  # costs computed in one step: 1 MB on a CPU
DECISIONS = {"cpu": 1 << 26, "cuda": 1 << 32}  # bytes of the decisions of a batch
LAUNCH_DECISIONS = 1 << 30  # bytes of the decisions of one launch on a GPU
NODES_PER_THREAD = 8
MOST_WARPS = 16
WINDOW = 32  # steps before and after the seam that the first search covers
NARROW = 4  # bits of a step up to which costs fit 16 bits
PERIOD = {1: 16, 2: 8, 3: 2, 4: 1}  # most bits of a step -> steps between subtractions of the least cost
WIDE_PERIOD = 16
RESOLUTION = {1: 18, 2: 12, 3: 8, 4: 5}  # most bits of a step -> least cost of a step on average
LEVELS = {1: 512, 2: 512, 3: 1024, 4: 1024}  # most bits of a step -> different emissions, to which the table is rounded
BENT = (3, 4)  # most bits of a step whose large costs are compressed, because 16 bits could not tell them apart
HEADROOM = 3.0  # wide costs: values further than this outside the table's range are clamped


class _Costs(NamedTuple):
    """How costs are represented: integers (difference * unit)^2 >> shift."""

    dtype: torch.dtype
    difference: int  # bits of a rounded difference
    shift: int
    bits: int  # of a sum of costs, and the oldest symbol below them


NARROW_COSTS = _Costs(torch.int32, 15, 15, 16)
WIDE_COSTS = _Costs(torch.int64, 20, 0, 60)


class _TrellisStep(NamedTuple):
    """A step of a path, and tables for the way back.

    A node is what of a state is left without the symbol that the next step shifts out; its place is new symbol * rest +
    remaining bits.
    """

    symbols: int  # that can be shifted in
    rest: int  # what this step's new symbol and that of the next leave of a state
    oldest: Tensor  # of each node before, the symbol that is shifted out
    emitted: Tensor  # index of the emission, by new symbol and node before
    state: Tensor  # by symbol shifted out and place of the node behind
    previous: Tensor  # the place of the node before, likewise


class Search:
    """Paths through the trellis of one table."""

    def __init__(self, table: Tensor, state_bits: int, symbol_bits: float) -> None:
        """Take table [2^state_bits, vector_dim] float32 of what states emit; 2 * symbol_bits <= state_bits."""
        self.table = table
        self.state_bits, self.symbol_bits, self.dim = state_bits, symbol_bits, table.shape[1]
        self.step_bits = step_bits(symbol_bits)
        self.nodes = 1 << (state_bits - self.step_bits[0])  # before the first step of a path, and where it is closed
        self.most_bits = max(self.step_bits)
        if state_bits < 2 * symbol_bits:
            raise ValueError(f"state_bits {state_bits} is fewer than twice the {symbol_bits} bits of a step")
        self.costs = NARROW_COSTS if self.most_bits <= NARROW else WIDE_COSTS
        self.limits = self._limits()
        self._make_levels()
        self.steps = [self._step(i, table.device) for i in range(len(self.step_bits))]
        self.compiled = None
        self.on_gpu: TritonSearch | None = None
        if self.most_bits <= NARROW and runs_on_gpu(table.device):
            costs = GpuCosts(self.farthest, self.costs.shift, self.limits)
            self.on_gpu = TritonSearch(symbol_bits, self.levels[self.index], costs)
        if table.device.type == "cpu" and self.most_bits <= NARROW:
            self.compiled = viterbi_compiled.compiled_search(
                self.unit, self.levels, self.index, state_bits, symbol_bits, self.limits
            )

    def _limits(self) -> Limits:
        """Return how costs stay small."""
        bits, kinds = self.most_bits, len(self.step_bits)
        period = PERIOD.get(bits, WIDE_PERIOD)
        largest = (1 << (self.costs.bits - bits)) - 1
        reach = 0  # steps after which every node can be reached
        while int(reach * self.symbol_bits) < self.state_bits - self.step_bits[reach % kinds]:
            reach += 1
        most = (largest - 1) // (reach + period)  # a path that starts where it must never costs `largest`
        knee = most >> 2 if bits in BENT else most
        saturates = period < reach
        return Limits(most, knee, period, largest if saturates else reach * most + 1, saturates)

    def _make_levels(self) -> None:
        """Round what states emit to integers: `levels` [emissions, dim], and `index` [2^state_bits] into them."""
        table, bits = self.table.double().cpu(), self.most_bits
        largest, power = table.abs().max().item(), table.square().mean().item()
        self.farthest = (1 << self.costs.difference) - 1
        self.unit = self.farthest / (largest + HEADROOM)
        if bits <= NARROW:
            distance = power * 4.0 ** (-self.symbol_bits / self.dim)  # expected of a value
            self.unit = min((RESOLUTION[bits] * 2**self.costs.shift / distance) ** 0.5, self.farthest / largest)
        scaled = table * self.unit
        if bits <= NARROW and self.dim == 1:
            step = max(1.0, 2 * largest * self.unit / (LEVELS[bits] - 2))
            scaled = (scaled / step).round() * step
        levels, index = scaled.round().long().unique(dim=0, return_inverse=True)
        self.levels, self.index = levels.to(self.table.device, self.costs.dtype), index.to(self.table.device)

    def _step(self, number: int, device: torch.device) -> _TrellisStep:
        """Make the tables of the steps of a path that have this number among those that take turns."""
        bits, next_bits, rest = self.step_bits[number], self._bits(number + 1), self._rest(number)
        symbols, oldest = 1 << bits, 1 << next_bits  # as many as the next step shifts in leave the state behind
        place = torch.arange(symbols * rest, device=device)
        new, low = place // rest, place % rest
        before = torch.arange(oldest, device=device)[:, None] * rest + low  # [oldest symbol, place]
        return _TrellisStep(
            symbols,
            rest,
            torch.arange(oldest * rest, device=device, dtype=self.costs.dtype) // rest,
            self.index.view(-1, symbols).T.flatten(),
            ((before << bits) | new).flatten(),
            self._place(before, number - 1).flatten(),
        )

    def _place(self, node: Tensor, number: int) -> Tensor:
        """Return the places of nodes behind a step."""
        bits = self._bits(number)
        return (node & ((1 << bits) - 1)) * self._rest(number) + (node >> bits)

    def _bits(self, number: int) -> int:
        """Return the bits that a step shifts in."""
        return self.step_bits[number % len(self.step_bits)]

    def _rest(self, number: int) -> int:
        """Return what the new symbol of a step and that of the next leave of a state."""
        return 1 << (self.state_bits - self._bits(number) - self._bits(number + 1))

    def integers(self, values: Tensor) -> Tensor:
        """Return values [sequences, steps * dim] as the integers that are searched, [sequences, steps, dim]."""
        rounded = (values * self.unit).round_().clamp_(-self.farthest, self.farthest)
        return rounded.to(self.costs.dtype).view(len(values), -1, self.dim)

    def encode(self, values: Tensor) -> Tensor:
        """Return states [sequences, steps] of tail-biting paths close to values [sequences, steps * dim] float32."""
        count, steps, device = len(values), values.shape[1] // self.dim, values.device
        if self.compiled:
            return self.compiled.encode(values, self._window(steps))
        integers = self.integers(values)
        if self.on_gpu:
            return self._search(integers, self._seam(integers))
        states = torch.empty(count, steps, dtype=torch.int64, device=device)
        wide = max(1, STATES.get(device.type, STATES["cpu"]) >> self.state_bits)
        tall = max(
            1,
            DECISIONS.get(device.type, DECISIONS["cpu"])
            // (self.costs.dtype.itemsize * self.nodes * (steps + 2 * WINDOW)),
        )
        for part in torch.arange(count, device=device).split(min(wide, tall)):
            batch = integers[part[0] : part[-1] + 1]
            states[part[0] : part[-1] + 1] = self._search(batch, self._seam(batch))
        return states

    def _window(self, steps: int) -> int:
        """Return the steps on each side of the seam that the first search covers: whole rounds of `step_bits`."""
        kinds = len(self.step_bits)
        return min(WINDOW, steps // 2) // kinds * kinds

    def _seam(self, batch: Tensor) -> Tensor:
        """Return the node [sequences] of a good path where the last step meets the first."""
        steps, half = batch.shape[1], self._window(batch.shape[1])
        window = torch.cat([batch[:, steps - half :], batch[:, :half]], 1)
        return self._search(window, None)[:, half - 1] & (self.nodes - 1)

    def _level_costs(self, values: Tensor) -> Tensor:
        """Return what a step adds to the cost where its state emits each level, [sequences, levels].

        Squared distances less the least that values [sequences, dim] allow, at most `most`.
        """
        costs, half = self.costs, 1 << self.costs.shift >> 1
        distances = (self.levels - values[:, None]).clamp_(-self.farthest - 1, self.farthest)
        outside = (values.abs() - self.levels.abs().amax(0)).clamp_(min=0)[:, None]
        squares = ((distances.square_() + half) >> costs.shift) - ((outside.square_() + half) >> costs.shift)
        if self.limits.knee < self.limits.most:
            squares = torch.minimum(squares, (squares + 7 * self.limits.knee) >> 3)
        squares.clamp_(max=self.limits.most)
        return squares.sum(2, dtype=costs.dtype).clamp_(max=self.limits.most)

    def _search(self, batch: Tensor, seam: Tensor | None) -> Tensor:
        """Return states [sequences, steps]; seam: the node [sequences] where each path starts and ends, None: any.

        The oldest symbol is in the low bits of a total, so that the minimum is the decision, too.
        """
        if self.on_gpu:
            return self.on_gpu.search(batch, seam)
        count, steps, _ = batch.shape
        kinds, shift = len(self.steps), self.most_bits
        cost = torch.zeros(count, self.nodes, dtype=self.costs.dtype, device=batch.device)
        if seam is not None:
            cost.fill_(self.limits.far).scatter_(1, seam[:, None], 0)
        total = cost.new_empty(count, 1 << self.state_bits)
        decisions = [cost.new_empty(steps // kinds, count, step.symbols, step.rest) for step in self.steps]
        for t in range(steps):
            step, decision = self.steps[t % kinds], decisions[t % kinds][t // kinds]
            torch.index_select(self._level_costs(batch[:, t]) << shift, 1, step.emitted, out=total)
            before = (cost << shift) + step.oldest
            total.view(count, step.symbols, -1).add_(before[:, None])
            torch.amin(total.view(count, step.symbols, -1, step.rest), 2, out=decision)
            cost = (decision.transpose(1, 2) >> shift).reshape(count, -1)
            if t % self.limits.period == self.limits.period - 1:
                cost -= cost.amin(1, keepdim=True)
        end = cost.argmin(1) if seam is None else seam
        return self._trace(decisions, self._place(end, -1))

    def _trace(self, decisions: list[Tensor], place: Tensor) -> Tensor:
        """Return states [sequences, steps] of the best paths that end at `place` [sequences].

        decisions: of the steps in turn, [steps / turns, sequences, symbols, rest].
        """
        kinds, count, place = len(decisions), len(place), place[:, None]
        steps = kinds * len(decisions[0])
        states = torch.empty(count, steps, dtype=torch.int64, device=place.device)
        for t in range(steps - 1, -1, -1):
            step, decision = self.steps[t % kinds], decisions[t % kinds][t // kinds].view(count, -1)
            oldest = decision.gather(1, place) & ((1 << self.most_bits) - 1)
            place = place + oldest * decision.shape[1]
            states[:, t : t + 1] = step.state[place]
            place = step.previous[place]
        return states


class GpuCosts(NamedTuple):
    """How the integers of the search on a GPU are made."""

    farthest: int  # magnitude of a difference
    shift: int  # of a squared difference
    limits: Limits


class TritonSearch:
    """The search through one trellis on a GPU: the same integers, one program a sequence, one launch a search.

    Costs stay in registers from step to step, a decision is one byte, and the way back is walked in the same launch.
    """

    def __init__(self, symbol_bits: float, emitted: Tensor, costs: GpuCosts) -> None:
        """Take what states emit, emitted [states, dim] int32 of at most 16 bits, on the device of the search."""
        self.costs, (self.count, self.turns) = costs, float(symbol_bits).as_integer_ratio()
        self.states, self.dim = emitted.shape
        self.nodes = self.states >> int(symbol_bits)
        self.tops = emitted.abs().amax(0)
        self.emitted = emitted.T.to(torch.int16).contiguous()  # [dim, states]

    def search(self, values: Tensor, seam: Tensor | None) -> Tensor:
        """Return states [sequences, steps] int64; values [sequences, steps, dim] int32, seam [sequences] int64 or None.

        seam: the node where each path starts and ends.
        """
        from compress.kernels.triton import _viterbi

        count, steps, _ = values.shape
        values, device, limits = values.contiguous(), values.device, self.costs.limits
        states = torch.empty(count, steps, dtype=torch.int64, device=device)
        some = max(1, min(count, LAUNCH_DECISIONS // (steps * self.nodes)))
        decisions = torch.empty(some * steps * self.nodes, dtype=torch.uint8, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for first in range(0, count, some):
                part = slice(first, min(first + some, count))
                _viterbi.paths[(part.stop - first,)](
                    values[part], states if seam is None else seam[part], self.emitted, self.tops, decisions,
                    states[part], steps, COUNT=self.count, TURNS=self.turns, STATES=self.states, DIM=self.dim,
                    FARTHEST=self.costs.farthest,
                    SHIFT=self.costs.shift, MOST=limits.most, KNEE=limits.knee, PERIOD=limits.period, FAR=limits.far,
                    SEAMED=seam is not None, num_warps=warps_of_program(self.nodes),
                )  # fmt: skip
        return states


def warps_of_program(nodes: int) -> int:
    """Return the warps of a program."""
    return max(1, min(MOST_WARPS, nodes // (32 * NODES_PER_THREAD)))


def runs_on_gpu(device: torch.device) -> bool:
    """Return whether kernels can be compiled for this device: a GPU of NVIDIA that is not too old."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
