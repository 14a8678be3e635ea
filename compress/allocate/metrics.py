"""Damages and scores that take passes of the whole model, each by its name: a function that measures it and keeps it.

A function is given the measurements of a folder (compress/allocate/sensitivity.py), measures, and writes a file there;
block by block where it takes long, so that a killed run goes on (gradients need all blocks, and start over).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress import plugins
from compress.allocate import block_scores
from compress.calib import fisher
from compress.errors import RecipeError

if TYPE_CHECKING:
    from compress.allocate.groups import Group
    from compress.allocate.sensitivity import Measured


def _swap(found: Measured, name: str, around: Mapping[str, str]) -> None:
    """KL(original || model) with one unit at one option, for all; `around`: the levels of everything else."""
    known = found.kept(name).get("damages", {}).get(name, {})
    judge, blocks = found.judge(), len(found.skeleton.blocks)
    before = judge.forwards - found.kept(name).get("forwards", 0.0)
    for index in range(blocks):
        groups = [group for group in found.groups if group.members[0].block == index and group.name not in known]
        asked = [(group, option) for group in groups for option in found.options(group)]
        if not asked:
            continue
        found.progress("trying one unit at a time", index, blocks)
        tried = [_changed(found, group, option, around) for group, option in asked]
        kls = judge.divergence(tried, range(found.samples))
        for group in groups:
            known[group.name] = [0.0] * len(found.opened.names)
        for (group, option), kl in zip(asked, kls, strict=True):
            known[group.name][option] = max(0.0, kl)
        forwards = judge.forwards - before
        found.keep(name, False, damages={name: known}, samples=found.samples, forwards=forwards)
    found.keep(name, True, damages={name: known}, samples=found.samples, forwards=judge.forwards - before)


def _changed(found: Measured, group: Group, option: int, around: Mapping[str, str]) -> dict[str, str]:
    own = found.assignment(group, option)
    return {**{name: level for name, level in around.items() if name not in _names(group)}, **own}


def _names(group: Group) -> set[str]:
    return {member.name for member in group.members}


def _swap_base(found: Measured) -> None:
    """The same over a base at which every unit is at its largest option (AdaQuant)."""
    around: dict[str, str] = {}
    for group in found.groups:
        largest = max(found.options(group), key=lambda option: found.nbytes(group, option))
        around |= found.assignment(group, largest)
    _swap(found, "swap_base", around)


def _noise(found: Measured) -> None:
    """alpha t^2 of each unit and option: the slope of the KL in noise on the unit, and the option's relative error."""
    judge = found.judge()
    members = {group.name: [member.name for member in group.members] for group in found.groups}
    known, blocks = found.kept("noise").get("slopes", {}), len(found.skeleton.blocks)
    before = judge.forwards - found.kept("noise").get("forwards", 0.0)
    for index in range(blocks):
        some = {g.name: members[g.name] for g in found.groups if g.members[0].block == index and g.name not in known}
        if some:
            found.progress("measuring the answer to noise", index, blocks)
            known |= block_scores.slopes(judge, some, range(found.samples))
            forwards = judge.forwards - before
            found.keep("noise", False, slopes=known, samples=found.samples, forwards=forwards)
    slopes = {name: block_scores.Slope(*known[name]) for name in members}
    errors = found.relative_errors()
    damages = {
        name: [slope.alpha * error if not math.isnan(error) else 0.0 for error in errors[name]]
        for name, slope in slopes.items()
    }
    alphas = {name: slope.alpha for name, slope in slopes.items()}
    worst = min(slope.r2 for slope in slopes.values())
    found.keep(
        "noise",
        damages={"noise": damages},
        scores={"alpha": alphas},
        samples=found.samples,
        forwards=judge.forwards - before,
        least_r2=worst,
    )


def _gradients(found: Measured) -> None:
    """gradient: sum |g dW|, with the mean loss gradient g; fisher: sum F dW^2, with the mean square of gradients F."""
    scopes = [plugins.load("transform", step.method).SCOPE for step in found.opened.asked.recipe.transform]
    if "block" in scopes:
        raise RecipeError(
            "gradients are taken of the model as it is stored; use another estimator with such transforms"
        )
    skeleton, _ = found.source()
    tokens = found.calibration.tokens[: found.samples]
    sums: dict[str, dict[str, list[float]]] = {name: {} for name in ("gradient", "fisher")}
    for rows in sums.values():
        rows.update({group.name: [0.0] * len(found.opened.names) for group in found.groups})
    blocks = len(skeleton.blocks)
    file = found.database.folder / "stream"
    for index, by_linear in fisher.gradients(skeleton, tokens, file, found.opened.asked.device):
        found.progress("taking gradients", blocks - index, blocks)
        originals = found.originals(skeleton, index)
        for group in found.groups:
            if group.members[0].block == index:
                for member in group.members:
                    change = partial(found.change, member, original=originals[member.name])
                    _add_gradients(found, group, by_linear[member.name], change, sums)
    found.keep("gradient", damages=sums, samples=found.samples)


def _add_gradients(
    found: Measured,
    group: Group,
    gradient: fisher.Gradient,
    change: Callable[[int], Tensor],
    sums: dict[str, dict[str, list[float]]],
) -> None:
    """Add what one linear of a unit is damaged by each option; change: what an option adds to its weight [out, in]."""
    mean, squares = (part.cpu() / found.samples for part in gradient)  # as the originals
    for option in found.options(group):
        if found.assignment(group, option):
            difference = change(option)
            sums["gradient"][group.name][option] += (mean * difference).abs().sum(dtype=torch.float64).item()
            sums["fisher"][group.name][option] += (squares * difference.square()).sum(dtype=torch.float64).item()


def _lim(found: Measured) -> None:
    skeleton, _ = found.source()
    tokens = found.calibration.tokens[: found.samples]
    scores = block_scores.lim(skeleton, tokens, found.database.folder / "stream", found.opened.asked.device)
    _keep_blocks(found, "lim", scores, samples=found.samples)


def _zd(found: Measured) -> None:
    skeleton, _ = found.source()
    scores = []
    for index in range(len(skeleton.blocks)):
        weights = found.originals(skeleton, index)
        scores.append(block_scores.zd(weights.values()) if weights else 0.0)
    _keep_blocks(found, "zd", scores)


def _keep_blocks(found: Measured, name: str, by_block: Sequence[float], **more: Any) -> None:
    """A score of blocks as that of their units."""
    found.keep(name, scores={name: {group.name: by_block[group.members[0].block] for group in found.groups}}, **more)


MEASURES: dict[str, Callable[[Any], None]] = {
    "swap": partial(_swap, name="swap", around={}),
    "swap_base": _swap_base,
    "noise": _noise,
    "gradient": _gradients,
    "fisher": _gradients,
    "lim": _lim,
    "zd": _zd,
}
