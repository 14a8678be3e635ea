"""Apply a recipe to a skeleton: decide what happens to every linear, and its exact bytes. No weight is read."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from compress import formats, plugins
from compress.errors import RecipeError, shown
from compress.formats import transforms
from compress.model.skeleton import Skeleton
from compress.model.spared import keeps_bias, spared_linears
from compress.quant import incoherence, parts
from compress.recipe.schema import KEEP, Recipe
from compress.run import draft_heads, outside_plan
from compress.storage.checkpoint import Readable
from compress.types import NO_TRANSFORMS, LayerPlan, LinearSpec, LowRank, Plan, Scheme, Stored, WeightTransforms


def make(recipe: Recipe, skeleton: Skeleton, pack: bool = True) -> Plan:
    """Apply the recipe's rules to every linear of the decoder blocks; without `pack` all weights stay as they are.

    Raises RecipeError if no linear is left to quantize or a pattern matches nothing.
    """
    specs, kept = skeleton.linears(is_needed=pack)
    asked = {spec.name: recipe.scheme_for(spec.name) for spec in specs}
    schemes, one_sided = _without_gradients(asked, recipe, skeleton) if pack else (asked, "")
    _check_patterns(recipe, skeleton, specs, kept)
    decided = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not pack:
        plain = Plan((), kept, {n: stored.nbytes for n, stored in _source_tensors(skeleton).items()}, decided)
        return draft_heads.add(outside_plan.add_tables(plain, recipe, skeleton, _outside), recipe, skeleton, _outside)
    names = {scheme.method for scheme in schemes.values() if scheme is not None}
    methods = {name: plugins.load("quant", name) for name in names}
    layers: list[LayerPlan] = []
    dense_inputs: list[LinearSpec] = []
    spared = {name: reason for name, reason in spared_linears(skeleton).items() if recipe.is_open(name)}
    packed_experts = _with_packed(skeleton, [spec for spec in specs if spec.is_expert], schemes)
    for spec in specs:
        scheme = schemes[spec.name]
        if scheme is not None:
            online = skeleton.edits.online if skeleton.edits is not None else {}
            layer = _layer(spec, scheme, methods[scheme.method], online.get(spec.name, NO_TRANSFORMS))
            if scheme.sparsity is not None and layer.stored.sparsity is None:
                dense_inputs.append(spec)
            if reason := _reason_to_keep(layer, spared, recipe, skeleton):
                kept[spec.name] = reason
            else:
                layers.append(layer)
        elif spec.is_expert and (_owner(spec) in packed_experts or recipe.transform):  # what is edited is not copied
            layers.append(_dense(spec))
        else:
            kept[spec.name] = Plan.CHOSEN
    _check_tuned(layers, recipe)
    unread_message = _sparsity_message(dense_inputs, layers, recipe)
    if all(layer.stored.is_plain for layer in layers):
        raise RecipeError(f"recipe {shown(recipe.name)} leaves no linear to quantize; look at its rules and ignore")
    replaced = {stored.name for layer in layers for stored in skeleton.weight_sources(layer.spec)}
    kept_nbytes = {name: stored.nbytes for name, stored in _source_tensors(skeleton).items() if name not in replaced}
    for layer in layers:
        if len(layer.spec.parameters) > 1:  # the bias of an expert becomes a tensor of its own
            kept_nbytes[f"{layer.spec.name}.bias"] = layer.spec.shape[0] * layer.spec.dtype.itemsize
    chosen = sum(spec.numel for spec in specs if schemes[spec.name] is None or spec.name in kept)
    of_blocks = Plan(tuple(layers), kept, kept_nbytes, decided, chosen_numel=chosen, one_sided=one_sided)
    of_blocks = dataclasses.replace(of_blocks, messages=(*_spared_message(of_blocks), *unread_message))
    with_towers = outside_plan.add_towers(of_blocks, recipe, skeleton, _outside)
    with_tables = outside_plan.add_tables(with_towers, recipe, skeleton, _outside)
    whole = draft_heads.add(with_tables, recipe, skeleton, _outside)
    return _with_estimates(_check_originals(whole, recipe))


def _reason_to_keep(layer: LayerPlan, spared: dict[str, str], recipe: Recipe, skeleton: Skeleton) -> str:
    """Return why a linear is left alone though the recipe has a scheme for it, "" if it is not.

    spared: linears that are left alone by default. Raises RecipeError for a rule that drops what has a bias.
    """
    name = layer.spec.name
    if not layer.nbytes and keeps_bias(skeleton, layer.spec):
        if not recipe.is_open(name):
            raise RecipeError(f"{name} has a bias, which would stay where it is dropped; change its rule")
        return Plan.BIASED
    is_spared = name in spared and (spared[name] == Plan.ROUTER or layer.nbytes < layer.spec.numel)
    return spared[name] if is_spared else ""


def _spared_message(plan: Plan) -> tuple[str, ...]:
    """Return a line on the linears that are left alone by default."""
    if not plan.spared_names:
        return ()
    ends, count = ", ".join(sorted({name.rpartition(".")[2] for name in plan.spared_names})), len(plan.spared_names)
    return (
        f"linears that gate a recurrence or choose experts stay as they are: {count} ({ends}); a rule with their "
        "names quantizes them",
    )


def _sparsity_message(dense: Sequence[LinearSpec], layers: Sequence[LayerPlan], recipe: Recipe) -> tuple[str, ...]:
    """Return a line on linears that read all inputs though a recipe says otherwise.

    Raises RecipeError where all of them do, and for what cannot be done along with activation sparsity.
    """
    sparse = [layer for layer in layers if layer.stored.sparsity is not None]
    turning = [
        step.method
        for step in recipe.transform
        if getattr(plugins.load("transform", step.method), "ROTATES_INPUTS", False)
    ]
    if sparse and turning:
        raise RecipeError(
            f"sparsity: {turning[0]} rotates what linears read, and inputs that are about normal have few small ones; "
            "remove the transform or sparsity"
        )
    if recipe.tune and sparse:
        raise RecipeError("sparsity: what is tuned reads all inputs; remove tune or sparsity")
    if not dense:
        return ()
    experts = sum(spec.is_expert for spec in dense)
    rotated = f"{len(dense) - experts} whose inputs are rotated, so that few are small (incoherence: false mends that)"
    reasons = [*([rotated] if len(dense) > experts else []), *([f"{experts} of experts"] if experts else [])]
    if not sparse:
        raise RecipeError(f"sparsity: no linear can leave inputs unread: {', '.join(reasons)}")
    return (f"sparsity: these linears read all inputs: {', '.join(reasons)}",)


def _check_tuned(layers: Sequence[LayerPlan], recipe: Recipe) -> None:
    """Raise RecipeError where what is tuned was transformed before, or has levels: each is what its bits are alone."""
    from_source = [
        step.method for step in recipe.tune if getattr(plugins.load("tune", step.method), "FROM_SOURCE", False)
    ]
    if recipe.transform and from_source:
        raise RecipeError(
            f"tune: {from_source[0]} trains the weights as the source has them, not as transform "
            f"{recipe.transform[0].method} leaves them; run `compress transform` first and give this its output"
        )
    if recipe.tune and (with_levels := [layer.spec.name for layer in layers if layer.scheme.nested]):
        raise RecipeError(
            f"{with_levels[0]} is nested, and what all its levels share cannot be tuned; remove tune or nested"
        )


def _check_originals(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan; RecipeError where a transform would change weights that are stored as they are."""
    if recipe.transform and (changed := [layer for layer in plan.packed if layer.scheme.has_original]):
        raise RecipeError(
            f"{changed[0].spec.name}: level {changed[0].scheme.levels[-1]} is the original weight, which transform "
            f"{recipe.transform[0].method} would change; remove transform, or that level of `nested`"
        )
    return plan


