"""Run a linear layer of an engine, fused or not, as the packed linears of the checkpoint that it stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.serving import parts
from compress.serving.parts import Part, Parts, Region, Totals
from compress.types import Stored

PARTS = "packed"  # what a layer's parts are called among its children
QKV = {"q": 0, "k": 1, "v": 2}


class PackedLinears(ABC):
    """Build and run a layer as a list of linears of the checkpoint; the base of an engine's own class."""

    engine: str  # its name in messages
    qkv: type  # the engine's class of layers of queries, keys and values

    def __init__(self, linears: Mapping[str, Stored | None], totals: Totals) -> None:
        """linears: name -> how it is stored, None where it is not packed, in the order of the layer's outputs."""
        self.linears, self.totals = linears, totals

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
        """Give the layer its parts and the placeholders that the engine loads into."""
        rank, kv_rank = self.ranks(layer)
        first = rank * input_size_per_partition if input_size_per_partition != input_size else 0
        if isinstance(layer, self.qkv):
            full, ranks = _heads(layer, rank, kv_rank)
        else:
            full, ranks = _outputs(output_partition_sizes, output_size, rank)
        columns = range(first, first + input_size_per_partition)
        own = [
            Region((whole, input_size), (range(place * size, (place + 1) * size),), columns)
            for whole, place, size in zip(full, ranks, output_partition_sizes, strict=True)
        ]
        self._build(layer, own, params_dtype)

    @abstractmethod
    def ranks(self, layer: Any) -> tuple[int, int]:
        """Return the place of this process among those that share a layer, and among those that share its keys."""

    def _build(self, layer: Any, regions: list[Region], dtype: torch.dtype) -> None:
        """Give the layer a part for each linear, and the placeholders that the engine loads into.

        regions: of the linears that the engine fuses; dtype: of the linears that are not packed. Raises
        UnsupportedModelError where the engine fuses other ones.
        """
        if len(self.linears) == 1:  # a single one, or stored fused
            regions = [parts.joined(regions)]
        if len(regions) != len(self.linears):
            raise UnsupportedModelError(
                f"{', '.join(self.linears)}: {self.engine} fuses {len(regions)} linears in their place; "
                "serve with transformers"
            )
        own = [
            Part(name, stored, region, dtype)
            for (name, stored), region in zip(self.linears.items(), regions, strict=True)
        ]
        setattr(layer, PARTS, Parts(own))
        self.totals.waiting += 1

        def load(param: Any, tensor: Tensor, shard: Any = None) -> None:
            index = 0 if len(own) == 1 else QKV.get(shard, shard)
            own[index].load(param.stored_as, tensor, param.device)

        parts.add_placeholders(layer, [part.specs for part in own], load)

    def complete(self, layer: Any, say: Callable[[str], object]) -> None:
        """Build the layer's linears, all of whose tensors have come; errors and `say` as those of `finish`."""
        own: Parts = getattr(layer, PARTS)
        finish(layer, own, layer.params_dtype, self.totals, say)
        own.finish()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's outputs [..., out] for inputs x [..., in] of this rank."""
        y: Tensor = layer._modules[PARTS].forward(x)  # no hooks: a call of a module costs as much as a small product
        return y if bias is None else y + bias


def finish(layer: Any, own: Iterable[Part], dtype: torch.dtype, totals: Totals, say: Callable[[str], object]) -> None:
    """Complete a layer whose tensors have all come, and say what is to be known when all layers are complete.

    Raises CheckpointError with the name of a tensor that did not come.
    """
    own = list(own)
    for part in own:
        part.check()
    device = parts.remove_placeholders(layer)
    layer.qweight = nn.Parameter(torch.empty(0, dtype=torch.int16, device=device), False)  # LoRA asks for its device
    parts.warm(parts.linears_of(own), dtype)
    for line in totals.finish(own):
        say(line)


def _outputs(sizes: list[int], output_size: int, rank: int) -> tuple[list[int], list[int]]:
    """Return all outputs and this rank's place, of linears that share `output_size` outputs evenly among ranks."""
    count = output_size // sum(sizes)  # of ranks
    return [size * count for size in sizes], [rank if count > 1 else 0] * len(sizes)


def _heads(layer: Any, rank: int, kv_rank: int) -> tuple[list[int], list[int]]:
    """Return all outputs and this rank's place, of queries, keys and values that are fused; few heads are repeated."""
    counts = [layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads]
    widths = [layer.head_size, layer.head_size, layer.v_head_size]
    full = [count * width for count, width in zip(counts, widths, strict=True)]
    return full, [rank, *[kv_rank // layer.num_kv_head_replicas] * 2]
