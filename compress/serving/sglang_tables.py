"""Embeddings and output heads of SGLang from packed tables; a tied table is stored once."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

from compress.serving.tables import PackedTable, plain_rows

logger = logging.getLogger(__name__)


class TableMethod(PackedTable, QuantizeMethodBase):
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
