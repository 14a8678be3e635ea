"""Embeddings and output heads of vLLM from packed tables; a tied table is stored once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
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
from compress.serving import names, parts
from compress.serving.parts import Totals
from compress.serving.tables import Table
from compress.types import Stored

logger = init_logger("vllm.compress")
TABLE = "table"  # what a layer's table is called among its children


class TableMethod(QuantizeMethodBase):
    """Build and run an embedding, a head, or a head that is tied to an embedding."""

    def __init__(self, candidates: Mapping[str, Stored], name: str, totals: Totals) -> None:
        """candidates: the tables of the checkpoint that the layer may hold, by name; none: it is not packed."""
        self.candidates, self.name, self.totals = candidates, name, totals
        self.is_tied = False

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Give the layer a table and the placeholders that vLLM loads into."""
        indices = layer.shard_indices
        rows = range(indices.org_vocab_start_index, indices.org_vocab_end_index)
        table = Table(self.name, self.candidates, (layer.org_vocab_size, input_size), rows, params_dtype)
        setattr(layer, TABLE, table)
        self.totals.waiting += 1

        def load(param: Any, tensor: Tensor) -> None:
            table.load(param.stored_as, tensor, param.device)

        parts.add_placeholders(layer, table.specs, load)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let a head multiply with the table of the embedding."""
        parts.remove_placeholders(layer)
        setattr(layer, TABLE, getattr(embed_tokens, TABLE))
        self.is_tied = True
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Build the table from what has come."""
        table: Table = getattr(layer, TABLE)
        parts.remove_placeholders(layer)
        table.finish()
        if table.head is None:
            self._use_plain(layer, table)
        else:
            device = next(table.parameters()).device
            layer.weight = nn.Parameter(torch.empty(0, dtype=table.dtype, device=device), False)  # LoRA asks for it
            if isinstance(layer, ParallelLMHead):
                parts.warm([table.head], table.dtype)
            if not self.is_tied:
                self.totals.add(sum(tensor.nbytes for tensor in table.head.parameters()), table.whole_because)
        for line in self.totals.finish([]):
            logger.info(line)

    @staticmethod
    def _use_plain(layer: Any, table: Table) -> None:
        """Go on as vLLM does with a table that is not packed."""
        assert table.plain is not None, "a table is packed or plain"
        missing = layer.num_embeddings_per_partition - table.plain.shape[0]
        if missing:
            table.plain = nn.Parameter(nn.functional.pad(table.plain, (0, 0, 0, missing)), requires_grad=False)
        layer.weight = table.plain
        layer.quant_method = UnquantizedEmbeddingMethod()
        layer.quant_method.process_weights_after_loading(layer)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the rows of token ids, counted from the first one of this rank."""
        return getattr(layer, TABLE).look_up(input_)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return this rank's logits, padded as vLLM pads the vocabulary."""
        y = getattr(layer, TABLE).project(x, layer.num_embeddings_per_partition)
        return y if bias is None else y + bias


class _Told:
    """A layer that learns of our method where the model that builds it does not tell."""

    def __init__(self, *sizes: Any, quant_config: Any = None, **options: Any) -> None:
        current = getattr(get_current_vllm_config_or_none(), "quant_config", None)
        if quant_config is None and current is not None and current.get_name() == hf.METHOD and len(sizes) <= 2:
            quant_config = current if names.tables(current.stored) else None
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
