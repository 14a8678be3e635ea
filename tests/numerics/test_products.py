"""16-bit products in float32: the same numbers as in 16 bits, on the processors that are slower at those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.model.blockwise import BlockArgs, run_block
from compress.numerics import products

XEON = {"architecture": "x86_64", "cpu_name": "Intel Xeon", "avx512_bf16": True, "avx512_fp16": True}
LAPTOP = {"architecture": "x86_64", "cpu_name": "AMD Ryzen", "avx2": True}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is slower in bfloat16, whatever this one is."""
    monkeypatch.setattr(products, "is_slow", lambda dtype: dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("processor", "dtype", "is_slow"),
    [
        (XEON, torch.bfloat16, True),
        ({**XEON, "amx_bf16": True}, torch.bfloat16, False),
        (XEON, torch.float16, False),
        (XEON, torch.float32, False),
        (LAPTOP, torch.bfloat16, True),
        (LAPTOP, torch.float16, True),
        ({**LAPTOP, "avx512_bf16": True}, torch.bfloat16, False),
        ({"architecture": "aarch64"}, torch.bfloat16, False),
        ({}, torch.bfloat16, False),
    ],
)
def test_processors(processor: dict[str, Any], dtype: torch.dtype, is_slow: bool) -> None:
    assert products.is_slow(dtype, processor) is is_slow


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("slices", [None, (64, 48)])  # in the second case three outputs and a few rows at a time
def test_linears(with_bias: bool, slices: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if slices is not None:
        monkeypatch.setattr(products, "WEIGHT_SLICE", slices[0])
        monkeypatch.setattr(products, "ROWS_SLICE", slices[1])
    x, weight, bias = tensor(2, 9, 20), tensor(7, 20, seed=1), tensor(7, seed=2) if with_bias else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = products.linear(x, weight, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("mask", ["none", "causal", "shared", "of each"])
def test_attention(mask: str) -> None:
    q, k, v = tensor(3, 4, 6, 8), tensor(3, 2, 6, 8, seed=1), tensor(3, 2, 6, 8, seed=2)
    masks = {"shared": tensor(1, 1, 6, 6, seed=3), "of each": tensor(3, 1, 6, 6, seed=4) > 0}
    if mask == "of each":
        masks[mask] |= torch.eye(6, dtype=torch.bool)
    named: dict[str, Any] = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "enable_gqa": True}
    found = products.attention(q, k, v, **named, scale=0.3)
    if mask == "shared":
        named["attn_mask"] = masks[mask].float()
    wide = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), **named, scale=0.3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wide.bfloat16(), rtol=2**-8, atol=1e-6)


@pytest.mark.usefixtures("slow")
def test_while_active_only_16_bit_tensors_are_widened() -> None:
    x, weight = tensor(5, 16), tensor(8, 16, seed=1)
    with products.Widened():
        widened, plain = functional.linear(x, weight), functional.linear(x.float(), weight.float())
    assert torch.equal(widened, products.linear(x, weight)) and widened.dtype == torch.bfloat16
    torch.testing.assert_close(plain, functional.linear(x.float(), weight.float()))


@pytest.mark.usefixtures("slow")
def test_blocks_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return products.linear(x, weight, bias)

    monkeypatch.setitem(products._WIDENED, functional.linear, noted)
    block = nn.Linear(16, 16).bfloat16()
    out = run_block(block, BlockArgs((), {}), tensor(2, 3, 16), "a block")
    assert out.dtype == torch.bfloat16 and shapes == [(16, 16)]


@pytest.mark.parametrize("is_onednn", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 20), (64, 33, 130)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_float32(
    is_onednn: bool, shape: tuple[int, int, int], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "uses_onednn", lambda: is_onednn)
    rows, outputs, columns = shape
    left, right = tensor(rows, columns, dtype=torch.float32), tensor(outputs, columns, dtype=torch.float32, seed=1)
    bias = tensor(outputs, dtype=torch.float32, seed=2) if with_bias else None
    exact = functional.linear(left.double(), right.double(), None if bias is None else bias.double())
    bound = 1e-6 * columns**0.5 * (left.norm() * right.norm()).item()
    assert (products.multiply(left, right, bias) - exact).abs().max().item() <= bound
    sliced = products.multiply(torch.cat([left, left], 1)[:, columns:], right, bias)  # rows lie apart
    assert (sliced - exact).abs().max().item() <= bound


def test_which_processors_use_onednn() -> None:
    assert products.uses_onednn(LAPTOP)
    assert not products.uses_onednn(XEON)
    assert not products.uses_onednn({})


@pytest.mark.parametrize(
    ("processor", "is_fast"),
    [
        ({**LAPTOP, "avx512_bf16": True}, True),
        ({**XEON, "amx_bf16": True}, True),
        (XEON, False),
        (LAPTOP, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_processors_that_are_fast_in_bfloat16(processor: dict[str, Any], is_fast: bool) -> None:
    assert products.is_fast(torch.bfloat16, processor) is is_fast
    assert not products.is_fast(torch.float32, processor)


@pytest.mark.parametrize("trains", [False, True])  # the weight takes a gradient, too: torch's own linear
def test_gradients_of_linears(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "uses_onednn", lambda: True)
    x, layer, behind = tensor(2, 9, 20, dtype=torch.float32), nn.Linear(20, 7), tensor(2, 9, 7, dtype=torch.float32)
    layer.requires_grad_(trains)
    gradients = []
    for mode in (products.Backward(), products.Widened()):
        inputs = x.clone().requires_grad_()
        with mode:
            out = layer(inputs)
        torch.testing.assert_close(out, functional.linear(x, layer.weight, layer.bias))
        gradients.append(torch.autograd.grad(out, inputs, behind)[0])
    for gradient in gradients:
        torch.testing.assert_close(gradient, behind @ layer.weight)


def test_without_gradients_a_parameter_gives_what_a_plain_tensor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are read back have parameters where quantized ones have none: their bits are compared."""
    calls: list[int] = []

    def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(len(left))
        return functional.linear(left, right, bias)

    monkeypatch.setattr(products, "multiply", multiply)
    layer, x = nn.Linear(20, 7), tensor(9, 20, dtype=torch.float32)
    for trains in (True, False):
        run_block(layer.requires_grad_(trains), BlockArgs((), {}), x, "a block")
    assert calls == [9, 9]
