"""Products that skip inputs: against float64, for any number of threads, and where a column or a row is ragged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats.columns import Params
from compress.kernels import dispatch, llvm, sparse_inputs
from compress.kernels.cpu import columns
from compress.types import PackedWeight
from helpers import problems
from helpers.stored import columnar, random_weight

pytestmark = pytest.mark.skipif(not llvm.available(), reason="llvmlite compiles nothing here")
CODES = (
    Params(4, 128),
    Params(4, 100, symmetric=False),
    Params(8, 32, symmetric=False, dtype="bfloat16"),
    Params(2, -1),
    Params(8, -1, dtype="float16"),
)
SHAPES = ((137, 600), (512, 200), (2300, 40))  # ragged tiles, several spans of a row, more than a chunk of outputs
ERRORS = {torch.float32: 5e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # relative, of 16-bit activations and outputs


def thresholds(inputs: int) -> dict[str, Tensor | None]:
    """What leaves out nothing, a part by one threshold or by many, and everything."""
    drawn = torch.rand(inputs, generator=torch.Generator().manual_seed(3))
    return {"none": None, "one": torch.tensor([0.7]), "each": drawn, "all": torch.tensor([1e9])}


def weights(shape: tuple[int, int], codes: tuple[Params, ...] = CODES) -> list[PackedWeight]:
    """16-bit values, then codes."""
    return columnar(problems.random(*shape), ()) + [random_weight("columns", params, shape) for params in codes]


def expected(x: Tensor, weight: PackedWeight, threshold: Tensor | None) -> Tensor:
    kept = x if threshold is None else x * (x.float().abs() >= threshold)
    return kept.double() @ formats.decode(weight, torch.float64).T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ERRORS))
def test_products_with_kept_inputs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = problems.random(4, shape[1], seed=7).to(dtype)
    for weight in weights(shape, CODES if dtype == torch.float32 else CODES[1:2]):
        kernel = columns.ColumnProduct(weight.tensors, weight.params, shape)
        assert torch.equal(kernel.decode(dtype), formats.decode(weight, dtype))
        for name, threshold in thresholds(shape[1]).items():
            whole = kernel.sparse(x, threshold)
            exact = expected(x, weight, threshold)
            assert (whole.double() - exact).norm() <= ERRORS[dtype] * exact.norm(), (weight.params, name)
            assert name != "all" or not whole.any()
            alone = kernel.sparse(x[1:2], threshold)
            assert (alone.double() - exact[1:2]).norm() <= ERRORS[dtype] * exact[1:2].norm(), (weight.params, name)


def test_many_rows_are_multiplied_with_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (300, 200)
    monkeypatch.setattr(columns, "PANEL_SIZE", 1)  # a tile of outputs at a time
    x = problems.random(15, shape[1], seed=2).bfloat16().view(3, 5, -1)
    for weight in weights(shape):
        y = dispatch.product(x, weight.tensors, weight.format, weight.params, shape)
        exact = expected(x.flatten(0, 1), weight, None)
        assert y.shape == (3, 5, shape[0])
        assert (y.flatten(0, 1).double() - exact).norm() <= 8e-3 * exact.norm()
        few = dispatch.product(x[0], weight.tensors, weight.format, weight.params, shape)
        assert (few.double() - exact[:5]).norm() <= 8e-3 * exact[:5].norm()


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns.emitter, "THREAD", 1)
    shape = (1000, 96)
    x, threshold = problems.random(2, shape[1]), torch.tensor([0.5])
    for weight in weights(shape):
        kernel = columns.ColumnProduct(weight.tensors, weight.params, shape)
        alone = kernel.sparse(x, threshold)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        assert torch.equal(kernel.sparse(x, threshold), alone)
        monkeypatch.undo()
        monkeypatch.setattr(columns.emitter, "THREAD", 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_goes_through(value: float) -> None:
    shape = (256, 96)
    x = problems.random(1, shape[1])
    x[0, 50] = value
    for weight in weights(shape):
        y = columns.ColumnProduct(weight.tensors, weight.params, shape).sparse(x, torch.tensor([0.5]))
        assert not y.isfinite().any()


def test_a_product_is_offered_where_a_kernel_fits() -> None:
    shape = (256, 96)
    (weight,) = weights(shape, ())
    threshold, x = torch.tensor([0.5]), problems.random(4, shape[1])
    y = sparse_inputs.product(x, weight, threshold)
    assert y is not None and torch.allclose(y.double(), expected(x, weight, threshold), atol=1e-4)
    assert sparse_inputs.product(problems.random(5, shape[1]), weight, threshold) is None
    assert sparse_inputs.product(x.clone().requires_grad_(), weight, threshold) is None
    assert sparse_inputs.product(x.double(), weight, threshold) is None
    (small,) = weights((8, 96), ())
    assert sparse_inputs.product(x, small, threshold) is None
