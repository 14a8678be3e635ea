"""Let SGLang serve packed checkpoints: the quantization method "compress" and how it runs SGLang's layers.

A linear layer, fused or not, runs as the packed linears of the checkpoint that it stands for, an expert as three of
them, with the checkpoint's own pruning of experts. A table that is tied is stored once. SGLang calls `register`,
through compress/serving/__init__.py, in every process that it starts, before a model is built.

Many of SGLang's models do not tell embeddings and heads of the quantization method, and its loaders pass over tensors
for which no layer asks. So a model that SGLang has built is completed before its weights are loaded: layers are looked
up by their names in the model, and what no layer holds is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers import quantization
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.base_config import (
    FusedMoEMethodBase,
    LinearMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
)
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.runtime import hf
from compress.runtime.expert_layouts import PROJECTIONS
from compress.serving import config
from compress.serving.config import PackedConfig, PackedModules
from compress.serving.layers import ACTIVATIONS, PackedExpertLayer, PackedLinears, Share
from compress.serving.tables import PackedTable, plain_rows

Weights = Iterable[tuple[str, Tensor]]
SUPPORTED_RUNNER = {"no_combine": False, "routed_scaling_factor": 1, "gemm1_alpha": None, "gemm1_clamp_limit": None}
logger = logging.getLogger(__name__)
FUSED_BY_EVERY_MODEL = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}  # in every model
ADDED = ("packed_modules_mapping", "hf_config")  # what SGLang lays beside what config.json holds
ENGINE_PROJECTIONS = ("w1", "w3", "w2")  # SGLang's names, if its experts are not at transformers' place
CACHE_NOTE = (
    "the checkpoint's kv_cache section is not applied: SGLang has no hook for the cache of a plugin; "
    "--kv-cache-dtype fp8_e4m3 is the nearest of its own types, vLLM applies the section"
)
BUILD = "sglang.srt.model_loader.loader._initialize_model"


class SglangConfig(PackedConfig, QuantizationConfig):
    """`quantization_config` of config.json, with the names that SGLang's modules have."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SglangConfig:
        packed_config = cls({key: value for key, value in config.items() if key not in ADDED})
        if packed_config.kv_cache is not None:
            logger.warning(CACHE_NOTE)
        packed_config.packed_modules_mapping = {**FUSED_BY_EVERY_MODEL, **(config.get("packed_modules_mapping") or {})}
        return packed_config

    def get_scaled_act_names(self) -> list[str]:
        return []

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename what is listed as SGLang renames the checkpoint's modules."""
        self.listed.rename(hf_to_sglang_mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return what builds and runs a layer; None or SGLang's own for what is not packed."""
        if isinstance(layer, LinearBase):
            linears = self.listed.linears(prefix, self.packed_modules_mapping)
            return UnquantizedLinearMethod() if linears is None else SglangLinears(linears, self.listed)
        if isinstance(layer, FusedMoE):
            return self._experts(prefix)
        if isinstance(layer, VocabParallelEmbedding) and prefix in self.listed.stored:
            return SglangTable({prefix: self.listed.stored[prefix]}, prefix, self.listed)
        return None

    def _experts(self, prefix: str) -> SglangExperts | None:
        is_there = any(name.startswith(f"{prefix}.") for name in self.listed.stored)
        module = self.listed.experts(prefix, PROJECTIONS if is_there else ENGINE_PROJECTIONS)
        return None if module is None else SglangExperts(module, self.listed)


def register() -> None:
    """Register the method with SGLang, for GPUs and CPUs, and what is done once a model is built."""
    quantization.QUANTIZATION_METHODS[hf.METHOD] = SglangConfig
    quantization.CPU_QUANTIZATION_METHODS[hf.METHOD] = SglangConfig
    if hf.METHOD not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([hf.METHOD])
        HookRegistry.register(BUILD, _complete, HookType.AFTER)


def _complete(model: nn.Module, model_config: Any, load_config: Any, quant_config: Any = None) -> None:
    """Complete a model of ours that SGLang has built."""
    if isinstance(quant_config, SglangConfig):
        _complete_model(model, quant_config.listed)


class SglangLinears(PackedLinears, LinearMethodBase):
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


class SglangExperts(PackedExpertLayer, FusedMoEMethodBase):
    """Build and run the experts of a block."""

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
        self.build(layer, range(layer.num_experts), share, params_dtype, _same_number)

    def _refuse_others(self, layer: Any, config: Any) -> None:
        """Raise UnsupportedModelError for experts that do more than multiply, and for experts elsewhere.

        Whether ids of experts are those of a rank depends on SGLang's backend, so that each rank has all experts.
        """
        other = [name for name, value in SUPPORTED_RUNNER.items() if getattr(config, name) not in (value, None)]
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

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """Use no runner of SGLang."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has come."""
        self.finish(layer, layer.num_experts, _same_number, logger.info)

    def weighs_inputs(self, layer: Any) -> bool:
        return bool(layer.moe_runner_config.apply_router_weight_on_input)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return the weighted sums [tokens, hidden] over the experts, of which this rank may have its columns."""
        routing, count = dispatch_output.topk_output, layer.num_experts
        ids = routing.topk_ids.masked_fill(routing.topk_ids < 0, count)  # of no expert
        x = dispatch_output.hidden_states
        return StandardCombineInput(self.run(layer, x, (routing.topk_weights, ids), count))


def _same_number(number: int) -> int:
    return number


class SglangTable(PackedTable, QuantizeMethodBase):
    """Build and run an embedding, a head, or one layer that is both."""

    is_head = False  # whether logits are computed with the layer, known once the model is built

    def process_weights_after_loading(self, layer: Any) -> None:
        """Build the table from what has come; go on as SGLang does with one that is not packed."""
        table = self.finish(layer, self.is_head)
        if table.head is None:
            layer.weight = plain_rows(layer, table)
            layer.quant_method = UnquantizedEmbeddingMethod()
        for line in self.totals.finish([]):
            logger.info(line)


def _complete_model(model: Any, listed: PackedModules) -> None:
    """Give packed tables to layers that SGLang has built plain, and rename stored experts for the model's loader.

    Raises UnsupportedModelError with the name of a packed module that no layer of the model holds. Draft heads are a
    model of their own.
    """
    _complete_tables(model, listed)
    elsewhere = [name for name, layer in model.named_modules() if isinstance(layer, PPMissingLayer)]
    held = {name for layer in model.modules() for name in _names_held(layer)}
    is_of_drafts = any(name in held for name in listed.drafts)
    for name in (name for name in listed.stored if (name in listed.drafts) == is_of_drafts):
        if name not in held and not any(f"{name}.".startswith(f"{other}.") for other in elsewhere):
            raise UnsupportedModelError(
                f"{name} is packed, and no layer that SGLang builds for {type(model).__name__} has this name; "
                "serve with transformers"
            )
    if listed.renamed:
        model.load_weights = _rename_stored(model.load_weights, listed)


def _names_held(layer: nn.Module) -> Iterable[str]:
    """Return the names of the checkpoint's modules that a layer holds."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, PackedLinears):
        return method.linears
    if isinstance(method, PackedExpertLayer):
        return method.listed
    return method.candidates if isinstance(method, PackedTable) else ()


def _complete_tables(model: Any, listed: PackedModules) -> None:
    """Let embeddings and heads hold their packed tables; a head that is tied holds the embedding's."""
    tables = config.names_of_tables(listed.stored)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, VocabParallelEmbedding)}
    for name, layer in layers.items():
        if name in tables and not isinstance(layer.quant_method, SglangTable):
            _build(layer, SglangTable({name: listed.stored[name]}, name, listed))
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    packed = {name: layer for name, layer in layers.items() if name in tables and not isinstance(layer, ParallelLMHead)}
    for name, layer in layers.items():
        is_head = isinstance(layer, ParallelLMHead)
        embedding = _embedding_of(name, layer, packed) if is_head and is_tied and name not in tables else None
        if embedding is not None:
            _build(layer, SglangTable({}, name, listed))
            layer.quant_method.tie_weights(layer, embedding)
        if isinstance(layer.quant_method, SglangTable):
            layer.quant_method.is_head = is_head or is_tied  # SGLang may have no layer but the embedding for both


