"""Define what allocators are given and give back.

A `Problem` is a table: for every unit (linears that a runtime keeps together) the ways to store it, each with its exact
bytes and its damage by one or more estimators. A damage is the increase of a loss that storing the unit so causes.
Estimators of `WholeModel` take passes over the whole model (metrics.py); others are errors of weights and of layers'
outputs. A choice takes one entry of every unit within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, Protocol

from compress.errors import BudgetError, RecipeError, shown

Choice = tuple[int, ...]  # of each unit, the index of an entry
JOINT: Final = "joint"  # among what an allocator needs: it measures choices
KL_ONE_AT_A_TIME: Final = "kl_one_at_a_time"
FROM_BASE: Final = "kl_one_at_a_time_from_base"
KL_SHARES: Final = "kl_shares"
AUTO: Final = "auto"  # stands for the best estimator that fits into the time (cost.py)
BEST_FIRST: Final = (KL_ONE_AT_A_TIME, KL_SHARES, "gradient", "hessian")  # what auto stands for
WholeModel = Literal["fisher", "gradient", "kl_one_at_a_time", "kl_one_at_a_time_from_base", "kl_shares", "noise"]
Estimator = Literal["auto", "hessian", "output", "weight", WholeModel]
BlockScale = Literal["none", WholeModel]


@dataclass(frozen=True)
class UnitEntry:
    """One way to store a unit."""

    option: str  # as the recipe's list of options names it
    nbytes: int  # of all members, everything included
    bits: float  # stored bits a weight, everything included
    damage: Mapping[str, float] = field(default_factory=dict)  # estimator -> damage, at least 0, less is better
    is_base: bool = True  # its option is of the first one's kind: other settings of the same method, or kept


@dataclass(frozen=True)
class Unit:
    """Linears that are stored alike, or a table outside of the blocks."""

    name: str  # model.layers.0.self_attn.{q_proj,k_proj,v_proj}
    members: tuple[str, ...]  # full names
    block: int  # of a table: one behind the last
    numel: int  # weights
    entries: tuple[UnitEntry, ...]  # ascending in bytes
    is_expert: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)  # of the unit, whatever the entry (lim, zd, share ...)
    is_table: bool = False

    @property
    def kind(self) -> str:
        """Return the name without numbers: units of one kind are the same part of different blocks (or experts)."""
        return ".".join("*" if part.isdigit() else part for part in self.name.split("."))


@dataclass(frozen=True)
class Problem:
    """The units, their entries and the bytes that a choice may take."""

    units: tuple[Unit, ...]
    budget: int  # bytes of all units together

    def nbytes(self, choice: Choice) -> int:
        """Return the bytes of a choice."""
        return sum(unit.entries[i].nbytes for unit, i in zip(self.units, choice, strict=True))

    def damage(self, choice: Choice, estimator: str) -> float:
        """Return the sum over units."""
        return sum(unit.entries[i].damage[estimator] for unit, i in zip(self.units, choice, strict=True))

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def least(self) -> int:
        """Return the bytes of the smallest choice."""
        return sum(min(entry.nbytes for entry in unit.entries) for unit in self.units)

    @property
    def most(self) -> int:
        """Return the bytes of the largest choice."""
        return sum(max(entry.nbytes for entry in unit.entries) for unit in self.units)

    def base(self) -> tuple[Problem, list[list[int]]] | None:
        """Return the allocation among base entries alone, and of each unit the places of these; None: no other way.

        None, too, where some unit has none of them, or they do not fit.
        """
        places = [[i for i, entry in enumerate(unit.entries) if entry.is_base] for unit in self.units]
        if not all(places) or sum(map(len, places)) == sum(len(unit.entries) for unit in self.units):
            return None
        pairs = zip(self.units, places, strict=True)
        units = tuple(replace(unit, entries=tuple(unit.entries[i] for i in row)) for unit, row in pairs)
        made = Problem(units, self.budget)
        return (made, places) if made.least <= self.budget else None

    def check(self) -> None:
        """Raise BudgetError unless some choice is within the budget."""
        if self.budget < self.least:
            bpw = 8 / self.numel
            raise BudgetError(
                f"the smallest options take {self.least} bytes ({self.least * bpw:.3f} bits a weight), more than the "
                f"budget of {self.budget} ({self.budget * bpw:.3f}); raise the target, or offer smaller options"
            )


class ChoiceEvaluator(Protocol):
    """An evaluator of the joint effect of choices on the model's predictions."""

    samples: int  # calibration sequences there are
    seq_len: int  # tokens of each
    seed: int
    folder: Path  # for what a resumed search needs; kept until the search is done
    say: Callable[[str], None]  # shows what is being done
    forwards: float  # tokens that have gone through the whole model so far, shared prefixes counted once

    def divergence(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        """Return KL(original || choice), nats a token, of each choice on these sequences, alone or beside others."""


class ShareEvaluator(ChoiceEvaluator, Protocol):
    """An evaluator that also tells what each unit has to do with the effect of a choice."""

    def shares(self, choice: Choice) -> list[float]:
        """Return each unit's share of KL(original || choice) on all sequences, nats a token."""


@dataclass(frozen=True)
class Allocated:
    """The decision of an allocator."""

    choice: Choice
    notes: tuple[str, ...] = ()  # for the report, each one sentence
    trace: tuple[Mapping[str, float], ...] = ()  # of a search: one row a step (what it names, in its own words)
    facts: Mapping[str, float | str] = field(default_factory=dict)  # bound, seconds, token-forwards ...


# ---------------------------------------------------------------- options of a whole model, by name


def rank_options(units: Sequence[Unit]) -> list[str]:
    """Rank all options by the bytes that they take a weight where they are offered, ascending; ties by name."""
    nbytes: dict[str, int] = {}
    numel: dict[str, int] = {}
    for unit in units:
        for entry in unit.entries:
            nbytes[entry.option] = nbytes.get(entry.option, 0) + entry.nbytes
            numel[entry.option] = numel.get(entry.option, 0) + unit.numel
    return sorted(nbytes, key=lambda option: (nbytes[option] / numel[option], option))


def option_named(units: Sequence[Unit], key: str, option: str | None, default: int) -> str:
    """Return the option that the setting `key` names; None: the one at `default` of the ranking. Raises RecipeError."""
    known = rank_options(units)
    if option is None:
        return known[default]
    if option not in known:
        raise RecipeError(f"allocate: {key} {shown(option)} is none of the options, which are {', '.join(known)}")
    return option


def entries_at(units: Sequence[Unit], option: str) -> list[int]:
    """Return of each unit the index of the entry of this option.

    Where it is not offered, the largest of no higher rank is taken, else the smallest.
    """
    rank = {name: number for number, name in enumerate(rank_options(units))}
    chosen = []
    for unit in units:
        ranks = [rank[entry.option] for entry in unit.entries]
        allowed = [number for number in ranks if number <= rank[option]] or [min(ranks)]
        chosen.append(ranks.index(max(allowed)))
    return chosen
