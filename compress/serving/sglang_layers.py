"""A linear layer of SGLang, fused or not, as the packed linears of the checkpoint that it stands for."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from compress.serving import layers
from compress.serving.layers import PackedLinears
from compress.serving.parts import Region

logger = logging.getLogger(__name__)


class PackedMethod(PackedLinears, LinearMethodBase):
    """Build and run a layer of SGLang as a list of linears of the checkpoint."""

    engine = "SGLang"

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
        """Give the layer its parts and the placeholders that SGLang loads into."""
        rank, _ = get_group_rank_size(layer.tp_group)
        first = rank * input_size_per_partition if input_size_per_partition != input_size else 0
        columns = range(first, first + input_size_per_partition)
        self.build(layer, _regions(layer, output_partition_sizes, output_size, columns), params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        self.complete(layer, logger.info)


def _regions(layer: Any, sizes: list[int], output_size: int, columns: range) -> list[Region]:
    """Return the region of each of the linears that SGLang fuses, given the sizes of their outputs on this rank."""
    rank, _ = get_group_rank_size(layer.tp_group)
    if isinstance(layer, QKVParallelLinear):
        kv_rank, _ = get_group_rank_size(layer.kv_tp_group)
        full, ranks = layers.heads(layer, rank, kv_rank)
    else:
        full, ranks = layers.outputs(sizes, output_size, rank)
    return layers.regions(layer, sizes, full, ranks, columns)
