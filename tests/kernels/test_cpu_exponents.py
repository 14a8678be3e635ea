"""Compiled decoders and products of the lossless format: the bits of the weight, and products against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import exponents
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import exponents as kernel
from compress.types import PackedWeight, Stored

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]
EVERY = torch.arange(1 << 16).sub(1 << 15).to(torch.int16).view(torch.bfloat16)


def weight_of(rows: int, columns: int) -> Tensor:
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 0.02).bfloat16()
    weight[0, 0], weight[-1, 0], weight[rows // 2, -1] = 0.0, 1e-39, -300.0
    return weight


def prepared(weight: Tensor, coding: str) -> Any:
    params, tensors = exponents.pack(weight, coding)
    return kernel.prepare(tensors, params, (weight.shape[0], weight.shape[1]))


@pytest.mark.parametrize("coding", ["huffman", "ranked"])
@pytest.mark.parametrize("weight", [EVERY.view(256, 256), EVERY.view(32, 2048), weight_of(37, 90), weight_of(5, 33)])
def test_decoders_give_every_bit(coding: str, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(kernel, "THREAD", 1)
    monkeypatch.setattr(kernel.huffman, "THREAD", 1)
    decoded = prepared(weight, coding).decode(torch.bfloat16)
    assert torch.equal(decoded.view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("coding", ["huffman", "ranked"])
def test_rows_that_are_looked_up(coding: str) -> None:
    weight = weight_of(90, 66)
    params, tensors = exponents.pack(weight, coding)
    ids = torch.tensor([89, 0, 45, 45])
    rows = dispatch.rows(ids, tensors, "exponents", params, (90, 66), torch.bfloat16)
    assert torch.equal(rows, weight[ids])
    stored = PackedWeight(Stored("exponents", params), tensors, (90, 66))
    assert torch.equal(dispatch.decode(stored, torch.float32), weight.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 128), (37, 90), (101, 200), (16, 33)])
def test_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of activations have the same results whatever others there are; many rows have those of F.linear."""
    weight = weight_of(*shape)
    product = prepared(weight, "ranked")
    x = torch.randn(kernel.MOST, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = product(x)
    exact = x.double() @ weight.double().T
    assert (whole.double() - exact).norm() / exact.norm() < max(1e-6, torch.finfo(dtype).eps)
    for count in (1, 3):
        assert torch.equal(product(x[:count]), whole[:count]) or shape[1] % 2
    params, tensors = exponents.pack(weight, "ranked")
    many = x.repeat(2, 1)
    assert torch.equal(dispatch.product(many, tensors, "exponents", params, shape), F.linear(many, weight.to(dtype)))
    params, tensors = exponents.pack(weight, "huffman")
    assert torch.equal(dispatch.product(x, tensors, "exponents", params, shape), F.linear(x, weight.to(dtype)))


def test_products_of_several_weights_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [prepared(weight_of(rows, 96), "ranked") for rows in (48, 33, 16)]
    x = torch.randn(3, 96).bfloat16()
    one = torch.cat([each(x) for each in kernels], -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(kernel, "THREAD", 1)
    joined = kernels[0].fuse(kernels[1:])
    assert torch.equal(joined(kernels, x), one)
    assert kernels[0].fuse([prepared(weight_of(16, 90), "ranked")]) is None


def test_damaged_streams_lead_nowhere_else() -> None:
    """Any bytes decode to some weights."""
    weight = weight_of(64, 80)
    params, tensors = exponents.pack(weight, "huffman")
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        tensors["stream"] = torch.randint(0, 256, (params.stream,), dtype=torch.uint8, generator=generator)
        assert kernel.prepare(tensors, params, (64, 80)).decode(torch.bfloat16).shape == (64, 80)
