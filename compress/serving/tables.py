"""A rank's rows of a table of embeddings, of an output head, or of one table for both, packed or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress import formats
from compress.errors import CheckpointError
from compress.formats import levels
from compress.runtime.embedding import LIKE, PackedEmbedding
from compress.runtime.linear import PackedLinear
from compress.serving import parts
from compress.serving.config import PackedModules
from compress.serving.parts import PLAIN_KEY
from compress.serving.sharing import share
from compress.types import PackedWeight, Stored

TABLE_CHILD = "table"  # the name of a layer's table among its children


class TableShard(nn.Module):
    """Look rows of a table [tokens, hidden] up, and multiply with it.

    It may be stored in any of several ways, or not packed: which one it is shows when the tensors have come.
    """

    def __init__(
        self,
        name: str,
        candidates: Mapping[str, Stored],
        shape: tuple[int, int],
        rows: range,
        dtype: torch.dtype,
        level: int | None = None,
    ) -> None:
        """candidates: name in the checkpoint -> how it is stored; rows: those of this rank, of `shape`.

        level: of its levels, the one that is computed with; None: the whole table.
        """
        super().__init__()
        self.name, self.shape, self.rows, self.dtype, self.level = name, shape, rows, dtype, level
        self.shared_nbytes = 0  # of tensors that another model in this process holds
        self.candidates = {key: stored for key, stored in candidates.items() if _is_possible(stored, shape)}
        self.whole_because: str | None = None  # why it could not be cut
        self.embedding: PackedEmbedding | None = None
        self.head: PackedLinear | None = None
        self.plain: nn.Parameter | None = None  # this rank's rows of a table that is not packed
        self._is_built = False
        self._arrived: dict[str, Tensor] = {}

    @property
    def specs(self) -> list[dict[str, formats.Spec]]:
        """What may come: the stored tensors of all candidates, and a plain table."""
        packed = [formats.specs(stored, self.shape) for stored in self.candidates.values()]
        return [*packed, {LIKE: ((0,), self.dtype), PLAIN_KEY: (self.shape, self.dtype)}]

    def load(self, key: str, tensor: Tensor, device: torch.device | str) -> None:
        """Take a copy of a stored tensor to a device."""
        if key != LIKE:  # says the type of the rows in transformers; here the engine does
            self._arrived[key] = tensor.to(device, copy=True)

    def finish(self) -> None:
        """Build the table from what has come, once; CheckpointError if that is not all."""
        if self._is_built:
            return
        self._is_built = True
        tensors, self._arrived = self._arrived, {}
        if PLAIN_KEY in tensors:
            rows = tensors[PLAIN_KEY][self.rows.start : self.rows.stop].to(self.dtype, copy=True)
            self.plain = nn.Parameter(rows, requires_grad=False)
            self._share(self)
            return
        packed = levels.view(self._weight_of(tensors), self.level)
        try:
            weight = formats.cut(packed, self.rows, range(self.shape[1]))
        except ValueError as error:
            self.whole_because, weight = str(error), packed
        self.head = PackedLinear.from_packed(weight)
        self._share(self.head)
        if formats.has_rows(weight.stored):
            self.embedding = _embedding(self.head.packed(), self.dtype)

    def _share(self, module: nn.Module) -> None:
        self.shared_nbytes = share((self.name, self.shape, self.rows, type(module)), module)

    def _weight_of(self, tensors: dict[str, Tensor]) -> PackedWeight:
        """Return the weight in the form that these tensors have."""
        for name, stored in self.candidates.items():
            specs = formats.specs(stored, self.shape)
            if {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()} == specs:
                weight = PackedWeight(stored, tensors, self.shape)
                formats.check(weight, name)
                return weight
        for name, stored in self.candidates.items():  # say what is wrong
            formats.check(PackedWeight(stored, tensors, self.shape), name)
        raise CheckpointError(f"{self.name}.{PLAIN_KEY} is not in the checkpoint; download or write it again")

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows [..., hidden] of ids [...], counted from the first row of this rank."""
        assert self.embedding is not None, "only tables with rows become embeddings"
        rows: Tensor = self.embedding(ids if self.whole_because is None else ids + self.rows.start)
        return rows

    def project(self, x: Tensor, width: int) -> Tensor:
        """Return x [..., hidden] times this rank's rows, [..., width]: zeros behind those."""
        assert self.head is not None, "only packed tables are multiplied with here"
        y: Tensor = self.head(x)
        if self.whole_because is not None:
            y = y[..., self.rows.start : self.rows.stop]
        return y if y.shape[-1] == width else F.pad(y, (0, width - y.shape[-1]))


