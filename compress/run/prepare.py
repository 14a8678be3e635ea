"""Decide everything about a job before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence

from compress import plugins
from compress.model import dry_load
from compress.model.skeleton import Skeleton
from compress.recipe import Recipe
from compress.run import calibration_text, demands, expert_pruning, kv_cache, outside_plan, plan, plan_summary, source
from compress.run.job import Job, Prepared
from compress.types import Plan, Scheme


def prepare(job: Job) -> Prepared:
    """Open the model, apply the recipe, arrange the memory. Of the weights only headers are read."""
    return prepare_all(job, [job.recipe])[0]


def prepare_all(
    job: Job, recipes: Sequence[Recipe], every: bool = False, tables: Sequence[Scheme | None] = ()
) -> tuple[Prepared, list[Plan]]:
    """Prepare a job for the first of several recipes that differ in their schemes; return the plans of all.

    `every`: statistics of all inputs, and so calibration text, whether a method needs them or not. `tables`: all
    schemes of the tables outside of the blocks, where an allocation chooses one.
    """
    calibration_text.check(job)
    skeleton = source.open_model(job)
    plans, options = make_plans(job, skeleton, recipes, tables, every)
    layers = tuple(layer for table in options for layer in table.layers.values())
    prepared = demands.arrange(job, skeleton, plans, layers, every)
    calibration_text.check_stacks(job, prepared)
    return prepared, plans


def make_plans(
    job: Job, skeleton: Skeleton, recipes: Sequence[Recipe], tables: Sequence[Scheme | None] = (), every: bool = False
) -> tuple[list[Plan], list[outside_plan.TableOptions]]:
    """Return the plan of each recipe, and the tables at each of the schemes; refuse what packs too little.

    The skeleton gets the edits of transforms of the whole model. `every` as for `prepare_all`.
    """
    plan.check_stacks(job.recipe, skeleton, len(recipes) > 1 or every)
    for step in job.recipe.transform:
        if plugins.load("transform", step.method).SCOPE == "model":
            skeleton.edits = plugins.load("transform", step.method).apply(skeleton, step.config, job.seed)
    if job.recipe.kv_cache is not None:
        kv_cache.check(skeleton.config, job.recipe.kv_cache)
    plans = [plan.make(recipe, skeleton, job.pack) for recipe in recipes]
    options = plan.table_options(job.recipe, skeleton, tables)
    if job.pack:
        matrices = plan_summary.matrix_sizes(skeleton)
        plans = [plan_summary.add_reasons(each, skeleton, matrices) for each in plans]
        for each in plans if not job.allow_partial else ():
            plan_summary.check(each, skeleton.checkpoint.directory, matrices, job.recipe.ignore)
        expert_pruning.check(job.recipe, plans[0])
        dry_load.check_planned(skeleton, outside_plan.with_smallest_tables(plans[0], options))
    return plans, options
