"""The kernel of compress/quant/viterbi.py: imported at the first launch, because it needs triton.

A node is the last bits of a state, low * SYMBOLS + the newest symbol. It is reached from the nodes oldest * REST + low
by the states oldest * NODES + node, so that for one oldest symbol the entries of all states are one run of the table.
"""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _by_oldest(cost, SYMBOLS: tl.constexpr, SYMBOL_BITS: tl.constexpr, REST: tl.constexpr):
    """Costs of the nodes [REST, SYMBOLS] -> for each oldest symbol those of the nodes that begin with it, [REST]."""
    parts = (tl.permute(tl.reshape(cost, (SYMBOLS, REST)), (1, 0)),)
    for level in tl.static_range(SYMBOL_BITS):
        zeros = ()
        ones = ()
        for i in tl.static_range(1 << level):
            if level + 1 < SYMBOL_BITS:
                zero, one = tl.split(tl.reshape(parts[i], (REST, SYMBOLS >> (level + 1), 2)))
            else:
                zero, one = tl.split(parts[i])
            zeros = zeros + (zero,)
            ones = ones + (one,)
        parts = zeros + ones
    return parts


@triton.jit
def _added(entry, value, top, HALF: tl.constexpr, FARTHEST: tl.constexpr, SHIFT: tl.constexpr, MOST: tl.constexpr,
           KNEE: tl.constexpr):  # fmt: skip
    """Return what entries add to the cost for a value: squared differences less the least that the value allows."""
    difference = tl.minimum(tl.maximum(entry - value, -FARTHEST - 1), FARTHEST)
    outside = tl.maximum(tl.maximum(value, -value) - top, 0)
    square = ((difference * difference + HALF) >> SHIFT) - ((outside * outside + HALF) >> SHIFT)
    if KNEE < MOST:
        square = tl.minimum(square, (square + 7 * KNEE) >> 3)
    return tl.minimum(square, MOST)


@triton.jit
def _step(cost, t, values, emitted, tops, decisions, BITS: tl.constexpr, OLDEST_BITS: tl.constexpr,
          HELD_BITS: tl.constexpr, REST: tl.constexpr, DIM: tl.constexpr, FARTHEST: tl.constexpr, SHIFT: tl.constexpr,
          MOST: tl.constexpr, KNEE: tl.constexpr):  # fmt: skip
    """Return the costs of the nodes behind step t [REST, symbols], of those before it; store the decisions.

    BITS are shifted in, OLDEST_BITS shifted out by the next step. HELD_BITS of a cost are kept free for the latter.
    """
    SYMBOLS: tl.constexpr = 1 << BITS
    OLDEST: tl.constexpr = 1 << OLDEST_BITS
    NODES: tl.constexpr = REST * SYMBOLS
    HALF: tl.constexpr = 1 << SHIFT >> 1
    node = tl.arange(0, REST)[:, None] * SYMBOLS + tl.arange(0, SYMBOLS)[None, :]
    before = _by_oldest(cost << HELD_BITS, OLDEST, OLDEST_BITS, REST)
    best = tl.full((REST, SYMBOLS), 0x7FFFFFFF, tl.int32)
    for oldest in tl.static_range(OLDEST):
        added = tl.zeros((REST, SYMBOLS), tl.int32)
        for v in tl.static_range(DIM):
            entry = tl.load(emitted + (v * OLDEST + oldest) * NODES + node).to(tl.int32)
            value, top = tl.load(values + t * DIM + v), tl.load(tops + v)
            added += _added(entry, value, top, HALF, FARTHEST, SHIFT, MOST, KNEE)
        if DIM > 1:
            added = tl.minimum(added, MOST)
        best = tl.minimum(best, (before[oldest] + oldest)[:, None] + (added << HELD_BITS))
    tl.store(decisions + node, (best & (OLDEST - 1)).to(tl.uint8))
    return best >> HELD_BITS


