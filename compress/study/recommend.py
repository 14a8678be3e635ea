"""Choose recipes for a model that has to fit a size: the best quality, the best trade, and the smallest sensible one.

Sizes of weights are exact: each recipe is planned on the model that is asked about. That of a cache which needs
calibration is an estimate, the share of an exact cache that it had in the study. Losses are those of a study,
mostly of another model; they say which recipe is better than which, and roughly by what factor, not what this model
will lose.

With a context the cache of so many tokens counts, too: exact, or by each recipe for the cache alone on the frontier of
the study, whose loss is added to that of the weights.

The smallest sensible choice is the smallest whose expected loss is at most SENSIBLE. The best trade is the choice
between these two that lies farthest below the straight line through them, in bytes against the logarithm of the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from compress import recipe
from compress.errors import CompressError, RecipeError
from compress.kv.settings import cache_settings
from compress.model import architectures
from compress.model.cache_pass import cached_layers
from compress.progress import Progress, note, silent
from compress.recipe import Recipe
from compress.run import kv_cache, plan_serving, prepare, source
from compress.run.job import Job, Prepared
from compress.study import losses
from compress.study.checkpoints import identify
from compress.study.losses import Known, RecipeLoss

SENSIBLE = 0.1  # nats a token: some 10% of perplexity
BEST, TRADE, SMALLEST = "best quality", "best trade", "smallest sensible"
LEAST_KL = 1e-6  # nats a token; what is below counts as this much where logarithms are taken


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe, with or without another one's cache."""

    recipe: str
    cache: str | None  # recipe of the cache; None: what `recipe` says, exact if it says nothing
    nbytes: int  # of all stored tensors
    is_bound: bool  # whether that is an upper bound: bits are still to be allocated
    cache_nbytes: int  # at the context; 0 without one
    kl: float  # expected, nats a token
    se: float | None

    @property
    def total(self) -> int:
        """Bytes of weights and cache."""
        return self.nbytes + self.cache_nbytes


@dataclass(frozen=True)
class Wanted:
    """What is to fit."""

    job: Job  # of the model; its recipe is replaced
    limit: int  # [bytes]
    context: int | None = None  # [tokens] of the cache that counts


def serving(wanted: Wanted, choice: RecipeChoice, memory: plan_serving.ServingMemory) -> dict[str, Any]:
    """Return what an engine serves of a choice in a memory, as JSON values; "reason": why that cannot be counted."""
    try:
        return plan_serving.beside(wanted.job, choice.nbytes, with_cache(choice).kv_cache, memory)
    except CompressError as error:
        return {"reason": str(error)}


def none_usable(left_out: Mapping[str, str]) -> str:
    """Return what to say where a model can use no recipe of the study."""
    reasons = dict.fromkeys(left_out.values())
    return f"no recipe of the study can be used on this model: {next(iter(reasons), 'it has none')}"


def choices(wanted: Wanted, study: Known, progress: Progress = silent) -> tuple[list[RecipeChoice], dict[str, str]]:
    """Return all choices, whether they fit or not, and the recipes that this model cannot use with the reasons."""
    options, left_out = list[RecipeChoice](), dict[str, str]()
    caches: Mapping[str | None, tuple[int, RecipeLoss | None]] | None = None
    candidates = study.frontier
    for done, loss in enumerate(candidates):
        progress("planning recipes", done, len(candidates))
        resolved = recipe.load(loss.recipe)
        try:
            nbytes, is_bound, prepared = size(dataclasses.replace(wanted.job, recipe=resolved))
        except CompressError as error:
            left_out[loss.recipe] = str(error)
            continue
        if caches is None:
            caches = _caches(wanted, study, prepared)
        if resolved.kv_cache is not None:
            exact = caches[None][0]
            options.append(
                RecipeChoice(
                    loss.recipe, None, nbytes, is_bound, int(exact * (loss.cache_share or 1)), loss.kl, loss.se
                )
            )
            continue
        for name, (cache_nbytes, extra) in caches.items():
            kl, se = (loss.kl, loss.se) if extra is None else _sum(loss, extra)
            options.append(RecipeChoice(loss.recipe, name, nbytes, is_bound, cache_nbytes, kl, se))
    return options, left_out


def size(job: Job) -> tuple[int, bool, Prepared]:
    """Return the bytes that a job would write and whether that is only a bound, because bits are still to be chosen."""
    plain = dataclasses.replace(job.recipe, allocate=None)
    prepared = prepare.prepare(dataclasses.replace(job, recipe=plain))
    return *plan_serving.bound_nbytes(job.recipe, prepared.plan), prepared


