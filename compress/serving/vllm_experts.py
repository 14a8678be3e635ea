"""The experts of a block in vLLM, each as three packed linears, with the checkpoint's own pruning of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from compress.errors import CheckpointError, UnsupportedModelError
from compress.runtime import experts as runtime_experts
from compress.runtime.expert_layouts import PROJECTIONS
from compress.serving import parts
from compress.serving.parts import Part, Region, Totals
from compress.serving.vllm_layers import PARTS, finish
from compress.types import Pruning, Stored

SHARDS = dict(zip(("w1", "w3", "w2"), PROJECTIONS, strict=True))  # vLLM's names of gate, up and down
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class PackedExperts(FusedMoEMethodBase):
    """Build and run the experts of a block one by one."""

    def __init__(
        self, moe: Any, module: str, listed: Mapping[str, Stored], pruning: Pruning | None, totals: Totals
    ) -> None:
        """module: the experts' name in the checkpoint; listed: all linears below it."""
        super().__init__(moe)
        self.module, self.listed, self.pruning, self.totals = module, listed, pruning, totals

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
        parallel = self.moe.moe_parallel_config
        first = intermediate_size_per_partition * parallel.tp_rank
        inner = range(first, first + intermediate_size_per_partition)
        full = intermediate_size_per_partition * parallel.tp_size
        regions = {"w1": Region.of_rows((full, hidden_size), inner), "w3": Region.of_rows((full, hidden_size), inner)}
        regions["w2"] = Region((hidden_size, full), (range(hidden_size),), inner)
        experts = nn.ModuleList()
        for number in range(layer.global_num_experts):
            if layer._map_global_expert_id_to_local_expert_id(number) != -1:
                own = {shard: self._part(number, shard, region) for shard, region in regions.items()}
                experts.append(nn.ModuleDict(own))
        setattr(layer, PARTS, experts)
        self.totals.waiting += 1
        _add_placeholders(layer, experts)

    def _part(self, number: int, shard: str, region: Region) -> Part:
        name = f"{self.module}.{number}.{SHARDS[shard]}"
        if name not in self.listed:
            raise CheckpointError(f"{name} is not listed as packed, but other experts beside it are")
        return Part(name, self.listed[name], region, self.dtype)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that every tensor has come."""
        own = [part for expert in getattr(layer, PARTS) for part in expert.values()]
        finish(layer, own, self.dtype, self.totals)

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
        experts, count = getattr(layer, PARTS), layer.global_num_experts
        if self.pruning is not None:
            topk_ids, topk_weights = runtime_experts.prune(x, topk_ids.long(), topk_weights, self.pruning, count)
        out = torch.zeros_like(x)
        for number in topk_ids.unique().tolist():
            local = layer._map_global_expert_id_to_local_expert_id(number) if 0 <= number < count else -1
            if local == -1:  # of another rank, or dropped
                continue
            token, position = torch.where(topk_ids == number)
            weight = topk_weights[token, position, None]
            before = layer.apply_router_weight_on_input
            h = self._expert(experts[local], x[token] * weight.to(x.dtype) if before else x[token])
            out.index_add_(0, token, (h if before else h * weight).to(out.dtype))
        return out

    def _expert(self, expert: Any, x: Tensor) -> Tensor:
        y: Tensor = expert["w2"](self.activation(expert["w1"](x)) * expert["w3"](x))
        return y


def _add_placeholders(layer: Any, experts: Any) -> None:
    def load(  # as vLLM calls it
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local != -1:
            experts[local][shard_id].load(param.stored_as, loaded_weight, param.device)
        return (local != -1) if return_success else None

    parts.add_placeholders(layer, [expert[shard].specs for expert in experts for shard in ("w1", "w3")], load, "w13_")
    parts.add_placeholders(layer, [expert["w2"].specs for expert in experts], load, "w2_")
