"""Integers with more rows of activations than the kernel of few rows is good for: the same bits."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import llvm
from compress.kernels.cpu import emitter
from compress.kernels.cpu import int as int_kernel
from helpers import problems, stored
from helpers.cpu_weights import int_weight, kernel_of

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]


@pytest.mark.parametrize(
    ("shape", "bits", "group", "symmetric"),
    [((33, 1130), 4, 128, False), ((40, 416), 3, -1, True), ((17, 512), 8, -1, False), ((16, 1024), 2, 256, False)],
)
def test_tiles_give_the_bits_of_single_rows(
    shape: tuple[int, int], bits: int, group: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = int_weight(shape, bits, group, symmetric)
    kernel = kernel_of(weight)
    assert isinstance(kernel, int_kernel.Int) and kernel.together(200) == int_kernel.MOST_TILED
    x = problems.random(33, shape[1]) + 0.5
    alone = torch.cat([kernel(row[None]) for row in x])
    expected = stored.product(x, weight)
    assert (alone - expected).norm() < 1e-4 * expected.norm()
    for count in (11, 12, 13, 18, 33):
        assert torch.equal(kernel(x[:count]), alone[:count])
    monkeypatch.setattr(int_kernel, "MOST_TILED", 15)
    assert torch.equal(kernel(x), alone)


@pytest.mark.parametrize(("group", "most"), [(64, emitter.MOST_OF_INTEGERS), (128, 128), (-1, emitter.EVERY)])
def test_short_spans_leave_many_rows_to_panels(group: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter, "widens", lambda dtype: True)
    assert kernel_of(int_weight((32, 512), 4, group, False)).most_rows(torch.bfloat16) == most
