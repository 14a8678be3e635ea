"""Matrices turned by the transforms around them: values and gradients of compress/formats/transforms.py in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import transforms
from compress.tune import turned_linear
from compress.types import WeightTransforms

HADAMARD = WeightTransforms(("signs", "hadamard"), ("hadamard_transposed", "signs"))
AROUND = {
    "hadamard": HADAMARD,
    "the other way": WeightTransforms(("hadamard_transposed", "signs"), ("signs", "hadamard")),
    "inputs": WeightTransforms(("signs", "hadamard"), ()),
    "outputs": WeightTransforms((), ("hadamard", "signs")),
    "scales": WeightTransforms(("channel_scale", "signs", "hadamard"), ()),
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
            found[name] = torch.nn.functional.normalize(torch.rand(size, generator=generator) + 0.5, dim=0)
    return found


@pytest.mark.parametrize("shape", [(48, 576), (320, 64), (36, 176)], ids=str)  # 36 rows are left to PyTorch
@pytest.mark.parametrize("around", AROUND)
def test_values_and_gradients(around: str, shape: tuple[int, int]) -> None:
    ops = AROUND[around]
    own = tensors(ops, shape)
    generator = torch.Generator().manual_seed(2)
    matrix, slope = (torch.randn(shape, generator=generator) for _ in range(2))
    found: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for dtype, make in ((torch.float32, turned_linear.turned_effective), (torch.float64, transforms.effective)):
        leaf = matrix.to(dtype).requires_grad_()
        made = make(leaf, ops, own)
        found[dtype] = made.detach(), torch.autograd.grad(made, leaf, slope.to(dtype))[0]
    for mine, exact in zip(found[torch.float32], found[torch.float64], strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=1e-5)


def test_gradients_reach_what_transforms_store() -> None:
    """Scales of channels are trained, so they must not go the way that keeps nothing."""
    ops = AROUND["scales"]
    own: dict[str, Any] = tensors(ops, (32, 64))
    own["in_channel_scale"].requires_grad_()
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    turned_linear.turned_effective(matrix, ops, own).square().sum().backward()
    assert own["in_channel_scale"].grad.abs().min() > 0
