"""Matrices turned by the transforms around them: values and gradients of compress/formats/transforms.py in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import transforms
from compress.tune import stored_linear
from compress.types import WeightTransforms

HADAMARD = WeightTransforms(("signs", "hadamard"), ("hadamard_transposed", "signs"))
AROUND = {
    "hadamard": HADAMARD,
    "the other way": WeightTransforms(("hadamard_transposed", "signs"), ("signs", "hadamard")),
    "inputs": WeightTransforms(("signs", "hadamard"), ()),
    "outputs": WeightTransforms((), ("hadamard", "signs")),
    "scales": WeightTransforms(("channel_scale", "signs", "hadamard"), ()),
    "stored scales": WeightTransforms(("channel_scale8", "hadamard"), ("hadamard", "channel_scale16")),
    "reflection": WeightTransforms(("reflection",), ("hadamard",)),
}


def tensors(ops: WeightTransforms, shape: tuple[int, int]) -> dict[str, Tensor]:
    """What is stored of transforms."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, (size, dtype) in transforms.specs(ops, shape).items():
        if dtype == torch.uint8:
            found[name] = torch.randint(0, 256, size, generator=generator, dtype=dtype)
        else:
            found[name] = torch.nn.functional.normalize(torch.rand(size, generator=generator) + 0.5, dim=0).to(dtype)
    return found


@pytest.mark.parametrize("shape", [(48, 576), (320, 64), (36, 176)], ids=str)  # 36 rows are left to PyTorch
@pytest.mark.parametrize("around", AROUND)
def test_values_and_gradients(around: str, shape: tuple[int, int]) -> None:
    ops = AROUND[around]
    own = tensors(ops, shape)
    generator = torch.Generator().manual_seed(2)
    matrix, slope = (torch.randn(shape, generator=generator) for _ in range(2))
    found: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for dtype, make in ((torch.float32, stored_linear.turned_effective), (torch.float64, transforms.effective)):
        leaf = matrix.to(dtype).requires_grad_()
        made = make(leaf, ops, own)
        found[dtype] = made.detach(), torch.autograd.grad(made, leaf, slope.to(dtype))[0]
    for mine, exact in zip(found[torch.float32], found[torch.float64], strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=1e-5)


SCALED = WeightTransforms(("channel_scale16", "hadamard"), ("hadamard", "channel_scale16"))
INNER = WeightTransforms(("hadamard", "channel_scale"), ("channel_scale16", "hadamard"))


@pytest.mark.parametrize("is_trained", [True, False], ids=["matrix too", "scales alone"])
@pytest.mark.parametrize("ops", [AROUND["scales"], AROUND["stored scales"], SCALED, INNER], ids=str)
def test_gradients_reach_what_transforms_store(ops: WeightTransforms, is_trained: bool) -> None:
    """Scales of channels are trained, so they must not go the way that keeps nothing."""
    own: dict[str, Any] = tensors(ops, (32, 64))
    leaves = [own[name].detach().float().requires_grad_() for name in own if own[name].is_floating_point()]
    names = [name for name in own if own[name].is_floating_point()]
    generator = torch.Generator().manual_seed(3)
    matrix, slope = (torch.randn(32, 64, generator=generator) for _ in range(2))
    found = []
    for dtype, make in ((torch.float32, stored_linear.turned_effective), (torch.float64, transforms.effective)):
        around = own | dict(zip(names, leaves, strict=True))
        leaf = matrix.to(dtype).requires_grad_(is_trained)
        loss = (make(leaf, ops, around) * slope).sum()
        found.append(torch.autograd.grad(loss, [*leaves, leaf] if is_trained else leaves))
    for mine, exact in zip(*found, strict=True):
        assert exact.abs().min() > 0
        torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-4, atol=1e-5)
