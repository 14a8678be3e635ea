"""The kernel of the grid format on a CPU: what tests of all kernels do not see. Its decoder gives the format's bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import grid
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import grid as kernel
from compress.types import PackedWeight, Stored
from helpers import problems, stored
from helpers.cpu_weights import GRID, grid_weight, kernel_of

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = [case for case in GRID if grid.has_rows(grid.Params(*case[1]))]


@pytest.fixture
def plain_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One without permutations of 16 or 8 numbers; what is compiled for it is not kept."""
    monkeypatch.setattr(llvm, "features", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(llvm, "function", lambda build, *args: llvm.compiled(build(*args)))
    yield


def every_code(values: str, scale_type: str, block: int = 32) -> PackedWeight:
    """A weight that has every code in every place of a vector, and every scale that the type has."""
    params = grid.Params(values, block, scale_type)
    count = 2**params.bits
    codes = (torch.arange(64)[:, None] * 4 + torch.arange(256)) % count
    scales = torch.arange(64 * (256 // block)) % (grid.E8M0_LARGEST + 1)
    kind = grid.SCALE_DTYPES[scale_type]
    made = scales.to(torch.uint8).view(kind) if kind.itemsize == 1 else scales.to(kind) / 128
    tensors = grid.pack(codes.to(torch.uint8), {"scales": made.view(64, -1)}, params)
    return PackedWeight(Stored("grid", params), tensors, (64, 256))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same, NaN being as good as NaN; numbers below the normal ones may be 0."""
    tiny = torch.finfo(a.dtype).tiny
    small = (a.float().abs() < tiny) & (b.float().abs() < tiny)
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan()) | small).all())


@pytest.mark.parametrize("values", list(grid.VALUE_BITS))
@pytest.mark.parametrize("scale_type", ["e8m0", "e4m3", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_and_scale(values: str, scale_type: str, dtype: torch.dtype) -> None:
    """NaN of e4m3, the least exponent of e8m0, and numbers that are not normal, too."""
    weight = every_code(values, scale_type)
    assert same(kernel_of(weight).decode(dtype), formats.decode_stored(weight, dtype))


@pytest.mark.parametrize("case", ROWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_looked_up(case: Any, dtype: torch.dtype) -> None:
    weight = grid_weight(*case)
    last = weight.shape[0] - 1
    for ids in ([last], [3, 0, 3, last, 7], []):
        index = torch.tensor(ids, dtype=torch.int32)
        rows = kernel.look_up(weight.tensors, weight.params, weight.shape, index, dtype)
        assert rows is not None
        assert torch.equal(rows, grid.decode_rows(weight.tensors, weight.params, weight.shape, index.long(), dtype))


def test_what_is_not_looked_up() -> None:
    weight, ids = grid_weight(*GRID[7]), torch.tensor([1])  # nested scales
    assert kernel.look_up(weight.tensors, weight.params, weight.shape, ids, torch.float32) is None
    weight = grid_weight(*ROWS[0])
    assert kernel.look_up(weight.tensors, weight.params, weight.shape, ids, torch.float64) is None


def test_blocks_of_parts_of_vectors_are_left_to_the_format() -> None:
    assert dispatch.supported("cpu", "grid", grid.Params("e2m1", 24, "e8m0"), (64, 512)) is None


def test_a_row_with_a_nan_gives_nan() -> None:
    """Of any number of rows of activations, whatever they are."""
    weight = stored.random_weight("grid", grid.Params("e4m3", 32, "e8m0"), (40, 320))
    weight.tensors["codes"].view(torch.uint8)[7, 200] = 0xFF
    x = torch.zeros(5, 320)
    for count in (1, 5):
        y = kernel_of(weight)(x[:count])
        assert y[:, 7].isnan().all() and (y[:, 8:] == 0).all()


@pytest.mark.usefixtures("plain_processor")
@pytest.mark.parametrize("case", [GRID[1], GRID[2], GRID[7], GRID[9]], ids=str)
def test_processors_without_permutations(case: Any) -> None:
    weight = grid_weight(*case)
    one = kernel_of(weight)
    x = problems.random(3, weight.shape[1])
    assert torch.equal(one.decode(torch.float32), formats.decode_stored(weight, torch.float32))
    expected = stored.product(x, weight)
    assert (one(x) - expected).norm() < 1e-6 * expected.norm()
