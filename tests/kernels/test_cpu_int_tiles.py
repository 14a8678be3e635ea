"""Integers with more rows of activations than the kernel of few rows is good for: the same bits."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import llvm
from compress.kernels.cpu import emitter, int_tiles
from compress.kernels.cpu import int as int_kernel
from helpers import problems, stored
from helpers.cpu_weights import int_weight, kernel_of

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]


@pytest.mark.parametrize(
    ("shape", "bits", "group", "symmetric"),
    [
        ((33, 1130), 4, 128, False),
        ((40, 416), 3, -1, True),
        ((17, 512), 8, -1, False),
        ((16, 1024), 2, 256, False),
        ((20, 608), 3, 64, False),
        ((40, 576), 2, 32, False),
        ((20, 1088), 2, 64, False),
        ((33, 608), 8, 128, True),
        ((33, 576), 4, 64, True),
        ((20, 1130), 6, 128, True),
    ],
)
def test_tiles_give_the_bits_of_single_rows(
    shape: tuple[int, int], bits: int, group: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = int_weight(shape, bits, group, symmetric)
    kernel = kernel_of(weight)
    assert isinstance(kernel, int_kernel.Int) and kernel.together(200) == int_tiles.MOST_TILED
    x = problems.random(33, shape[1]) + 0.5
    alone = torch.cat([kernel(row[None]) for row in x])
    expected = stored.product(x, weight)
    assert (alone - expected).norm() < 1e-4 * expected.norm()
    for count in (2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 18, 33):
        assert torch.equal(kernel(x[:count]), alone[:count])
    monkeypatch.setattr(int_tiles, "MOST_TILED", 15)
    assert torch.equal(kernel(x), alone)


@pytest.mark.parametrize(("group", "most"), [(16, emitter.MOST_OF_INTEGERS), (64, emitter.EVERY), (-1, emitter.EVERY)])
def test_spans_that_are_no_vectors_leave_many_rows_to_panels(
    group: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitter, "widens", lambda dtype: True)
    assert kernel_of(int_weight((32, 512), 4, group, False)).most_rows(torch.bfloat16) == most


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_numbers(bits: int, sign: int) -> None:
    """The largest codes times the largest activations, of one sign or alternating, are not cut off anywhere."""
    weight = int_weight((32, 1024), bits, -1, True)
    for words in (t for name, t in weight.tensors.items() if name.startswith("words")):
        words.fill_(-1)
        words[::2] = 0
    kernel = kernel_of(weight)
    x = torch.full((14, 1024), 3.0)
    x[1::2, 1::2] = sign * 3.0
    expected = stored.product(x, weight)
    for count in (1, 2, 4, 14):
        assert (kernel(x[:count]) - expected[:count]).abs().max() < 1e-5 * expected.abs().max()