def check_stacks(recipe: Recipe, skeleton: Skeleton, is_allocated: bool) -> None:
    """Raise RecipeError for what a model of two stacks cannot have."""
    if skeleton.second is None:
        return
    asked = {
        "kv_cache": recipe.kv_cache is not None,
        "transform of the whole model": any(
            plugins.load("transform", s.method).SCOPE == "model" for s in recipe.transform
        ),
        "tune": bool(recipe.tune),
        "pruning": recipe.pruning is not None,
        "allocation": is_allocated,
    }
    if refused := [name for name, is_asked in asked.items() if is_asked]:
        raise RecipeError(
            f"{', '.join(refused)}: not for a model of an encoder and a decoder, whose blocks read two streams; use a "
            "recipe that only quantizes, such as int8, int4 or trellis4bit"
        )


def _with_estimates(plan: Plan) -> Plan:
    """Return the plan with a message if the bytes of some weights are known only when they are packed."""
    guesses = [layer for layer in plan.packed if formats.is_estimated(layer.stored)]
    if not guesses:
        return plan
    nbytes = sum(layer.nbytes for layer in guesses)
    line = f"the bytes of {len(guesses)} weights depend on their numbers: {nbytes:,} are an estimate by what is usual"
    return dataclasses.replace(plan, messages=(*plan.messages, line))


