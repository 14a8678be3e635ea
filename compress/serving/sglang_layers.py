"""A linear layer of SGLang, fused or not, as the packed linears of the checkpoint that it stands for."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from compress.serving.layers import PackedLinears

logger = logging.getLogger(__name__)


class PackedMethod(PackedLinears, LinearMethodBase):
    """Build and run a layer of SGLang as a list of linears of the checkpoint."""

    engine, qkv = "SGLang", QKVParallelLinear

    def ranks(self, layer: Any) -> tuple[int, int]:
        rank, _ = get_group_rank_size(layer.tp_group)
        if not isinstance(layer, QKVParallelLinear):
            return rank, rank
        kv_rank, _ = get_group_rank_size(layer.kv_tp_group)
        return rank, kv_rank

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        self.complete(layer, logger.info)
