"""The quantization method "compress" of SGLang: which of its layers holds which modules of the checkpoint."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
from sglang.srt.layers import quantization
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import nn

from compress.runtime import hf
from compress.runtime.expert_layouts import PROJECTIONS
from compress.serving import sglang_model
from compress.serving.config import PackedConfig
from compress.serving.sglang_experts import PackedExperts
from compress.serving.sglang_layers import PackedMethod
from compress.serving.sglang_tables import TableMethod

logger = logging.getLogger(__name__)
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # in every model
ADDED = ("packed_modules_mapping", "hf_config")  # what SGLang lays beside what config.json holds
OTHER_PROJECTIONS = ("w1", "w3", "w2")  # where SGLang's experts are not at transformers' place
BUILD = "sglang.srt.model_loader.loader._initialize_model"


class CompressConfig(PackedConfig, QuantizationConfig):
    """`quantization_config` of config.json, with the names that SGLang's modules have."""

    engine, nearest_cache = "SGLang", "fp8_e4m3"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressConfig:
        read = hf.CompressConfig.read({key: value for key, value in config.items() if key not in ADDED})
        own = cls(read, logger.warning)
        own.packed_modules_mapping = {**FUSED, **(config.get("packed_modules_mapping") or {})}
        return own

    def get_scaled_act_names(self) -> list[str]:
        return []

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename what is listed as SGLang renames the checkpoint's modules."""
        self.listed.rename(hf_to_sglang_mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return what builds and runs a layer; None or SGLang's own for what is not packed."""
        if isinstance(layer, LinearBase):
            linears = self.listed.linears(prefix, self.packed_modules_mapping)
            return UnquantizedLinearMethod() if linears is None else PackedMethod(linears, self.listed.totals)
        if isinstance(layer, FusedMoE):
            return self._experts(prefix)
        if isinstance(layer, VocabParallelEmbedding) and prefix in self.listed.stored:
            return TableMethod({prefix: self.listed.stored[prefix]}, prefix, self.listed.totals)
        return None

    def _experts(self, prefix: str) -> PackedExperts | None:
        is_there = any(name.startswith(f"{prefix}.") for name in self.listed.stored)
        module = self.listed.experts(prefix, PROJECTIONS if is_there else OTHER_PROJECTIONS)
        return None if module is None else PackedExperts(module, self.listed)


def register() -> None:
    """Register the method with SGLang, for GPUs and CPUs, and what is done once a model is built."""
    quantization.QUANTIZATION_METHODS[hf.METHOD] = CompressConfig
    quantization.CPU_QUANTIZATION_METHODS[hf.METHOD] = CompressConfig
    if hf.METHOD not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([hf.METHOD])
        HookRegistry.register(BUILD, _complete, HookType.AFTER)


def _complete(model: nn.Module, model_config: Any, load_config: Any, quant_config: Any = None) -> None:
    """Complete a model of ours that SGLang has built."""
    if isinstance(quant_config, CompressConfig):
        sglang_model.complete(model, quant_config.listed)
