"""The experts of a block in vLLM, each as three packed linears, with the checkpoint's own pruning of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from compress.errors import UnsupportedModelError
from compress.serving import layers
from compress.serving.experts import ACTIVATIONS, PackedExpertLayer, Share
from compress.serving.listed import Listed
from compress.serving.vllm_layers import logger


class PackedExperts(PackedExpertLayer, FusedMoEMethodBase):
    """Build and run the experts of a block one by one."""

    def __init__(self, moe: Any, module: str, listed: Listed) -> None:
        """module: the experts' name in the checkpoint."""
        FusedMoEMethodBase.__init__(self, moe)
        PackedExpertLayer.__init__(self, module, listed)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Give the layer the parts of the experts of this rank, and the placeholders that vLLM loads into."""
        activation = str(getattr(layer.activation, "value", layer.activation))
        if activation not in ACTIVATIONS or self.moe.has_bias or not self.moe.is_act_and_mul:
            raise UnsupportedModelError(
                f"{self.module}: experts with biases, without a gate or with activation {activation} are not served "
                "by vLLM; serve with transformers"
            )
        if torch.empty(0).is_cuda and not get_current_vllm_config().model_config.enforce_eager:
            raise UnsupportedModelError(
                f"{self.module}: packed experts are not recorded in CUDA graphs; serve with --enforce-eager"
            )
        self.activation, self.dtype = ACTIVATIONS[activation], params_dtype
        parallel, local = self.moe.moe_parallel_config, layer._map_global_expert_id_to_local_expert_id
        first = intermediate_size_per_partition * parallel.tp_rank
        inner = range(first, first + intermediate_size_per_partition)
        share = Share(hidden_size, inner, intermediate_size_per_partition * parallel.tp_size)
        numbers = [number for number in range(layer.global_num_experts) if local(number) != -1]
        self.build(layer, numbers, share, params_dtype, local)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that every tensor has come."""
        layers.finish(layer, self.parts_of(layer), self.dtype, self.totals, logger.info)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        """Return the weighted sums [tokens, hidden] over the experts of this rank; x [tokens, hidden]."""
        local = layer._map_global_expert_id_to_local_expert_id
        return self.run(layer, x, (topk_weights, topk_ids), layer.global_num_experts, local)
