"""Weights that read the same activations, multiplied in one call: the bits of single products."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor

from compress.kernels import dispatch, llvm
from compress.kernels.contract import Prepared
from compress.kernels.cpu import emitter
from compress.kernels.cpu.small_matmul import Product
from compress.runtime.linear import FusedLinears, PackedLinear
from compress.types import PackedWeight
from helpers import problems
from helpers.cpu_weights import codebook_weight, int_weight

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]
ALIKE = [int_weight((rows, 256), 4, 64, False) for rows in (64, 21, 32)]  # the second is padded
CASES = {
    "alike": ALIKE,
    "one": ALIKE[:1],
    "other groups": [ALIKE[0], int_weight((32, 256), 4, 32, False)],
    "other formats": [ALIKE[0], codebook_weight((32, 256), {"bits": (4,), "vector_dim": 2})],
}


def linears_of(weights: list[PackedWeight]) -> list[PackedLinear]:
    return [PackedLinear.from_packed(weight) for weight in weights]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 2, 7, 70])
def test_as_single_products(case: str, count: int) -> None:
    linears = linears_of(CASES[case])
    x = problems.random(count, 256).bfloat16()
    with torch.no_grad():
        y = FusedLinears(linears).product(x[None])
        expected = torch.cat([linear(x) for linear in linears], -1)
    assert y is not None and y.shape == (1, count, expected.shape[-1]) and torch.equal(y[0], expected)


def test_activations_become_integers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    quantize = Product.quantize
    monkeypatch.setattr(Product, "quantize", lambda self, *args: calls.append(self) or quantize(self, *args))
    beside, x = FusedLinears(linears_of(ALIKE)), problems.random(3, 256).bfloat16()
    assert beside.product(x) is not None
    assert {each.shape for each in calls} == {(64, 256)} and len(calls) <= 2  # three rows, or two and one


@pytest.mark.parametrize("widens", [False, True])
def test_activations_are_widened_once(widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all weights of a layer that are decoded: the bits of single products."""
    monkeypatch.setattr(emitter, "widens", lambda dtype: widens and dtype == torch.bfloat16)
    weights = [int_weight((rows, 256), 4, 16, False) for rows in (64, 21, 32)]  # no tiles have such short spans
    linears, x, seen = linears_of(weights), problems.random(200, 256).bfloat16(), []
    expected = torch.cat([linear(x) for linear in linears], -1)
    decoded = dispatch.decoded_product

    def spy(kernel: Prepared, given: Tensor, into: Tensor) -> Tensor:
        seen.append(given)
        return decoded(kernel, given, into)

    monkeypatch.setattr(dispatch, "decoded_product", spy)
    found = FusedLinears(linears).product(x)
    assert found is not None and torch.equal(found, expected)
    assert [each.dtype for each in seen] == [torch.float32 if widens else torch.bfloat16] * 3
    assert len({each.data_ptr() for each in seen}) == 1


def test_tensors_that_have_moved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = linears_of(ALIKE)
    beside, x = FusedLinears(linears), problems.random(1, 256).bfloat16()
    before = beside.product(x)
    for name in linears[1].specs:
        linears[1].register_parameter(name, torch.nn.Parameter(getattr(linears[1], name).clone(), False))
    linears[1].scales.zero_()
    after = beside.product(x)
    assert before is not None and after is not None
    assert torch.equal(after[:, :64], before[:, :64]) and not after[:, 64:85].any() and before[:, 64:85].any()


def test_what_cannot_be_done_at_once_is_left_to_single_products() -> None:
    beside = FusedLinears(linears_of(ALIKE))
    assert beside.product(problems.random(2, 256)) is None  # float32 is decoded, and kept
    assert beside.product(problems.random(2, 256).bfloat16().requires_grad_()) is None
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        beside.product(torch.zeros(2, 264, dtype=torch.bfloat16))


def test_linears_that_do_more_are_not_bare() -> None:
    assert linears_of(ALIKE)[0].is_bare
    assert not PackedLinear.from_packed(ALIKE[0], torch.zeros(64)).is_bare


@pytest.mark.parametrize("rows", range(1, 13))
def test_weights_whose_integers_lie_in_another_way(rows: int) -> None:
    """4 bits in tiles of 16 words are tiled from five rows on, 2 bits in tiles of 64 from eight."""
    x = problems.random(rows, 576).bfloat16()
    weights = [int_weight((32, 576), bits, 64, True) for bits in (4, 2)]
    for some in (weights, weights[::-1]):
        product = FusedLinears(linears_of(some)).product(x)
        alone = torch.cat([linear(x) for linear in linears_of(some)], -1)
        assert product is not None and torch.equal(product, alone)


def test_a_copy_of_what_has_run_has_tensors_of_its_own() -> None:
    beside, x = FusedLinears(linears_of(ALIKE)), problems.random(2, 256).bfloat16()
    expected = beside.product(x)
    other = copy.deepcopy(beside)
    for linear in beside.linears:
        linear.scales.zero_()
    found = other.product(x)
    assert expected is not None and found is not None and torch.equal(found, expected)
    assert [linear._weight for linear in other.linears] == other._weights.weights


def test_replaced_tensors_are_freed() -> None:
    beside, x = FusedLinears(linears_of(ALIKE)), problems.random(2, 256).bfloat16()
    assert beside.product(x) is not None
    linear = beside.linears[1]
    replaced = weakref.ref(linear.scales)
    linear._weight.forget()
    linear.scales = torch.nn.Parameter(linear.scales.clone(), False)
    assert replaced() is None
