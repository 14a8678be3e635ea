"""Hold a block in float32 while it is edited and compared with itself: rounding would hide what an edit does wrong.

The weights of experts, most of a block that has any, are not copied: they are edited where they are and widened, one
linear at a time, when they are used.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from compress.model.blockwise import BlockArgs
from compress.runtime.experts import Experts


def copy_of(block: nn.Module) -> nn.Module:
    """Return a block that computes in float32; the block itself where it does. Weights of experts are shared."""
    shared = {id(p): p for linear in _linears_of_experts(block) for p in linear.parameters()}
    own = [p for p in block.parameters() if id(p) not in shared]
    if all(p.dtype == torch.float32 for p in (*own, *shared.values())):
        return block
    memo: dict[int, Any] = {**shared}
    memo |= {id(p): nn.Parameter(p.detach().float(), requires_grad=False) for p in own}
    memo |= {id(b): b.float() for b in block.buffers() if b.is_floating_point()}
    memo |= {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    wide = copy.deepcopy(block, memo)
    for linear in _linears_of_experts(wide):
        linear.forward = _in_float32(linear)  # type: ignore[method-assign]
    return wide


def arguments(call: BlockArgs) -> BlockArgs:
    """Return a block's arguments with tensors of numbers in float32."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(wide, (call.args, call.kwargs))
    return call._replace(args=args, kwargs=kwargs)


@torch.no_grad()
def take(block: nn.Module, wide: nn.Module) -> None:
    """Give a block the weights of its copy, rounded to its own types."""
    for parameter, edited in zip(block.parameters(), wide.parameters(), strict=True):
        if parameter is not edited:
            parameter.copy_(edited)


def _linears_of_experts(block: nn.Module) -> list[nn.Linear]:
    experts = [module for module in block.modules() if isinstance(module, Experts)]
    return [linear for module in experts for linear in module.modules() if isinstance(linear, nn.Linear)]


def _in_float32(linear: nn.Linear) -> Any:
    def forward(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.float()
        return functional.linear(x.float(), linear.weight.float(), bias)

    return forward