def _is_possible(stored: Stored, shape: tuple[int, int]) -> bool:
    """Return whether a weight of this shape can be stored so: what is listed may be another module's."""
    try:
        formats.specs(stored, shape)
    except ValueError:
        return False
    return True


def _embedding(weight: PackedWeight, dtype: torch.dtype) -> PackedEmbedding:
    """Return an embedding that shares the tensors of a weight; its rows have the type `dtype`."""
    embedding = PackedEmbedding(weight.stored, nn.Embedding(*weight.shape, device="meta", dtype=dtype))
    for name, tensor in weight.tensors.items():
        embedding.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        device = tensor.device
    embedding.like = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    return embedding


class PackedTable:
    """Run an embedding, a head, or a head that is tied to an embedding; the base of an engine's own class."""

    def __init__(self, candidates: Mapping[str, Stored], name: str, listed: PackedModules) -> None:
        """candidates: the tables of the checkpoint that the layer may hold, by name; none: it is not packed."""
        self.candidates, self.name, self.totals, self.level = candidates, name, listed.totals, listed.level
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
        """Give the layer a table [tokens, hidden], of which this rank has some rows, and placeholders."""
        indices = layer.shard_indices
        rows = range(indices.org_vocab_start_index, indices.org_vocab_end_index)
        shape = (layer.org_vocab_size, input_size)
        table = TableShard(self.name, self.candidates, shape, rows, params_dtype, self.level)
        setattr(layer, TABLE_CHILD, table)
        self.totals.waiting += 1

        def load(param: Any, tensor: Tensor) -> None:
            table.load(param.stored_as, tensor, param.device)

        parts.add_placeholders(layer, table.specs, load)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let a head multiply with the table of the embedding."""
        parts.remove_placeholders(layer)
        setattr(layer, TABLE_CHILD, getattr(embed_tokens, TABLE_CHILD))
        self.is_tied = True
        return layer

    def finish(self, layer: Any, is_head: bool) -> TableShard:
        """Build the table from what has come, and return it; is_head: the layer multiplies with it."""
        table: TableShard = getattr(layer, TABLE_CHILD)
        parts.remove_placeholders(layer)
        table.finish()
        if table.head is not None:
            device = next(table.parameters()).device
            layer.weight = nn.Parameter(torch.empty(0, dtype=table.dtype, device=device), False)  # engines ask for it
            if is_head:
                parts.warm([table.head], table.dtype)
            if not self.is_tied:
                nbytes = sum(tensor.nbytes for tensor in table.head.parameters())
                self.totals.add(nbytes, table.whole_because, table.shared_nbytes)
        return table

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the rows of token ids, counted from the first one of this rank."""
        rows: Tensor = getattr(layer, TABLE_CHILD).look_up(input_)
        return rows

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return this rank's logits, padded as the engine pads the vocabulary."""
        y: Tensor = getattr(layer, TABLE_CHILD).project(x, layer.num_embeddings_per_partition)
        return y if bias is None else y + bias


def plain_rows(layer: Any, table: TableShard) -> nn.Parameter:
    """Return the rows of a table that is not packed, padded as the engine pads the vocabulary."""
    assert table.plain is not None, "a table is packed or plain"
    missing = layer.num_embeddings_per_partition - table.plain.shape[0]
    if missing:
        table.plain = nn.Parameter(F.pad(table.plain, (0, 0, 0, missing)), requires_grad=False)
    return table.plain
