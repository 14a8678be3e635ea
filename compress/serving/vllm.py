"""Let vLLM serve packed checkpoints: the quantization method "compress" and how it runs vLLM's layers.

A linear layer, fused or not, runs as the packed linears of the checkpoint that it stands for, an expert as three of
them, with the checkpoint's own pruning of experts. A table that is tied is stored once. vLLM calls `register`, through
compress/serving/__init__.py, in every process that it starts, before a model is built.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import WeightsMapper

from compress.errors import UnsupportedModelError
from compress.runtime import hf
from compress.serving import config
from compress.serving.config import PackedConfig, PackedModules
from compress.serving.layers import ACTIVATIONS, PackedExpertLayer, PackedLinears, Share
from compress.serving.sharing import share
from compress.serving.tables import PackedTable, plain_rows
from compress.serving.vllm_cache import VllmCache
from compress.serving.vllm_cache_settings import CheckpointCache

logger = init_logger("vllm.compress")
CACHE_TENSORS = re.compile(r"^layers\.\d+\.(keys|values|read)\.")  # names that compress/kv/static.py gives
DRAFT = "draft_model."  # what vLLM puts before the names of the layers of a draft model


class VllmConfig(PackedConfig, QuantizationConfig):
    """`quantization_config` of config.json, with the names that vLLM's modules have."""

    cache: VllmCache | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> VllmConfig:
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Take the cache of the checkpoint, of which vLLM says here where it lies."""
        if self.kv_cache is not None:
            self.cache = VllmCache(CheckpointCache(self.kv_cache, model_name, hf_config, revision))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename what is listed as vLLM renames the checkpoint's modules."""
        self.listed.rename(hf_to_vllm_mapper)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Return how stored names of experts are changed; asked once the layers are built.

        Left out are the calibrated tensors of the cache, where vLLM takes their file for one of weights. vLLM's own
        drops tensors by other names.
        """
        if self.cache is not None:
            self.cache.finish()
        return WeightsMapper(orig_to_new_regex={**self.listed.patterns(), CACHE_TENSORS: None})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return what builds and runs a layer; None or vLLM's own for what is not packed."""
        prefix = prefix.removeprefix(DRAFT)
        if isinstance(layer, LinearBase):
            linears = self.listed.linears(prefix, self.packed_modules_mapping)
            return UnquantizedLinearMethod() if linears is None else VllmLinears(linears, self.listed)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._table(layer, prefix)
        if isinstance(layer, Attention | MLAAttention) and self.cache is not None:
            self.cache.place(layer, prefix)
        return None

    def _experts(self, layer: RoutedExperts, prefix: str) -> VllmExperts | None:
        projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        module = self.listed.experts(prefix, projections)
        return None if module is None else VllmExperts(layer.moe_config, module, self.listed)

    def _table(self, layer: VocabParallelEmbedding, prefix: str) -> VllmTable | VllmPlainTable:
        """Return the method of an embedding or a head.

        Some of vLLM's models do not tell an embedding its name: what it holds is then seen by the tensors that come.
        """
        tables = config.names_of_tables(self.listed.stored)
        if not tables:
            return VllmPlainTable(prefix)
        named = bool(prefix) or isinstance(layer, ParallelLMHead)
        names = [prefix] if named and prefix in self.listed.stored else [] if named else tables
        candidates = {name: self.listed.stored[name] for name in names}
        return VllmTable(candidates, prefix or "the token embeddings", self.listed)


class VllmLinears(PackedLinears, LinearMethodBase):
    """Build and run a layer of vLLM as a list of linears of the checkpoint."""

    engine, qkv = "vLLM", QKVParallelLinear

    def ranks(self, layer: Any) -> tuple[int, int]:
        return layer.tp_rank, layer.tp_rank

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        self.complete(layer, logger.info)


class VllmExperts(PackedExpertLayer, FusedMoEMethodBase):
    """Build and run the experts of a block."""

    def __init__(self, moe: Any, module: str, listed: PackedModules) -> None:
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
        self.activation, self.dtype = ACTIVATIONS[activation], params_dtype
        parallel, local = self.moe.moe_parallel_config, layer._map_global_expert_id_to_local_expert_id
        first = intermediate_size_per_partition * parallel.tp_rank
        inner = range(first, first + intermediate_size_per_partition)
        share = Share(hidden_size, inner, intermediate_size_per_partition * parallel.tp_size)
        numbers = [number for number in range(layer.global_num_experts) if local(number) != -1]
        self.build(layer, numbers, share, params_dtype, local)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        local = layer._map_global_expert_id_to_local_expert_id
        self.finish(layer, layer.global_num_experts, local, logger.info)

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
        return self.run(layer, x, (topk_weights, topk_ids), layer.global_num_experts)


class VllmTable(PackedTable, QuantizeMethodBase):
    """Build and run an embedding, a head, or a head that is tied to an embedding."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Build the table from what has come; go on as vLLM does with one that is not packed."""
        table = self.finish(layer, isinstance(layer, ParallelLMHead))
        if table.head is None:
            layer.weight = plain_rows(layer, table)
            layer.quant_method = UnquantizedEmbeddingMethod()
            layer.quant_method.process_weights_after_loading(layer)
        for line in self.totals.finish([]):
            logger.info(line)


class VllmPlainTable(UnquantizedEmbeddingMethod):
    """Run an embedding or a head of a checkpoint that packs none; a draft model shares its target's."""

    def __init__(self, prefix: str) -> None:
        """prefix: the layer's name, which may be empty."""
        super().__init__()
        self.prefix = prefix

    def process_weights_after_loading(self, layer: Any) -> None:
        """Go on as vLLM does, with the weight of an equal layer of the target."""
        share((self.prefix, type(layer), layer.org_vocab_size, layer.embedding_dim), layer)
        layer.quant_method = UnquantizedEmbeddingMethod()
        layer.quant_method.process_weights_after_loading(layer)


class _FindsQuantConfig:
    """A layer that learns of our method where the model that builds it does not tell."""

    def __init__(self, *sizes: Any, quant_config: Any = None, **options: Any) -> None:
        current = getattr(get_current_vllm_config_or_none(), "quant_config", None)
        if quant_config is None and current is not None and current.get_name() == hf.METHOD and len(sizes) <= 2:
            quant_config = current
        super().__init__(*sizes, quant_config=quant_config, **options)  # type: ignore[call-arg]  # a layer's


class FindingEmbedding(_FindsQuantConfig, VocabParallelEmbedding):
    """A `VocabParallelEmbedding` that is told of our method."""


class FindingHead(_FindsQuantConfig, ParallelLMHead):
    """A `ParallelLMHead` that is told of our method."""


def _register_tables() -> None:
    """Put these layers in the place of vLLM's, unless that is done or another plugin has its own there."""
    for name, layer in (("VocabParallelEmbedding", FindingEmbedding), ("ParallelLMHead", FindingHead)):
        known = op_registry_oot.get(name)
        if known is None:
            PluggableLayer.register_oot(layer, name=name)
        elif known is not layer:
            logger.warning("another plugin replaces %s: packed tables may not be served", name)


def register() -> None:
    """Make vLLM know the quantization method "compress"; again does no harm."""
    register_quantization_config(hf.METHOD)(VllmConfig)
    _register_tables()
    getattr(torch.cpu, "_init_amx", bool)()  # vLLM's attention does not ask Linux for AMX, only its products do
