"""Measure what takes passes of the whole model: damages and scores of units, each by its name, and whole choices.

A metric's function is given the measurements of a folder (compress/allocate/sensitivity.py) and writes a file there;
block by block where it takes long, so that a killed run goes on (gradients need all blocks, and start over).

    kl_one_at_a_time             KL(original || model) with one unit at one option, all others as they are
    kl_one_at_a_time_from_base   the same with all others at their largest option (AdaQuant)
    noise                        alpha t^2: the slope of the KL in random noise on the unit, times the relative error
    gradient, fisher             sum |g dW| with the mean gradient g of the loss; sum F dW^2 with its mean square F
    kl_shares                    share of the KL with every unit at that option (compress/allocate/kl_shares.py)
    table_kl                     KL(original || model) with one table outside of the blocks at one option
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from compress import plugins, process_memory
from compress.allocate import kl_shares, prepare_options
from compress.allocate import table as tables
from compress.allocate.joint_kl import JointKL
from compress.allocate.problem import FROM_BASE, JOINT, KL_ONE_AT_A_TIME, KL_SHARES, Choice
from compress.allocate.sensitivity import WITH_OPTIONS, Measurements
from compress.allocate.table import TABLE_KL, UnitLinears
from compress.allocate.variants import FIXED
from compress.calib import fisher
from compress.errors import NotMeasuredError, RecipeError

LEAST_SHARE = 0.01  # [fraction] of a unit's part of the errors of all weights: its share of a divergence at least


def table(store: Measurements, needs: frozenset[str]) -> tables.SensitivityTable:
    """Return the table with these damages and scores, measured now where they are not known yet."""
    wanted = needs.difference({*WITH_OPTIONS, JOINT}) | ({TABLE_KL} if store.opened.tables else set())
    allocator = plugins.load("allocate", store.opened.allocation.method)
    known_metrics = {**METRICS, TABLE_KL: _table_kl, **getattr(allocator, "METRICS", {})}
    for name in sorted(wanted):
        if any(name in known for known in store.read()):
            continue
        if name not in known_metrics:
            raise RecipeError(f"there is no measurement {name!r}; known: {', '.join([*WITH_OPTIONS, *known_metrics])}")
        if not store.opened.job.measures:
            raise NotMeasuredError(f"{store.database.folder} has no {name}")
        started = time.monotonic()
        known_metrics[name](store)
        store.seconds[name] = round(time.monotonic() - started, 2)
    measured = store.table()
    tables.save(measured, store.database.folder)
    return measured


def _kl_one_at_a_time(store: Measurements, name: str, around: Mapping[str, str]) -> None:
    """Measure KL(original || model) with each unit at each option alone; `around`: the variants of all others."""
    known = store.read_unfinished(name).get("damages", {}).get(name, {})
    evaluator, blocks = store.evaluators.on_calibration(store.samples), len(store.skeleton.blocks)
    before = evaluator.forwards - store.read_unfinished(name).get("forwards", 0.0)
    for index in range(blocks):
        groups = [group for group in store.groups if group.members[0].block == index and group.name not in known]
        pairs = [(group, option) for group in groups for option in store.options(group)]
        if not pairs:
            continue
        store.progress("trying one unit at a time", index, blocks)
        tried = [_assignment_around(store, group, option, around) for group, option in pairs]
        kls = evaluator.divergence(tried, range(store.samples))
        for group in groups:
            known[group.name] = [0.0] * len(store.opened.names)
        for (group, option), kl in zip(pairs, kls, strict=True):
            known[group.name][option] = max(0.0, kl)
        forwards = evaluator.forwards - before
        store.keep(name, False, damages={name: known}, samples=store.samples, forwards=forwards)
    store.keep(name, True, damages={name: known}, samples=store.samples, forwards=evaluator.forwards - before)


def _assignment_around(
    store: Measurements, group: UnitLinears, option: int, around: Mapping[str, str]
) -> dict[str, str]:
    """Return the variants of all linears with one unit at an option."""
    members = {member.name for member in group.members}
    others = {name: variant for name, variant in around.items() if name not in members}
    return others | store.assignment(group, option)


def _kl_from_base(store: Measurements) -> None:
    """Measure the same over a base at which every unit is at its largest option (AdaQuant)."""
    around: dict[str, str] = {}
    for group in store.groups:
        largest = max(
            store.options(group), key=lambda option: prepare_options.nbytes(store.opened, group.members, option)
        )
        around |= store.assignment(group, largest)
    _kl_one_at_a_time(store, FROM_BASE, around)


def _noise(store: Measurements) -> None:
    """Measure alpha t^2 of each unit and option: the slope of the KL in noise, and the option's relative error."""
    evaluator = store.evaluators.on_calibration(store.samples)
    members = {group.name: [member.name for member in group.members] for group in store.groups}
    known, blocks = store.read_unfinished("noise").get("slopes", {}), len(store.skeleton.blocks)
    before = evaluator.forwards - store.read_unfinished("noise").get("forwards", 0.0)
    for index in range(blocks):
        some = {g.name: members[g.name] for g in store.groups if g.members[0].block == index and g.name not in known}
        if some:
            store.progress("measuring the answer to noise", index, blocks)
            known |= kl_shares.slopes(evaluator, some, range(store.samples))
            forwards = evaluator.forwards - before
            store.keep("noise", False, slopes=known, samples=store.samples, forwards=forwards)
    slopes = {name: kl_shares.Slope(*known[name]) for name in members}
    errors = store.relative_errors()
    damages = {
        name: [slope.alpha * error if not math.isnan(error) else 0.0 for error in errors[name]]
        for name, slope in slopes.items()
    }
    alphas = {name: slope.alpha for name, slope in slopes.items()}
    worst = min(slope.r2 for slope in slopes.values())
    store.keep(
        "noise",
        damages={"noise": damages},
        scores={"alpha": alphas},
        samples=store.samples,
        forwards=evaluator.forwards - before,
        least_r2=worst,
    )


