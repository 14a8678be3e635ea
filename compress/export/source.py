"""Open a packed checkpoint for export: its weights one by one, read when they are asked for, and all other tensors.

    source = open_source(directory)
    for weight in source.packed:          # compress/export/weights.py: what is known of a weight without reading it
        if weight.not_integers() is None:
            integers = weight.integers()  # codes, scales, zeros
    for name, tensor in source.plain.items():
        tensor.read()

Names are those of published checkpoints of the architecture, experts one by one. They are found by reversing
transformers' own renaming.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightRenaming,
    build_glob_alternation,
    revert_weight_conversion,
)

from compress import formats
from compress.errors import CheckpointError
from compress.export.weights import EMBEDDINGS, HEAD, StoredWeight
from compress.model import meta_pass
from compress.model.skeleton import Skeleton
from compress.model.told_linears import EXPERT
from compress.runtime import embedding, hf, linears
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.expert_layouts import ExpertLayout
from compress.runtime.experts import Experts, is_supported, layout_of
from compress.runtime.linear import PackedLinear, PackedModule
from compress.storage.checkpoint import Checkpoint, Readable, open_checkpoint

FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
NAMED_EXPERTS = 2  # experts whose names are asked for: the others differ by their number only
SECTION = "quantization_config"
CACHE_NOTE = "the cache of keys and values is that of the other tool: the cache recipe is left out"


class PublishedNames(NamedTuple):
    """Names of modules: path in the model -> name in published checkpoints."""

    names: Mapping[str, str]
    experts: frozenset[str]  # paths of the modules of experts
    fused: frozenset[str]  # those of them that published checkpoints hold in a few fused tensors


def published_names(model: PreTrainedModel, linears: Iterable[str]) -> PublishedNames:
    """Return the names of these linears of a model, whose experts are `Experts`, or not taken apart yet."""
    modules = dict(model.named_modules())
    experts = {path: module.layout for path, module in modules.items() if isinstance(module, Experts)}
    experts |= {path: layout_of(module) for path, module in modules.items() if is_supported(module)}
    templates = {path: _templates(model, path, layout) for path, layout in experts.items()}
    renamings = _reverse_renamings(model)
    names = {}
    for linear in linears:
        path, number, projection = linear.rsplit(".", 2) if linear.count(".") > 1 else ("", "", linear)
        if path in experts:
            names[linear] = templates[path].get(projection, f"{path}.{{}}.{projection}").format(number)
        else:
            names[linear] = _published_name(f"{linear}.weight", renamings).removesuffix(".weight")
    return PublishedNames(
        names, frozenset(experts), frozenset(path for path, projections in templates.items() if not projections)
    )


def _reverse_renamings(model: PreTrainedModel) -> list[WeightRenaming]:
    """Return what turns the names of a model into those of published checkpoints."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    reverse = [entry.reverse_transform() for entry in mapping if not isinstance(entry, PrefixChange)]
    return [entry for entry in reverse if isinstance(entry, WeightRenaming)]


def _templates(model: PreTrainedModel, path: str, layout: ExpertLayout) -> dict[str, str]:
    """Return projection -> name with {} for the number of the expert; {} if no expert has a tensor of its own.

    transformers takes apart small stand-ins of the fused parameters, whose numbers tell what has gone where.
    """
    marks: dict[str, Tensor] = {}
    for name in dict.fromkeys(part.parameter for part in layout.parts):
        inside = [index for index, part in enumerate(layout.parts) if part.parameter == name]
        values = torch.tensor(
            [[number * len(layout.parts) + index for index in inside] for number in range(NAMED_EXPERTS)]
        )
        is_turned = next(part.transposed for part in layout.parts if part.parameter == name)
        marks[f"{path}.{name}"] = values[:, None, :] if is_turned else values[:, :, None]
    try:
        taken = revert_weight_conversion(model, marks)
    except FAILURES:  # of an operation that needs the real sizes
        return {}
    names = {int(mark): name for name, mark in taken.items() if mark.numel() == 1}
    templates = {}
    for index, part in enumerate(layout.parts):
        each = [names.get(number * len(layout.parts) + index, "") for number in range(NAMED_EXPERTS)]
        before = os.path.commonprefix(each)
        if (
            f"{before}0{each[0][len(before) + 1 :]}" != each[0]
            or each[0][len(before) + 1 :] != each[1][len(before) + 1 :]
        ):
            return {}
        templates[part.projection] = f"{before}{{}}{each[0][len(before) + 1 :]}".removesuffix(".weight")
    return templates


