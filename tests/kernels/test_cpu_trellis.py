"""The compiled product with trellises: every window, any number of rows of activations, tiles of all sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compress.formats.trellis import PARTIAL_BITS, row_multiple
from compress.kernels import llvm
from compress.kernels.cpu import emitter, trellis
from helpers import problems, stored
from helpers.cpu_weights import kernel_of, trellis_weight

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]

COMMON = [(2, 14), (2, 16), (3, 14), (3, 16), (4, 12), (4, 14)]  # bits and state_bits of recipes, or nearly
COMMON += [(1.5, 14), (2.5, 12), (3.5, 16), (1.25, 14), (1.75, 14), (2.25, 9), (2.75, 16)]
WINDOWS = [(bits, states) for bits in range(1, 9) for states in range(2 * bits, 17)]
PARTIAL_WINDOWS = [(bits, states) for bits in PARTIAL_BITS for states in range(math.ceil(2 * bits), 17)]


def check(bits: float, state_bits: int, code: str) -> None:
    """Products with every column alone, which give the weights, to the error of activations in 16 bits."""
    weight = trellis_weight((134, 43), bits, state_bits, row_multiple(bits), code, True)
    product = kernel_of(weight)
    expected = stored.product(torch.eye(43), weight)
    torch.testing.assert_close(product(torch.eye(43)).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "state_bits"), COMMON)
def test_windows(bits: float, state_bits: int) -> None:
    check(bits, state_bits, "mul1")


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "state_bits"), PARTIAL_WINDOWS)
def test_all_windows_of_parts_of_a_bit(bits: float, state_bits: int) -> None:
    check(bits, state_bits, "mul1")


@pytest.mark.slow
@pytest.mark.parametrize("code", ["mul1", "1mad"])
@pytest.mark.parametrize(("bits", "state_bits"), WINDOWS)
def test_all_windows(bits: int, state_bits: int, code: str) -> None:
    check(bits, state_bits, code)


@pytest.mark.parametrize(
    ("shape", "bits"),
    [((100, 1100), 2), ((37, 31), 2), ((16, 512), 2), ((130, 33), 2), ((100, 550), 2.5), ((200, 70), 1.75)],
)
def test_any_number_of_rows(shape: tuple[int, int], bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and to the bit what each row has alone, in tiles of any size and in more than one call of the kernel."""
    weight = trellis_weight(shape, bits, 16, max(32, row_multiple(bits)), "mul1", False)
    product = kernel_of(weight)
    x = problems.random(33, shape[1]) + 0.5
    expected = stored.product(x, weight)
    alone = torch.cat([product(row[None]) for row in x])
    assert (alone - expected).norm() < 1e-4 * expected.norm()
    for count in range(1, 34):
        assert torch.equal(product(x[:count]), alone[:count])
    monkeypatch.setattr(trellis, "TOGETHER", 5)
    assert torch.equal(product(x), alone)


@pytest.mark.parametrize(("code", "bits"), [("mul1", 3), ("1mad", 3), ("mul1", 1.5), ("mul1", 1.25)])
def test_fewer_and_smaller_registers(code: str, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older processor runs instead, on this one: the same bits."""
    weight = trellis_weight((50, 530), bits, 12, row_multiple(bits), code, True)
    x = problems.random(11, 530)
    expected = kernel_of(weight)(x)
    monkeypatch.setattr(llvm, "features", frozenset)
    monkeypatch.setattr(llvm, "function", lambda kind, *settings: llvm.compiled(kind(*settings)))
    assert torch.equal(kernel_of(weight)(x), expected)


def test_the_largest_sums_of_a_span() -> None:
    """All sums of bytes are the largest that there is, and all activations: 2^30 in each lane."""
    weight = trellis_weight((16, 512), 8, 16, 16, "mul1", False)
    pair = largest_pair()
    weight.tensors["words"][:] = pair - 65536 if pair > 32767 else pair
    x = torch.full((2, 512), 3.0)
    expected = stored.product(x, weight)
    assert expected.abs().max() > 3 * 512 * 2.0 * weight.tensors["scale"].item()
    torch.testing.assert_close(kernel_of(weight)(x).double(), expected, rtol=1e-5, atol=1e-3)


def largest_pair() -> int:
    """Return the word of two 8-bit codes that follow each other for ever and give the largest sum of two weights."""
    states = torch.arange(1 << 16)
    turned = (states & 0xFF) << 8 | states >> 8

    def sums(state: Any) -> Any:
        word = state * 0x83DCD12D & 0xFFFFFFFF
        return sum(word >> shift & 0xFF for shift in (0, 8, 16, 24))

    return int((sums(states) + sums(turned)).argmax())


@pytest.mark.parametrize(("widens", "most"), [(True, emitter.EVERY), (False, emitter.MOST)])
def test_where_bfloat16_is_slow_every_number_of_rows_takes_the_kernel(
    widens: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitter, "widens", lambda dtype: widens and dtype == torch.bfloat16)
    kernel = kernel_of(trellis_weight((32, 64), 2, 16, 32, "mul1", False))
    assert kernel.most_rows(torch.bfloat16) == most and kernel.most_rows(torch.float16) == emitter.EVERY
