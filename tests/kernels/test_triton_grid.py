"""The Triton kernels of the grid format: results in the interpreter, machine code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import grid as grid_format
from compress.formats.grid import Params
from compress.kernels import dispatch
from compress.kernels.triton import grid, products
from compress.types import PackedWeight
from helpers import (
    interpreter,  # noqa: F401
    offline,
)
from helpers.stored import product, random_weight

NVFP4 = Params("e2m1", 16, "e4m3", tensor_scale=True)
WEIGHTS: list[tuple[Params, tuple[int, int]]] = [
    (NVFP4, (70, 320)),
    (Params("e2m1", 32, "e8m0"), (33, 300)),
    (Params("e4m3", 32, "e8m0"), (20, 200)),
    (Params("e4m3", -1, "float32", -1), (40, 301)),
    (Params("e4m3", -1, "float32"), (37, 130)),
    (Params("e4m3", 128, "float32", 128), (200, 300)),
    (Params("nf4", 64, "nested"), (40, 640)),
    (Params("fp4", 96, "bfloat16"), (37, 333)),
    (Params("dynamic8", 256, "float16", 1, True), (40, 300)),
]
each_weight = pytest.mark.parametrize(("params", "shape"), WEIGHTS, ids=str)


@pytest.fixture(autouse=True)
def _memory_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: fill(empty(*size, **options)))
    products.forget()


def fill(tensor: Tensor) -> Tensor:
    return tensor.fill_(math.nan) if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 else tensor


@each_weight
@pytest.mark.parametrize("rows", [1, 9])
def test_products_are_those_of_the_decoded_weight(params: Params, shape: tuple[int, int], rows: int) -> None:
    assert dispatch.supported("cuda", "grid", params, shape) is not None
    weight = random_weight("grid", params, shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    expected = product(x, weight)
    for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 1e-3)):
        y = grid.prepare(weight.tensors, params, shape)(x.to(dtype))
        assert y.dtype == dtype and (y - expected).norm() < bound * expected.norm()


@each_weight
def test_decoders_give_the_bits_of_the_format(params: Params, shape: tuple[int, int]) -> None:
    weight = random_weight("grid", params, shape)
    kernel = grid.prepare(weight.tensors, params, shape)
    assert torch.equal(kernel.decode(torch.float32), formats.decode_stored(weight, torch.float32))
    exact = formats.decode_stored(weight, torch.float64)
    rounded = kernel.decode(torch.bfloat16).double()
    assert ((rounded - exact).abs() <= exact.abs() * 2**-7).all()  # the interpreter cuts off instead of rounding


def test_every_code_and_every_scale() -> None:
    """NaN of e4m3 and the least exponent of e8m0, too."""
    for values in grid_format.VALUE_BITS:
        for scale_type in ("e8m0", "e4m3"):
            params = Params(values, 32, scale_type)
            codes = (torch.arange(32)[:, None] * 8 + torch.arange(256)).remainder(2**params.bits).to(torch.uint8)
            scales = torch.arange(256).remainder(grid_format.E8M0_LARGEST + 1).to(torch.uint8).view(32, 8)
            scales = scales.view(grid_format.SCALE_DTYPES[scale_type])
            tensors = grid_format.pack(codes, {"scales": scales}, params)
            weight = PackedWeight(random_weight("grid", params, (32, 256)).stored, tensors, (32, 256))
            decoded = grid.prepare(tensors, params, (32, 256)).decode(torch.float32)
            expected = formats.decode_stored(weight, torch.float32)
            assert torch.equal(decoded.nan_to_num(7.0), expected.nan_to_num(7.0)), (values, scale_type)


@pytest.mark.parametrize(
    "params", [Params("e4m3", 32, "e8m0"), Params("fp4", 96, "bfloat16"), Params("nf4", 64, "float32")]
)
def test_rows_are_looked_up(params: Params) -> None:
    shape, ids = (37, 1100), torch.tensor([3, 36, 0, 3])
    tensors = random_weight("grid", params, shape).tensors
    rows = grid.look_up(tensors, params, shape, ids, torch.float32)
    assert rows is not None and torch.equal(rows, grid_format.decode_rows(tensors, params, shape, ids, torch.float32))
    rows = grid.look_up(tensors, params, shape, torch.tensor([-1, 5, 37, 1 << 40]), torch.float32)
    assert rows is not None and rows[[0, 2, 3]].isnan().all()
    assert torch.equal(rows[1:2], grid_format.decode_rows(tensors, params, shape, torch.tensor([5]), torch.float32))


def test_what_is_left_to_the_format() -> None:
    shape, ids = (64, 480), torch.tensor([1])
    assert dispatch.supported("cuda", "grid", Params("e2m1", 24, "e8m0"), shape) is None
    params = Params("e4m3", 32, "float32", 32)  # blocks of rows
    tensors = random_weight("grid", params, shape).tensors
    assert grid.look_up(tensors, params, shape, ids, torch.float32) is None
    params = Params("e4m3", 32, "e8m0")
    tensors = random_weight("grid", params, shape).tensors
    assert grid.look_up(tensors, params, shape, ids, torch.float64) is None


POINTERS = {"codes": "*u8", "points": "*fp32", "dynamic": "*fp32", "sizes": "*fp32", "mean": "*fp32"}
SIGNATURE = POINTERS | {"tensor_scale": "*fp32", "partials": "*fp32", "counters": "*i32"}
SIGNATURE |= dict.fromkeys(["rows", "in_features", "out_features", "row_bytes", "blocks", "steps", "parts"], "i32")
SCALES = {"e4m3": "*u8", "e8m0": "*u8", "nested": "*u8", "float32": "*fp32"}
ALIGNED = ("in_features", "out_features", "row_bytes", "blocks")
SHAPE = (4096, 4096)
# Instructions of a weight, triton 3.6: of the inner loop of the product, of all of the decoder. An H200 has time for 15
# while it reads a weight in bfloat16.
COSTS = [
    # params, rows, dtype, arch, most of the product, most of the decoder
    (NVFP4, 8, "bf16", 90, 12.5, 20),
    (Params("e2m1", 32, "e8m0"), 16, "fp16", 100, 12.5, 17),
    (Params("e4m3", 32, "e8m0"), 8, "bf16", 90, 14, 23),
    (Params("e4m3", 128, "float32", 128), 16, "bf16", 90, 15, 21),
    (Params("nf4", 64, "nested"), 8, "fp16", 80, 9, 23),
]


@pytest.mark.slow
def test_machine_code() -> None:
    cases: list[tuple[offline.Case, float]] = []
    for params, rows, dtype, arch, *_ in COSTS:
        kinds = SIGNATURE | {"x": f"*{dtype}", "out": f"*{dtype}", "scales": SCALES[params.scale_type]}
        constants: dict[str, Any] = grid.configuration(params, rows, SHAPE) | {"SPLIT": True, "COMPILED": True}
        module = "compress.kernels.triton.grid"
        case = offline.Case(module, "multiply", kinds, constants, arch, grid.WARPS, 3, ALIGNED)
        cases.append((case, constants["BLOCK_N"] * constants["BLOCK_K"]))
        constants = grid.decode_constants(params, SHAPE)
        case = offline.Case(module, "decode", kinds, constants, arch, grid.WARPS, 3, ALIGNED)
        cases.append((case, constants["BLOCK_N"] * constants["BLOCK_K"]))
    built = offline.compile_cases([case for case, _ in cases])
    for i, (one, (case, weights)) in enumerate(zip(built, cases, strict=True)):
        cost = COSTS[i // 2]
        assert one.spills == 0, cost
        count = one.loop_count if case.kernel == "multiply" else sum(one.opcodes.values())
        each = count * 32 * case.warps / weights
        assert each < cost[4 + i % 2], (cost, case.kernel, each)