def three(found: Sequence[RecipeChoice], limit: int) -> dict[str, RecipeChoice]:
    """Return the recommended choices by name; none if nothing fits. One may have several names."""
    front = losses.unbeaten([choice for choice in found if choice.total <= limit], lambda choice: choice.total)
    if not front:
        return {}
    best = front[-1]
    sensible = [choice for choice in front if choice.kl <= SENSIBLE]
    smallest = sensible[0] if sensible else best
    between = [choice for choice in front if smallest.total <= choice.total <= best.total]
    return {BEST: best, TRADE: min(between, key=lambda choice: _above(choice, smallest, best)), SMALLEST: smallest}


def command(wanted: Wanted, choice: RecipeChoice) -> list[str]:
    """Return the words of the command line that makes a choice."""
    words = ["compress", "quantize", wanted.job.model, "--recipe", choice.recipe]
    words += ["--calib", wanted.job.calib] if wanted.job.calib is not None else []
    if choice.cache is not None:
        said = yaml.safe_dump(shortest(choice.cache), default_flow_style=True, sort_keys=False, width=10**6).strip()
        words += ["--set", f"kv_cache={said}"]
    return words


def shortest(name: str) -> dict[str, Any]:
    """Return the kv_cache of a built-in recipe without the keys that say only what is the default."""
    section: dict[str, Any] = recipe.data(name)["kv_cache"]
    meant = cache_settings(section)
    for key in list(section):
        less = {other: value for other, value in section.items() if other != key}
        with suppress(RecipeError):  # of a key that must be given
            section = less if cache_settings(less) == meant else section
    return section


def with_cache(choice: RecipeChoice) -> Recipe:
    """Return the recipe of a choice."""
    resolved = recipe.load(choice.recipe)
    if choice.cache is None:
        return resolved
    return dataclasses.replace(resolved, kv_cache=recipe.load(choice.cache).kv_cache)


class Studied(NamedTuple):
    """The study that losses are taken from, and the others."""

    known: Known
    others: list[Known]
    is_same: bool  # whether it is of the very model that is asked about

    def agreements(self) -> Iterator[tuple[str, float, int]]:
        """Yield for each other study its model, the rank correlation with this one, and how many recipes both have."""
        for other in self.others:
            agreement = losses.rank_agreement(self.known, other)
            if agreement is not None:
                yield other.model, *agreement


def choose_study(job: Job, study: Path | None) -> Studied:
    """Return the study of the model, or else of the one nearest in size. Raises CompressError where there is none."""
    known = losses.read_shipped() if study is None else [losses.read(study)]
    known = [each for each in known if each.losses]
    if not known:
        raise CompressError("no study is at hand; make one with `compress study` and give its study.json with --study")
    own, parameters = identify(source.of(job))
    nearest = losses.nearest(known, parameters, own)
    return Studied(nearest, [each for each in known if each is not nearest], nearest.fingerprint == own)


def _caches(wanted: Wanted, study: Known, prepared: Prepared) -> dict[str | None, tuple[int, RecipeLoss | None]]:
    """Return recipe of the cache -> its bytes at the context and its loss; None: the exact cache."""
    if wanted.context is None:
        return {None: (0, None)}
    skeleton = prepared.skeleton
    if remark := architectures.beyond(skeleton.config, wanted.context):
        note(remark)
    heads = cached_layers(skeleton.config).by_layer.values()
    a_token = sum(math.prod(shape) for each in heads for shape in (each.keys, each.values)) * skeleton.dtype.itemsize
    exact = a_token * wanted.context
    caches: dict[str | None, tuple[int, RecipeLoss | None]] = {None: (exact, None)}
    sized = [loss for loss in study.caches.values() if loss.cache_share is not None]
    for loss in losses.unbeaten(sized, lambda loss: loss.cache_share):
        settings = recipe.load(loss.recipe).kv_cache
        if settings is None:
            continue
        try:
            kv_cache.check(skeleton.config, settings)
        except CompressError:
            continue
        nbytes = int(exact * (loss.cache_share or 1))
        if not settings.needs():
            measured = kv_cache.bytes_at_context(skeleton.config, settings, {}, skeleton.dtype, wanted.context)
            nbytes = int(measured.bytes_per_token * wanted.context)
        if nbytes < exact:
            caches[loss.recipe] = (nbytes, loss)
    return caches


def _sum(one: RecipeLoss, other: RecipeLoss) -> tuple[float, float | None]:
    """Return loss and standard error of two that come together."""
    se = None if one.se is None or other.se is None else math.hypot(one.se, other.se)
    return one.kl + other.kl, se


def _above(choice: RecipeChoice, smallest: RecipeChoice, best: RecipeChoice) -> float:
    """Return how far a choice lies above the line between two others, in bytes against log KL; negative: below."""

    def height(one: RecipeChoice) -> float:
        return math.log(max(one.kl, LEAST_KL))

    span = best.total - smallest.total
    share = (choice.total - smallest.total) / span if span else 0.0
    return height(choice) - (height(smallest) + share * (height(best) - height(smallest)))


def plain(choice: RecipeChoice) -> dict[str, Any]:
    """Return a choice as JSON values."""
    return {**dataclasses.asdict(choice), "total": choice.total}
