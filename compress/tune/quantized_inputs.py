"""Quantize the inputs of linears while their block is tuned, as they are at run time."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compress.formats import transforms
from compress.runtime import activation_quant
from compress.types import IN_SCALE, PackedWeight


def attach(linear: nn.Module, packed: PackedWeight) -> None:
    """Let a linear with the decoded weight of `packed` see what the packed one will see, if its inputs are quantized.

    Inputs are rounded in the basis of the stored matrix, and turned back. Gradients pass straight through the rounding.
    A low-rank part is taken to read them, too.
    """
    activations, ops = packed.stored.activations, packed.stored.ops
    if activations is None:
        return
    own = {name: tensor for name, tensor in packed.tensors.items() if name == IN_SCALE or name.startswith("in_")}

    def quantized(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        turned = transforms.apply_input(x, ops, own)
        rounded = activation_quant.fake_quantize(turned, activations, own.get(IN_SCALE))
        return transforms.undo_input(rounded, ops, own), *args[1:]

    linear.register_forward_pre_hook(quantized)
