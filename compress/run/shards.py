"""Write the shard of a block of a checkpoint, or load a finished one anew."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from compress import formats
from compress.errors import CheckpointError
from compress.model.skeleton import Skeleton
from compress.run import report, trained_tensors
from compress.run.job import Prepared
from compress.runtime import linears
from compress.runtime.experts import Experts
from compress.storage.checkpoint import EditedTensor, Readable, read_header, write_shard
from compress.storage.workdir import Output
from compress.types import LayerReport, PackedWeight

Contents = dict[str, Tensor | Readable | EditedTensor]  # of a shard, by their names on disk


def shard_name(index: int, blocks: int) -> str:
    """Return the file of block `index`; index == blocks is the file of everything outside the blocks."""
    return f"model-{index + 1:05d}-of-{blocks + 1:05d}.safetensors"


def copied_tensors(skeleton: Skeleton, kept: dict[str, int], index: int | None) -> dict[str, Readable]:
    """Return the stored tensors among `kept` that belong to block `index` (None: to no block), to be copied."""
    blocks = range(len(skeleton.blocks)) if index is None else [index]
    prefixes = tuple(skeleton.block_prefix(block) for block in blocks)
    groups = [group for name, group in skeleton.sources.items() if name.startswith(prefixes) == (index is not None)]
    return {stored.name: stored for group in groups for stored in group if stored.name in kept}


def write_block(
    output: Output, prepared: Prepared, index: int, block: nn.Module, packed: dict[str, PackedWeight], edited: bool
) -> dict[str, Any]:
    """Write a block's shard: packed tensors, and the others, as they are in the block if that was `edited`.

    Return its file and hash.
    """
    skeleton = prepared.skeleton
    contents: Contents = dict(copied_tensors(skeleton, prepared.plan.kept_nbytes, index))
    if edited:
        contents.update(edited_tensors(skeleton, contents, block, skeleton.block_prefix(index)))
    tensors = {f"{name}.{key}": tensor for name, w in packed.items() for key, tensor in w.tensors.items()}
    for name in packed:
        bias = skeleton.linear(block, name).bias
        if bias is not None and f"{name}.bias" in prepared.plan.kept_nbytes:  # of an expert there is none to be copied
            contents.setdefault(f"{name}.bias", bias.detach().cpu())
    file = shard_name(index, len(skeleton.blocks))
    return {"file": file, "sha256": write_shard(output.model / file, {**contents, **tensors})}


def restore_block(
    output: Output, skeleton: Skeleton, index: int, device: torch.device, record: dict[str, Any]
) -> tuple[nn.Module, dict[str, PackedWeight], list[LayerReport]]:
    """Load a finished block anew, from its shard where that holds it; return also its packed weights and reports."""
    on_disk = read_header(output.model / record["file"])
    reports = [report.from_dict(values) for values in record["layers"]]
    packed = {}
    for row in reports:
        keys = {key: f"{row.name}.{key}" for key in formats.specs(row.stored, row.shape)}
        if missing := [name for name in keys.values() if name not in on_disk]:
            raise CheckpointError(f"{record['file']} in {output.model} lacks {missing[0]}; use --restart")
        tensors = {key: on_disk.pop(name).read() for key, name in keys.items()}
        packed[row.name] = PackedWeight(row.stored, tensors, row.shape)
        formats.check(packed[row.name], row.name)
    edits, sources = skeleton.edits, skeleton.sources
    skeleton.free()
    try:
        skeleton.edits = None
        skeleton.sources = {n: [on_disk.get(source.name, source) for source in group] for n, group in sources.items()}
        block = skeleton.load_block(index, device)
    finally:
        skeleton.edits, skeleton.sources = edits, sources
    for name in packed:
        if (bias := on_disk.get(f"{name}.bias")) is not None:
            skeleton.linear(block, name).bias.copy_(bias.read())
    return block, packed, reports


def edited_tensors(
    skeleton: Skeleton, kept: Mapping[str, Any], module: nn.Module, prefix: str = ""
) -> dict[str, Tensor]:
    """Return those of the `kept` stored tensors that the loaded module has changed, in their types on disk."""
    changed = {}
    for name, held in module.named_parameters():
        owner, _, last = name.rpartition(".")
        parameter = linears.as_stored(module.get_submodule(owner), last, held)
        for source in skeleton.sources.get(prefix + name, []):
            if not parameter.is_meta and source.name in kept and source.shape == tuple(parameter.shape):
                tensor = parameter.detach().to("cpu", torch.promote_types(source.dtype, parameter.dtype))
                if not torch.equal(source.read().to(parameter.dtype).to(tensor.dtype), tensor):
                    changed[source.name] = tensor
    experts = {f"{prefix}{name}.": each for name, each in module.named_modules() if isinstance(each, Experts)}
    for own, submodule in experts.items():
        groups = (group for name, group in skeleton.sources.items() if name.startswith(own))
        unpacked = {source.name for group in groups for source in group} & kept.keys()
        if unpacked:
            state = submodule.fuse(skeleton.dtype).state_dict(prefix=own)
            stored = revert_weight_conversion(skeleton.model, state)
            changed.update({key: tensor for key, tensor in stored.items() if key in unpacked})
    return changed


def intact_blocks(output: Output, count: int) -> list[dict[str, Any]]:
    """Return the records of the finished blocks up to the first whose shard is not the file that was recorded.

    The rest of the `count` blocks is forgotten, and computed again.
    """
    finished = output.finished_blocks(report.BLOCK_RECORD)
    records = list(
        takewhile(lambda record: trained_tensors.is_intact(output, record["file"], record["sha256"]), finished)
    )
    if len(records) < count:
        output.forget_from(len(records))
    return records
