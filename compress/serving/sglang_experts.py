"""The experts of a block in SGLang, each as three packed linears, with the checkpoint's own pruning of experts."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec
from torch import nn

from compress.errors import UnsupportedModelError
from compress.serving import layers
from compress.serving.experts import ACTIVATIONS, PackedExpertLayer, Share
from compress.serving.sglang_layers import logger

PLAIN = {"no_combine": False, "routed_scaling_factor": 1, "gemm1_alpha": None, "gemm1_clamp_limit": None}


class PackedExperts(PackedExpertLayer, FusedMoEMethodBase):
    """Build and run the experts of a block one by one."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Give the layer the parts of all experts, and the placeholders that SGLang loads into."""
        config = layer.moe_runner_config
        self._refuse_others(layer, config)
        self.activation, self.dtype = ACTIVATIONS[config.activation], params_dtype
        first = intermediate_size_per_partition * layer.moe_tp_rank
        inner = range(first, first + intermediate_size_per_partition)
        share = Share(hidden_size, inner, intermediate_size_per_partition * layer.moe_tp_size)
        self.build(layer, range(layer.num_experts), share, params_dtype, _same)

    def _refuse_others(self, layer: Any, config: Any) -> None:
        """Raise UnsupportedModelError for experts that do more than multiply, for graphs, and for experts elsewhere.

        Whether ids of experts are those of a rank depends on SGLang's backend, so that each rank has all experts.
        """
        other = [name for name, value in PLAIN.items() if getattr(config, name) not in (value, None)]
        other += [] if config.activation in ACTIVATIONS else [f"activation {config.activation}"]
        other += ["biases"] if layer.with_bias else []
        other += [] if config.is_gated else ["no gate"]
        if other:
            raise UnsupportedModelError(
                f"{self.module}: experts with {', '.join(other)} are not served by SGLang; serve with transformers"
            )
        if layer.num_fused_shared_experts:
            raise UnsupportedModelError(
                f"{self.module}: shared experts among packed ones; serve with --disable-shared-experts-fusion"
            )
        if layer.num_local_experts != layer.num_experts:
            raise UnsupportedModelError(
                f"{self.module}: packed experts are not divided among ranks; serve with --ep-size 1"
            )
        graphs = get_exec().graph.cuda_graph_config if torch.empty(0).is_cuda else None
        if graphs is not None and {graphs.decode.backend, graphs.prefill.backend} != {Backend.DISABLED}:
            raise UnsupportedModelError(
                f"{self.module}: packed experts are not recorded in CUDA graphs; serve with --disable-cuda-graph"
            )

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """Use no runner of SGLang."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that every tensor has come."""
        layers.finish(layer, self.parts_of(layer), self.dtype, self.totals, logger.info)

    def weighs_inputs(self, layer: Any) -> bool:
        return bool(layer.moe_runner_config.apply_router_weight_on_input)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return the weighted sums [tokens, hidden] over the experts, of which this rank may have its columns."""
        routing, count = dispatch_output.topk_output, layer.num_experts
        ids = routing.topk_ids.masked_fill(routing.topk_ids < 0, count)  # of no expert
        x = dispatch_output.hidden_states
        return StandardCombineInput(self.run(layer, x, (routing.topk_weights, ids), count, _same))


def _same(number: int) -> int:
    return number
