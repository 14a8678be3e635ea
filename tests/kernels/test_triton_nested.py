"""The Triton kernel of sums of two `int` weights: interpreted, against the decoded weight, and compiled for sm_90."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import int as int_format
from compress.formats import nested
from compress.kernels.triton import nested as kernel
from compress.kernels.triton import products
from compress.types import PackedWeight, Stored
from helpers import interpreter  # noqa: F401


def plane(bits: int, group: int, symmetric: bool, shape: tuple[int, int], size: float) -> PackedWeight:
    """Random codes with scales of about this size."""
    generator = torch.Generator().manual_seed(bits)
    params = int_format.params_for(bits, group, symmetric, shape[1])
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.randn(shape[0], int_format.groups(params, shape), generator=generator) * size).half()
    zeros = None
    if not symmetric:
        zeros = torch.randint(0, 2**bits, scales.shape, generator=generator, dtype=torch.uint8)
    return PackedWeight(Stored("int", params), int_format.pack(codes, scales, zeros, params), shape)


def activations(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.5).half().float()


CASES: list[Any] = [
    # bits, groups, symmetric, shape, rows
    ((4, 4), (128, 128), (True, True), (24, 1024), 3),
    ((2, 2), (64, 64), (False, False), (20, 300), 8),
    ((4, 4), (64, -1), (False, True), (33, 576), 9),
    ((3, 5), (64, 32), (True, False), (16, 640), 1),
    ((2, 6), (128, 64), (False, False), (48, 2048), 16),
]


@pytest.mark.parametrize(("bits", "groups", "symmetric", "shape", "rows"), CASES)
def test_the_sum_of_two_planes(
    bits: tuple[int, int],
    groups: tuple[int, int],
    symmetric: tuple[bool, bool],
    shape: tuple[int, int],
    rows: int,
) -> None:
    parts = [
        plane(*each, shape, size)
        for each, size in zip(zip(bits, groups, symmetric, strict=True), (0.02, 0.002), strict=True)
    ]
    weight = nested.join(parts, (bits[0], sum(bits)))
    product = kernel.prepare(weight.tensors, weight.params, shape)
    assert product is not None
    x = activations(rows, shape[1])
    wanted = x.double() @ nested.decode(weight.tensors, weight.params, shape, torch.float64).T
    error = (product(x).double() - wanted).abs().max() / wanted.abs().max()
    assert error < 2e-6
    assert not products.workspace(torch.device("cpu")).counters.any()
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(product.decode(dtype), formats.decode_stored(weight, dtype))
    ids = torch.tensor([5, 0, shape[0] - 1])
    rows_found = kernel.look_up(weight.tensors, weight.params, shape, ids, torch.float32)
    assert rows_found is not None
    assert torch.equal(rows_found, nested.decode_rows(weight.tensors, weight.params, shape, ids, torch.float32))


def test_other_sums_are_left_to_the_formats() -> None:
    parts = [plane(2, 64, True, (16, 512), 0.02) for _ in range(3)]
    three = nested.join(parts, (2, 4, 6))
    assert kernel.prepare(three.tensors, three.params, three.shape) is None
