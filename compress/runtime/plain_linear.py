"""Multiply linears that are not packed by compiled functions on a CPU, where these are faster than torch's.

A packed model has linears that stay as they are: the head, what a recipe leaves alone. torch multiplies their bfloat16
at 5 billion multiply-adds a second on processors that have no instructions for it, where the packed ones beside them
reach ten times as many.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.kernels.cpu import dense


class CompiledLinear(nn.Linear):
    """An `nn.Linear` that computes in float32 whatever the type, where that pays and nothing passes a gradient back."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features] of the same type."""
        weight, bias = self.weight, self.bias
        if _is_unusual(input, weight, bias) or not dense.takes(input, weight):
            return F.linear(input, weight, bias)
        return dense.multiply(input, weight, bias)


def _is_unusual(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether torch has more to do than to multiply."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return True
    if type(x) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return True
    if bias is not None and (bias.dtype != weight.dtype or not bias.is_cpu or not bias.is_contiguous()):
        return True
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias))


def compile_linears(model: nn.Module) -> None:
    """Let the linears of a model that compute what `nn.Linear` does, and are of no class of their own, be compiled.

    They stay the same objects with the same parameters.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CompiledLinear
