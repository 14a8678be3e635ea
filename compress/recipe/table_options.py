"""Check the options that an allocation has for the token embeddings and the output head: `allocate.tables`.

What a table costs is measured as a KL, in nats a token. It can be added only to damages of linears in the same unit.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

from compress.recipe.blocks import check_table
from compress.recipe.schema import KEEP, TABLES
from compress.recipe.yaml import Entries, error_at, sequence

if TYPE_CHECKING:
    from compress.types import Scheme

# Damages that are a divergence of the whole model; what stands for them or measures whole choices.
IN_NATS = frozenset({"kl_one_at_a_time", "kl_one_at_a_time_from_base", "kl_shares", "noise", "auto", "joint"})


def check(options: tuple[Scheme | None, ...], block: Entries, recipe: Entries, quantize: Scheme) -> None:
    """Raise RecipeError for options of tables that leave no choice, or that a section of the recipe contradicts.

    block: the section `allocate`; recipe: all sections.
    """
    if not options:
        return
    at = block["tables"][0]
    if quantize.method == KEEP:
        raise error_at(at, "allocate: tables are for weights and need quantize; remove them")
    for section in TABLES:
        if section in recipe:
            raise error_at(
                recipe[section][0], f"{section} and allocate.tables say both how it is stored; remove one of them"
            )
    if len(set(options)) < max(2, len(options)):
        raise error_at(at, "allocate: tables needs two or more options, all different")
    for option, node in zip(options, sequence(block, "tables"), strict=True):
        if option is not None:
            check_table(option, node, "allocate: tables")


def check_damages(block: Entries, name: str, config: Any, needs: Set[str]) -> None:
    """Raise RecipeError for an allocator that does not add up damages in nats a token; needs: what it asks for."""
    others = sorted(needs - IN_NATS)
    if not sequence(block, "tables") or (needs and not others) or getattr(config, "scale", "none") in IN_NATS:
        return
    what = f"by {' and '.join(others)}" if others else "without damages"
    raise error_at(
        block["tables"][0],
        f"allocate: {name} chooses {what}, which the KL that a table is measured by cannot be added to; use method "
        "knapsack with the estimator auto, kl_one_at_a_time, kl_shares or noise, or with a scale by one of these",
    )
