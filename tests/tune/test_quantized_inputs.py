"""Linears whose inputs are quantized while a block is tuned: they give what packed linears give at run time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from compress import formats
from compress.runtime.linear import PackedLinear
from compress.tune import held_block
from compress.types import IN_SCALE, Activations, PackedWeight, WeightTransforms
from helpers.pico import round_to_nearest

AROUND = WeightTransforms(input=("signs", "hadamard", "channel_scale"))
KINDS = [
    Activations(bits=8),
    Activations(bits=4, clip=0.9),
    Activations(bits=8, scale="tensor"),
    Activations(bits=8, dtype="fp8"),
]


def packed_weight(activations: Activations, ops: WeightTransforms) -> PackedWeight:
    weight = round_to_nearest(torch.randn(48, 32, generator=torch.Generator().manual_seed(0)), 4, 16)
    stored = dataclasses.replace(weight.stored, ops=ops, activations=activations)
    around = {
        "in_signs": torch.full((4,), 0x5A, dtype=torch.uint8),
        "in_channel_scale": torch.linspace(0.5, 2, 32),
        IN_SCALE: torch.tensor([0.03]),
    }
    wanted = formats.specs(stored, weight.shape)
    return PackedWeight(stored, {**weight.tensors, **{k: t for k, t in around.items() if k in wanted}}, weight.shape)


def plain(packed: PackedWeight) -> nn.Linear:
    linear = nn.Linear(32, 48, bias=False).requires_grad_(False)
    linear.weight.copy_(formats.decode(packed, torch.float32))
    return linear


def inputs() -> Tensor:
    return torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ops", [WeightTransforms(), AROUND], ids=["plain", "turned"])
@pytest.mark.parametrize("activations", KINDS, ids=str)
def test_outputs_are_those_of_the_packed_linear(activations: Activations, ops: WeightTransforms) -> None:
    packed, x = packed_weight(activations, ops), inputs()
    linear = plain(packed)
    exact = linear(x)
    held_block.attach_quantized_inputs(linear, packed)
    expected = PackedLinear.from_packed(packed, None)(x)
    assert torch.allclose(linear(x), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(exact, expected, rtol=1e-3, atol=1e-3)


def test_gradients_pass_the_rounding() -> None:
    packed = packed_weight(Activations(bits=8), AROUND)
    linear, x = plain(packed), inputs().requires_grad_()
    held_block.attach_quantized_inputs(linear, packed)
    linear(x).sum().backward()
    assert torch.allclose(x.grad, linear.weight.sum(0).expand_as(x), rtol=1e-4, atol=1e-4)  # nothing is clipped


def test_inputs_stay_as_they_are_without_activations() -> None:
    packed = packed_weight(Activations(bits=8), WeightTransforms())
    packed = PackedWeight(dataclasses.replace(packed.stored, activations=None), packed.tensors, packed.shape)
    linear = plain(packed)
    held_block.attach_quantized_inputs(linear, packed)
    assert torch.equal(linear(inputs()), nn.functional.linear(inputs(), linear.weight))
