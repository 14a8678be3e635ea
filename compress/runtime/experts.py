"""Run the experts of a mixture-of-experts block as separate linears, so that each can be packed.

transformers holds the experts of a block in two fused parameters, gate_up_proj [experts, 2 * intermediate, hidden] and
down_proj [experts, hidden, intermediate]. `Experts` takes the place of such a module with children `<i>.gate_proj`,
`<i>.up_proj`, `<i>.down_proj`, whose packed tensors have these names on disk.

Only the plain layout is taken apart: gate and up concatenated, not transposed, no biases, no norm after an expert, the
gate function act(gate) * up. Everything else is left as it is (`is_supported`).

Where `Experts.pruning` is set, a token goes without an expert that matters little to it: online dynamic pruning (ODP),
Huang et al. 2024, arXiv:2410.06270. `prune` says how; calib/expert_routing.py chooses the thresholds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from compress.runtime.linear import PackedLinear
from compress.types import Pruning

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

# What `use_experts_implementation` of transformers writes on the module; has_post_expert_norm is newer than 5.16.
_PLAIN_LAYOUT = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_gate": True}


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether the module holds the experts of a block in fused three-dimensional parameters, in any layout."""
    own = dict(module.named_parameters(recurse=False))
    return "down_proj" in own and own["down_proj"].dim() == 3 and ("gate_up_proj" in own or "up_proj" in own)