def _published_name(name: str, renamings: list[WeightRenaming]) -> str:
    """Return the name that all renamings make of a tensor's, one after the other."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


@dataclass(frozen=True)
class PackedSource:
    """A checkpoint of ours, of which nothing but headers has been read."""

    directory: Path
    config: dict[str, Any]  # config.json without how the weights are packed
    packed: tuple[StoredWeight, ...]  # in the order of the model
    plain: Mapping[str, Readable]  # every tensor of no packed weight, biases of these included, by its published name
    dtype: torch.dtype  # of the model
    skeleton: Skeleton  # the model without weights
    fused: frozenset[str]  # paths of the modules of experts that published checkpoints hold in a few fused tensors
    dropped: tuple[str, ...]  # what a checkpoint of weights alone cannot say, a line each

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(weight.nbytes for weight in self.packed) + sum(tensor.nbytes for tensor in self.plain.values())

    def first_readers(self) -> Mapping[str, str]:
        """Return the path of a linear -> that of the first linear that reads the same input."""
        return meta_pass.flow(self.skeleton.config, self.skeleton.dtype).shared

    def heads(self) -> set[str]:
        """Return the paths of the output head, which has no matrix of its own where it is tied."""
        model = self.skeleton.model
        head = model.get_output_embeddings()
        return {name for name, each in model.named_modules() if head is not None and each is head}

    def looked_up(self) -> set[str]:
        """Return the paths of modules whose matrices are looked up, and not multiplied with."""
        modules = self.skeleton.model.named_modules()
        return {name for name, each in modules if isinstance(each, nn.Embedding | PackedEmbedding)}

    def draft_names(self) -> set[str]:
        """Return the stored tensors of draft heads, by name."""
        return set(self.skeleton.draft_tensors)

    def kept_in_float32(self, names: Iterable[str], dtype: torch.dtype) -> set[str]:
        """Return the tensors that a model of type `dtype` computes with in float32, such as what chooses experts."""
        plan = self.skeleton.model._get_dtype_plan(dtype)
        if not plan:
            return set()
        search, _, _ = build_glob_alternation(list(plan))
        return {name for name in names if search.search(name)}


def open_source(directory: Path) -> PackedSource:
    """Open a checkpoint that compress wrote, packed or plain; CheckpointError for any other quantized one."""
    checkpoint = open_checkpoint(directory)
    skeleton = Skeleton(checkpoint)
    checkpoint = skeleton.checkpoint  # without what a level leaves out
    skeleton.check_tensors()
    modules = _packed_modules(skeleton.model)
    published = published_names(skeleton.model, modules)
    own = {name: _tensors(skeleton, name, list(module.specs)) for name, module in modules.items()}
    packed = tuple(_weight(skeleton, published, name, modules[name], own[name]) for name in modules)
    packed += _packed_drafts(checkpoint)
    taken = {stored.name for weight in packed for stored in (weight.tensors or {}).values()}
    biases = {}
    for name, module in modules.items():
        if isinstance(module, PackedEmbedding):
            taken.add(_tensors(skeleton, name, [embedding.LIKE])[embedding.LIKE].name)
        elif f"{name}.bias" in skeleton.sources:
            biases[_tensors(skeleton, name, ["bias"])["bias"].name] = f"{published.names[name]}.bias"
    plain = {biases.get(name, name): stored for name, stored in checkpoint.tensors.items() if name not in taken}
    section = checkpoint.config.get(SECTION) or {}
    config = {key: value for key, value in checkpoint.config.items() if key != SECTION}
    return PackedSource(
        directory, config, packed, plain, skeleton.dtype, skeleton, published.fused, tuple(_dropped_notes(section))
    )


def _packed_drafts(checkpoint: Checkpoint) -> tuple[StoredWeight, ...]:
    """Return the packed linears of draft heads."""
    if not (section := checkpoint.config.get(SECTION)):
        return ()
    config, weights = hf.CompressConfig.read(section), []
    for name, (rows, columns) in config.draft_heads.items():
        stored = hf.scheme(config, name)
        keys = formats.specs(stored, (rows, columns))
        if missing := next((key for key in keys if f"{name}.{key}" not in checkpoint.tensors), None):
            raise CheckpointError(f"{name}.{missing} is not in the checkpoint; download or write it again")
        tensors = {key: checkpoint.tensors[f"{name}.{key}"] for key in keys}
        is_expert = EXPERT.search(name) is not None
        weights.append(
            StoredWeight(name, (rows, columns), stored, (), False, is_expert, False, name, tensors, is_draft=True)
        )
    return tuple(weights)


def _packed_modules(model: nn.Module) -> dict[str, PackedModule]:
    """Return the modules of packed weights by path, a table that two modules share once."""
    packed, seen = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            first = id(module.get_parameter(next(iter(module.specs))))
            if first not in seen:
                packed[name] = module
            seen.add(first)
    return packed


def _tensors(skeleton: Skeleton, name: str, keys: list[str]) -> dict[str, Readable]:
    return {key: skeleton.sources[f"{name}.{key}"][0] for key in keys}


def _weight(
    skeleton: Skeleton, published: PublishedNames, path: str, module: PackedModule, tensors: dict[str, Readable]
) -> StoredWeight:
    model = skeleton.model
    tables = {EMBEDDINGS: model.get_input_embeddings(), HEAD: model.get_output_embeddings()}
    roles = tuple(role for role, table in tables.items() if table is module or _share(table, module))
    tied = (
        next((each for each, module_there in model.named_modules() if module_there is tables[HEAD]), "")
        if len(roles) == 2
        else ""
    )
    is_turned = isinstance(module, PackedLinear) and linears.is_turned(module)
    parent = path.rsplit(".", 2)[0]
    is_expert, is_fused = parent in published.experts, parent in published.fused
    name = published.names[path]
    return StoredWeight(name, module.shape, module.stored, roles, is_turned, is_expert, is_fused, path, tensors, tied)


def _share(table: nn.Module | None, module: PackedModule) -> bool:
    """Return whether a table is the same stored tensors as a packed module."""
    if not isinstance(table, PackedModule) or table.specs.keys() != module.specs.keys():
        return False
    return all(table.get_parameter(key) is module.get_parameter(key) for key in module.specs)


def _dropped_notes(section: Mapping[str, Any]) -> list[str]:
    """Return what config.json says of run time beside how weights are stored, a line each."""
    lines = []
    if section.get("kv_cache"):
        lines.append(CACHE_NOTE)
    if section.get("experts"):
        lines.append("all experts that a token is routed to are computed: the pruning of experts is left out")
    return lines


def fused_experts(source: PackedSource, path: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the experts in the module `path`, biases included; the block is loaded for that."""
    skeleton = source.skeleton
    index = next(i for i in range(len(skeleton.blocks)) if path.startswith(skeleton.block_prefix(i)))
    block = skeleton.load_block(index, torch.device("cpu"))
    experts = block.get_submodule(path.removeprefix(skeleton.block_prefix(index)))
    assert isinstance(experts, Experts)
    module = experts.fuse(dtype)
    skeleton.free()
    parameters = {f"{path}.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    for name, tensor in revert_weight_conversion(skeleton.model, parameters).items():
        if name not in source.plain:  # a norm beside the experts is no weight of theirs
            yield name, tensor.contiguous()
