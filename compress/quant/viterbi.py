"""Find the best path through a bitshift trellis, for many short sequences at once (Viterbi's algorithm).

A state has `state_bits` bits; each step shifts a symbol of `symbol_bits` new bits in from the right and emits the
state's table entry, so that 2^symbol_bits states can precede a state and as many can follow. A sequence is tail-biting:
the state before its first step equals the state after its last, so that it takes exactly steps * symbol_bits bits. The
common node is found by a first search over a window around the seam of the sequence rolled by half (QTIP, arXiv
2406.11235; there the first search covers the whole sequence), the second search is constrained to it.

Costs are integers: squared distances in units of 1 / `unit`, with the decision that led to a cost in its low bits. One
minimum then gives both, nothing depends on how sequences are batched, and every device finds the same path. On a CPU
the steps run compiled (viterbi_compiled.py) where that is possible, else in torch as on a GPU. There, batches are
bounded by `STATES` costs, because a step that stays in the cache is several times faster, and by DECISIONS bytes for
the decisions of all steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.quant import viterbi_compiled

STATES = {"cpu": 1 << 18, "cuda": 1 << 26}  # costs computed in one step: 1 MB on a CPU
DECISIONS = {"cpu": 1 << 26, "cuda": 1 << 32}  # bytes of the decisions of a batch
WINDOW = 32  # steps before and after the seam that the first search covers
RENORMALIZE = 8  # steps between subtractions of the least cost
SHORT = 2**15 - 1  # what values and slopes must be below to be multiplied as 16-bit numbers
NARROW = 4  # bits of a step up to which int32 resolves costs finely enough
HEADROOM = 3.0  # values further than this outside the table's range are clamped for the search


class Search:
    """Paths through the trellis of one table."""

    def __init__(self, table: Tensor, state_bits: int, symbol_bits: int) -> None:
        """Take table [2^state_bits, vector_dim] float32 of what states emit; 2 * symbol_bits <= state_bits."""
        self.table = table
        self.state_bits, self.symbol_bits, self.dim = state_bits, symbol_bits, table.shape[1]
        self.symbols, self.nodes = 1 << symbol_bits, 1 << (state_bits - symbol_bits)  # a node: a state less its oldest
        self.rest = self.nodes // self.symbols
        if not self.rest:
            raise ValueError(f"state_bits {state_bits} is fewer than twice the {symbol_bits} bits of a step")
        device = table.device
        self.limit = table.abs().max().item() + HEADROOM
        largest = self.dim * (self.limit + table.abs().max().item()) ** 2
        memory = -(-state_bits // symbol_bits) + RENORMALIZE  # steps whose costs can add up to a difference
        bits = 29 if symbol_bits <= NARROW else 40
        self.dtype = torch.int32 if symbol_bits <= NARROW else torch.int64
        self.far = 2 << bits  # cost of a forbidden node: more than paths can differ by, and nothing overflows
        self.unit = (2.0 ** (bits - symbol_bits) / (memory * largest)) ** 0.5
        scaled = (table * self.unit).round().to(self.dtype)
        # [dim, new symbol, node before]: the minimum over the oldest symbol then runs over an outer dimension
        emitted = scaled.view(self.nodes, self.symbols, self.dim).permute(2, 1, 0).contiguous()
        self.slope = emitted * (-2 << symbol_bits)
        oldest = torch.arange(self.nodes, device=device, dtype=self.dtype) // self.rest
        self.fixed = (emitted.square().sum(0, dtype=self.dtype) << symbol_bits) + oldest
        self._tables(device)
        self.compiled = None
        if device.type == "cpu" and self.dtype == torch.int32:
            is_short = max(self.limit * self.unit, self.slope.abs().max().item()) < SHORT
            self.compiled = viterbi_compiled.compiled_search(
                state_bits, symbol_bits, self.dim, self.far, RENORMALIZE, is_short
            )

    def _tables(self, device: torch.device) -> None:
        """Make tables for the way back. A node's position in the decisions is new symbol * rest + remaining bits."""
        place = torch.arange(self.nodes, device=device)
        new, low = place // self.rest, place % self.rest
        before = torch.arange(self.symbols, device=device)[:, None] * self.rest + low  # [oldest symbol, place]
        self.state = ((before << self.symbol_bits) | new).flatten()
        self.previous = self._place(before).flatten()

    def _place(self, node: Tensor) -> Tensor:
        return (node & (self.symbols - 1)) * self.rest + (node >> self.symbol_bits)

    def encode(self, values: Tensor) -> Tensor:
        """Return states [sequences, steps] of tail-biting paths close to values [sequences, steps * dim] float32."""
        count, length = values.shape
        steps, device = length // self.dim, values.device
        integers = (values.clamp(-self.limit, self.limit) * self.unit).round_().to(self.dtype)
        integers = integers.view(count, steps, self.dim)
        if self.compiled:
            return self._search(integers, self._seam(integers))
        states = torch.empty(count, steps, dtype=torch.int64, device=device)
        wide = max(1, STATES.get(device.type, STATES["cpu"]) >> self.state_bits)
        tall = max(
            1, DECISIONS.get(device.type, DECISIONS["cpu"]) // (self.dtype.itemsize * self.nodes * (steps + 2 * WINDOW))
        )
        for part in torch.arange(count, device=device).split(min(wide, tall)):
            batch = integers[part[0] : part[-1] + 1]
            states[part[0] : part[-1] + 1] = self._search(batch, self._seam(batch))
        return states

    def _seam(self, batch: Tensor) -> Tensor:
        """Return the node [sequences] of a good path where the last step meets the first."""
        steps = batch.shape[1]
        half = min(WINDOW, steps // 2)
        window = torch.cat([batch[:, steps - half :], batch[:, :half]], 1)
        return self._search(window, None)[:, half - 1] & (self.nodes - 1)

    def _search(self, batch: Tensor, seam: Tensor | None) -> Tensor:
        """Return states [sequences, steps]; seam: the node [sequences] where each path starts and ends, None: any."""
        if self.compiled:
            return self.compiled.search(batch, seam, self.fixed, self.slope)
        return self._search_torch(batch, seam)

    def _search_torch(self, batch: Tensor, seam: Tensor | None) -> Tensor:
        count, steps, _ = batch.shape
        n, rest = self.symbols, self.rest
        cost = torch.zeros(count, self.nodes, dtype=self.dtype, device=batch.device)
        if seam is not None:
            cost.fill_(self.far).scatter_(1, seam[:, None], 0)
        total = torch.empty(count, n, self.nodes, dtype=self.dtype, device=batch.device)
        clean = torch.empty(count, n, rest, dtype=self.dtype, device=batch.device)
        decisions = torch.empty(steps, count, n, rest, dtype=self.dtype, device=batch.device)
        for t in range(steps):
            torch.add(cost[:, None], self.fixed, out=total)
            for v in range(self.dim):
                total.addcmul_(self.slope[v], batch[:, t, v, None, None])
            torch.amin(total.view(count, n, n, rest), 2, out=decisions[t])
            torch.bitwise_and(decisions[t], -n, out=clean)
            cost.view(count, rest, n).copy_(clean.transpose(1, 2))
            if t % RENORMALIZE == RENORMALIZE - 1:
                cost -= cost.amin(1, keepdim=True)
        end = cost.argmin(1) if seam is None else seam
        return self._trace(decisions.view(steps, count, self.nodes), self._place(end))

    def _trace(self, decisions: Tensor, place: Tensor) -> Tensor:
        """Return states [sequences, steps] of the best paths that end at `place` [sequences]."""
        steps, count, nodes = decisions.shape
        taken = torch.empty(steps, count, 1, dtype=torch.int64, device=decisions.device)
        place = place[:, None]
        for t in range(steps - 1, -1, -1):
            oldest = decisions[t].gather(1, place) & (self.symbols - 1)
            torch.add(place, oldest, alpha=nodes, out=taken[t])
            place = self.previous[taken[t]]
        return self.state[taken[:, :, 0].T]
