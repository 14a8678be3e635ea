"""Open a packed checkpoint for export: its weights one by one, read when they are asked for, and all other tensors.

    source = open_source(directory)
    for weight in source.packed:          # compress/export/weights.py: what is known of a weight without reading it
        if weight.not_integers() is None:
            integers = weight.integers()  # codes, scales, zeros
    for name, tensor in source.plain.items():
        tensor.read()

Names are those of published checkpoints of the architecture (compress/export/names.py), experts one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.export import names
from compress.export.names import Published
from compress.export.weights import EMBEDDINGS, HEAD, Packed
from compress.model.skeleton import Skeleton
from compress.runtime import embedding, linears
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedLinear
from compress.runtime.packed import PackedModule
from compress.storage.checkpoint import Readable, open_checkpoint

SECTION = "quantization_config"


@dataclass(frozen=True)
class Source:
    """A checkpoint of ours, of which nothing but headers has been read."""

    directory: Path
    config: dict[str, Any]  # config.json without how the weights are packed
    packed: tuple[Packed, ...]  # in the order of the model
    plain: Mapping[str, Readable]  # every tensor of no packed weight, biases of these included, by its published name
    dtype: torch.dtype  # of the model
    skeleton: Skeleton  # the model without weights
    fused: frozenset[str]  # paths of the modules of experts that published checkpoints hold in a few fused tensors
    dropped: tuple[str, ...]  # what a checkpoint of weights alone cannot say, a line each

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(weight.nbytes for weight in self.packed) + sum(tensor.nbytes for tensor in self.plain.values())


def open_source(directory: Path) -> Source:
    """Open a checkpoint that compress wrote, packed or plain; CheckpointError for any other quantized one."""
    checkpoint = open_checkpoint(directory)
    skeleton = Skeleton(checkpoint)
    skeleton.check_tensors()
    modules = _packed_modules(skeleton.model)
    published = names.published(skeleton.model, modules)
    own = {name: _tensors(skeleton, name, list(module.specs)) for name, module in modules.items()}
    packed = tuple(_weight(skeleton, published, name, modules[name], own[name]) for name in modules)
    taken = {stored.name for tensors in own.values() for stored in tensors.values()}
    biases = {}
    for name, module in modules.items():
        if isinstance(module, PackedEmbedding):
            taken.add(_tensors(skeleton, name, [embedding.LIKE])[embedding.LIKE].name)
        elif f"{name}.bias" in skeleton.sources:
            biases[_tensors(skeleton, name, ["bias"])["bias"].name] = f"{published.names[name]}.bias"
    plain = {biases.get(name, name): stored for name, stored in checkpoint.tensors.items() if name not in taken}
    section = checkpoint.config.get(SECTION) or {}
    config = {key: value for key, value in checkpoint.config.items() if key != SECTION}
    return Source(directory, config, packed, plain, skeleton.dtype, skeleton, published.fused, tuple(_dropped(section)))


def _packed_modules(model: nn.Module) -> dict[str, PackedModule]:
    """Return the modules of packed weights by path, a table that two modules share once."""
    found, seen = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            first = id(module.get_parameter(next(iter(module.specs))))
            if first not in seen:
                found[name] = module
            seen.add(first)
    return found


def _tensors(skeleton: Skeleton, name: str, keys: list[str]) -> dict[str, Readable]:
    return {key: skeleton.sources[f"{name}.{key}"][0] for key in keys}


def _weight(
    skeleton: Skeleton, published: Published, path: str, module: PackedModule, tensors: dict[str, Readable]
) -> Packed:
    model = skeleton.model
    tables = {EMBEDDINGS: model.get_input_embeddings(), HEAD: model.get_output_embeddings()}
    roles = tuple(role for role, table in tables.items() if table is module or _share(table, module))
    tied = next((each for each, found in model.named_modules() if found is tables[HEAD]), "") if len(roles) == 2 else ""
    is_turned = isinstance(module, PackedLinear) and linears.is_turned(module)
    parent = path.rsplit(".", 2)[0]
    is_expert, is_fused = parent in published.experts, parent in published.fused
    name = published.names[path]
    return Packed(name, module.shape, module.stored, roles, is_turned, is_expert, is_fused, path, tensors, tied)


def _share(table: nn.Module | None, module: PackedModule) -> bool:
    """Return whether a table is the same stored tensors as a packed module."""
    if not isinstance(table, PackedModule) or table.specs.keys() != module.specs.keys():
        return False
    return all(table.get_parameter(key) is module.get_parameter(key) for key in module.specs)


def _dropped(section: Mapping[str, Any]) -> list[str]:
    """Return what config.json says of run time beside how weights are stored, a line each."""
    lines = []
    if section.get("kv_cache"):
        lines.append("the cache of keys and values is that of the other tool: the cache recipe is left out")
    if section.get("experts"):
        lines.append("all experts that a token is routed to are computed: the pruning of experts is left out")
    return lines
