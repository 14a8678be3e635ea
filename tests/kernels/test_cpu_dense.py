"""Products of plain weights with few rows of activations, beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import dense as dense_format
from compress.kernels import dispatch, llvm
from compress.kernels.calls import ActivationRows
from compress.kernels.cpu import dense

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")

TYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((37, 70, 1), (64, 576, 3), (100, 96, 16), (16, 33, 6), (1, 1, 2))  # outputs, inputs, rows


def weights(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in ((outputs, inputs), (outputs,)))  # type: ignore[return-value]


def relative(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", TYPES)
def test_products_are_those_of_float64(dtype: torch.dtype) -> None:
    for outputs, inputs, rows in SIZES:
        weight, bias = weights(outputs, inputs, dtype)
        x = weights(rows, inputs, dtype, seed=1)[0]
        reference = x.double() @ weight.double().T + bias.double()
        rounding = relative(reference.to(dtype), reference)
        most = 1.1 * rounding + 1e-6
        assert relative(dense.multiply(x, weight, bias), reference) < most
        assert relative(dense.multiply(x, weight), reference - bias.double()) < max(most, 1.5 * rounding)


def test_types_of_weight_and_activations_may_differ() -> None:
    weight, bias = weights(40, 64, torch.bfloat16)
    x = weights(5, 64, torch.float32, seed=1)[0]
    y = dense.multiply(x[None], weight, bias.float())
    assert y.dtype == torch.float32 and y.shape == (1, 5, 40)
    assert relative(y[0], x.double() @ weight.double().T + bias.double()) < 1e-6


def test_rows_and_threads_do_not_matter() -> None:
    weight, _ = weights(2000, 600, torch.bfloat16)
    x = weights(7, 600, torch.bfloat16, seed=1)[0]
    whole = dense.multiply(x, weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(dense.multiply(x, weight), whole)
    finally:
        torch.set_num_threads(threads)
    single = torch.cat([dense.multiply(row[None], weight) for row in x])
    assert torch.equal(single, whole)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_format_of_plain_weights_is_multiplied(stored: str, dtype: torch.dtype) -> None:
    params, shape = dense_format.Params(stored), (200, 192)
    tensors = dense_format.pack(weights(*shape, torch.float32)[0], params)
    for rows in (1, 5, 40):
        x = weights(rows, 192, dtype, seed=1)[0]
        y = dispatch.product(x, tensors, "dense", params, shape)
        reference = x.double() @ tensors["values"].double().T
        assert y.dtype == dtype and relative(y, reference) < 4 * relative(reference.to(dtype), reference) + 1e-6


def test_weights_that_read_the_same_are_multiplied_in_one_call() -> None:
    params = dense_format.Params()
    kernels = [
        dense.PlainProduct(dense_format.pack(weights(rows, 192, torch.float32)[0], params), params, (rows, 192))
        for rows in (100, 7)
    ]
    x = weights(3, 192, torch.bfloat16, seed=1)[0]
    run = kernels[0].fuse(kernels[1:])
    assert run is not None and torch.equal(run(kernels, x), torch.cat([kernel(x) for kernel in kernels], 1))


def test_several_weights_write_beside_each_other() -> None:
    parts = [weights(outputs, 96, torch.bfloat16, seed=outputs) for outputs in (33, 16, 5)]
    x = weights(3, 96, torch.bfloat16, seed=1)[0]
    out, memory = torch.full((3, 60), 9.0, dtype=torch.bfloat16), list[Tensor]()

    def take(nbytes: int) -> int:
        memory.append(torch.empty(nbytes, dtype=torch.uint8))
        return memory[-1].data_ptr()

    rows = ActivationRows(3, torch.bfloat16, x.data_ptr(), out.data_ptr(), 60)
    biases = [parts[0][1], None, parts[2][1]]
    for call in dense.product_calls(rows, take, [weight for weight, _ in parts], biases):
        call.run()
    single = [dense.multiply(x, weight, bias) for (weight, _), bias in zip(parts, biases, strict=True)]
    assert torch.equal(out[:, :54], torch.cat(single, 1)) and torch.equal(out[:, 54:], torch.full_like(out[:, 54:], 9))
