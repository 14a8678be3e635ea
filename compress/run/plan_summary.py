"""Summarize a plan: rows of linears that are stored alike, and what it packs of all that could be packed.

Nothing large is left out without a word.

What counts is every matrix that the text model makes products with: linears of any class and experts, wherever they
are. Embeddings, the output head, and what is too narrow to be packed do not count.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from compress import formats
from compress.errors import CheckpointError, UnsupportedModelError
from compress.formats import levels, transforms
from compress.formats import lowrank as lowrank_format
from compress.formats.stored import KEYS, from_dict
from compress.model import draft_heads
from compress.model.meta_pass import flow
from compress.model.skeleton import MIN_FEATURES, Skeleton
from compress.runtime import activation_quant, hf, linears
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedModule
from compress.types import LayerPlan, LinearSpec, Plan, Scheme

MIN_PACKED_SHARE = 0.5  # a run that packs less of the weights needs --allow-partial
NAMED_PARTS = 3  # the largest ones, in the message
OUTSIDE = "outside of the decoder blocks"
NO_LINEAR = "not a linear layer"


@dataclass(frozen=True)
class LinearGroup:
    """Linears that differ only in their numbers (block, expert) and are stored alike; one row of the printed plan."""

    pattern: str  # model.layers.*.self_attn.q_proj
    count: int
    shape: tuple[int, int]
    method: str
    format: str
    bpw: float
    nbytes: int  # of all members


def groups(plan: Plan) -> list[LinearGroup]:
    """Gather the plan's layers that are stored alike."""
    counts: dict[tuple[str, tuple[int, int], str, str, int], int] = {}
    for layer in plan.packed:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", layer.spec.name)
        key = (pattern, layer.spec.shape, layer.scheme.method, describe(layer), layer.nbytes)
        counts[key] = counts.get(key, 0) + 1
    return [
        LinearGroup(pattern, count, shape, method, text, 8 * nbytes / (shape[0] * shape[1]), nbytes * count)
        for (pattern, shape, method, text, nbytes), count in counts.items()
    ]


def plan_of_packed(skeleton: Skeleton) -> Plan:
    """Return the plan that a packed checkpoint was written by, as far as its headers tell.

    Raises CheckpointError for a checkpoint without packed linears.
    """
    kept = {stored.name: stored.nbytes for stored in skeleton.checkpoint.tensors.values()}
    head = skeleton.model.get_output_embeddings()
    linears, tables = list[LayerPlan](), list[LayerPlan]()
    for name, module in skeleton.model.named_modules():
        if isinstance(module, PackedModule) and f"{name}.{next(iter(module.specs))}" in skeleton.sources:
            names = {stored.name for key in module.specs for stored in skeleton.sources[f"{name}.{key}"]}
            nbytes = sum(kept.pop(stored) for stored in names)
            spec = LinearSpec(name, module.shape, skeleton.dtype, block=0, input_key=name)
            is_table = isinstance(module, PackedEmbedding) or module is head
            (tables if is_table else linears).append(LayerPlan(spec, Scheme("", None), module.stored, nbytes))
    if not linears:
        raise CheckpointError(
            f"{skeleton.checkpoint.directory} has no packed linears; give a directory that `compress quantize` wrote"
        )
    drafts = _packed_drafts(skeleton, kept)
    plain = skeleton.draft_tensors.keys() & kept.keys() - draft_heads.copies(skeleton).keys()
    numel = skeleton.numel() + sum(layer.spec.numel for layer in drafts)
    numel += draft_heads.count_numbers(skeleton.draft_tensors[name] for name in plain)
    plan = Plan(tuple(linears), kept_nbytes=kept, tables=tuple(tables), numel=numel, written_numel=numel)
    return dataclasses.replace(plan, draft_layers=drafts, unused=skeleton.unused_tensors())


def _packed_drafts(skeleton: Skeleton, kept: dict[str, int]) -> tuple[LayerPlan, ...]:
    """Return the packed linears of draft heads, whose tensors are taken out of `kept`."""
    config, layers = hf.CompressConfig.read(skeleton.checkpoint.config["quantization_config"]), list[LayerPlan]()
    for name, (rows, columns) in config.draft_heads.items():
        stored = hf.scheme(config, name)
        nbytes = sum(kept.pop(f"{name}.{key}", 0) for key in formats.specs(stored, (rows, columns)))
        spec = LinearSpec(name, (rows, columns), skeleton.dtype, draft_heads.NO_BLOCK, input_key=name)
        layers.append(LayerPlan(spec, Scheme("", None), stored, nbytes))
    return tuple(layers)


class LevelSize(NamedTuple):
    """What a level of a checkpoint takes, if it is all that is stored."""

    level: int
    nbytes: int  # of all tensors
    bpw: float  # stored bits per packed weight