@triton.jit
def _back(end, decisions, state, BITS: tl.constexpr, REST: tl.constexpr):
    """Store the state of a step, which shifts BITS in, before the node `end`, and return the node before it."""
    oldest = tl.load(decisions + end, cache_modifier=".cg").to(tl.int32)
    tl.store(state, (oldest * (REST << BITS) + end).to(tl.int64))
    return oldest * REST + (end >> BITS)


@triton.constexpr_function
def new_bits(i: int, count: int, turns: int) -> int:
    """Bits that a step shifts in whose number leaves i, divided by turns; turns steps have count bits."""
    i %= turns
    return (i + 1) * count // turns - i * count // turns


@triton.constexpr_function
def count_nodes(i: int, count: int, turns: int, states: int) -> int:
    """Nodes before step i."""
    i %= turns
    return states >> ((i + 1) * count // turns - i * count // turns)


@triton.jit(do_not_specialize=["steps"])
def paths(values, seams, emitted, tops, decisions, states, steps,
          COUNT: tl.constexpr, TURNS: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, FARTHEST: tl.constexpr,
          SHIFT: tl.constexpr, MOST: tl.constexpr, KNEE: tl.constexpr, PERIOD: tl.constexpr, FAR: tl.constexpr,
          SEAMED: tl.constexpr):  # fmt: skip
    """Write states [sequences, steps] int64 of the best path of each sequence; a program takes one.

    TURNS steps shift COUNT bits in, as `new_bits` divides them, and so on in turn.
    values [sequences, steps, DIM] int32, seams [sequences] int64: the node where a path starts and ends (SEAMED).
    emitted [DIM, states] int16, tops [DIM] int32: the largest of their magnitudes; decisions: space of uint8
    [sequences, steps, nodes].
    """
    NODES: tl.constexpr = count_nodes(0, COUNT, TURNS, STATES)  # before the first step; there are no more elsewhere
    LAST_BITS: tl.constexpr = new_bits(TURNS - 1, COUNT, TURNS)  # no step shifts more in
    REST: tl.constexpr = NODES >> LAST_BITS
    sequence = tl.program_id(0).to(tl.int64)
    values += sequence * steps * DIM
    decisions += sequence * steps * NODES
    states += sequence * steps
    cost = tl.zeros((REST, 1 << LAST_BITS), tl.int32)
    end = tl.zeros((), tl.int32)
    if SEAMED:
        end = tl.load(seams + sequence).to(tl.int32)
        node = tl.arange(0, REST)[:, None] * (1 << LAST_BITS) + tl.arange(0, 1 << LAST_BITS)[None, :]
        cost = tl.where(node == end, 0, FAR)
    for turn in range(0, steps // TURNS):
        for i in tl.static_range(TURNS):
            t = turn * TURNS + i
            cost = _step(
                cost, t, values, emitted, tops, decisions + t * NODES, new_bits(i, COUNT, TURNS),
                new_bits(i + 1, COUNT, TURNS), LAST_BITS,
                count_nodes(i + 1, COUNT, TURNS, STATES) >> new_bits(i, COUNT, TURNS), DIM, FARTHEST, SHIFT, MOST,
                KNEE,
            )  # fmt: skip
            if t % PERIOD == PERIOD - 1:
                cost -= tl.min(tl.min(cost, 1), 0)
    if not SEAMED:
        # argmin of what `reshape` returns finds another node with Triton 3.6 on a GPU, the interpreter does not show it
        node = tl.arange(0, REST)[:, None] * (1 << LAST_BITS) + tl.arange(0, 1 << LAST_BITS)[None, :]
        least = tl.min(tl.min(cost, 1), 0)
        end = tl.min(tl.min(tl.where(cost == least, node, NODES), 1), 0)
    tl.debug_barrier()  # all threads have stored their decisions
    for turn in range(0, steps // TURNS):
        for i in tl.static_range(TURNS):
            t = steps - 1 - turn * TURNS - i
            end = _back(
                end, decisions + t * NODES, states + t, new_bits(TURNS - 1 - i, COUNT, TURNS),
                count_nodes(TURNS - i, COUNT, TURNS, STATES) >> new_bits(TURNS - 1 - i, COUNT, TURNS),
            )  # fmt: skip