def _without_gradients(
    schemes: dict[str, Scheme | None], recipe: Recipe, skeleton: Skeleton
) -> tuple[dict[str, Scheme | None], str]:
    """Return the schemes, without all that goes by gradients at outputs where these cannot be taken; and why.

    They are of the model before any block is transformed, and of one stack.
    """
    steps = [step.method for step in recipe.transform if plugins.load("transform", step.method).SCOPE == "block"]
    parts = [scheme.lowrank for scheme in schemes.values() if scheme is not None and scheme.lowrank is not None]
    if skeleton.second is not None and any(part.metric == "fisher" or part.train for part in parts):
        raise RecipeError(
            "lowrank: metric fisher and train are not for a model of an encoder and a decoder; leave them out"
        )
    if steps and any(part.metric == "fisher" for part in parts):
        raise RecipeError(
            f"{steps[0]} changes what linears read after gradients are taken there, by which metric: fisher goes; "
            "set another metric, or run `compress transform` first and give this its output"
        )
    changed = {name: scheme and _one_sided(scheme) for name, scheme in schemes.items()}
    if changed == schemes or not (steps or skeleton.second is not None):
        return schemes, ""
    if skeleton.second is not None:
        return changed, "the loss's gradients are not taken through two stacks: rounding is one-sided"
    by = ", ".join(dict.fromkeys(steps))
    return changed, f"{by} changes what linears give after gradients are taken there: rounding is one-sided"


def _one_sided(scheme: Scheme) -> Scheme:
    """Return a scheme that goes by no gradients at outputs."""
    scales = "rms" if scheme.out_scales == "sensitivity" else scheme.out_scales
    return dataclasses.replace(scheme, two_sided=False, out_scales=scales)


def table_options(
    recipe: Recipe, skeleton: Skeleton, schemes: Sequence[Scheme | None]
) -> list[outside_plan.TableOptions]:
    """Return the tables outside of the blocks at each of these schemes; None keeps a table. Raises RecipeError."""
    return outside_plan.table_options(recipe, skeleton, schemes, _outside)


def _source_tensors(skeleton: Skeleton) -> dict[str, Readable]:
    """Return all tensors of the checkpoint to be written that come from the source, by their names on disk."""
    return {stored.name: stored for sources in skeleton.sources.values() for stored in sources}


def _layer(spec: LinearSpec, scheme: Scheme, method: ModuleType, online: WeightTransforms) -> LayerPlan:
    """Plan one linear. online: operations that a transform leaves to run time; a random rotated basis replaces them."""
    scheme, method = _fitting(scheme, method, spec.shape)
    scheme = incoherence.with_chosen_scales(scheme, spec.shape)
    around = incoherence.operations(scheme) if scheme.incoherence else online
    lowrank = scheme.lowrank.stored if scheme.lowrank is not None else None
    is_rotated = any(name not in transforms.DIAGONAL for name in around.input)
    sparsity = None if scheme.sparsity is None or is_rotated or spec.is_expert else scheme.sparsity
    if sparsity is not None and sparsity.has_rest_part:
        lowrank = LowRank(sparsity.rank(spec.shape))
    if around and scheme.lowrank is not None and scheme.lowrank.metric == "fisher":
        raise RecipeError(f"{spec.name}: metric fisher is not known in a rotated basis; set another metric for it")
    try:
        matrix = parts.plan(scheme, spec.shape, spec.dtype)
        stored = Stored(matrix.format, matrix.params, around, scheme.activations, lowrank)
        if sparsity is not None:
            stored = dataclasses.replace(stored, sparsity=sparsity.for_linear(sparsity.unread()))
            columns: Any = formats.get("columns")
            by_columns = columns.params_for(stored.format, stored.params)  # which kernels read that skip some
            if by_columns is not None:
                stored = dataclasses.replace(stored, format="columns", params=by_columns)
        nbytes = formats.nbytes(stored, spec.shape)
    except ValueError as error:  # a setting that cannot be for this shape
        shape = f"{spec.shape[0]} x {spec.shape[1]}"
        raise RecipeError(
            f"{spec.name} ({shape}): {error}; change the setting, or give this linear a rule of its own"
        ) from error
    return LayerPlan(spec, scheme, stored, nbytes)


