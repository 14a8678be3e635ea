"""Solve the multiple-choice knapsack greedily on convex hulls, with a lower bound that says how good the answer is.

Of each unit the entries that no other dominates are kept, and of those the lower convex hull of damage over bytes. The
linear relaxation takes the segments of all hulls, steepest first: the prefix of them that fits is optimal for the bytes
that it takes, and the first that does not fit gives Dantzig's bound for all choices. The rest of the budget, less than
that segment, is then filled: with segments that fit (a unit whose segment does not fit is out), with any other upgrade
by damage per byte, and with exchanges of one upgrade for one downgrade.

A greedy filling alone may do worse with more room. So it is tried at a fixed list of rooms between one prefix and the
next, each time against the result of the room before, and the rest goes to the cheapest upgrades one by one. A larger
budget then never gives more damage, and no upgrade that fits is left.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_ROOMS_TRIED = 64
ENTRIES_TRIED = 4_000_000  # about, in all rooms together
MAX_EXCHANGES = 50
MAX_ENTRIES_TO_EXCHANGE = 20_000  # larger tables have a bound so close that exchanges are not worth their sorting


@dataclass(frozen=True)
class EntryTable:
    """The entries of all units, padded: one row a unit, ascending in bytes."""

    nbytes: Ints  # [units, entries]; padding: that of the last entry
    damage: Floats  # [units, entries]; padding: inf
    index: Ints  # [units, entries] into the unit's own entries

    @cached_property
    def rows(self) -> Ints:
        return np.arange(len(self.nbytes))

    def cost(self, at: Ints) -> int:
        """Return the bytes of a choice, given as columns [units]."""
        return int(self.nbytes[self.rows, at].sum())

    def loss(self, at: Ints) -> float:
        """Return the damage of a choice."""
        return float(self.damage[self.rows, at].sum())

    def drop_dominated(self) -> EntryTable:
        """Keep only entries with less damage than all that take as many bytes or fewer; damage falls strictly."""
        before = np.full_like(self.damage, np.inf)
        before[:, 1:] = np.minimum.accumulate(self.damage, 1)[:, :-1]
        keep = self.damage < before
        order = np.argsort(~keep, axis=1, kind="stable")[:, : int(keep.sum(1).max(initial=1))]
        kept = np.take_along_axis(keep, order, 1)
        nbytes = np.where(kept, np.take_along_axis(self.nbytes, order, 1), 0)
        damage = np.where(kept, np.take_along_axis(self.damage, order, 1), np.inf)
        return EntryTable(np.maximum.accumulate(nbytes, 1), damage, np.take_along_axis(self.index, order, 1))


@dataclass(frozen=True)
class Segments:
    """The steps along the hulls, steepest first; those of one unit in its order."""

    unit: Ints
    to: Ints  # column
    nbytes: Ints  # more than before the step
    rate: Floats  # damage taken away a byte

    def __getitem__(self, selected: NDArray[np.bool_] | Ints | slice) -> Segments:
        return Segments(self.unit[selected], self.to[selected], self.nbytes[selected], self.rate[selected])


def greedy(table: EntryTable, budget: int) -> tuple[Ints, float]:
    """Return columns [units] within the budget, and a lower bound of the damage of any choice within it.

    The table has no dominated entries, and its first column is within the budget.
    """
    segments = hulls(table)
    room = budget - int(table.nbytes[:, 0].sum())
    spent = np.cumsum(segments.nbytes)
    count = int(np.searchsorted(spent, room, side="right"))
    at = np.zeros(len(table.nbytes), np.int64)
    at[segments.unit[:count]] = segments.to[:count]  # the last of a unit counts
    if count == len(spent):
        return at, table.loss(at)
    left = room - (int(spent[count - 1]) if count else 0)
    bound = table.loss(at) - float(segments.rate[count]) * left
    at = _fill(table, segments[count:], at, left)
    return at, min(bound, table.loss(at))


def hulls(table: EntryTable) -> Segments:
    """Return the steps from each unit's smallest entry to its best along the lower convex hull."""
    units, entries = table.nbytes.shape
    at = np.zeros(units, np.int64)
    before = np.full(units, np.inf)
    steps = []
    for step in range(entries - 1):
        more, gain = _upgrades(table, at)
        rate = np.where(gain > 0, gain / np.maximum(more, 1), 0.0)
        best = rate.max(1)
        to = entries - 1 - np.argmax(rate[:, ::-1] == best[:, None], axis=1)  # of equal ones the furthest
        best = np.minimum(best, before)  # rounding does not turn the order within a unit
        on = np.flatnonzero(best > 0)
        if not len(on):
            break
        steps.append((on, to[on], more[on, to[on]], best[on], np.full(len(on), step)))
        at[on], before[on] = to[on], best[on]
    if not steps:
        none = np.zeros(0, np.int64)
        return Segments(none, none, none, np.zeros(0))
    unit, column, nbytes, rates, number = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    return Segments(unit, column, nbytes, rates)[np.lexsort((number, unit, -rates))]


def _upgrades(table: EntryTable, at: Ints) -> tuple[Ints, Floats]:
    """Return bytes more and damage less [units, entries] of every entry than the chosen one; padding gains -inf."""
    here = table.rows, at
    return table.nbytes - table.nbytes[here][:, None], table.damage[here][:, None] - table.damage