def level_sizes(layers: Sequence[Mapping[str, Any]], nbytes: int) -> list[LevelSize]:
    """Return the levels of a checkpoint, rising; layers: rows of its report, nbytes: of all of its tensors."""
    weights = [
        (from_dict({key: row[key] for key in KEYS if key in row}, row["name"]), (row["shape"][0], row["shape"][1]))
        for row in layers
    ]
    nested = [(stored, shape) for stored, shape in weights if levels.levels(stored)]
    packed, numel = sum(row["nbytes"] for row in layers), sum(rows * columns for _, (rows, columns) in weights)
    sizes = []
    for level in sorted({level for stored, _ in nested for level in levels.levels(stored)}):
        at_level = ((levels.at_level(stored, level), stored, shape) for stored, shape in nested)
        spared = sum(formats.nbytes(stored, shape) - formats.nbytes(own, shape) for own, stored, shape in at_level)
        sizes.append(LevelSize(level, nbytes - spared, 8 * (packed - spared) / numel))
    return sizes


def describe(layer: LayerPlan) -> str:
    """Return the format and its main numbers in a few words, from the parameters that config.json stores."""
    stored = layer.stored
    shown = [
        f"{key}={' + '.join(map(str, value)) if key == 'parts' else value}"
        for key, value in vars(stored.params).items()
        if key not in ("tile_words", "scale_dtype", "step_dtype", "narrow_tail") and value is not None
    ]
    inputs = activation_quant.describe(stored.activations) if stored.activations is not None else ""
    lowrank = lowrank_format.describe(stored.lowrank) if stored.lowrank is not None else ""
    return " ".join(filter(None, [stored.format, *shown, transforms.describe(stored.ops), inputs, lowrank]))


def add_reasons(plan: Plan, skeleton: Skeleton, matrices: Mapping[str, int]) -> Plan:
    """Return the plan with a reason for everything that counts and is not packed."""
    names = {layer.spec.name for layer in plan.layers}
    kept = dict(plan.kept_reasons)
    experts = {name.rsplit(".", 2)[0] for name in (*names, *kept)}  # whose linears are listed one by one
    for name in matrices:
        if name not in names | experts | kept.keys():
            is_inside = name.startswith(skeleton.in_blocks)
            kept[name] = NO_LINEAR if is_inside else OUTSIDE
    return dataclasses.replace(plan, kept_reasons=kept)


def check(plan: Plan, where: Path, matrices: Mapping[str, int], ignored: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedModelError if a plan with all reasons (`add_reasons`) packs less than half of what counts.

    `where`: the model's directory. What the recipe leaves out on purpose counts as packed: by its rules, or by one of
    the `ignored` patterns.
    """
    own = [layer for layer in plan.layers if not layer.stored.is_plain or layer.scheme.config is not None]
    packed = sum(layer.spec.numel for layer in own)
    left: dict[str, tuple[int, str]] = {}
    covered = packed + plan.chosen_numel
    for name, numel in matrices.items():
        if name not in plan.kept_reasons or plan.kept_reasons[name] in (plan.CHOSEN, plan.GATE, plan.ROUTER):
            continue
        if any(fnmatchcase(name, pattern) for pattern in ignored):
            covered += numel
            continue
        part = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        left[part] = left.get(part, (0, ""))[0] + numel, plan.kept_reasons[name]
    total = sum(matrices.values())
    if covered >= MIN_PACKED_SHARE * total:
        return
    largest = sorted(left.items(), key=lambda item: -item[1][0])[:NAMED_PARTS]
    parts = "; ".join(f"{part}, {numel / total:.0%}: {reason}" for part, (numel, reason) in largest)
    raise UnsupportedModelError(
        f"{where}: only {packed / total:.0%} of the linear weights would be packed; left out "
        f"are {parts}; to pack the others all the same, add --allow-partial"
    )


def matrix_sizes(skeleton: Skeleton) -> dict[str, int]:
    """Return the modules of the text model that hold matrices which count: name -> numbers in them."""
    model = skeleton.model
    skipped = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in _parameters(m)}
    text = flow(skeleton.config, skeleton.dtype).called
    decoder = {f"{name}." for name, module in model.named_modules() if module is model.get_decoder()}
    prefixes = (*skeleton.in_blocks, *(decoder if not text else ()))
    numels: dict[str, int] = {}
    for name, module in model.named_modules():
        if name not in text and not name.startswith(prefixes):
            continue
        numel = sum(p for key, p in _matrices(module) if id(module.get_parameter(key)) not in skipped)
        if numel:
            numels[name] = numel
    return numels


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())


def _matrices(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield name and size of a module's own parameters that are matrices, or stacks of them, and wide enough."""
    if isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return
    is_linear = linears.shape_of(module) is not None
    for key, parameter in module.named_parameters(recurse=False):
        is_matrix = parameter.dim() == 3 or (parameter.dim() == 2 and (is_linear or key == "weight"))
        if is_matrix and min(parameter.shape[-2:]) >= MIN_FEATURES:
            yield key, parameter.numel()