def _fitting(scheme: Scheme, method: ModuleType, shape: tuple[int, int]) -> tuple[Scheme, ModuleType]:
    """Return the scheme and its method, or those that the method names for a shape that its blocks do not fit."""
    other = method.instead(scheme.config, shape) if hasattr(method, "instead") else None
    if other is None:
        return scheme, method
    name, settings = other
    method = plugins.load("quant", name)
    return dataclasses.replace(scheme, method=name, config=method.Config(**settings)), method


def _outside(spec: LinearSpec, scheme: Scheme) -> LayerPlan:
    """Plan a weight outside of the blocks that text runs through."""
    return _layer(spec, dataclasses.replace(scheme, sparsity=None), plugins.load("quant", scheme.method), NO_TRANSFORMS)


def _dense(spec: LinearSpec) -> LayerPlan:
    """Plan a linear that stays as it is."""
    stored = parts.original_stored(spec.dtype)
    return LayerPlan(spec, Scheme(KEEP, None), stored, formats.nbytes(stored, spec.shape))


def _owner(spec: LinearSpec) -> str:
    """Return the experts module that an expert's linear belongs to."""
    return spec.name.rsplit(".", 2)[0]


def _with_packed(skeleton: Skeleton, experts: list[LinearSpec], schemes: dict[str, Scheme | None]) -> set[str]:
    """Return the experts modules some of whose linears are packed, and those stored in the same tensors as these."""
    packed = {_owner(spec) for spec in experts if schemes[spec.name] is not None}
    stored = {spec: {tensor.name for tensor in skeleton.weight_sources(spec)} for spec in _first_of_each(experts)}
    replaced = {name for spec, names in stored.items() if _owner(spec) in packed for name in names}
    return packed | {_owner(spec) for spec, names in stored.items() if names & replaced}


def _first_of_each(experts: list[LinearSpec]) -> list[LinearSpec]:
    """Return one linear of each module of experts."""
    return list({_owner(spec): spec for spec in experts}.values())


def _check_patterns(recipe: Recipe, skeleton: Skeleton, specs: list[LinearSpec], kept: Iterable[str]) -> None:
    """Raise RecipeError for a pattern that finds nothing: it is a typo, and what it was for would go unnoticed.

    Each pattern of a rule must match a linear; of `match_any`, which lists the names that several architectures have
    for the same thing, one. Each of `ignore` must match a linear, or any other module, parameter or stored tensor: what
    is no target, such as lm_head, may be named.
    """
    linears = [spec.name for spec in specs]
    known = set(linears)
    for rule in recipe.rules:
        missed = [pattern for pattern in rule.match if not _is_found(pattern, known)]
        if missed and not (rule.alternatives and len(missed) < len(rule.match)):
            raise RecipeError(
                f"rule {shown(missed[0])} matches no linear of the decoder blocks; names look like {linears[0]!r}"
                + _closest(missed[0], linears)
            )
    if not recipe.ignore:
        return
    model = skeleton.model
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    known |= {*kept, *modules, *parameters, *_source_tensors(skeleton)}
    for pattern in recipe.ignore:
        if not _is_found(pattern, known):
            raise RecipeError(
                f"ignore: {shown(pattern)} matches nothing in the model; linears look like {linears[0]!r}"
                + _closest(pattern, [*linears, *modules])
            )


def _is_found(pattern: str, names: Collection[str]) -> bool:
    """Return whether a pattern matches one of the names."""
    return pattern in names or (any(s in pattern for s in "*?[") and any(fnmatchcase(name, pattern) for name in names))


def _closest(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a sentence with the names whose last parts are most like those of a pattern, "" without any.

    Of names that differ only in their numbers the first stands for all.
    """
    written = pattern.lstrip("*").lstrip(".").lower()
    words = written.count(".") + 1
    ends: dict[str, str] = {}
    for name in names:
        ends.setdefault(".".join(re.sub(r"(?<=\.)\d+(?=\.|$)", "0", name).split(".")[-words:]).lower(), name)
    close = [ends[end] for end in difflib.get_close_matches(written, ends, n=3, cutoff=0.5)]
    return f"; the closest are {', '.join(map(repr, close))}" if close else ""
