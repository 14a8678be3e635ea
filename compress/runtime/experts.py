"""The experts of a mixture-of-experts block as separate linears, so that each can be packed.

transformers holds the experts of a block in two fused parameters, gate_up_proj [experts, 2 * intermediate, hidden] and
down_proj [experts, hidden, intermediate]. `Experts` takes the place of such a module with children `<i>.gate_proj`,
`<i>.up_proj`, `<i>.down_proj`, whose packed tensors have these names on disk.

Only the plain layout is taken apart: gate and up concatenated, not transposed, no biases, no norm after an expert, the
gate function act(gate) * up. Everything else is left as it is (`is_supported`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from compress.runtime.linear import PackedLinear

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

# What `use_experts_implementation` of transformers writes on the module; has_post_expert_norm is newer than 5.16.
_PLAIN_LAYOUT = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_gate": True}


def is_fused_experts(module: nn.Module) -> bool:
    """Whether the module holds the experts of a block in fused three-dimensional parameters, in any layout."""
    own = dict(module.named_parameters(recurse=False))
    return "down_proj" in own and own["down_proj"].dim() == 3 and ("gate_up_proj" in own or "up_proj" in own)


def is_supported(module: nn.Module) -> bool:
    """Whether a fused-experts module has the plain layout that `Experts` computes."""
    if not is_fused_experts(module) or {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return False
    if any(getattr(module, name, None) is not value for name, value in _PLAIN_LAYOUT.items()):
        return False
    if getattr(module, "has_post_expert_norm", False):
        return False
    from transformers.integrations import moe  # transformers may be half loaded when this file is imported

    gate = getattr(type(module), "_apply_gate", None)
    return gate is moe._default_apply_gate and callable(getattr(module, "act_fn", None))


class Experts(nn.ModuleDict):
    """Children "0", "1", ...: ModuleDict {gate_proj, up_proj, down_proj} of nn.Linear or PackedLinear."""

    act_fn: Callable[[Tensor], Tensor]
    _template: nn.Module

    @classmethod
    def from_fused(cls, fused: nn.Module) -> Experts:
        """Linears that are views of the parameters of `fused`: nothing is copied, and meta parameters will do."""
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
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top_k] -> [tokens, hidden].

        The operations of the fused module's own loop, but gate and up are two products: equal to the bit where the
        matrix library sums a column alike for both widths, within 1e-6 of the largest value otherwise.
        """
        out = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            if index >= len(self):  # marks a token that another process computes
                continue
            expert = cast(nn.ModuleDict, self[str(index)])
            token, position = torch.where(top_k_index == index)
            x = hidden_states[token]
            x = expert["down_proj"](self.act_fn(expert["gate_proj"](x)) * expert["up_proj"](x))
            out.index_add_(0, token, (x * top_k_weights[token, position, None]).to(out.dtype))
        return out

    def fuse(self, dtype: torch.dtype) -> nn.Module:
        """The module that `from_fused` took, with the present weights, dequantized to `dtype`."""
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
    """A copy with its parameters on meta; the model's configuration stays shared."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta")) for p in fused.parameters()}
    memo[id(fused.config)] = fused.config
    return copy.deepcopy(fused, memo)
