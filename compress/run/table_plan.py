"""Apply the sections `embeddings` and `head` of a recipe to a model: how each table is stored, and its exact bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase

from compress import formats, plugins
from compress.errors import RecipeError
from compress.model import tables
from compress.model.meta_pass import READ, read_weights
from compress.model.skeleton import Skeleton
from compress.model.tables import Table
from compress.recipe.schema import Recipe
from compress.run import memory_plan
from compress.types import LayerPlan, LinearSpec, Plan, Scheme

PlanWeight = Callable[[LinearSpec, Scheme], LayerPlan]


def added(plan: Plan, recipe: Recipe, skeleton: Skeleton, plan_weight: PlanWeight) -> Plan:
    """Return the plan with the tables that the recipe packs, and the numbers of parameters.

    plan_weight: plans one weight. Raises RecipeError for a table that would be stored in two ways, or whose rows could
    not be looked up.
    """
    head = skeleton.model.get_output_embeddings() if skeleton.is_untied else None
    written, twice = skeleton.numel(), 0 if head is None else head.weight.numel()
    plan = dataclasses.replace(plan, written_numel=written, numel=written - twice)
    is_asked = plan.layers and (recipe.embeddings is not None or recipe.head is not None)
    found = tables.find(skeleton) if is_asked else []
    read = read_weights(skeleton.config, skeleton.dtype, (name for table in found for name in table.names))
    for table in found:
        scheme = _scheme(recipe, table)
        if scheme is None:
            continue
        refused = table.refused or (READ if read & set(table.names) else None)
        if refused is not None or _is_ignored(recipe, table):
            plan.kept[table.spec.name] = refused or plan.CHOSEN
            continue
        layer = plan_weight(table.spec, scheme)
        if "embeddings" in table.roles:
            _check_rows(table, layer)
            _check_data(table, layer)
        copies = {stored.name for stored in table.sources}
        plan = dataclasses.replace(
            plan,
            tables=(*plan.tables, layer),
            looked_up=(*plan.looked_up, *([table.spec.name] if "embeddings" in table.roles else [])),
            kept_nbytes={name: nbytes for name, nbytes in plan.kept_nbytes.items() if name not in copies},
        )
    return plan


def _scheme(recipe: Recipe, table: Table) -> Scheme | None:
    """Return how the recipe stores a table; of one that is tied the two sections must not say different things."""
    asked = {role: scheme for role in table.roles if (scheme := getattr(recipe, role)) is not None}
    if len(asked) == 2 and _storage(asked["embeddings"]) != _storage(asked["head"]):
        raise RecipeError(
            f"{table.spec.name} is embeddings and output head in one and is stored once, but the sections embeddings "
            "and head of the recipe differ in format, bits, group_size or symmetric; make them equal, or remove one"
        )
    return asked.get("head", asked.get("embeddings"))


def _storage(scheme: Scheme) -> list[object]:
    """Return what decides how a scheme stores a table: settings that the formats of both sections know."""
    format = plugins.load("quant", scheme.method).FORMAT
    return [format, *(getattr(scheme.config, key, None) for key in ("bits", "group_size", "symmetric"))]


def _is_ignored(recipe: Recipe, table: Table) -> bool:
    names = [*table.names, *(f"{name}.weight" for name in table.names)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in recipe.ignore)


def _check_data(table: Table, layer: LayerPlan) -> None:
    if "head" not in table.roles and memory_plan.needs_statistics(layer):
        raise RecipeError(
            f"embeddings: {layer.scheme.method} works by statistics of inputs, which a look-up has none of; give a "
            "method that needs no data"
        )


def _check_rows(table: Table, layer: LayerPlan) -> None:
    if not formats.has_rows(layer.stored):
        where = "embeddings" if len(table.roles) == 1 else "head, which the embeddings are tied to,"
        raise RecipeError(
            f"{where}: {layer.scheme.method} stores no rows that could be looked up; give a method that writes "
            "format int, with neither incoherence, activations nor lowrank"
        )
