"""Run an engine's linear layers and blocks of experts as packed linears of the checkpoint.

A linear layer, fused or not, stands for one or several linears of the checkpoint. An expert is three of them, with the
checkpoint's own pruning of experts.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.errors import CheckpointError, UnsupportedModelError
from compress.runtime import experts as runtime_experts
from compress.runtime.expert_layouts import PROJECTIONS
from compress.runtime.grouped import ExpertRunner, is_static, run_in_turn
from compress.serving import parts
from compress.serving.config import PackedModules
from compress.serving.parts import FusedShards, LinearShard, Region, Totals
from compress.types import Stored

SHARDS_CHILD = "packed"  # the name of a layer's shards among its children
QKV_INDEX = {"q": 0, "k": 1, "v": 2}


class PackedLinears(ABC):
    """Build and run a layer as a list of linears of the checkpoint; the base of an engine's own class."""

    engine: str  # its name in messages
    qkv: type  # the engine's class of layers of queries, keys and values

    def __init__(self, linears: Mapping[str, Stored | None], listed: PackedModules) -> None:
        """linears: name -> how it is stored, None where it is not packed, in the order of the layer's outputs."""
        self.linears, self.totals, self.level = linears, listed.totals, listed.level

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
        """Give the layer its shards and the placeholders that the engine loads into."""
        rank, kv_rank = self.ranks(layer)
        first = rank * input_size_per_partition if input_size_per_partition != input_size else 0
        if isinstance(layer, self.qkv):
            full, ranks = _heads(layer, rank, kv_rank)
        else:
            full, ranks = _outputs(output_partition_sizes, output_size, rank)
        columns = range(first, first + input_size_per_partition)
        regions = [
            Region((whole, input_size), (range(position * size, (position + 1) * size),), columns)
            for whole, position, size in zip(full, ranks, output_partition_sizes, strict=True)
        ]
        self._build(layer, regions, params_dtype)

    @abstractmethod
    def ranks(self, layer: Any) -> tuple[int, int]:
        """Return the place of this process among those that share a layer, and among those that share its keys."""

    def _build(self, layer: Any, regions: list[Region], dtype: torch.dtype) -> None:
        """Give the layer a shard for each linear, and the placeholders that the engine loads into.

        regions: of the linears that the engine fuses; dtype: of the linears that are not packed. Raises
        UnsupportedModelError where the engine fuses other ones.
        """
        if len(self.linears) == 1:  # a single one, or stored fused
            regions = [parts.join_regions(regions)]
        if len(regions) != len(self.linears):
            raise UnsupportedModelError(
                f"{', '.join(self.linears)}: {self.engine} fuses {len(regions)} linears in their place; "
                "serve with transformers"
            )
        shards = [
            LinearShard(name, stored, region, dtype, self.level)
            for (name, stored), region in zip(self.linears.items(), regions, strict=True)
        ]
        setattr(layer, SHARDS_CHILD, FusedShards(shards))
        self.totals.waiting += 1

        def load(param: Any, tensor: Tensor, shard: Any = None) -> None:
            index = 0 if len(shards) == 1 else QKV_INDEX.get(shard, shard)
            shards[index].load(param.stored_as, tensor, param.device)

        parts.add_placeholders(layer, [each.specs for each in shards], load)

    def complete(self, layer: Any, say: Callable[[str], object]) -> None:
        """Build the layer's linears, all of whose tensors have come; errors and `say` as those of `finish_layer`."""
        shards: FusedShards = getattr(layer, SHARDS_CHILD)
        finish_layer(layer, shards, layer.params_dtype, self.totals, say)
        shards.finish()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's outputs [..., out] for inputs x [..., in] of this rank."""
        y: Tensor = layer._modules[SHARDS_CHILD].forward(
            x
        )  # no hooks: a call of a module costs as much as a small product
        return y if bias is None else y + bias


