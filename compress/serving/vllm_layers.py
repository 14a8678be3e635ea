"""A linear layer of vLLM, fused or not, as the packed linears of the checkpoint that it stands for."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear

from compress.serving.layers import PackedLinears

logger = init_logger("vllm.compress")


class PackedMethod(PackedLinears, LinearMethodBase):
    """Build and run a layer of vLLM as a list of linears of the checkpoint."""

    engine, qkv = "vLLM", QKVParallelLinear

    def ranks(self, layer: Any) -> tuple[int, int]:
        return layer.tp_rank, layer.tp_rank

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        self.complete(layer, logger.info)
