"""Embeddings and output heads of vLLM from packed tables; a tied table is stored once."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from compress.runtime import hf
from compress.serving import names
from compress.serving.tables import PackedTable, plain_rows

logger = init_logger("vllm.compress")


class TableMethod(PackedTable, QuantizeMethodBase):
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


class _Told:
    """A layer that learns of our method where the model that builds it does not tell."""

    def __init__(self, *sizes: Any, quant_config: Any = None, **options: Any) -> None:
        current = getattr(get_current_vllm_config_or_none(), "quant_config", None)
        if quant_config is None and current is not None and current.get_name() == hf.METHOD and len(sizes) <= 2:
            quant_config = current if names.tables(current.listed.stored) else None
        super().__init__(*sizes, quant_config=quant_config, **options)  # type: ignore[call-arg]  # a layer's


class ToldEmbedding(_Told, VocabParallelEmbedding):
    """A `VocabParallelEmbedding` that is told of our method."""


class ToldHead(_Told, ParallelLMHead):
    """A `ParallelLMHead` that is told of our method."""


def register() -> None:
    """Put these layers in the place of vLLM's, unless that is done or another plugin has its own there."""
    for name, layer in (("VocabParallelEmbedding", ToldEmbedding), ("ParallelLMHead", ToldHead)):
        known = op_registry_oot.get(name)
        if known is None:
            PluggableLayer.register_oot(layer, name=name)
        elif known is not layer:
            logger.warning("another plugin replaces %s: packed tables may not be served", name)
