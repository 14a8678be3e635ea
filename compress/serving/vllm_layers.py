"""A linear layer of vLLM, fused or not, as the packed linears of the checkpoint that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear

from compress.errors import UnsupportedModelError
from compress.serving import parts
from compress.serving.parts import Part, Parts, Region, Totals
from compress.types import Stored

logger = init_logger("vllm.compress")
PARTS = "packed"  # what a layer's parts are called among its children
QKV = {"q": 0, "k": 1, "v": 2}


class PackedMethod(LinearMethodBase):
    """Build and run a layer of vLLM as a list of linears of the checkpoint."""

    def __init__(self, linears: Mapping[str, Stored | None], totals: Totals) -> None:
        """linears: name -> how it is stored, None where it is not packed, in the order of the layer's outputs."""
        self.linears, self.totals = linears, totals

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Give the layer its parts and the placeholders that vLLM loads into."""
        first = layer.tp_rank * input_size_per_partition if input_size_per_partition != input_size else 0
        columns = range(first, first + input_size_per_partition)
        regions = _regions(layer, output_partition_sizes, output_size, columns, input_size)
        if len(self.linears) == 1:  # a single one, or stored fused
            regions = [parts.joined(regions)]
        if len(regions) != len(self.linears):
            raise UnsupportedModelError(
                f"{', '.join(self.linears)}: vLLM fuses {len(regions)} linears in their place; serve with transformers"
            )
        own = [
            Part(name, stored, region, params_dtype)
            for (name, stored), region in zip(self.linears.items(), regions, strict=True)
        ]
        setattr(layer, PARTS, Parts(own))
        self.totals.waiting += 1

        def load(param: Any, tensor: Tensor, shard: Any = None) -> None:
            index = 0 if len(own) == 1 else QKV.get(shard, shard)
            own[index].load(param.stored_as, tensor, param.device)

        parts.add_placeholders(layer, [part.specs for part in own], load)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        own: Parts = getattr(layer, PARTS)
        finish(layer, own, layer.params_dtype, self.totals)
        own.finish()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's outputs [..., out] for inputs x [..., in] of this rank."""
        y: Tensor = layer._modules[PARTS].forward(x)  # no hooks: a call of a module costs as much as a small product
        return y if bias is None else y + bias


def finish(layer: Any, own: Iterable[Part], dtype: torch.dtype, totals: Totals) -> None:
    """Complete a layer whose tensors have all come; CheckpointError with the name of one that did not."""
    own = list(own)
    for part in own:
        part.check()
    device = parts.remove_placeholders(layer)
    layer.qweight = nn.Parameter(torch.empty(0, dtype=torch.int16, device=device), False)  # LoRA asks for its device
    parts.warm(parts.linears_of(own), dtype)
    for line in totals.finish(own):
        logger.info(line)


def _regions(layer: Any, sizes: list[int], output_size: int, columns: range, input_size: int) -> list[Region]:
    """Return the region of each of the linears that vLLM fuses, given the sizes of their outputs on this rank."""
    if isinstance(layer, QKVParallelLinear):
        heads = [layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads]
        widths = [layer.head_size, layer.head_size, layer.v_head_size]
        ranks = [layer.tp_rank, *[layer.tp_rank // layer.num_kv_head_replicas] * 2]
        full = [count * width for count, width in zip(heads, widths, strict=True)]
    else:
        count = output_size // sum(sizes)  # of ranks that share the outputs
        ranks = [layer.tp_rank if count > 1 else 0] * len(sizes)
        full = [size * count for size in sizes]
    return [
        Region((whole, input_size), (range(rank * size, (rank + 1) * size),), columns)
        for whole, rank, size in zip(full, ranks, sizes, strict=True)
    ]
