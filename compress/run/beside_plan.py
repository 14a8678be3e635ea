"""Plan what lies beside the text model: towers where the recipe asks for it, and decoder blocks that text skips.

Calibration is on text, which never reaches these linears. So a tower takes methods that need no data alone. Linears of
skipped decoder blocks get the scheme that their names get; a method that works by statistics does what it does for an
expert that no token was routed to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase

from compress.errors import RecipeError, shown
from compress.model import beside
from compress.model.skeleton import Skeleton
from compress.recipe.schema import Recipe
from compress.run import sizes
from compress.types import LayerPlan, LinearSpec, Plan, Scheme

NO_TEXT = "no text reaches it"
PlanLinear = Callable[[LinearSpec, Scheme], LayerPlan]


def added(plan: Plan, recipe: Recipe, skeleton: Skeleton, plan_linear: PlanLinear) -> Plan:
    """Return the plan with what the recipe packs beside the text model.

    plan_linear: plans one linear. Raises RecipeError for a pattern that matches no linear of a tower, and for a method
    that needs data there.
    """
    if not skeleton.text_path.towers and not skeleton.text_path.skipped and not recipe.towers:
        return plan
    specs, refused = beside.linears(skeleton)
    _check_patterns(recipe, [name for name in (*(s.name for s in specs), *refused) if beside.is_tower(skeleton, name)])
    layers, kept = list[LayerPlan](), dict(plan.kept_reasons)
    for spec in specs if plan.layers else ():
        is_tower = beside.is_tower(skeleton, spec.name)
        scheme = recipe.tower_scheme(spec.name) if is_tower else recipe.scheme_for(spec.name)
        layer = plan_linear(spec, scheme) if scheme is not None else None
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
    kept |= {name: why for name, why in refused.items() if not beside.is_tower(skeleton, name)}
    replaced = {stored.name for layer in layers for stored in skeleton.weight_sources(layer.spec)}
    stored = {name: nbytes for name, nbytes in plan.kept_nbytes.items() if name not in replaced}
    return dataclasses.replace(plan, tower_layers=tuple(layers), kept_reasons=kept, kept_nbytes=stored)


def _needs_tokens(layer: LayerPlan) -> bool:
    """Return whether a linear cannot do without what only tokens give: a scale of its inputs, a trained part."""
    lowrank = layer.scheme.lowrank
    is_trained = lowrank is not None and bool(lowrank.train or lowrank.train_blocks)
    return sizes.needs_in_scale(layer) or sizes.needs_gradients(layer) or is_trained


def _check_patterns(recipe: Recipe, names: list[str]) -> None:
    """Raise RecipeError for a pattern of `towers` that matches none of the linears in towers."""
    for pattern in (pattern for rule in recipe.towers for pattern in rule.match):
        if not any(fnmatchcase(name, pattern) for name in names):
            look = f"their names look like {names[0]!r}" if names else "this model has none"
            raise RecipeError(f"towers: {shown(pattern)} matches no linear beside the text model; {look}")
