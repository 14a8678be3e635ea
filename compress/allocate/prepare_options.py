"""Prepare a model for the recipe at every option."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from compress import plugins
from compress.allocate.variants import FIXED, recipe_fingerprint
from compress.calib.data import Calibration
from compress.errors import RecipeError, shown
from compress.model import architectures
from compress.model.skeleton import Skeleton
from compress.progress import note
from compress.recipe.schema import KEEP, Allocation, Recipe, Rule, option_names
from compress.run import plan, prepare
from compress.run.job import Job, Prepared, identity
from compress.run.outside_plan import TableOptions
from compress.types import LayerPlan, LinearSpec, Plan, Scheme

PlannedOptions = dict[str, LayerPlan]  # "<option number>" or "fixed" -> how a linear is stored at it

KEPT = (KEEP, f"table {KEEP}")  # names of the options of linears and of tables that leave a weight as it is


@dataclasses.dataclass(frozen=True)
class Options:
    """The model, prepared for the recipe at every option."""

    job: Job  # its recipe with one option for all, and without an allocation
    allocation: Allocation
    prepared: Prepared
    names: list[str]  # of all options
    levels: dict[str, PlannedOptions]  # linear -> its options, in ascending order; without keeping it
    dense_nbytes: dict[str, int]  # linear -> bytes as it is stored now
    tables: tuple[TableOptions, ...] = ()  # outside of the blocks, that the allocation decides on
    notes: tuple[str, ...] = ()  # why a table is none of them

    @property
    def needs(self) -> frozenset[str]:
        """Names of the damages and scores that the allocator asks for."""
        needs: frozenset[str] = plugins.load("allocate", self.allocation.method).needs(self.allocation.config)
        return needs

    @property
    def transform_scopes(self) -> set[str]:
        """What the recipe's transforms work on: "block", "model"."""
        return {plugins.load("transform", step.method).SCOPE for step in self.job.recipe.transform}

    @property
    def base_options(self) -> set[int]:
        """The numbers of the options that differ from the first quantizing one in settings of its method alone."""
        schemes = [option for option in self.allocation.options if option is not None]
        first = next((each for each in schemes if not _is_dropping(each)), schemes[0])
        return {
            number
            for number, each in enumerate(self.allocation.options)
            if each is None or dataclasses.replace(each, config=first.config) == first
        }

    @property
    def table_names(self) -> list[str]:
        """The names of the options of tables, which are numbered behind those of linears."""
        return [f"table {name}" for name in option_names(self.allocation.tables)]

    @property
    def table_layers(self) -> dict[str, LayerPlan]:
        """Each table at each of its options: "<table>@<number>" -> how it is stored."""
        return {
            f"{table.spec.name}@{len(self.names) + number}": layer
            for table in self.tables
            for number, layer in table.layers.items()
        }


def options(job: Job) -> Options:
    """Open the model and plan every option. Raises RecipeError for a recipe without an allocation."""
    recipe, allocation = job.recipe, job.recipe.allocate
    if allocation is None:
        raise RecipeError(
            f"recipe {shown(recipe.name)} has nothing to allocate; give it an allocate section, or --target 3.25bpw"
        )
    listed = {str(i): option for i, option in enumerate(allocation.options) if option is not None}
    quantizing = dict(sorted(listed.items(), key=lambda item: _is_dropping(item[1])))  # transforms decide by the first
    if not quantizing:
        raise RecipeError(
            f"recipe {shown(recipe.name)} leaves the weights as they are: there is nothing of them to measure; use "
            "quantize with --target and --context"
        )
    calibration = dataclasses.replace(recipe.calibration, target_correction=0.0)
    recipes = [
        dataclasses.replace(recipe, quantize=option, calibration=calibration, allocate=None, tune=())
        for option in quantizing.values()
    ]
    plain = dataclasses.replace(job, recipe=recipes[0])
    prepared, plans = prepare.prepare_all(plain, recipes, every=True, tables=allocation.tables)
    if allocation.context is not None and (
        remark := architectures.beyond(prepared.skeleton.config, allocation.context)
    ):
        note(remark)
    tables = plan.table_options(plain.recipe, prepared.skeleton, allocation.tables)
    levels = _levels(recipe, dict(zip(quantizing, plans, strict=True)))
    if not levels:
        raise RecipeError(f"the rules of recipe {shown(recipe.name)} leave nothing to allocate")
    for layer in plans[0].layers:
        if layer.spec.name not in levels:
            levels[layer.spec.name] = {FIXED: layer}
    specs = {layer.spec.name: layer.spec for planned in plans for layer in planned.layers}
    dense = {name: _stored_nbytes(prepared.skeleton, spec) for name, spec in specs.items()}
    open_tables = tuple(table for table in tables if table.refused is None)
    notes = tuple(f"{table.spec.name} stays as it is: {table.refused}" for table in tables if table.refused)
    return Options(plain, allocation, prepared, option_names(allocation.options), levels, dense, open_tables, notes)


