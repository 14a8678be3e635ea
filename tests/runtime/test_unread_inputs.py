"""Small inputs go unread: against a masked product in float64, and which tokens it is for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import dense, lowrank, stored
from compress.quant import rtn
from compress.runtime.linear import PackedLinear
from compress.runtime.linears import sparse_for
from compress.types import (
    IN_THRESHOLD,
    Activations,
    InputSparsity,
    LowRank,
    PackedWeight,
    Stored,
)

SHAPE = (48, 64)


def _packed(score: str, tokens: str = "all", bits: int = 16, **beside: object) -> PackedWeight:
    """A weight with thresholds about the median of normal inputs; with score rank a low-rank part beside it."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(SHAPE, generator=generator)
    sparsity = InputSparsity(0.5, score, tokens)  # type: ignore[arg-type]
    if bits == 16:
        plain = Stored("dense", dense.Params("float32"))
        tensors = dense.pack(weight, plain.params)
    else:
        quantized = rtn.quantize(weight, None, rtn.Config(bits=bits, group_size=32)).weight
        plain, tensors = quantized.stored, dict(quantized.tensors)
    count = sparsity.thresholds(SHAPE[1])
    tensors[IN_THRESHOLD] = 0.67 + 0.2 * torch.rand(count, generator=generator)
    if score == "rank" or "lowrank" in beside:
        part = LowRank(4)
        beside["lowrank"] = part
        a, b = torch.randn(4, SHAPE[1], generator=generator), torch.randn(4, SHAPE[0], generator=generator)
        tensors |= {lowrank.PREFIX + name: each for name, each in lowrank.pack(a, b, part).items()}
    return PackedWeight(dataclasses.replace(plain, sparsity=sparsity, **beside), tensors, SHAPE)  # type: ignore[arg-type]


def _expected(weight: PackedWeight, x: Tensor) -> Tensor:
    """The product in float64, column by column of the inputs that are read."""
    matrix = formats.decode_stored(weight, torch.float32).double()
    threshold = weight.tensors[IN_THRESHOLD].double().expand(SHAPE[1])
    part = torch.zeros(SHAPE, dtype=torch.float64)
    if weight.stored.lowrank is not None:
        a, b = lowrank.part_factors(weight.tensors, weight.stored.lowrank, SHAPE, torch.float32)
        part = b.double().T @ a.double()
    y = torch.zeros(len(x), SHAPE[0], dtype=torch.float64)
    for row, token in zip(y, x.double(), strict=True):
        for j, value in enumerate(token):
            is_read = bool(value.abs() >= threshold[j])
            if weight.stored.has_rest_part:
                row += value * (matrix if is_read else part)[:, j]
            elif is_read:
                row += value * (matrix + part)[:, j]
    return y


@pytest.mark.parametrize("score", ["magnitude", "weighted", "rank"])
@pytest.mark.parametrize("bits", [16, 4])
def test_product_reads_large_inputs_alone(score: str, bits: int) -> None:
    weight = _packed(score, bits=bits)
    x = torch.randn(3, SHAPE[1], generator=torch.Generator().manual_seed(1))
    y = PackedLinear.from_packed(weight)(x)
    torch.testing.assert_close(y.double(), _expected(weight, x), rtol=1e-4, atol=1e-4)


def test_a_part_that_belongs_to_the_weight_reads_the_same_inputs() -> None:
    weight = _packed("magnitude", lowrank=None)
    x = torch.randn(2, SHAPE[1], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(PackedLinear.from_packed(weight)(x).double(), _expected(weight, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("score", ["magnitude", "rank"])
def test_tokens_that_come_together_are_read_whole_unless_asked(score: str) -> None:
    weight = _packed(score, tokens="decode")
    layer, whole = PackedLinear.from_packed(weight), formats.decode(weight, torch.float64)
    x = torch.randn(2, 5, SHAPE[1], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x).double(), x.double() @ whole.T, rtol=1e-4, atol=1e-4)
    alone = torch.cat([layer(x[:, i : i + 1]) for i in range(5)], 1)
    with sparse_for(layer, "all"):
        torch.testing.assert_close(alone, layer(x))
    with sparse_for(layer, None):
        torch.testing.assert_close(layer(x[:, :1]), layer(x)[:, :1])
    assert not torch.equal(alone, layer(x))


def test_quantized_inputs_are_those_that_are_read() -> None:
    weight = _packed("magnitude", bits=8, activations=Activations(8))
    x = torch.randn(3, SHAPE[1], generator=torch.Generator().manual_seed(1))
    y, expected = PackedLinear.from_packed(weight)(x), _expected(weight, x)
    assert ((y - expected).norm() / expected.norm()).item() < 0.02


def test_what_is_stored_comes_back_and_decodes_to_the_whole_weight() -> None:
    weight = _packed("rank", bits=4)
    assert stored.from_dict(stored.to_dict(weight.stored), "here") == weight.stored
    whole = formats.read_all(weight)
    assert whole.stored == Stored(weight.format, weight.params)
    assert torch.equal(formats.decode(weight, torch.float32), formats.decode_stored(weight, torch.float32))
    cut = formats.cut(weight, range(16), range(32))
    assert torch.equal(formats.decode(cut, torch.float32), formats.decode(weight, torch.float32)[:16, :32])
    with pytest.raises(ValueError, match="share 1"):
        InputSparsity(1.0)
    with pytest.raises(Exception, match="negative"):
        formats.check(dataclasses.replace(weight, tensors={**weight.tensors, IN_THRESHOLD: -torch.ones(64)}), "w")


@pytest.mark.parametrize("score", ["magnitude", "rank"])
def test_what_is_no_number_is_read(score: str) -> None:
    x = torch.randn(2, SHAPE[1], generator=torch.Generator().manual_seed(1))
    x[1, 5] = torch.nan
    y = PackedLinear.from_packed(_packed(score))(x)
    assert y[0].isfinite().all() and y[1].isnan().all()