def _gradients(store: Measurements) -> None:
    """Measure sum |g dW| with the mean loss gradient g, and sum F dW^2 with the mean square of gradients F."""
    if "block" in store.opened.transform_scopes:
        raise RecipeError(
            "gradients are taken of the model as it is stored; use another estimator with such transforms"
        )
    skeleton = store.source()
    tokens = store.calibration.tokens[: store.samples]
    sums: dict[str, dict[str, list[float]]] = {name: {} for name in ("gradient", "fisher")}
    for rows in sums.values():
        rows.update({group.name: [0.0] * len(store.opened.names) for group in store.groups})
    blocks = len(skeleton.blocks)
    file = store.database.folder / "stream"
    for index, by_linear in fisher.gradients(skeleton, tokens, file, store.opened.job.device):
        store.progress("taking gradients", blocks - index, blocks)
        originals = store.originals(skeleton, index)
        for group, member in [(g, m) for g in store.groups for m in g.members if m.block == index]:
            mean, squares = (total.cpu() / store.samples for total in by_linear[member.name])  # as the originals
            for option in filter(partial(store.assignment, group), store.options(group)):
                change = store.change(member, option, originals[member.name])
                sums["gradient"][group.name][option] += (mean * change).abs().sum(dtype=torch.float64).item()
                sums["fisher"][group.name][option] += (squares * change.square()).sum(dtype=torch.float64).item()
    store.keep("gradient", damages=sums, samples=store.samples)


def _kl_shares(store: Measurements) -> None:
    """Measure each unit's share of the KL with every unit at one option, option by option."""
    count = len(store.opened.names)
    before = store.read_unfinished(KL_SHARES)
    known = before.get("damages", {}).get(KL_SHARES, {group.name: [0.0] * count for group in store.groups})
    for option in range(int(before.get("options", 0)), count):
        store.progress("sharing out the divergence of each option", option, count)
        groups = [group for group in store.groups if option in store.options(group)]
        assignment = {name: at for group in groups for name, at in store.assignment(group, option).items()}
        shares = store.evaluators.shares(assignment, store.samples) if assignment else {}
        summed = {group.name: sum(shares.get(member.name, 0.0) for member in group.members) for group in groups}
        errors = store.relative_errors()
        sizes = {g.name: sum(member.numel for member in g.members) * errors[g.name][option] for g in groups}
        for name, share in _with_least_shares(summed, sizes).items():
            known[name][option] = share
        done = option + 1
        store.keep(KL_SHARES, done == count, damages={KL_SHARES: known}, samples=store.samples, options=done)


