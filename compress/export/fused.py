"""Decode all experts of a block into the few tensors in which published checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from compress.export.source import Source
from compress.runtime.experts import Experts


def tensors(source: Source, path: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the experts in the module `path`, biases included; the block is loaded for that."""
    skeleton = source.skeleton
    index = next(i for i in range(len(skeleton.blocks)) if path.startswith(skeleton.block_prefix(i)))
    block = skeleton.load_block(index, torch.device("cpu"))
    experts = block.get_submodule(path.removeprefix(skeleton.block_prefix(index)))
    assert isinstance(experts, Experts)
    module = experts.fuse(dtype)
    skeleton.free()
    found = {f"{path}.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    for name, tensor in revert_weight_conversion(skeleton.model, found).items():
        if name not in source.plain:  # a norm beside the experts is no weight of theirs
            yield name, tensor.contiguous()
