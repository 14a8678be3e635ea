"""Apply the sections `embeddings` and `head` of a recipe to a model: how each table is stored, and its exact bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

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


class TableOptions(NamedTuple):
    """A table at each option of an allocation that it can have."""

    spec: LinearSpec
    roles: tuple[str, ...]  # "embeddings", "head", or both where it is tied
    layers: Mapping[int, LayerPlan]  # number of the option -> how it is stored; empty where it stays as it is
    sources: Mapping[str, int]  # stored tensor -> bytes of the table as it is
    refused: str | None  # why it stays as it is


def added(plan: Plan, recipe: Recipe, skeleton: Skeleton, plan_weight: PlanWeight) -> Plan:
    """Return the plan with the tables that the recipe packs, and the numbers of parameters.

    plan_weight: plans one weight. Raises RecipeError for a table that would be stored in two ways, or whose rows could
    not be looked up.
    """
    head = skeleton.model.get_output_embeddings() if skeleton.is_untied else None
    written, twice = skeleton.numel(), 0 if head is None else head.weight.numel()
    plan = dataclasses.replace(plan, written_numel=written, numel=written - twice)
    is_asked = plan.layers and (recipe.embeddings is not None or recipe.head is not None)
    for table, refused in _found(recipe, skeleton) if is_asked else ():
        scheme = _scheme(recipe, table)
        if scheme is None:
            continue
        if refused is not None:
            plan.kept[table.spec.name] = refused
            continue
        layer = plan_weight(table.spec, scheme)
        if (unfit := _unfit(table, layer)) is not None:
            raise RecipeError(unfit)
        copies = {stored.name for stored in table.sources}
        plan = dataclasses.replace(
            plan,
            tables=(*plan.tables, layer),
            looked_up=(*plan.looked_up, *([table.spec.name] if "embeddings" in table.roles else [])),
            kept_nbytes={name: nbytes for name, nbytes in plan.kept_nbytes.items() if name not in copies},
        )
    return plan


def options(
    recipe: Recipe, skeleton: Skeleton, schemes: Sequence[Scheme | None], plan_weight: PlanWeight
) -> list[TableOptions]:
    """Return the tables of a model, each at those of the schemes that it can have; None keeps a table as it is.

    Embeddings cannot have what needs statistics of inputs, nor what has no rows. Raises RecipeError for a table that
    can have none.
    """
    made = []
    for table, refused in _found(recipe, skeleton) if any(schemes) else ():
        planned = {n: plan_weight(table.spec, scheme) for n, scheme in enumerate(schemes) if scheme and not refused}
        unfit = {number: why for number, layer in planned.items() if (why := _unfit(table, layer)) is not None}
        layers = {number: layer for number, layer in planned.items() if number not in unfit}
        if planned and not layers:
            raise RecipeError(
                f"allocate: no option of tables is one for {table.spec.name}: {next(iter(unfit.values()))}"
            )
        sources = {stored.name: stored.nbytes for stored in table.sources}
        made.append(TableOptions(table.spec, table.roles, layers, sources, refused))
    return made


def smallest(plan: Plan, tables: Sequence[TableOptions]) -> Plan:
    """Return a plan with every table at its smallest option, to find out whether transformers loads packed tables."""
    layers = [min(table.layers.values(), key=lambda layer: layer.nbytes) for table in tables if table.layers]
    looked_up = [table.spec.name for table in tables if table.layers and "embeddings" in table.roles]
    return dataclasses.replace(plan, tables=(*plan.tables, *layers), looked_up=(*plan.looked_up, *looked_up))


def _found(recipe: Recipe, skeleton: Skeleton) -> Iterator[tuple[Table, str | None]]:
    """Yield every table of a model with the reason why it stays as it is, None where it can be packed."""
    found = tables.find(skeleton)
    read = read_weights(skeleton.config, skeleton.dtype, (name for table in found for name in table.names))
    for table in found:
        refused = table.refused or (READ if read & set(table.names) else None)
        yield table, refused or (Plan.CHOSEN if _is_ignored(recipe, table) else None)


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


def _unfit(table: Table, layer: LayerPlan) -> str | None:
    """Return why the rows of a table that is stored so could not be looked up, None if they can be, or need not be."""
    if "embeddings" not in table.roles:
        return None
    if not formats.has_rows(layer.stored):
        where = "embeddings" if len(table.roles) == 1 else "head, which the embeddings are tied to,"
        return (
            f"{where}: {layer.scheme.method} stores no rows that could be looked up; give a method that writes "
            "format int, with neither incoherence, activations nor lowrank"
        )
    if "head" not in table.roles and memory_plan.needs_statistics(layer):
        return (
            f"embeddings: {layer.scheme.method} works by statistics of inputs, which a look-up has none of; give a "
            "method that needs no data"
        )
    return None