def _is_dropping(option: Scheme) -> bool:
    """Return whether an option stores nothing of a weight, so that nothing can be chosen by it."""
    return plugins.load("quant", option.method).FORMAT == "zero" and option.lowrank is None


def _levels(recipe: Recipe, plans: Mapping[str, Plan]) -> dict[str, PlannedOptions]:
    """Return the options of all linears that are open; of two that a method turns into the same, the first.

    Experts keep both: other linears of their unit may be stored in two ways. What is left alone at some options is not
    open (compress/model/spared.py).
    """
    levels: dict[str, PlannedOptions] = {}
    spared = {name for planned in plans.values() for name in planned.spared_names}
    for number, planned in plans.items():
        for layer in planned.layers:
            is_open = recipe.is_open(layer.spec.name) and layer.spec.name not in spared
            if is_open and layer.scheme.config is not None:
                known = levels.setdefault(layer.spec.name, {})
                if layer.spec.is_expert or layer not in known.values():
                    known[number] = layer
    return levels


def _stored_nbytes(skeleton: Skeleton, spec: LinearSpec) -> int:
    """Return the bytes of a linear as it is; experts share their stored tensors."""
    if spec.is_expert:
        return spec.numel * spec.dtype.itemsize
    return sum(stored.nbytes for stored in skeleton.weight_sources(spec))


def measurement_identity(opened: Options, calibration: Calibration) -> dict[str, Any]:
    """Return what the measurements depend on: everything but the target and the allocator."""
    decisive = identity(opened.job, opened.prepared.skeleton.checkpoint, calibration)
    del decisive["command"]
    recipe = recipe_fingerprint(opened.job.recipe, opened.allocation)
    return {**decisive, "recipe": recipe, "units": opened.allocation.units}


def options_of(opened: Options, members: Sequence[LinearSpec]) -> list[int]:
    """Return the numbers of the options that all members of a unit have; keeping it is always one."""
    by_member = [opened.levels[member.name] for member in members]
    return [i for i, name in enumerate(opened.names) if name == KEEP or all(str(i) in levels for levels in by_member)]


def nbytes(opened: Options, members: Sequence[LinearSpec], option: int) -> int:
    """Return the bytes of a unit at an option, as planned."""
    levels = [opened.levels[member.name].get(str(option)) for member in members]
    dense = [opened.dense_nbytes[member.name] for member in members]
    return sum(level.nbytes if level is not None else kept for level, kept in zip(levels, dense, strict=True))


def apply_choice(recipe: Recipe, choices: dict[str, int], tables: Sequence[TableOptions]) -> Recipe:
    """Return the recipe with choices, linear or table -> number of its option: nothing is left to allocate.

    Those of linears become rules, those of tables the sections `embeddings` and `head`; `head` alone for a tied table.
    """
    assert recipe.allocate is not None, "the caller has checked"
    rules, options = list(recipe.rules), recipe.allocate.options
    for number, option in enumerate(options):
        if names := tuple(name for name, choice in choices.items() if choice == number):
            rules.append(Rule(names, option))
    sections = {
        "head" if "head" in table.roles else "embeddings": recipe.allocate.tables[
            choices[table.spec.name] - len(options)
        ]
        for table in tables
    }
    return dataclasses.replace(
        recipe,
        rules=tuple(rules),
        allocate=None,
        embeddings=sections.get("embeddings", recipe.embeddings),
        head=sections.get("head", recipe.head),
    )
