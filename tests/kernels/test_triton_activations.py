"""Activations of any size, in the kernels that multiply in float16: each row has a power of two of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compress.formats import codebook as codebook_format
from compress.formats import e8p as e8p_format
from compress.formats import trellis as trellis_format
from compress.kernels.triton import codebook, e8p, trellis
from helpers import interpreter  # noqa: F401
from helpers.stored import product, random_weight

Book = codebook_format.Params
WEIGHTS = [
    (trellis, "trellis", trellis_format.Params(2, 16, 32)),
    (e8p, "e8p", e8p_format.Params(2, True)),
    (codebook, "codebook", Book((8,), 4, 16)),
    (codebook, "codebook", Book((8,), 4, 16, axis="out", outliers=19)),
    (codebook, "codebook", Book((6,), 2, 16)),
]
SHAPE = (32, 512)  # in parts, where a kernel cuts at all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kernel", "format", "params"), WEIGHTS, ids=lambda value: getattr(value, "__name__", ""))
def test_large_and_small_activations(kernel: Any, format: str, params: Any, dtype: torch.dtype) -> None:
    weight = random_weight(format, params, SHAPE)
    sizes = torch.tensor([1e30, 1e6, 1.0, 1e-20, 0.0])
    x = torch.randn(5, SHAPE[1], generator=torch.Generator().manual_seed(0)) * sizes[:, None]
    x = x.to(dtype)
    found, wanted = kernel.prepare(weight.tensors, params, SHAPE)(x), product(x, weight)
    for row in range(4):
        error = (found[row] - wanted[row]).abs().max() / wanted[row].abs().max()
        assert error < (2**-7 if dtype == torch.bfloat16 else 2**-10), row
    assert not found[4].any()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # of NumPy
@pytest.mark.parametrize(("kernel", "format", "params"), WEIGHTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_row_that_is_not_finite_leaves_the_others_alone(kernel: Any, format: str, params: Any) -> None:
    weight = random_weight(format, params, SHAPE)
    x = torch.randn(3, SHAPE[1], generator=torch.Generator().manual_seed(0))
    alone = kernel.prepare(weight.tensors, params, SHAPE)(x)
    x[1, 7] = math.inf
    found = kernel.prepare(weight.tensors, params, SHAPE)(x)
    assert torch.equal(found[::2], alone[::2])
    assert not found[1].isfinite().any()
