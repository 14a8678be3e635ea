"""Plan what lies outside of the blocks that text runs through: embeddings, output head, towers, skipped blocks.

A transform that puts the model in another basis needs two tables, where embeddings and output head were one. It stays
one on disk if it is packed: the table as it was, with operations that are left to run time around it. Otherwise both
are stored, and a message gives the reason.

Calibration is on text, which never reaches the linears of towers and skipped blocks. So a tower takes methods that need
no data alone. Linears of skipped decoder blocks get the scheme that their names get; a method that works by statistics
does what it does for an expert that no token was routed to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from compress import formats, plugins
from compress.errors import RecipeError, shown
from compress.model import towers
from compress.model.meta_pass import READ, read_weights
from compress.model.skeleton import Skeleton
from compress.model.towers import Table
from compress.recipe.schema import Recipe
from compress.run import sizes
from compress.types import LayerPlan, LinearSpec, Plan, Scheme

NO_RUN_TIME_PLACE = "a plain checkpoint has no place for operations at run time"
NO_TEXT = "no text reaches it"
PlanWeight = Callable[[LinearSpec, Scheme], LayerPlan]


class TableOptions(NamedTuple):
    """A table at each option of an allocation that it can have."""

    spec: LinearSpec
    roles: tuple[str, ...]  # "embeddings", "head", or both where it is tied
    layers: Mapping[int, LayerPlan]  # number of the option -> how it is stored; empty where it stays as it is
    sources: Mapping[str, int]  # stored tensor -> bytes of the table as it is
    refused: str | None  # why it stays as it is


def add_tables(plan: Plan, recipe: Recipe, skeleton: Skeleton, plan_weight: PlanWeight) -> Plan:
    """Return the plan with the tables that the recipe packs, and the numbers of parameters.

    plan_weight: plans one weight. Raises RecipeError for a table that would be stored in two ways, or whose rows could
    not be looked up.
    """
    head = skeleton.model.get_output_embeddings() if skeleton.is_untied else None
    written, twice = skeleton.numel(), 0 if head is None else head.weight.numel()
    plan = dataclasses.replace(plan, written_numel=written, numel=written - twice, unused=skeleton.unused_tensors())
    plan = dataclasses.replace(plan, messages=(*plan.messages, *_unused_message(plan)))
    is_wanted = plan.layers and (recipe.embeddings is not None or recipe.head is not None)
    packed_tables = _find_tables(recipe, skeleton) if is_wanted else []
    ends = [table for table in packed_tables if not table.is_other]
    if head is not None:
        one = _join_tables(recipe, skeleton, ends, plan_weight) if plan.layers else NO_RUN_TIME_PLACE
        if isinstance(one, str):
            line = _untied_message(one, head.weight.numel() * skeleton.dtype.itemsize)
            plan = dataclasses.replace(plan, messages=(*plan.messages, line))
        else:
            plan = _with_table(dataclasses.replace(plan, tables_are_shared=True, written_numel=plan.numel), *one)
            packed_tables = [table for table in packed_tables if table.is_other]
    for table in packed_tables:
        scheme = _scheme(recipe, table)
        if scheme is None:
            continue
        if table.refused is not None:
            plan.kept_reasons[table.spec.name] = table.refused
            continue
        layer = plan_weight(table.spec, scheme)
        if (unfit := _unfit(table, layer)) is not None:
            raise RecipeError(unfit)
        plan = _with_table(plan, table, layer)
    return plan


def table_options(
    recipe: Recipe, skeleton: Skeleton, schemes: Sequence[Scheme | None], plan_weight: PlanWeight
) -> list[TableOptions]:
    """Return the tables of a model, each at those of the schemes that it can have; None keeps a table as it is.

    Embeddings cannot have what needs statistics of inputs, nor what has no rows. Raises RecipeError for a table that
    can have none.
    """
    made = []
    found_tables = _find_tables(recipe, skeleton) if any(schemes) else []
    for table in (table for table in found_tables if not table.is_other):
        planned = {
            n: plan_weight(table.spec, scheme) for n, scheme in enumerate(schemes) if scheme and not table.refused
        }
        unfit = {number: why for number, layer in planned.items() if (why := _unfit(table, layer)) is not None}
        layers = {number: layer for number, layer in planned.items() if number not in unfit}
        if planned and not layers:
            raise RecipeError(
                f"allocate: no option of tables is one for {table.spec.name}: {next(iter(unfit.values()))}"
            )
        sources = {stored.name: stored.nbytes for stored in table.sources}
        made.append(TableOptions(table.spec, table.roles, layers, sources, table.refused))
    return made


def with_smallest_tables(plan: Plan, tables: Sequence[TableOptions]) -> Plan:
    """Return a plan with every table at its smallest option, to find out whether transformers loads packed tables."""
    layers = [min(table.layers.values(), key=lambda layer: layer.nbytes) for table in tables if table.layers]
    looked_up = [table.spec.name for table in tables if table.layers and "embeddings" in table.roles]
    return dataclasses.replace(
        plan, tables=(*plan.tables, *layers), embedding_tables=(*plan.embedding_tables, *looked_up)
    )


def _find_tables(recipe: Recipe, skeleton: Skeleton) -> list[Table]:
    """Return the tables of a model, refused where the recipe ignores them or the model's own code reads them, too."""
    every = towers.find_tables(skeleton)
    read = read_weights(skeleton.config, skeleton.dtype, (name for table in every for name in table.names))
    return [
        table._replace(
            refused=table.refused
            or (READ if read & set(table.names) else None)
            or (Plan.CHOSEN if _is_ignored(recipe, table) else None)
        )
        for table in every
    ]


