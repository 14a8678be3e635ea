"""Forecast an allocation before anything is measured.

What has been measured already gives the answer, and so does an allocator that needs no data; else there are the sizes
that the options would give, and what measuring would take, from timing one block.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from compress import plugins
from compress.allocate import cost, decide, prepare_options, table
from compress.allocate.problem import JOINT
from compress.errors import NotMeasuredError
from compress.progress import Progress
from compress.run import prepare
from compress.run.job import Job


@dataclass(frozen=True)
class Unmeasured:
    """The work that measuring would take, and the sizes at hand."""

    options: int
    linears: int  # that are measured at each option; 0: of the cache alone
    tokens: int  # of calibration
    command: str  # of the command line, which measures and keeps what is missing
    target: str
    seconds: float = 0.0  # of quantizing every linear at every option, from timing one block
    estimator: str = ""  # what damages will be measured by, on how many samples and in what time; or what is refused
    uniform: tuple[dict[str, Any], ...] = ()  # of each option everywhere: option, bpw, nbytes of the whole model
    tables: tuple[str, ...] = ()  # outside of the blocks, that the target counts and whose options are measured, too
    table_options: int = 0  # of each of them


def forecast(job: Job, progress: Progress) -> Job | Unmeasured:
    """Return the job with its allocation made, as decide.py does, or what is missing for that; measure nothing.

    Raises RecipeError without a target, BudgetError for one that no choice can meet.
    """
    job = dataclasses.replace(job, measures=False)
    try:
        return decide.decide(job, progress)
    except NotMeasuredError:
        pass
    allocation = job.recipe.allocate
    assert allocation is not None and allocation.target is not None, "the recipe was checked"
    if not job.recipe.packs:
        prepared = prepare.prepare_all(job, [job.recipe], every=True)[0]
        return Unmeasured(0, 0, prepared.samples * prepared.seq_len, "quantize", allocation.target.text)
    opened = prepare_options.options(job)
    tokens = opened.prepared.samples * opened.prepared.seq_len
    sizes = table.assemble(opened, {}, {}, tokens, {})
    module = plugins.load("allocate", allocation.method)
    needs = module.needs(allocation.config)
    is_plain = (allocation.target.is_size or allocation.target.unit == "bpw") and allocation.context is None
    if is_plain:
        problem = sizes.problem(allocation.target)
        if not needs:
            numbers = sizes.option_numbers(module.allocate(problem, allocation.config, None).choice)
            return dataclasses.replace(job, recipe=prepare_options.apply_choice(job.recipe, numbers, opened.tables))
    progress("timing one block", 0, 0)
    seconds, estimator = cost.forecast(opened)
    return Unmeasured(
        len(opened.names),
        sum(len(unit.members) for unit in sizes.units if not unit.is_table),
        tokens,
        "measure" if is_plain and JOINT not in needs else "allocate",
        allocation.target.text,
        seconds,
        estimator,
        tuple(
            {"option": name, "bpw": sizes.bpw(choice), "nbytes": sizes.nbytes(choice)}
            for name in sizes.options
            if (choice := sizes.uniform(name)) is not None
        ),
        tuple(table.spec.name for table in opened.tables),
        len(opened.table_names),
    )
