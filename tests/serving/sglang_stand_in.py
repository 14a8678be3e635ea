"""The parts of SGLang 0.5.23 that the plugin touches, with its signatures, without its kernels and processes."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

Group = namedtuple("Group", "rank_in_group world_size")
Combined = namedtuple("Combined", "hidden_states")


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class Method:
    """QuantizeMethodBase, and those below it."""

    runner = None


class Unquantized(Method):
    """UnquantizedLinearMethod and UnquantizedEmbeddingMethod."""

    def create_weights(
        self,
        layer: Any,
        inputs: int,
        outputs: list[int],
        input_size: int,
        output_size: int,
        params_dtype: Any,
        **_: Any,
    ) -> None:
        layer.weight = nn.Parameter(torch.empty(sum(outputs), inputs, dtype=params_dtype), requires_grad=False)
        layer.weight.weight_loader = lambda param, tensor: param.data.copy_(tensor)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing is changed."""


class LinearBase(nn.Module):
    """ColumnParallelLinear with one output, MergedColumnParallelLinear with several, or RowParallelLinear."""

    tp_group: Any = None

    def __init__(
        self, input_size: int, outputs: list[int], config: Any, prefix: str, group: Any = None, rows: bool = False
    ) -> None:
        super().__init__()
        self.tp_group, self.input_size, self.params_dtype = group, input_size, torch.float32
        size = get_group_rank_size(group)[1]
        self.quant_method = config.get_quant_method(self, prefix)
        own = outputs if rows else [each // size for each in outputs]
        columns = input_size // size if rows else input_size
        self.quant_method.create_weights(
            self, columns, own, input_size, sum(outputs), params_dtype=torch.float32, weight_loader=None
        )


class QKVParallelLinear(LinearBase):
    def __init__(self, hidden: int, head: int, heads: int, kv_heads: int, config: Any, prefix: str, group: Any = None):
        nn.Module.__init__(self)
        self.head_size = self.v_head_size = head
        self.total_num_heads, self.total_num_kv_heads, self.kv_tp_group = heads, kv_heads, group
        size = get_group_rank_size(group)[1]
        self.num_kv_head_replicas = max(1, size // kv_heads)
        repeated = kv_heads * self.num_kv_head_replicas
        values = vars(self).copy()
        super().__init__(hidden, [heads * head, repeated * head, repeated * head], config, prefix, group)
        vars(self).update({key: value for key, value in values.items() if not key.startswith("_")})


class VocabParallelEmbedding(nn.Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, *, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.org_vocab_size, self.embedding_dim = num_embeddings, embedding_dim
        self.num_embeddings_padded = self.num_embeddings_per_partition = -(-num_embeddings // 64) * 64
        self.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=num_embeddings)
        method = None if quant_config is None else quant_config.get_quant_method(self, prefix=prefix)
        self.quant_method = method or Unquantized()
        sizes = [self.num_embeddings_per_partition]
        self.quant_method.create_weights(
            self, embedding_dim, sizes, embedding_dim, self.num_embeddings_padded, params_dtype=torch.float32
        )


class ParallelLMHead(VocabParallelEmbedding):
    pass


class FusedMoE(nn.Module):
    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, config: Any, prefix: str) -> None:
        super().__init__()
        self.num_experts = self.num_local_experts = num_experts
        self.moe_tp_rank, self.moe_tp_size, self.with_bias, self.num_fused_shared_experts = 0, 1, False, 0
        self.moe_runner_config = SimpleNamespace(
            activation="silu",
            is_gated=True,
            apply_router_weight_on_input=False,
            no_combine=False,
            routed_scaling_factor=None,
            gemm1_alpha=None,
            gemm1_clamp_limit=None,
        )
        self.quant_method = config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            layer=self,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size,
            params_dtype=torch.float32,
            weight_loader=None,
            with_bias=False,
        )
        self.quant_method.create_moe_runner(self, self.moe_runner_config)


class PPMissingLayer(nn.Module):
    pass


class HookRegistry:
    hooks: list[tuple[Any, ...]] = []

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any) -> None:
        cls.hooks.append((target, hook, hook_type))


def get_group_rank_size(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def install(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let `sglang` be this file; return the tables that a plugin writes into."""
    tables: dict[str, Any] = {"methods": {}, "cpu": {}, "choices": []}
    HookRegistry.hooks = []
    found: dict[str, dict[str, Any]] = {
        "arg_groups.choices": {
            "QUANTIZATION_CHOICES": tables["choices"],
            "add_quantization_method_choices": tables["choices"].extend,
        },
        "layers.quantization": {"QUANTIZATION_METHODS": tables["methods"], "CPU_QUANTIZATION_METHODS": tables["cpu"]},
        "layers.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            **dict.fromkeys(("QuantizeMethodBase", "LinearMethodBase", "FusedMoEMethodBase"), Method),
        },
        "layers.quantization.unquant": dict.fromkeys(
            ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"), Unquantized
        ),
        "layers.linear": {"LinearBase": LinearBase, "QKVParallelLinear": QKVParallelLinear},
        "layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": VocabParallelEmbedding,
            "ParallelLMHead": ParallelLMHead,
        },
        "layers.moe.fused_moe_triton.layer": {"FusedMoE": FusedMoE},
        "layers.moe.token_dispatcher.standard": {"StandardCombineInput": Combined},
        "layers.utils": {"PPMissingLayer": PPMissingLayer},
        "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": SimpleNamespace(AFTER="after")},
        "distributed.utils": {"get_group_rank_size": get_group_rank_size},
    }
    names = {"sglang", "sglang.srt"}
    for name in found:
        parts = f"sglang.srt.{name}".split(".")
        names |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    for name in sorted(names):
        module = ModuleType(name)
        vars(module).update(found.get(name.removeprefix("sglang.srt."), {}))
        patch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    return tables
