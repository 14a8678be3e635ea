"""The quantization method "compress" of vLLM: which of its layers holds which modules of the checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from compress.runtime import hf
from compress.serving import names
from compress.serving.config import PackedConfig
from compress.serving.vllm_experts import PackedExperts
from compress.serving.vllm_layers import PackedMethod
from compress.serving.vllm_tables import TableMethod

DRAFT = "draft_model."  # what vLLM puts before the names of the layers of a draft model
logger = init_logger("vllm.compress")  # vLLM shows what is logged below its own name


class CompressConfig(PackedConfig, QuantizationConfig):
    """`quantization_config` of config.json, with the names that vLLM's modules have."""

    engine, nearest_cache = "vLLM", "fp8"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressConfig:
        return cls(hf.CompressConfig.read(config), logger.warning)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename what is listed as vLLM renames the checkpoint's modules."""
        self.listed.rename(hf_to_vllm_mapper)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Return how stored names of experts are changed; asked once the layers are built.

        Nothing is left out: vLLM's own drops tensors by name.
        """
        return WeightsMapper(orig_to_new_regex=self.listed.patterns())

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return what builds and runs a layer; None or vLLM's own for what is not packed."""
        prefix = prefix.removeprefix(DRAFT)
        if isinstance(layer, LinearBase):
            linears = self.listed.linears(prefix, self.packed_modules_mapping)
            return UnquantizedLinearMethod() if linears is None else PackedMethod(linears, self.listed.totals)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._table(layer, prefix)
        return None

    def _experts(self, layer: RoutedExperts, prefix: str) -> PackedExperts | None:
        projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        module = self.listed.experts(prefix, projections)
        return None if module is None else PackedExperts(layer.moe_config, module, self.listed)

    def _table(self, layer: VocabParallelEmbedding, prefix: str) -> TableMethod | None:
        """Return the method of an embedding or a head where the checkpoint packs any of them.

        Some of vLLM's models do not tell an embedding its name: what it holds is then seen by the tensors that come.
        """
        tables = names.tables(self.listed.stored)
        if not tables:
            return None
        named = bool(prefix) or isinstance(layer, ParallelLMHead)
        own = [prefix] if named and prefix in self.listed.stored else [] if named else tables
        return TableMethod(
            {name: self.listed.stored[name] for name in own}, prefix or "the token embeddings", self.listed.totals
        )


def register() -> None:
    """Register the method with vLLM; again replaces it by itself."""
    register_quantization_config(hf.METHOD)(CompressConfig)
