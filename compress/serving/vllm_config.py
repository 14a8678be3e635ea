"""The quantization method "compress" of vLLM: which of its layers holds which modules of the checkpoint."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from compress.formats import stored
from compress.runtime import hf
from compress.serving import names
from compress.serving.parts import Totals
from compress.serving.vllm_experts import PackedExperts
from compress.serving.vllm_layers import PackedMethod
from compress.serving.vllm_tables import TableMethod
from compress.types import Pruning, Stored

DRAFT = "draft_model."  # what vLLM puts before the names of the layers of a draft model
logger = init_logger("vllm.compress")  # vLLM shows what is logged below its own name


class CompressConfig(QuantizationConfig):
    """`quantization_config` of config.json, with the names that vLLM's modules have."""

    def __init__(self, config: hf.CompressConfig) -> None:
        super().__init__()
        self.stored: dict[str, Stored] = {name: hf.scheme(config, name) for name in config.modules}
        self.pruning: dict[str, Pruning] = {
            name: stored.from_table(Pruning, values, f"quantization_config: experts: {name}")
            for name, values in config.experts.items()
        }
        self.renamed: dict[str, str] = {}  # expressions of names in the checkpoint -> what vLLM's loaders look for
        self.totals = Totals()
        if config.kv_cache is not None:
            logger.warning(
                "the checkpoint's kv_cache section is not applied: vLLM has cache types of its own, of which "
                "--kv-cache-dtype fp8 is the nearest"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressConfig:
        return cls(hf.CompressConfig.read(config))

    def get_name(self) -> str:
        return hf.METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return what the kernels need of a GPU of NVIDIA: compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename what is listed as vLLM renames the checkpoint's modules."""
        self.stored = hf_to_vllm_mapper.apply_dict(self.stored)
        self.pruning = hf_to_vllm_mapper.apply_dict(self.pruning)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Return how stored names of experts are changed; asked once the layers are built.

        Nothing is left out: vLLM's own drops tensors by name.
        """
        return WeightsMapper(orig_to_new_regex={re.compile(old): new for old, new in self.renamed.items()})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return what builds and runs a layer; None or vLLM's own for what is not packed."""
        prefix = prefix.removeprefix(DRAFT)
        if isinstance(layer, LinearBase):
            linears = names.linears(prefix, self.stored, self.packed_modules_mapping)
            if not any(name in self.stored for name in linears):
                return UnquantizedLinearMethod()
            return PackedMethod({name: self.stored.get(name) for name in linears}, self.totals)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._table(layer, prefix)
        return None

    def _experts(self, layer: RoutedExperts, prefix: str) -> PackedExperts | None:
        module = names.experts(prefix, self.stored)
        if module is None:
            return None
        projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        self.renamed.update(names.renamed_experts(module, prefix, projections))
        listed = {name: each for name, each in self.stored.items() if name.startswith(f"{module}.")}
        return PackedExperts(layer.moe_config, module, listed, self.pruning.get(module), self.totals)

    def _table(self, layer: VocabParallelEmbedding, prefix: str) -> TableMethod | None:
        """Return the method of an embedding or a head where the checkpoint packs any of them.

        Some of vLLM's models do not tell an embedding its name: what it holds is then seen by the tensors that come.
        """
        tables = names.tables(self.stored)
        if not tables:
            return None
        named = bool(prefix) or isinstance(layer, ParallelLMHead)
        own = [prefix] if named and prefix in self.stored else [] if named else tables
        return TableMethod({name: self.stored[name] for name in own}, prefix or "the token embeddings", self.totals)


def register() -> None:
    """Register the method with vLLM; again replaces it by itself."""
    register_quantization_config(hf.METHOD)(CompressConfig)