def _fill(table: EntryTable, segments: Segments, base: Ints, room: int) -> Ints:
    """Return the best choice found with at most `room` bytes more than `base`, a prefix followed by `segments`.

    Never worse with more room: the rooms tried depend on the base alone, and between them upgrades come in an order
    that does not depend on the room.
    """
    start, state = table.cost(base), base
    for tried in _rooms(table, base, int(segments.nbytes[0])):
        if tried > room:
            break
        budget = start + int(tried)
        state = _grow(table, state, budget)
        other = _exchange(table, _buy(table, segments, base, budget), budget)
        if table.loss(other) < table.loss(state):
            state = other
    return _grow(table, state, start + room)


def _rooms(table: EntryTable, base: Ints, width: int) -> Ints:
    """Return ascending numbers of bytes below `width`: those of single upgrades of the base, and even steps."""
    count = int(np.clip(ENTRIES_TRIED // table.damage.size, 4, MAX_ROOMS_TRIED)) // 2
    more, gain = _upgrades(table, base)
    takes = np.unique(more[(gain > 0) & (more < width)])
    if len(takes) > count:
        takes = takes[np.linspace(0, len(takes) - 1, count).astype(np.int64)]
    return np.unique(np.concatenate([takes, np.arange(1, count) * width // count]))


def _grow(table: EntryTable, at: Ints, budget: int) -> Ints:
    """Take the cheapest upgrade of all, whatever it gains, again and again while it fits."""
    at, room = at.copy(), budget - table.cost(at)

    def following(unit: int) -> int:
        column = at[unit] + 1
        ends = column == table.damage.shape[1] or table.damage[unit, column] == np.inf
        return room + 1 if ends else int(table.nbytes[unit, column] - table.nbytes[unit, at[unit]])

    after = np.minimum(at + 1, table.damage.shape[1] - 1)
    more = table.nbytes[table.rows, after] - table.nbytes[table.rows, at]  # 0 where there is none
    queue = [(int(more[unit]), int(unit)) for unit in np.flatnonzero((more > 0) & (more <= room))]
    heapq.heapify(queue)
    while queue and queue[0][0] <= room:
        takes, unit = heapq.heappop(queue)
        room -= takes
        at[unit] += 1
        if (takes := following(unit)) <= room:
            heapq.heappush(queue, (takes, unit))
    return at


def _buy(table: EntryTable, segments: Segments, base: Ints, budget: int) -> Ints:
    """Take segments that fit, in their order, then whatever other upgrades fit."""
    at = base.copy()
    _take(at, segments, budget - table.cost(at))
    return upgrade(table, at, budget)


def upgrade(table: EntryTable, at: Ints, budget: int) -> Ints:
    """Upgrade to any entry that fits, those first that take away most damage a byte, until none fits."""
    at = at.copy()
    while True:
        room = budget - table.cost(at)
        upgrades = offers(table, at, room)
        if not len(upgrades.unit):
            return at
        _take(at, upgrades[np.sort(np.unique(upgrades.unit, return_index=True)[1])], room)  # of each unit the best


def offers(table: EntryTable, at: Ints, room: int) -> Segments:
    """Return all single upgrades within `room` bytes, those first that take away most damage a byte."""
    more, gain = _upgrades(table, at)
    unit, column = np.nonzero((gain > 0) & (more <= room))
    takes = more[unit, column]
    rate = gain[unit, column] / np.maximum(takes, 1)  # 0 bytes more: in tables of the 0/1 program
    return Segments(unit, column, takes, rate)[np.lexsort((column, unit, -rate))]


def _take(at: Ints, segments: Segments, room: int) -> None:
    """Move `at` along segments in order while they fit; the first of a unit that does not fit ends that unit."""
    last = len(segments.unit)
    while len(segments.unit):
        position = np.arange(len(segments.unit))
        misfits = position[segments.nbytes > room][::-1]
        end = np.full(len(at), last)
        end[segments.unit[misfits]] = misfits  # the first of each unit, being the last that is written
        segments = segments[position < end[segments.unit]]
        spent = np.cumsum(segments.nbytes)
        count = int(np.searchsorted(spent, room, side="right"))
        at[segments.unit[:count]] = segments.to[:count]
        room -= int(spent[count - 1]) if count else 0
        segments = segments[count:]


def _exchange(table: EntryTable, at: Ints, budget: int) -> Ints:
    """Move one unit up and another down, the pair that lowers damage most, again and again; then upgrade what fits."""
    if table.damage.size > MAX_ENTRIES_TO_EXCHANGE:
        return at
    for _ in range(MAX_EXCHANGES):
        more, gain = _upgrades(table, at)
        up, down = np.nonzero(gain > 0), np.nonzero((gain < 0) & (gain > -np.inf))
        if not len(up[0]) or not len(down[0]):
            return at
        order = np.argsort(-more[down], kind="stable")  # by what a downgrade saves
        down = down[0][order], down[1][order]
        saves, loses = -more[down], -gain[down]
        # for each upgrade: among the downgrades that save enough, the one that loses least
        least = np.minimum.accumulate(loses[::-1])[::-1]
        which = np.arange(len(loses))
        cheapest = np.maximum.accumulate(np.where(loses == least, len(loses) - which, 0)[::-1])[::-1]
        first = np.searchsorted(saves, more[up] - (budget - table.cost(at)), side="left")
        possible = first < len(saves)
        partner = len(loses) - cheapest[np.minimum(first, len(saves) - 1)]
        wins = np.where(possible & (down[0][partner] != up[0]), gain[up] - loses[partner], -np.inf)
        best = int(np.argmax(wins))
        if not wins[best] > 1e-12 * gain[up][best]:
            return at
        at = at.copy()
        at[up[0][best]], at[down[0][partner[best]]] = up[1][best], down[1][partner[best]]
        at = upgrade(table, at, budget)
    return at
