"""Look up options of a whole model by name, for allocators that rank options and not damages."""

from __future__ import annotations

from collections.abc import Sequence

from compress.allocate.problem import Unit
from compress.errors import RecipeError, shown


def ranked(units: Sequence[Unit]) -> list[str]:
    """Rank all options by the bytes that they take a weight where they are offered, ascending; ties by name."""
    nbytes: dict[str, int] = {}
    numel: dict[str, int] = {}
    for unit in units:
        for entry in unit.entries:
            nbytes[entry.option] = nbytes.get(entry.option, 0) + entry.nbytes
            numel[entry.option] = numel.get(entry.option, 0) + unit.numel
    return sorted(nbytes, key=lambda option: (nbytes[option] / numel[option], option))


def named(units: Sequence[Unit], key: str, option: str | None, default: int) -> str:
    """Return the option that the setting `key` names; None: the one at `default` of the ranking. Raises RecipeError."""
    known = ranked(units)
    if option is None:
        return known[default]
    if option not in known:
        raise RecipeError(f"allocate: {key} {shown(option)} is none of the options, which are {', '.join(known)}")
    return option


def at(units: Sequence[Unit], option: str) -> list[int]:
    """Return of each unit the index of the entry of this option.

    Where it is not offered, the largest of no higher rank is taken, else the smallest.
    """
    rank = {name: number for number, name in enumerate(ranked(units))}
    chosen = []
    for unit in units:
        ranks = [rank[entry.option] for entry in unit.entries]
        allowed = [number for number in ranks if number <= rank[option]] or [min(ranks)]
        chosen.append(ranks.index(max(allowed)))
    return chosen
