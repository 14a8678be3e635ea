"""Run the experts of an engine's block, each as three packed linears, with the checkpoint's own pruning of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.errors import CheckpointError
from compress.runtime import experts as runtime_experts
from compress.runtime.expert_layouts import PROJECTIONS
from compress.serving import parts
from compress.serving.layers import PARTS
from compress.serving.listed import Listed
from compress.serving.parts import Part, Region

SHARDS = dict(zip(("w1", "w3", "w2"), PROJECTIONS, strict=True))  # the engines' names of gate, up and down
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
Local = Callable[[int], int]  # number of an expert -> its number on this rank, or -1


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
    """Build and run the experts of a block one by one; the base of an engine's own class."""

    activation: Callable[[Tensor], Tensor]

    def __init__(self, module: str, listed: Listed) -> None:
        """module: the experts' name in the checkpoint."""
        self.module, self.listed, self.pruning = module, listed.below(module), listed.pruning.get(module)
        self.totals = listed.totals

    def build(self, layer: Any, numbers: Iterable[int], share: Share, dtype: torch.dtype, local: Local) -> None:
        """Give the layer the parts of the experts `numbers`, in their local order, and placeholders."""
        experts = nn.ModuleList()
        for number in numbers:
            own = {shard: self._part(number, shard, region, dtype) for shard, region in share.regions.items()}
            experts.append(nn.ModuleDict(own))
        setattr(layer, PARTS, experts)
        self.totals.waiting += 1
        _add_placeholders(layer, experts, local)

    def _part(self, number: int, shard: str, region: Region, dtype: torch.dtype) -> Part:
        name = f"{self.module}.{number}.{SHARDS[shard]}"
        if name not in self.listed:
            raise CheckpointError(f"{name} is not listed as packed, but other experts beside it are")
        return Part(name, self.listed[name], region, dtype)

    def run(self, layer: Any, x: Tensor, routing: tuple[Tensor, Tensor], count: int, local: Local) -> Tensor:
        """Return the weighted sums [tokens, hidden] over the experts of this rank; x [tokens, hidden].

        routing: weights and numbers of experts, [tokens, top_k] each, numbers below `count` or else of no expert;
        local: number -> that on this rank, -1 for an expert of another rank.
        """
        experts, (topk_weights, topk_ids) = getattr(layer, PARTS), routing
        if self.pruning is not None:
            topk_ids, topk_weights = runtime_experts.prune(x, topk_ids.long(), topk_weights, self.pruning, count)
        out = torch.zeros_like(x)
        before = self.weighs_inputs(layer)
        for number in topk_ids.unique().tolist():
            place = local(number) if 0 <= number < count else -1
            if place == -1:  # of another rank, or dropped
                continue
            token, position = torch.where(topk_ids == number)
            weight = topk_weights[token, position, None]
            h = self._expert(experts[place], x[token] * weight.to(x.dtype) if before else x[token])
            out.index_add_(0, token, (h if before else h * weight).to(out.dtype))
        return out

    def weighs_inputs(self, layer: Any) -> bool:
        """Return whether the router's weights are those of an expert's inputs instead of its outputs."""
        return bool(layer.apply_router_weight_on_input)

    def _expert(self, expert: Any, x: Tensor) -> Tensor:
        y: Tensor = expert["w2"](self.activation(expert["w1"](x)) * expert["w3"](x))
        return y

    @staticmethod
    def parts_of(layer: Any) -> list[Part]:
        """Return the parts of all experts of a layer."""
        return [part for expert in getattr(layer, PARTS) for part in expert.values()]


def _add_placeholders(layer: Any, experts: Any, local: Local) -> None:
    def load(  # as engines call it
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        place = local(expert_id)
        if place != -1:
            experts[place][shard_id].load(param.stored_as, loaded_weight, param.device)
        return (place != -1) if return_success else None

    parts.add_placeholders(layer, [expert[shard].specs for expert in experts for shard in ("w1", "w3")], load, "w13_")
    parts.add_placeholders(layer, [expert["w2"].specs for expert in experts], load, "w2_")
