"""From a recipe and a skeleton to a plan: what happens to every linear, and its exact bytes. No weight is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType

from compress import activations, formats, incoherence, ops, plugins
from compress.checkpoint import StoredTensor
from compress.errors import RecipeError
from compress.formats import dense
from compress.formats import lowrank as lowrank_format
from compress.model import Skeleton
from compress.recipe import Recipe
from compress.recipe_types import KEEP
from compress.types import NO_OPS, LayerPlan, LinearSpec, Ops, Plan, Scheme


@dataclass(frozen=True)
class Group:
    """Linears that differ only in their numbers (block, expert) and are stored alike; one row of the printed plan."""

    pattern: str  # model.layers.*.self_attn.q_proj
    count: int
    shape: tuple[int, int]
    method: str
    format: str
    bpw: float
    nbytes: int  # of all members


def make(recipe: Recipe, skeleton: Skeleton, pack: bool = True) -> Plan:
    """Apply the recipe's rules to every linear of the decoder blocks; without `pack` all weights stay as they are.

    Raises RecipeError if no linear is left to quantize or a rule matches none.
    """
    specs, kept = skeleton.linears()
    schemes = {spec.name: recipe.scheme_for(spec.name) for spec in specs}
    _check_rules(recipe, specs)
    decided = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not pack:
        return Plan((), kept, {n: stored.nbytes for n, stored in _stored(skeleton).items()}, decided)
    names = {scheme.method for scheme in schemes.values() if scheme is not None}
    methods = {name: plugins.load("quant", name) for name in names}
    layers: list[LayerPlan] = []
    packed_experts = {_owner(spec) for spec in specs if spec.is_expert and schemes[spec.name] is not None}
    for spec in specs:
        scheme = schemes[spec.name]
        if scheme is not None:
            around = skeleton.edits.online.get(spec.name, NO_OPS) if skeleton.edits is not None else NO_OPS
            layers.append(_layer(spec, scheme, methods[scheme.method], around))
        elif spec.is_expert and (_owner(spec) in packed_experts or recipe.transform):  # what is edited is not copied
            layers.append(_dense(spec))
        else:
            kept[spec.name] = "kept by the recipe"
    if all(layer.format == "dense" for layer in layers):
        raise RecipeError(f"recipe {recipe.name!r} leaves no linear to quantize; look at its rules and ignore")
    replaced = {stored.name for layer in layers for stored in skeleton.weight_sources(layer.spec)}
    kept_nbytes = {name: stored.nbytes for name, stored in _stored(skeleton).items() if name not in replaced}
    return Plan(tuple(layers), kept, kept_nbytes, decided)


def groups(plan: Plan) -> list[Group]:
    """The plan's layers, gathered."""
    found: dict[tuple[str, tuple[int, int], str, str, int], int] = {}
    for layer in plan.layers:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", layer.spec.name)
        key = (pattern, layer.spec.shape, layer.scheme.method, describe(layer), layer.nbytes)
        found[key] = found.get(key, 0) + 1
    return [
        Group(pattern, count, shape, method, text, 8 * nbytes / (shape[0] * shape[1]), nbytes * count)
        for (pattern, shape, method, text, nbytes), count in found.items()
    ]


def describe(layer: LayerPlan) -> str:
    """The format and its main numbers in a few words, from the parameters that config.json stores."""
    shown = [
        f"{key}={value}"
        for key, value in vars(layer.params).items()
        if key not in ("tile_words", "scale_dtype") and value is not None
    ]
    inputs = activations.describe(layer.activations) if layer.activations is not None else ""
    beside = lowrank_format.describe(layer.lowrank) if layer.lowrank is not None else ""
    return " ".join(filter(None, [layer.format, *shown, ops.describe(layer.ops), inputs, beside]))


def _stored(skeleton: Skeleton) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint to be written that come from the source, by their names on disk."""
    return {stored.name: stored for sources in skeleton.sources.values() for stored in sources}


def _layer(spec: LinearSpec, scheme: Scheme, method: ModuleType, online: Ops) -> LayerPlan:
    """`online`: what a transform leaves to run time; a basis of the method's own takes its place."""
    around = incoherence.OPS if scheme.incoherence else online
    lowrank = scheme.lowrank.stored if scheme.lowrank is not None else None
    if around and scheme.lowrank is not None and scheme.lowrank.metric == "fisher":
        raise RecipeError(f"{spec.name}: metric fisher is not known in a rotated basis; set another metric for it")
    try:
        params = method.plan_params(scheme.config, spec.shape)
        nbytes = formats.nbytes(method.FORMAT, params, spec.shape, around, scheme.activations, lowrank)
    except ValueError as error:  # a setting that cannot be for this shape
        shape = f"{spec.shape[0]} x {spec.shape[1]}"
        raise RecipeError(
            f"{spec.name} ({shape}): {error}; change the setting, or give this linear a rule of its own"
        ) from error
    return LayerPlan(spec, scheme, method.FORMAT, params, nbytes, around, scheme.activations, lowrank)


def _dense(spec: LinearSpec) -> LayerPlan:
    params = dense.Params(str(spec.dtype).removeprefix("torch."))
    return LayerPlan(spec, Scheme(KEEP, None), "dense", params, formats.nbytes("dense", params, spec.shape))


def _owner(spec: LinearSpec) -> str:
    """The experts module that an expert's linear belongs to."""
    return spec.name.rsplit(".", 2)[0]


def _check_rules(recipe: Recipe, specs: list[LinearSpec]) -> None:
    for rule in recipe.rules:
        if not any(rule.matches(spec.name) for spec in specs):
            raise RecipeError(
                f"rule {', '.join(rule.match)!r:.200} matches no linear of the decoder blocks; names look like "
                f"{specs[0].name!r}"
            )
