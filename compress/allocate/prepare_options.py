"""Prepare a model for the recipe at every option."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.allocate.variants import FIXED
from compress.calib.data import Calibration
from compress.errors import OutputError, RecipeError
from compress.model.skeleton import Skeleton
from compress.recipe import fingerprint
from compress.recipe.schema import KEEP, Allocation, Recipe, Rule, option_names
from compress.run import prepare
from compress.run.job import Job, Prepared
from compress.types import LayerPlan, LinearSpec

Levels = dict[str, LayerPlan]  # "<option number>" or "fixed" -> how a linear is stored at that level


@dataclasses.dataclass(frozen=True)
class Options:
    """The model, prepared for the recipe at every option."""

    asked: Job  # its recipe with one option for all, and without an allocation
    allocation: Allocation
    prepared: Prepared
    names: list[str]  # of all options
    levels: dict[str, Levels]  # linear -> its levels, in ascending order; a kept option has none
    dense_nbytes: dict[str, int]  # linear -> bytes as it is stored now


def options(asked: Job) -> Options:
    """Open the model and plan every option. Raises RecipeError for a recipe without an allocation."""
    recipe, allocation = asked.recipe, asked.recipe.allocate
    if allocation is None:
        raise RecipeError(
            f"recipe {recipe.name!r} has nothing to allocate; give it an allocate section, or --target 3.25bpw"
        )
    wanted = {str(i): option for i, option in enumerate(allocation.options) if option is not None}
    if not wanted:
        raise RecipeError(
            f"recipe {recipe.name!r} leaves the weights as they are: there is nothing of them to measure; use "
            "quantize with --target and --context"
        )
    calibration = dataclasses.replace(recipe.calibration, asymmetric=0.0)
    recipes = [
        dataclasses.replace(recipe, quantize=option, calibration=calibration, allocate=None)
        for option in wanted.values()
    ]
    plain = dataclasses.replace(asked, recipe=recipes[0])
    prepared, plans = prepare.prepare_all(plain, recipes, every=True)
    levels: dict[str, Levels] = {}
    for number, plan in zip(wanted, plans, strict=True):
        for layer in plan.layers:
            if recipe.is_open(layer.spec.name) and layer.scheme.config is not None:
                levels.setdefault(layer.spec.name, {})[number] = layer
    if not levels:
        raise RecipeError(f"the rules of recipe {recipe.name!r} leave nothing to allocate")
    for layer in plans[0].layers:
        if layer.spec.name not in levels:
            levels[layer.spec.name] = {FIXED: layer}
    dense = {layer.spec.name: _stored_nbytes(prepared.skeleton, layer.spec) for layer in plans[0].layers}
    return Options(plain, allocation, prepared, option_names(allocation.options), levels, dense)


def _stored_nbytes(skeleton: Skeleton, spec: LinearSpec) -> int:
    """Of a linear as it is; experts share their stored tensors."""
    if spec.is_expert:
        return spec.numel * spec.dtype.itemsize
    return sum(stored.nbytes for stored in skeleton.weight_sources(spec))


def identity(opened: Options, calibration: Calibration) -> dict[str, Any]:
    """What the measurements depend on: everything but the target and the allocator."""
    known = prepare.identity(opened.asked, opened.prepared.skeleton.checkpoint, calibration)
    del known["command"]
    return {**known, "recipe": recipe_fingerprint(opened), "units": opened.allocation.units}


def recipe_fingerprint(opened: Options) -> str:
    """Of a recipe as far as it is measured; the settings of its allocator and the target are left out."""
    return fingerprint(dataclasses.replace(_bare(opened.asked.recipe), allocate=_undecided(opened.allocation)))


def _bare(recipe: Recipe) -> Recipe:
    """Without what linears are not measured by."""
    return dataclasses.replace(recipe, experts=None, kv_cache=None)


def _undecided(allocation: Allocation) -> Allocation:
    former: Any = "swap"  # as folders that were measured before its renaming spell the default cache_estimator
    return Allocation("", _Nothing(), allocation.options, units=allocation.units, samples=0, cache_estimator=former)


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """The settings of no allocator."""


def offered(opened: Options, members: Sequence[LinearSpec]) -> list[int]:
    """Numbers of the options that all members of a unit have; a kept one always is."""
    found = [opened.levels[member.name] for member in members]
    return [i for i, name in enumerate(opened.names) if name == KEEP or all(str(i) in levels for levels in found)]


def nbytes(opened: Options, members: Sequence[LinearSpec], option: int) -> int:
    """Of a unit at an option, as planned."""
    levels = [opened.levels[member.name].get(str(option)) for member in members]
    dense = [opened.dense_nbytes[member.name] for member in members]
    return sum(level.nbytes if level is not None else kept for level, kept in zip(levels, dense, strict=True))


def chosen(recipe: Recipe, choices: dict[str, int]) -> Recipe:
    """The recipe with what was allocated, linear -> number of its option, as rules: nothing is left to allocate."""
    assert recipe.allocate is not None, "the caller has checked"
    rules = list(recipe.rules)
    for number, option in enumerate(recipe.allocate.options):
        if names := tuple(name for name, choice in choices.items() if choice == number):
            rules.append(Rule(names, option))
    return dataclasses.replace(recipe, rules=tuple(rules), allocate=None)


def folder_of(asked: Job) -> Path:
    """Where measurements are kept unless the user says otherwise: beside the output, one folder for all targets.

    Its name tells the model, and what else is measured: options, calibration and seed.
    """
    if asked.out.name in ("", ".."):
        raise OutputError(f"{asked.out} cannot be an output directory; give --out a new name")
    recipe, allocation = asked.recipe, asked.recipe.allocate
    known = [str(prepare.resolve(asked.model).resolve()), asked.calib, asked.seed]
    known.append(
        fingerprint(dataclasses.replace(_bare(recipe), allocate=_undecided(allocation) if allocation else None))
    )
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:8]
    name = Path(asked.model.rstrip("/")).name or "model"
    return asked.out.with_name(f"{name}-{recipe.name}-{digest}.measured")
