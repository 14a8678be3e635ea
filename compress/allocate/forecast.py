"""What can be said of a recipe that leaves bits open before anything is measured.

What has been measured already is answered from; an allocator that needs no data is asked; else there are the sizes that
the options would give, and what measuring would take.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from compress import plugins
from compress.allocate import groups, prepare_options, session
from compress.allocate.problem import Entry, Unit
from compress.allocate.session import JOINT
from compress.allocate.table import Table
from compress.allocate.variants import FIXED
from compress.errors import NotMeasuredError
from compress.progress import Progress
from compress.recipe.schema import Allocation, Target
from compress.run import prepare
from compress.run.job import Job


@dataclass(frozen=True)
class Unmeasured:
    """What measuring would take, and the sizes at hand."""

    options: int
    linears: int  # that are measured at each option; 0: of the cache alone
    tokens: int  # of calibration
    command: str  # of the command line, which measures and keeps what is missing
    target: str
    uniform: tuple[dict[str, Any], ...] = ()  # of each option everywhere: option, bpw, nbytes of the whole model


def decided(asked: Job, progress: Progress) -> Job | Unmeasured:
    """The job with its allocation made, as `allocation.decided`, or what is missing for that; nothing is measured.

    Raises RecipeError without a target, BudgetError for one that no choice can meet.
    """
    asked = dataclasses.replace(asked, measures=False)
    try:
        return session.decided(asked, progress)
    except NotMeasuredError:
        pass
    wanted = asked.recipe.allocate
    assert wanted is not None and wanted.target is not None, "the recipe was checked"
    if not asked.recipe.packs:
        prepared = prepare.prepare_all(asked, [asked.recipe], every=True)[0]
        return Unmeasured(0, 0, prepared.samples * prepared.seq_len, "quantize", wanted.target.text)
    opened = prepare_options.options(asked)
    found = sizes(opened)
    plain = wanted.target.unit != "kl" and wanted.context is None
    if plain:
        found.problem(wanted.target)
        if not plugins.load("allocate", wanted.method).needs(wanted.config):
            return _without_data(asked, wanted, wanted.target, found)
    prepared = opened.prepared
    joint = JOINT in plugins.load("allocate", wanted.method).needs(wanted.config)
    return Unmeasured(
        len(found.options),
        sum(FIXED not in levels for levels in opened.levels.values()),
        prepared.samples * prepared.seq_len,
        "measure" if plain and not joint else "allocate",
        wanted.target.text,
        tuple(
            {"option": name, "bpw": found.bpw(choice), "nbytes": found.nbytes(choice)}
            for name in found.options
            if (choice := found.uniform(name)) is not None
        ),
    )


def _without_data(asked: Job, wanted: Allocation, target: Target, found: Table) -> Job:
    """The answer of an allocator that looks at sizes alone."""
    choice = plugins.load("allocate", wanted.method).allocate(found.problem(target), wanted.config, None).choice
    return dataclasses.replace(asked, recipe=prepare_options.chosen(asked.recipe, found.levels(choice)))


def sizes(opened: prepare_options.Options) -> Table:
    """The table without damages."""
    levels, plan = opened.levels, opened.prepared.plan
    specs = {layer.spec.name: layer.spec for found in levels.values() for layer in found.values()}
    free = [spec for name, spec in specs.items() if FIXED not in levels[name]]
    made = []
    for group in groups.groups(opened.prepared.skeleton, free, opened.allocation.units):
        numel = sum(member.numel for member in group.members)
        entries = []
        for option in prepare_options.offered(opened, group.members):
            nbytes = prepare_options.nbytes(opened, group.members, option)
            entries.append(Entry(opened.names[option], nbytes, 8 * nbytes / numel, {}))
        entries.sort(key=lambda entry: entry.nbytes)
        first, names = group.members[0], tuple(member.name for member in group.members)
        made.append(Unit(group.name, names, first.block, numel, tuple(entries), first.is_expert, {}))
    fixed = [found[FIXED] for found in levels.values() if FIXED in found]
    return Table(
        tuple(made),
        tuple(opened.names),
        sum(layer.nbytes for layer in fixed),
        sum(layer.spec.numel for layer in fixed),
        sum(plan.kept_nbytes.values()),
        opened.prepared.skeleton.checkpoint.nbytes,
        opened.prepared.samples * opened.prepared.seq_len,
    )