def _embedding_of(name: str, head: Any, packed: Mapping[str, Any]) -> Any:
    """Return the packed embedding whose table a tied head multiplies with, None if none has its shape."""
    candidates = {other: each for other, each in packed.items() if _shape(each) == _shape(head)}
    if len(candidates) > 1:
        raise UnsupportedModelError(
            f"{name} is tied to one of {', '.join(candidates)}, and which one is not known; serve with transformers"
        )
    return next(iter(candidates.values()), None)


def _shape(layer: Any) -> tuple[int, int]:
    """Return the size [tokens, hidden] of a table on all ranks."""
    return layer.org_vocab_size, layer.embedding_dim


def _build(layer: Any, method: SglangTable) -> None:
    """Take the plain weight of a layer away, and let it be built by a method."""
    dtype = layer.weight.dtype
    del layer.weight
    layer.quant_method = method
    sizes = [layer.num_embeddings_per_partition]
    method.create_weights(layer, layer.embedding_dim, sizes, layer.embedding_dim, layer.num_embeddings_padded, dtype)


def _rename_stored(load_weights: Callable[..., Any], listed: PackedModules) -> Callable[..., Any]:
    """Return a model's loader that sees the stored tensors by the names that it looks for."""
    patterns = listed.patterns()

    def new_name(name: str) -> str:
        for old, new in patterns.items():
            name = old.sub(new, name)
        return name

    def load(weights: Weights, *arguments: Any, **options: Any) -> Any:
        return load_weights(((new_name(name), tensor) for name, tensor in weights), *arguments, **options)

    return load
