"""One row of activations times the `lowrank` format, by compiled functions on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import lowrank
from compress.kernels import llvm
from compress.kernels.cpu import emitter
from compress.kernels.cpu import lowrank as kernel
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight, Stored
from helpers import problems

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}  # relative, at most
SHAPES = ((48, 96), (100, 70), (33, 7), (7, 40), (3, 130))


def stored(shape: tuple[int, int], rank: int, dtype: str = "bfloat16") -> tuple[lowrank.Params, dict[str, Tensor]]:
    params = lowrank.Params(rank, dtype=dtype)
    a, b = problems.random(rank, shape[1]), problems.random(rank, shape[0], seed=1)
    return params, lowrank.pack(a, b, params)


def expected(x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    return x.double() @ tensors["a"].double().T @ tensors["b"].double().T


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_products(kind: str, dtype: torch.dtype) -> None:
    """Against float64, rounded once: nothing is rounded between the factors."""
    for shape in SHAPES:
        for rank in {1, 2, min(5, *shape), min(32, *shape)}:
            params, tensors = stored(shape, rank, kind)
            x = problems.random(1, shape[1], seed=2).to(dtype)
            y, wanted = kernel._LowRank(tensors, params, shape)(x), expected(x, tensors)
            assert y.dtype == dtype and y.shape == (1, shape[0])
            error = (y.double() - wanted).abs() - HALF_STEP[dtype] * wanted.abs()
            assert error.max() < 2e-6 * wanted.abs().max() + 1e-30, (shape, rank)


def test_nothing_past_the_end_is_read_or_written() -> None:
    for shape in SHAPES:
        params, tensors = stored(shape, 3)
        around = {name: torch.full((t.numel() + 64,), torch.nan, dtype=t.dtype) for name, t in tensors.items()}
        for name, tensor in tensors.items():
            around[name][: tensor.numel()] = tensor.flatten()
        views = {name: around[name][: t.numel()].view_as(t) for name, t in tensors.items()}
        row = torch.full((shape[1] + 64,), torch.nan, dtype=torch.bfloat16)
        row[: shape[1]] = problems.random(shape[1], seed=2).bfloat16()
        y = kernel._LowRank(views, params, shape)(row[None, : shape[1]])
        assert torch.equal(y, kernel._LowRank(tensors, params, shape)(row[None, : shape[1]].clone()))
        assert torch.isfinite(y).all()


def test_any_number_of_threads_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params, tensors = stored((103, 64), 13)
    x = problems.random(1, 64, seed=2).bfloat16()
    alone = kernel._LowRank(tensors, params, (103, 64))(x)
    monkeypatch.setattr(emitter, "THREAD", 1)
    for threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(kernel._LowRank(tensors, params, (103, 64))(x), alone)


def test_which_rows_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of activations, factors of 16 bits; others are two products of torch."""
    calls = []
    real = kernel._multiply
    monkeypatch.setattr(kernel, "_multiply", lambda *args: calls.append(args) or real(*args))  # type: ignore[func-returns-value]
    shape = (48, 96)
    params, tensors = stored(shape, 5)
    layer = PackedLinear.from_packed(PackedWeight(Stored("lowrank", params), tensors, shape))
    with torch.no_grad():
        for size, count in (((96,), 2), ((1, 1, 96), 4), ((2, 96), 4)):
            x = problems.random(*size, seed=2).bfloat16()
            y = layer(x)
            assert y.shape == (*size[:-1], 48) and len(calls) == count
            assert (y.double() - expected(x, tensors)).abs().max() < 0.05 * y.abs().max()
    x = problems.random(1, 96, seed=2).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and len(calls) == 4
    trained = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    kernel._LowRank(trained, params, shape)(problems.random(1, 96, seed=2).bfloat16()).sum().backward()
    assert all(tensor.grad is not None for tensor in trained.values()) and len(calls) == 4
    few = lowrank.Params(5, 8)
    x = problems.random(1, 96, seed=2)
    packed = lowrank.pack(problems.random(5, 96), problems.random(5, 48), few)
    kernel._LowRank(packed, few, shape)(x)
    assert len(calls) == 4


def test_what_is_not_finite_stays_so() -> None:
    params, tensors = stored((48, 96), 5)
    x = problems.random(1, 96, seed=2)
    x[0, 3] = torch.nan
    assert kernel._LowRank(tensors, params, (48, 96))(x).isnan().all()