def _with_table(plan: Plan, table: Table, layer: LayerPlan) -> Plan:
    """Return the plan with one more packed table."""
    copies = {stored.name for stored in table.sources}
    return dataclasses.replace(
        plan,
        tables=(*plan.tables, layer),
        embedding_tables=(*plan.embedding_tables, *([table.spec.name] if "embeddings" in table.roles else [])),
        kept_nbytes={name: nbytes for name, nbytes in plan.kept_nbytes.items() if name not in copies},
    )


def _unused_message(plan: Plan) -> tuple[str, ...]:
    """Return a sentence on the stored tensors that the model does not use; () without any."""
    nbytes = plan.unused_nbytes
    if not nbytes:
        return ()
    first = max(nbytes, key=lambda name: nbytes[name])
    return (
        f"{len(nbytes)} stored tensors that the model does not use are copied and left out of bits over the whole "
        f"model: {sum(nbytes.values()):,} bytes, the largest {first}",
    )


def _join_tables(
    recipe: Recipe, skeleton: Skeleton, packed_tables: list[Table], plan_weight: PlanWeight
) -> tuple[Table, LayerPlan] | str:
    """Return the table that is packed in the place of those of embeddings and an untied head; why not, if not."""
    assert skeleton.edits is not None, "they have untied the head"
    ops = skeleton.edits.table_ops()
    if isinstance(ops, str):
        return ops
    if not packed_tables:
        return "the recipe packs neither; with its section embeddings they stay one"
    table = towers.join_tables(*packed_tables)
    scheme = None if _differ(recipe, table) else _scheme(recipe, table)
    if scheme is None:
        return "the recipe's sections embeddings and head store them in two ways"
    if table.refused is not None:
        return f"they are not both packed ({table.refused})"
    bare = plan_weight(table.spec, scheme)
    if not formats.has_rows(bare.stored):
        return f"{scheme.method} as the recipe has it stores no rows that could be looked up"
    stored = dataclasses.replace(bare.stored, ops=ops)
    return table, dataclasses.replace(bare, stored=stored, nbytes=formats.nbytes(stored, table.spec.shape))


def _untied_message(reason: str, nbytes: int) -> str:
    """Say that a head has been untied; nbytes: of its weight as it is."""
    return (
        f"the transform unties the output head from the embeddings, because {reason}; both are then stored: "
        f"+ {nbytes / (1 << 20):.1f} MiB before either is packed"
    )


def _schemes_by_role(recipe: Recipe, table: Table) -> dict[str, Scheme]:
    return {role: scheme for role in table.roles if (scheme := getattr(recipe, role)) is not None}


def _differ(recipe: Recipe, table: Table) -> bool:
    """Return whether the recipe stores a table that has two roles in two ways."""
    schemes = _schemes_by_role(recipe, table)
    return len(schemes) == 2 and _storage(schemes["embeddings"]) != _storage(schemes["head"])