def finish_layer(
    layer: Any, shards: Iterable[LinearShard], dtype: torch.dtype, totals: Totals, say: Callable[[str], object]
) -> None:
    """Complete a layer whose tensors have all come; pass log lines to `say` once all layers are complete.

    Raises CheckpointError with the name of a tensor that did not come.
    """
    shards = list(shards)
    for shard in shards:
        shard.check()
    device = parts.remove_placeholders(layer)
    layer.qweight = nn.Parameter(torch.empty(0, dtype=torch.int16, device=device), False)  # LoRA asks for its device
    parts.warm(parts.linears_of(shards), dtype)
    for line in totals.finish(shards):
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


PROJECTION_OF_SHARD = dict(zip(("w1", "w3", "w2"), PROJECTIONS, strict=True))  # the engines' names of gate, up and down
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
LocalNumber = Callable[[int], int]  # number of an expert -> its number on this rank, or -1


@dataclass(frozen=True)
class Share:
    """What a rank computes of the experts of a block."""

    hidden_size: int
    inner: range  # of the intermediate features
    full: int  # of these on all ranks

    @property
    def regions(self) -> dict[str, Region]:
        """Region of each linear of an expert."""
        first = Region.of_rows((self.full, self.hidden_size), self.inner)
        last = Region((self.hidden_size, self.full), (range(self.hidden_size),), self.inner)
        return {"w1": first, "w3": first, "w2": last}


class PackedExpertLayer:
    """Build and run the experts of a block, together where they can (runtime/grouped.py); the base of an engine's."""

    activation: Callable[[Tensor], Tensor]
    dtype: torch.dtype  # of activations

    def __init__(self, module: str, listed: PackedModules) -> None:
        """module: the experts' name in the checkpoint."""
        self.module, self.listed, self.pruning = module, listed.below(module), listed.pruning.get(module)
        self.totals, self.level = listed.totals, listed.level

    def build(self, layer: Any, numbers: Iterable[int], share: Share, dtype: torch.dtype, local: LocalNumber) -> None:
        """Give the layer the shards of the experts `numbers`, in their local order, and placeholders."""
        experts = nn.ModuleList()
        for number in numbers:
            linears = {shard: self._shard(number, shard, region, dtype) for shard, region in share.regions.items()}
            experts.append(nn.ModuleDict(linears))
        setattr(layer, SHARDS_CHILD, experts)
        self.totals.waiting += 1
        _add_placeholders(layer, experts, local)

    def _shard(self, number: int, shard: str, region: Region, dtype: torch.dtype) -> LinearShard:
        name = f"{self.module}.{number}.{PROJECTION_OF_SHARD[shard]}"
        if name not in self.listed:
            raise CheckpointError(f"{name} is not listed as packed, but other experts beside it are")
        return LinearShard(name, self.listed[name], region, dtype, self.level)

    def finish(self, layer: Any, count: int, local: LocalNumber, say: Callable[[str], object]) -> None:
        """Build the experts, whose tensors have all come; arguments and errors as those of `run` and `finish_layer`."""
        shards = self.shards_of(layer)
        finish_layer(layer, shards, self.dtype, self.totals, say)
        experts = getattr(layer, SHARDS_CHILD)
        linears = [[_whole_linear(expert[shard]) for shard in PROJECTION_OF_SHARD] for expert in experts]
        self.runner = ExpertRunner(linears, self.dtype)
        self._number, self.layer = next(_NUMBERS), ref(layer)
        _LAYERS[self._number] = self
        self._local_numbers = torch.tensor([local(i) for i in range(count)], device=layer.qweight.device)
        if self.runner.together is None and layer.qweight.is_cuda:
            say(f"{self.module}: in CUDA graphs every expert is given all tokens: {self.runner.reason}")

    def run(self, layer: Any, x: Tensor, routing: tuple[Tensor, Tensor], count: int) -> Tensor:
        """Return the weighted sums [tokens, hidden] over the experts of this rank; x [tokens, hidden].

        routing: weights and numbers of experts, [tokens, top_k] each, numbers below `count` or else of no expert.
        """
        weights, ids = routing
        if torch.compiler.is_compiling():
            return _run_layer(x, weights, ids, count, self._number)
        return self.compute(layer, x, routing, count)

    def compute(self, layer: Any, x: Tensor, routing: tuple[Tensor, Tensor], count: int) -> Tensor:
        """Do what `run` does, not as an operator."""
        experts, (topk_weights, topk_ids) = getattr(layer, SHARDS_CHILD), routing
        if self.pruning is not None:
            topk_ids, topk_weights = runtime_experts.prune(x, topk_ids.long(), topk_weights, self.pruning, count)
        is_known = (topk_ids >= 0) & (topk_ids < count)
        local = self._local_numbers[topk_ids.clamp(0, count - 1)]
        ids = local.masked_fill(~is_known, -1)  # elsewhere, or dropped
        before, together = self.weighs_inputs(layer), self.runner.together
        if together is not None and x.dtype == self.runner.dtype:
            return together.run(x, (ids, topk_weights), self._gate, weighs_inputs=before)
        if is_static(x):
            return run_in_turn(x, (ids, topk_weights), len(experts), lambda i, x: self._expert(experts[i], x), before)
        out = torch.zeros_like(x)
        for number in ids.unique().tolist():
            if number < 0:
                continue
            token, position = torch.where(ids == number)
            weight = topk_weights[token, position, None]
            h = self._expert(experts[number], x[token] * weight.to(x.dtype) if before else x[token])
            out.index_add_(0, token, (h if before else h * weight).to(out.dtype))
        return out

    def weighs_inputs(self, layer: Any) -> bool:
        """Return whether the router's weights are those of an expert's inputs instead of its outputs."""
        return bool(layer.apply_router_weight_on_input)

    def _gate(self, opened: Tensor, up: Tensor) -> Tensor:
        return self.activation(opened) * up

    def _expert(self, expert: Any, x: Tensor) -> Tensor:
        y: Tensor = expert["w2"](self._gate(expert["w1"](x), expert["w3"](x)))
        return y

    @staticmethod
    def shards_of(layer: Any) -> list[LinearShard]:
        """Return the shards of all experts of a layer."""
        return [part for expert in getattr(layer, SHARDS_CHILD) for part in expert.values()]


