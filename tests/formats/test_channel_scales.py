"""Diagonals that are stored in 16 or 8 bits a channel: exact values, nearest codes, bytes, and the compiled way."""

from __future__ import annotations

import pytest
import torch

from compress.formats import transforms
from compress.formats.transforms import Diagonal, pack_diagonal
from compress.types import WeightTransforms
from helpers.problems import random

NAMES = ["channel_scale16", "channel_scale8"]


def test_every_byte_has_its_value() -> None:
    """The values of the documentation, one by one; bfloat16 and float16 hold them."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = Diagonal("channel_scale8", codes).values(256, torch.float64)
    for code in range(256):
        magnitude = (1 + code % 16 / 16) * 2.0 ** (code // 16 % 8 - 4)
        assert float(values[code]) == (-magnitude if code >= 128 else magnitude)
    assert float(values[64]) == 1 and float(values[127]) == 15.5 and float(values[0]) == 1 / 16
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(values.to(dtype).double(), values)
    assert torch.equal(pack_diagonal("channel_scale8", values), codes)


def test_packing_takes_the_nearest_value() -> None:
    wanted = random(2000, seed=1) * 10 ** random(2000, seed=2)
    values = Diagonal("channel_scale8", torch.arange(256, dtype=torch.uint8)).values(256, torch.float64)
    stored = Diagonal("channel_scale8", pack_diagonal("channel_scale8", wanted)).values(2000, torch.float64)
    least = (wanted.double()[:, None] - values).abs().amin(1)
    assert torch.equal((stored - wanted).abs(), least) and torch.equal(stored.sign(), wanted.double().sign())
    halves = pack_diagonal("channel_scale16", wanted)
    normal = wanted.abs() > 2.0**-14
    assert torch.equal(halves[normal], wanted[normal].half()) and halves.dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "least", "most"), [("channel_scale16", 2.0**-14, 2.0**15), ("channel_scale8", 1 / 16, 15.5)]
)
def test_what_cannot_be_stored_becomes_the_end_of_the_range(name: str, least: float, most: float) -> None:
    wanted = torch.tensor([0.0, 1e-30, -1e-30, 1e30, -1e30, torch.inf])
    values = Diagonal(name, pack_diagonal(name, wanted)).values(6, torch.float32)
    assert values.tolist() == [least, least, -least, most, -most, most]


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_in_float64(name: str) -> None:
    stored = pack_diagonal(name, random(50))
    around = WeightTransforms((name,), (name,))
    tensors = {f"in_{name}": stored, f"out_{name}": stored}
    values = Diagonal(name, stored).values(50, torch.float64)
    x = random(3, 50, seed=4)
    for dtype, error in ((torch.float64, 0), (torch.float32, 2**-23), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        y = transforms.apply_output(x.to(dtype), around, tensors)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), x.to(dtype).double() * values, rtol=error, atol=0)
    matrix = random(50, 50, seed=5).double()
    assert torch.equal(transforms.effective(matrix, around, tensors), values[:, None] * matrix * values)
    assert transforms.specs(around, (50, 50)) == {f"{side}_{name}": ((50,), stored.dtype) for side in ("out", "in")}
    assert stored.nbytes == {"channel_scale16": 100, "channel_scale8": 50}[name]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_layers_multiply_alike_and_pass_gradients(name: str) -> None:
    ops = WeightTransforms((name, "hadamard"), ("hadamard", name))
    stored = {f"in_{name}": pack_diagonal(name, random(48)), f"out_{name}": pack_diagonal(name, random(48, seed=1))}
    is_trained = name == "channel_scale16"
    for tensor in stored.values():
        tensor.requires_grad_(is_trained)

    def around(x: torch.Tensor) -> torch.Tensor:
        return transforms.apply_output(transforms.apply_input(x, ops, stored), ops, stored)

    x = random(5, 48, seed=2).requires_grad_()
    leaves = [x, *stored.values()] if is_trained else [x]
    plain = around(x)
    compiled = torch.compile(around, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, plain)
    slope = random(5, 48, seed=3)
    for mine, wanted in zip(
        torch.autograd.grad((compiled * slope).sum(), leaves),
        torch.autograd.grad((plain * slope).sum(), leaves),
        strict=True,
    ):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(mine, wanted, rtol=1e-2 if mine.dtype == torch.float16 else 1e-5, atol=1e-4)
