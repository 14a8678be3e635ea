"""Price options in units or in time, for targets that are shares of what the original takes.

`75% units` leaves three quarters of the units, whatever their sizes: what is stored costs 1, what is dropped nothing.
`70% time` leaves linears that take 70% of the original's time at one token, measured on this machine. An allocator sees
costs in the place of bytes; all else, and the search, stays the same.

Every linear is timed at every option, and the table kept with the measurements:

    DIR/times.json     {"threads": 2, "seconds": {"<shape> <how it is stored>": seconds, ...}}

Linears of one shape that are stored alike take the same time, so that a model has a few entries. Times are medians of
many products, in which all entries take turns, so that none finds its weight in a cache for having just been there. An
original linear is timed as the runtime runs it beside packed ones.
What is not in a linear (attention, norms, the head) is not counted, and a dropped one takes no time. Of the experts of
a block a token reads some: models with experts are refused.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from compress.allocate.prepare_options import Options
from compress.allocate.problem import Problem, Unit
from compress.allocate.sensitivity import Measurements
from compress.allocate.table import SensitivityTable, assemble
from compress.errors import BudgetError, NotMeasuredError, RecipeError
from compress.formats import stored
from compress.recipe.schema import KEEP, Target
from compress.runtime.linear import PackedLinear
from compress.runtime.plain_linear import compile_linears
from compress.storage.checkpoint import read_json, write_text
from compress.types import LinearSpec, PackedWeight

FILE = "times.json"
TURNS, WARM_TURNS = 300, 20  # medians of so many products, and how many are not counted before
NANO = 1_000_000_000


def problem(store: Measurements, table: SensitivityTable, target: Target) -> tuple[SensitivityTable, Problem, int]:
    """Return what `price` does for a target in units or in time, and what the original costs."""
    costs = time_units(store, table) if target.unit == "%time" else count_units(table.units)
    return *price(table, target, costs), costs.original


@dataclasses.dataclass(frozen=True)
class Costs:
    """What every entry of a table costs, and the original."""

    entries: Sequence[Sequence[int]]  # of each unit, in the order of its entries
    original: int


def count_units(units: Sequence[Unit]) -> Costs:
    """Return 1 for a unit of which something is stored, 0 for one that is dropped."""
    return Costs([[int(entry.nbytes > 0) for entry in unit.entries] for unit in units], len(units))


def price(table: SensitivityTable, target: Target, costs: Costs) -> tuple[SensitivityTable, Problem]:
    """Return the table with entries in the order of their costs, and the allocation of a target's share of them.

    Raises BudgetError for a target that no choice reaches.
    """
    units, priced = list[Unit](), list[Unit]()
    for unit, row in zip(table.units, costs.entries, strict=True):
        order = sorted(range(len(row)), key=lambda i: (row[i], unit.entries[i].nbytes))
        entries = tuple(unit.entries[i] for i in order)
        units.append(dataclasses.replace(unit, entries=entries))
        prices = tuple(dataclasses.replace(unit.entries[i], nbytes=row[i]) for i in order)
        priced.append(dataclasses.replace(unit, entries=prices))
    made = Problem(tuple(priced), int(target.value / 100 * costs.original + 1e-9))
    if made.budget < made.least:
        least = 100 * made.least / max(1, costs.original)
        raise BudgetError(
            f"the target {target.text} is below the least that the options allow, {least:.1f}%; raise it, or offer "
            f"{'{method: drop}' if target.unit == '%units' else 'faster options'}"
        )
    made = dataclasses.replace(made, budget=min(made.budget, made.most))
    return dataclasses.replace(table, units=tuple(units)), made


def check(opened: Options) -> None:
    """Judge a target that is a share as far as it can be told before anything is measured.

    Raises RecipeError for a model with experts where it is one of time, BudgetError for one that no choice reaches.
    """
    target = opened.allocation.target
    if target is None or not target.is_share:
        return
    sizes = assemble(opened, {}, {}, 0, {})
    if target.unit == "%time":
        _check_linears(sizes)
    else:
        price(sizes, target, count_units(sizes.units))


def _check_linears(table: SensitivityTable) -> None:
    if any(unit.is_expert or unit.is_table for unit in table.units):
        raise RecipeError("a target in time is for linears that every token reads: no experts, and no allocate.tables")


def time_units(store: Measurements, table: SensitivityTable) -> Costs:
    """Return nanoseconds of one token of every entry, and of the original's linears; tables are not timed.

    Raises RecipeError for a model with experts, NotMeasuredError where the job may not measure.
    """
    _check_linears(table)
    members = {member.name: member for group in store.groups for member in group.members}
    numbers = {name: number for number, name in enumerate(table.options)}
    keys = {(name, o): _key(store, members[name], o) for name in members for o in range(len(store.opened.names))}
    examples = {key: at for at, key in keys.items() if key is not None}
    known = _read_or_time(store, examples)

    def cost(names: tuple[str, ...], option: int | None) -> int:
        return sum(int(NANO * known[_key(store, members[name], option) or ""]) for name in names)

    entries = [[cost(unit.members, numbers[entry.option]) for entry in unit.entries] for unit in table.units]
    return Costs(entries, sum(cost(unit.members, None) for unit in table.units))


def _key(store: Measurements, spec: LinearSpec, option: int | None) -> str | None:
    """Return what decides the time of a linear at an option (None: as it is); None where it has no such option."""
    shape = f"{spec.shape[0]}x{spec.shape[1]}"
    if option is None or store.opened.names[option] == KEEP:
        return f"{shape} as it is"
    layer = store.opened.levels[spec.name].get(str(option))
    if layer is None:
        return None
    return f"{shape} nothing" if not layer.nbytes else f"{shape} {json.dumps(stored.to_dict(layer.stored))}"


def _read_or_time(store: Measurements, examples: dict[str, tuple[str, int]]) -> dict[str, float]:
    """Return seconds by key, measured now where the folder does not have all of them for this number of threads."""
    path, threads = store.database.folder / FILE, torch.get_num_threads()
    content: Any = read_json(path) if path.is_file() else {}
    shapes = {key.partition(" ")[0] for key in examples}
    wanted = {*examples, *(f"{shape} as it is" for shape in shapes)}
    seconds: dict[str, float] = content.get("seconds", {}) if content.get("threads") == threads else {}
    if wanted <= seconds.keys():
        return seconds
    if not store.opened.job.measures:
        raise NotMeasuredError(f"{store.database.folder} has no times")
    store.progress("timing linears", 0, 0)
    specs = {member.name: member for group in store.groups for member in group.members}
    linears = {key: _linear(store, specs, key, examples.get(key)) for key in sorted(wanted)}
    seconds = _time(linears, store.skeleton.dtype)
    write_text(path, json.dumps({"threads": threads, "seconds": seconds}, indent=1) + "\n")
    return seconds


def _linear(
    store: Measurements, specs: dict[str, LinearSpec], key: str, example: tuple[str, int] | None
) -> nn.Module | None:
    """Return a linear that takes the time of a key; None: it takes none."""
    rows, columns = map(int, key.partition(" ")[0].split("x"))
    if key.endswith(" nothing"):
        return None
    if key.endswith(" as it is") or example is None:
        holder = nn.Sequential(nn.Linear(columns, rows, bias=False, dtype=store.skeleton.dtype)).requires_grad_(False)
        compile_linears(holder)
        return holder[0]
    name, option = example
    weight: PackedWeight = store.database.read_packed(specs[name].block, name, option)
    return PackedLinear.from_packed(weight)


@torch.no_grad()
def _time(linears: dict[str, nn.Module | None], dtype: torch.dtype) -> dict[str, float]:
    """Return the median seconds of a product of one token of this type with each of these linears."""
    calls: dict[str, Callable[[], object]] = {}
    for key, linear in linears.items():
        if linear is not None:
            x = torch.randn(1, 1, int(key.partition(" ")[0].split("x")[1])).to(dtype)
            calls[key] = lambda linear=linear, x=x: linear(x)  # type: ignore[misc]
    turns: dict[str, list[float]] = {key: [] for key in calls}
    for turn in range(TURNS + WARM_TURNS):
        for key, call in calls.items():
            begun = time.perf_counter()
            call()
            if turn >= WARM_TURNS:
                turns[key].append(time.perf_counter() - begun)
    return {key: statistics.median(turns[key]) if key in turns else 0.0 for key in linears}