def _with_least_shares(shares: Mapping[str, float], sizes: Mapping[str, float]) -> dict[str, float]:
    """Return shares of at least `LEAST_SHARE` of what a unit would have if all errors of weights did the same harm.

    A gradient on few tokens gives some units nothing, or less. A damage of 0 at the smallest option would keep such a
    unit there at any budget. sizes: the errors of units, nan where not known; 0 for what stays as it is.
    """
    total, error = sum(max(0.0, share) for share in shares.values()), math.fsum(filter(math.isfinite, sizes.values()))
    each = LEAST_SHARE * total / error if error else 0.0
    least = {name: each * size if math.isfinite(size) else 0.0 for name, size in sizes.items()}
    return {name: max(share, least[name]) for name, share in shares.items()}


def _table_kl(store: Measurements) -> None:
    """Measure KL(original || model) with each table at each of its options alone."""
    tables, first, count = store.opened.tables, len(store.opened.names), len(store.opened.allocation.tables)
    before = store.read_unfinished(TABLE_KL)
    known = before.get("damages", {}).get(TABLE_KL, {})
    evaluator = store.evaluators.on_calibration(store.samples)
    start = evaluator.forwards - before.get("forwards", 0.0)
    for number, table in enumerate(tables):
        name = table.spec.name
        if name not in known:
            store.progress("trying one table at a time", number, len(tables))
            kls = evaluator.divergence([{name: str(first + i)} for i in table.layers], range(store.samples))
            by_option = dict(zip(table.layers, kls, strict=True))
            known[name] = [max(0.0, by_option.get(i, 0.0)) for i in range(count)]
        done, forwards = number + 1 == len(tables), evaluator.forwards - start
        store.keep(TABLE_KL, done, damages={TABLE_KL: known}, samples=store.samples, forwards=forwards)


METRICS: dict[str, Callable[[Measurements], None]] = {
    KL_ONE_AT_A_TIME: partial(_kl_one_at_a_time, name=KL_ONE_AT_A_TIME, around={}),
    FROM_BASE: _kl_from_base,
    KL_SHARES: _kl_shares,
    "noise": _noise,
    "gradient": _gradients,
    "fisher": _gradients,
}


# ---------------------------------------------------------------- whole choices


class TableChoices:
    """A joint KL evaluator of choices of a table (`ChoiceEvaluator` of problem.py)."""

    def __init__(self, store: Measurements, table: tables.SensitivityTable, joint_kl: JointKL) -> None:
        self.store, self.table, self.joint_kl = store, table, joint_kl
        self.samples, self.seq_len = joint_kl.samples, joint_kl.seq_len
        self.seed, self.folder = store.opened.job.seed, store.database.folder
        self.fixed = {name: FIXED for name, by_option in store.opened.levels.items() if FIXED in by_option}
        self.say: Callable[[str], None] = joint_kl.say
        self.max_memory = store.opened.job.max_memory

    @property
    def forwards(self) -> float:
        """Return the tokens that have gone through the whole model so far."""
        return self.joint_kl.forwards

    def divergence(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        """Return KL(original || choice) of each choice, nats a token; samples: numbers of calibration sequences."""
        kls = self.joint_kl.divergence([self.assignment(choice) for choice in choices], samples)
        process_memory.trim()
        process_memory.check(self.max_memory)
        return kls

    def shares(self, choice: Choice) -> list[float]:
        """Return each unit's share of KL(original || choice) on all sequences, nats a token.

        The share of a table outside of the blocks is its KL alone.
        """
        by_linear = self.store.evaluators.shares(self.assignment(choice), self.samples)
        process_memory.trim()
        process_memory.check(self.max_memory)
        pairs = zip(self.table.units, choice, strict=True)
        return [
            unit.entries[i].damage[TABLE_KL]
            if unit.is_table
            else sum(by_linear.get(name, 0.0) for name in unit.members)
            for unit, i in pairs
        ]

    def assignment(self, choice: Choice) -> dict[str, Any]:
        """Return linear -> variant; what is kept is left out."""
        numbers = self.table.option_numbers(choice)
        return {
            **self.fixed,
            **{name: str(n) for name, n in numbers.items() if self.table.options[n] not in prepare_options.KEPT},
        }


def evaluator(
    store: Measurements, table: tables.SensitivityTable, text: str | None = None, tokens: int = 0
) -> TableChoices:
    """Return an evaluator of choices on the calibration text, or on the first `tokens` tokens of another.

    Raises NotMeasuredError where the job may not measure.
    """
    if not store.opened.job.measures:
        raise NotMeasuredError(f"{store.database.folder} does not hold this choice")
    if text is None:
        return TableChoices(store, table, store.evaluators.on_calibration(store.samples))
    return TableChoices(store, table, store.evaluators.on_text(text, tokens))