# For torch.compile: one operator, in which shapes may depend on where tokens go.
_LAYERS: WeakValueDictionary[int, PackedExpertLayer] = WeakValueDictionary()
_NUMBERS = itertools.count()


@torch.library.custom_op("compress::expert_layer", mutates_args=())
def _run_layer(x: Tensor, weights: Tensor, ids: Tensor, count: int, number: int) -> Tensor:
    method = _LAYERS[number]
    return method.compute(method.layer(), x, (weights, ids), count)


@_run_layer.register_fake
def _(x: Tensor, weights: Tensor, ids: Tensor, count: int, number: int) -> Tensor:
    return torch.empty_like(x)


def _whole_linear(shard: LinearShard) -> nn.Module:
    """Return the one linear that a shard computes with, the shard itself where there are several or too much of it."""
    return shard.linears[0] if len(shard.linears) == 1 and shard.whole_because is None else shard


def _add_placeholders(layer: Any, experts: Any, local: LocalNumber) -> None:
    def load(  # as engines call it
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        local_number = local(expert_id)
        if local_number != -1:
            experts[local_number][shard_id].load(param.stored_as, loaded_weight, param.device)
        return (local_number != -1) if return_success else None

    parts.add_placeholders(layer, [expert[shard].specs for expert in experts for shard in ("w1", "w3")], load, "w13_")
    parts.add_placeholders(layer, [expert["w2"].specs for expert in experts], load, "w2_")
