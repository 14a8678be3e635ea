"""A linear layer of vLLM, fused or not, as the packed linears of the checkpoint that it stands for."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear

from compress.serving import layers
from compress.serving.layers import PackedLinears
from compress.serving.parts import Region

logger = init_logger("vllm.compress")


class PackedMethod(PackedLinears, LinearMethodBase):
    """Build and run a layer of vLLM as a list of linears of the checkpoint."""

    engine = "vLLM"

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
        self.build(layer, _regions(layer, output_partition_sizes, output_size, columns), params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        self.complete(layer, logger.info)


def _regions(layer: Any, sizes: list[int], output_size: int, columns: range) -> list[Region]:
    """Return the region of each of the linears that vLLM fuses, given the sizes of their outputs on this rank."""
    if isinstance(layer, QKVParallelLinear):
        full, ranks = layers.heads(layer, layer.tp_rank, layer.tp_rank)
    else:
        full, ranks = layers.outputs(sizes, output_size, layer.tp_rank)
    return layers.regions(layer, sizes, full, ranks, columns)
