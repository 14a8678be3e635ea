"""Change a choice at random and keep it within the budget, by the order and the bytes of entries alone.

`switch_levels` and `trade` are the level switches of EvoPress (arXiv 2410.14649), `round_down` is its start;
`mutate_guided` is ours. Each returns a new choice, or None where chance has led to none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from compress.allocate.problem import Choice, Problem
from compress.allocate.search_state import UnitValues

MAX_FLIPS = 3
MAX_CHANGES = 10  # a mutation between units of different moves has no more
MIN_SHARE_USED = 0.8  # such a mutation uses at least this share of the bytes that it frees
TOURNAMENTS = (1, 4, 16)  # moves: the best of so many random changes is made; 1 is chance alone


class Moves:
    """The moves between entries, with their bytes, and the budget of a choice."""

    def __init__(self, problem: Problem, damages: UnitValues) -> None:
        self.budget = problem.budget
        self.bytes = [[entry.nbytes for entry in unit.entries] for unit in problem.units]
        self.upgrades = [_upgrades(row, damage) for row, damage in zip(self.bytes, damages, strict=True)]
        self.larger = [[[j for j, b in enumerate(row) if b > a] for a in row] for row in self.bytes]
        self.smaller = [[[j for j, b in enumerate(row) if b < a] for a in row] for row in self.bytes]

    def of(self, choice: Sequence[int]) -> int:
        """Return the bytes of a choice."""
        return sum(row[i] for row, i in zip(self.bytes, choice, strict=True))

    def step(self, unit: int, old: int, new: int) -> int:
        """Return the bytes that a unit takes more at entry `new`."""
        return self.bytes[unit][new] - self.bytes[unit][old]

    def higher(self, choice: Sequence[int], units: Sequence[int]) -> list[int]:
        """Return the units that can go an entry up."""
        return [u for u in units if choice[u] + 1 < len(self.bytes[u])]

    def lower(self, choice: Sequence[int], units: Sequence[int]) -> list[int]:
        """Return the units that can go an entry down."""
        return [u for u in units if choice[u] > 0]


def flips(rng: Random) -> int:
    """Draw the number of switches of one mutation: few, mostly."""
    return min(rng.randint(1, MAX_FLIPS), rng.randint(1, MAX_FLIPS))


def groups(problem: Problem, rule: str) -> list[list[int]]:
    """Group the units that may trade: of equal bytes ("size"), of one kind, or all ("none")."""
    grouped: dict[object, list[int]] = {}
    for index, unit in enumerate(problem.units):
        key: object = tuple(entry.nbytes for entry in unit.entries) if rule == "size" else unit.kind
        grouped.setdefault(None if rule == "none" else key, []).append(index)
    return list(grouped.values())


def switch_levels(moves: Moves, parent: Choice, among: Sequence[Sequence[int]], rng: Random) -> Choice | None:
    """Move one unit of a random group an entry down and another up: exactly equal bytes; large groups are likelier."""
    choice = list(parent)
    for _ in range(flips(rng)):
        group = rng.choices(among, weights=[len(g) for g in among])[0]
        down = moves.lower(choice, group)
        if not down:
            continue
        giver = rng.choice(down)
        freed = moves.step(giver, choice[giver] - 1, choice[giver])
        up = [u for u in moves.higher(choice, group) if moves.step(u, choice[u], choice[u] + 1) == freed]
        if not up:
            continue
        taker = rng.choice(up)  # may be the giver, if its entries are equally far apart: nothing is changed then
        choice[giver] -= 1
        choice[taker] += 1
    return _new(choice, parent)


def trade(moves: Moves, parent: Choice, rng: Random) -> Choice | None:
    """Move random units an entry up, then random ones down until the budget is met, whatever their bytes."""
    choice, units = list(parent), range(len(parent))
    added = freed = changes = 0
    for _ in range(flips(rng)):
        up = moves.higher(choice, units)
        if not up:
            break
        taker = rng.choice(up)
        choice[taker] += 1
        added += moves.step(taker, choice[taker] - 1, choice[taker])
        changes += 1
    over = moves.of(choice) - moves.budget
    while over > 0:
        giver = rng.choice(moves.lower(choice, units))
        choice[giver] -= 1
        step = moves.step(giver, choice[giver], choice[giver] + 1)
        over, freed, changes = over - step, freed + step, changes + 1
        if changes > MAX_CHANGES:
            return None
    return None if freed and added / freed < MIN_SHARE_USED else _new(choice, parent)


def round_down(moves: Moves, rng: Random) -> Choice:
    """Take the smallest entry (the same index for all units) that fills the budget; move units down until it is met."""
    last = max(len(row) for row in moves.bytes) - 1
    uniform = [[min(index, len(row) - 1) for row in moves.bytes] for index in range(last + 1)]
    choice = next((at for at in uniform if moves.of(at) >= moves.budget), uniform[last])
    over = moves.of(choice) - moves.budget
    while over > 0:
        giver = rng.choice(moves.lower(choice, range(len(choice))))
        choice[giver] -= 1
        over -= moves.step(giver, choice[giver], choice[giver] + 1)
    return tuple(choice)


def mutate_guided(moves: Moves, parent: Choice, values: UnitValues, rng: Random) -> Choice | None:
    """Move units up to any entry, others down until the budget is met, then up again while there is room.

    What looks best by `values` (of each unit, a value of each entry, less is better) wins tournaments of random size.
    """
    choice, size = list(parent), rng.choice(TOURNAMENTS)
    room = moves.budget - moves.of(choice)
    for _ in range(flips(rng)):
        room -= _move(moves, choice, values, (rng, size, moves.larger))
    for _ in range(MAX_CHANGES):
        if room >= 0:
            return _new(fill(moves, choice, values), parent)
        room -= _move(moves, choice, values, (rng, size, moves.smaller))
    return None


def _move(moves: Moves, choice: list[int], values: UnitValues, how: tuple[Random, int, list[list[list[int]]]]) -> int:
    """Move one unit to the winner of a tournament by value a byte, if there is any; returns the bytes added.

    how: the source of chance, how many moves compete, and where each entry may move to.
    """
    rng, size, targets = how
    best: tuple[float, int, int] | None = None
    for _ in range(size):
        unit = int(rng.random() * len(choice))
        now = choice[unit]
        if reachable := targets[unit][now]:
            new = reachable[int(rng.random() * len(reachable))]
            row = values[unit]
            move = ((row[new] - row[now]) / abs(moves.step(unit, now, new)), unit, new)
            best = move if best is None else min(best, move)
    if best is None:
        return 0
    _, unit, new = best
    step = moves.step(unit, choice[unit], new)
    choice[unit] = new
    return step


def fill(moves: Moves, choice: Sequence[int], values: UnitValues) -> Choice:
    """Return the choice with upgrades until none can be afforded; what gains most by `values` comes first."""
    upgraded = list(choice)
    room = moves.budget - moves.of(upgraded)
    while best := min(_affordable(moves, upgraded, values, room), default=None):
        _, unit, new = best
        room -= moves.step(unit, upgraded[unit], new)
        upgraded[unit] = new
    return tuple(upgraded)


def _affordable(moves: Moves, choice: Sequence[int], values: UnitValues, room: int) -> Iterator[tuple[float, int, int]]:
    for unit, now in enumerate(choice):
        for new in moves.upgrades[unit][now]:
            if moves.step(unit, now, new) > room:
                break
            yield values[unit][new] - values[unit][now], unit, new


def _upgrades(nbytes: Sequence[int], damages: Sequence[float]) -> list[list[int]]:
    """Return for every entry those with more bytes and less damage, the smallest first."""
    count = range(len(nbytes))
    better = [[j for j in count if nbytes[j] > nbytes[i] and damages[j] < damages[i]] for i in count]
    return [sorted(row, key=nbytes.__getitem__) for row in better]


def _new(choice: Sequence[int], parent: Choice) -> Choice | None:
    return None if tuple(choice) == parent else tuple(choice)