def _scheme(recipe: Recipe, table: Table) -> Scheme | None:
    """Return how the recipe stores a table; of one that is tied the two sections must not say different things."""
    schemes = _schemes_by_role(recipe, table)
    if _differ(recipe, table):
        raise RecipeError(
            f"{table.spec.name} is embeddings and output head in one and is stored once, but the sections embeddings "
            "and head of the recipe differ in format, bits, levels, group_size or symmetric; make them equal, or "
            "remove one"
        )
    return schemes.get("head", schemes.get("embeddings"))


def _storage(scheme: Scheme) -> list[object]:
    """Return what decides how a scheme stores a table: settings that the formats of both sections know."""
    format = plugins.load("quant", scheme.method).FORMAT
    return [format, scheme.levels, *(getattr(scheme.config, key, None) for key in ("bits", "group_size", "symmetric"))]


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
            f"{where}: {layer.scheme.method} as the recipe has it stores no rows that could be looked up; give a "
            "method or type whose rows have scales of their own, with neither incoherence, activations nor lowrank"
        )
    if "head" not in table.roles and sizes.needs_statistics(layer):
        return (
            f"embeddings: {layer.scheme.method} works by statistics of inputs, which a look-up has none of; give a "
            "method that needs no data"
        )
    return None


def add_towers(plan: Plan, recipe: Recipe, skeleton: Skeleton, plan_weight: PlanWeight) -> Plan:
    """Return the plan with what the recipe packs of towers and of blocks that text skips.

    plan_weight: plans one linear. Raises RecipeError for a pattern that matches no linear of a tower, and for a method
    that needs data there.
    """
    if not skeleton.text_path.towers and not skeleton.text_path.skipped and not recipe.towers:
        return plan
    specs, refused = towers.tower_linears(skeleton)
    _check_tower_patterns(
        recipe, [name for name in (*(s.name for s in specs), *refused) if towers.is_tower(skeleton, name)]
    )
    layers, kept = list[LayerPlan](), dict(plan.kept_reasons)
    for spec in specs if plan.layers else ():
        is_tower = towers.is_tower(skeleton, spec.name)
        scheme = recipe.tower_scheme(spec.name) if is_tower else recipe.scheme_for(spec.name)
        layer = plan_weight(spec, scheme) if scheme is not None else None
        if layer is not None and is_tower and sizes.needs_text(layer):
            raise RecipeError(
                f"towers: {layer.scheme.method} needs calibration text, which never reaches {spec.name}; name no "
                "method there, or one that needs no data, without low-rank parts and static scales"
            )
        if layer is not None and not is_tower and _needs_tokens(layer):
            layer = None
        if layer is not None:
            layers.append(layer)
        elif not is_tower:
            kept[spec.name] = NO_TEXT if scheme is not None else "kept by the recipe"
    kept |= {name: why for name, why in refused.items() if not towers.is_tower(skeleton, name)}
    replaced = {stored.name for layer in layers for stored in skeleton.weight_sources(layer.spec)}
    stored = {name: nbytes for name, nbytes in plan.kept_nbytes.items() if name not in replaced}
    return dataclasses.replace(plan, tower_layers=tuple(layers), kept_reasons=kept, kept_nbytes=stored)


def _needs_tokens(layer: LayerPlan) -> bool:
    """Return whether a linear cannot do without what only tokens give: a scale of its inputs, a trained part."""
    lowrank = layer.scheme.lowrank
    is_trained = lowrank is not None and bool(lowrank.train or lowrank.train_blocks)
    return sizes.needs_in_scale(layer) or sizes.needs_gradients(layer) or is_trained


def _check_tower_patterns(recipe: Recipe, names: list[str]) -> None:
    """Raise RecipeError for a pattern of `towers` that matches none of the linears in towers."""
    for pattern in (pattern for rule in recipe.towers for pattern in rule.match):
        if not any(fnmatchcase(name, pattern) for name in names):
            look = f"their names look like {names[0]!r}" if names else "this model has none"
            raise RecipeError(f"towers: {shown(pattern)} matches no linear beside the text model; {look}")