def is_supported(module: nn.Module) -> bool:
    """Return whether a fused-experts module has the plain layout that `Experts` computes."""
    if not is_fused_experts(module) or {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return False
    if any(getattr(module, name, None) is not value for name, value in _PLAIN_LAYOUT.items()):
        return False
    if getattr(module, "has_post_expert_norm", False):
        return False
    from transformers.integrations import moe  # transformers may be half loaded when this file is imported

    gate = getattr(type(module), "_apply_gate", None)
    return gate is moe._default_apply_gate and callable(getattr(module, "act_fn", None))


def prune(
    hidden_states: Tensor, index: Tensor, weights: Tensor, pruning: Pruning, experts: int
) -> tuple[Tensor, Tensor]:
    """Return the routing [tokens, top_k] without the pairs that are dropped: index `experts` and weight 0 there.

    A token loses the expert of its smallest weight where that is below `threshold` times its largest, and the others
    take over the share `taken` of that weight, in proportion: with 1, as published, the weights' sum stays what it was.
    Published for two experts of a token; of more than two at most one goes. Tokens with ||h||_1 of at least `protected`
    keep all, and so do those of whose experts another process computes some. What happens to a token depends on nothing
    but that token: generating gives what reading gives, whatever else is in the batch.
    """
    exact = weights.float()
    low, last = exact.min(-1, keepdim=True)
    dropped = low < pruning.threshold * exact.amax(-1, keepdim=True)  # [tokens, 1]
    dropped &= (index < experts).all(-1, keepdim=True)
    if pruning.protected is not None:
        dropped &= magnitude(hidden_states)[:, None] < pruning.protected
    gone = torch.zeros_like(index, dtype=torch.bool).scatter(-1, last, dropped)
    total = exact.sum(-1, keepdim=True)
    raised = (exact * (1 + pruning.taken * low / (total - low))).masked_fill(gone, 0).to(weights.dtype)
    return index.masked_fill(gone, experts), torch.where(dropped, raised, weights)


def magnitude(hidden_states: Tensor) -> Tensor:
    """Return ||h||_1 of each token, float32 [tokens]."""
    return hidden_states.float().abs().sum(-1)


class Pairs:
    """Counts of the (token, expert) pairs that the router has chosen, and of those dropped."""

    def __init__(self) -> None:
        self.routed = 0
        self._dropped: Tensor | int = 0  # to be read at the end only: on a GPU, reading waits

    def add(self, index: Tensor, kept: Tensor, experts: int) -> None:
        """Count the routing [tokens, top_k] of one pass, before and after pruning."""
        self.routed += index.numel()
        self._dropped = self._dropped + ((index < experts) & (kept >= experts)).sum()

    @property
    def dropped(self) -> int:
        return int(self._dropped)

    @property
    def share(self) -> float:
        """The share of the pairs that were dropped; 0 where there were none."""
        return self.dropped / self.routed if self.routed else 0.0


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[str, Pairs]]:
    """Let the model's `Experts` modules count what they drop while active: name -> pairs."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    pairs = {name: Pairs() for name in modules}
    try:
        for name, module in modules.items():
            module.pairs = pairs[name]
        yield pairs
    finally:
        for module in modules.values():
            module.pairs = None


class Experts(nn.ModuleDict):
    """Children "0", "1", ...: ModuleDict {gate_proj, up_proj, down_proj} of nn.Linear or PackedLinear."""

    act_fn: Callable[[Tensor], Tensor]
    pruning: Pruning | None = None  # None: every token gets all experts that the router chose
    pairs: Pairs | None = None  # what is dropped is counted here, if anywhere
    _template: nn.Module

    @classmethod
    def from_fused(cls, fused: nn.Module) -> Experts:
        """Return experts whose linears are views of the parameters of `fused`, which may be on meta."""
        assert is_supported(fused), "the caller asks is_supported first"
        gate_up, down = fused.get_parameter("gate_up_proj"), fused.get_parameter("down_proj")
        width = gate_up.shape[1] // 2
        experts = cls()
        for i in range(gate_up.shape[0]):
            parts = (gate_up[i, :width], gate_up[i, width:], down[i])
            experts[str(i)] = nn.ModuleDict(dict(zip(PROJECTIONS, map(_linear, parts), strict=True)))
        # not registered as children, which are the experts and nothing else
        experts.__dict__["act_fn"] = fused.act_fn
        experts.__dict__["_template"] = _without_data(fused)
        return experts.train(fused.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums over the experts, [tokens, hidden].

        hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top_k]. The operations
        of the fused module's own loop, but gate and up are two products: equal to the bit where the matrix library sums
        a column alike for both widths, within 1e-6 of the largest value otherwise.
        """
        if self.pruning is not None:
            kept = prune(hidden_states, top_k_index, top_k_weights, self.pruning, len(self))
            if self.pairs is not None:
                self.pairs.add(top_k_index, kept[0], len(self))
            top_k_index, top_k_weights = kept
        elif self.pairs is not None:
            self.pairs.add(top_k_index, top_k_index, len(self))
        out = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            if index >= len(self):  # marks a token that another process computes, or a pair that is dropped
                continue
            expert = cast(nn.ModuleDict, self[str(index)])
            token, position = torch.where(top_k_index == index)
            x = hidden_states[token]
            x = expert["down_proj"](self.act_fn(expert["gate_proj"](x)) * expert["up_proj"](x))
            out.index_add_(0, token, (x * top_k_weights[token, position, None]).to(out.dtype))
        return out

    def fuse(self, dtype: torch.dtype) -> nn.Module:
        """Return the module that `from_fused` took, with the present weights in `dtype`; it cannot prune."""
        experts = [cast(nn.ModuleDict, expert) for expert in self.values()]
        weights = {name: [_weight(expert[name], dtype) for expert in experts] for name in PROJECTIONS}
        gate_up = map(torch.cat, zip(weights["gate_proj"], weights["up_proj"], strict=True))
        fused = _without_data(self._template)
        fused.gate_up_proj = nn.Parameter(torch.stack(list(gate_up)))
        fused.down_proj = nn.Parameter(torch.stack(weights["down_proj"]))
        return fused.train(self.training)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    return linear


def _weight(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    if isinstance(linear, PackedLinear):
        return linear.dequantize(dtype)
    return linear.get_parameter("weight").detach().to(dtype)


def _without_data(fused: nn.Module) -> nn.Module:
    """Return a copy with its parameters on meta; the model's configuration stays shared."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta")) for p in fused.parameters()}
    memo[id(fused.config)] = fused.config
    return copy.deepcopy(fused, memo)
