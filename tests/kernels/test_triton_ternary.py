"""The Triton kernels of the ternary format: their results in the interpreter, their machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress import formats
from compress.formats.ternary import Params
from compress.kernels import dispatch
from compress.kernels.triton import products, ternary
from helpers import (
    interpreter,  # noqa: F401
    neighbours,
    offline,
)
from helpers.stored import product, random_weight

CASES = [
    (Params("base3", 64), (70, 200)),
    (Params("base3", -1), (50, 333)),
    (Params("base3", -1, "bfloat16", tensor_scale=True), (40, 350)),
    (Params("planar", 16), (70, 150)),
    (Params("planar", 128, "bfloat16"), (30, 400)),
    (Params("base3", 80), (20, 400)),
    (Params("planar", -1, "float32"), (30, 77)),
    (Params("binary", 32), (33, 200)),
]


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize(("params", "shape"), CASES)
def test_matmul_is_that_of_the_decoded_weight(params: Params, shape: tuple[int, int], rows: int) -> None:
    assert dispatch.supported("cuda", "ternary", params, shape)
    weight = random_weight("ternary", params, shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    wanted = product(x, weight)
    for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
        y = ternary.prepare(weight.tensors, params, shape)(x.to(dtype))
        assert y.dtype == dtype and y.shape == wanted.shape
        assert (y - wanted).abs().max() < bound * wanted.abs().max()


@pytest.mark.parametrize(("params", "shape"), [*CASES, (Params("base3", 20, "bfloat16"), (20, 90))])
def test_decode_is_that_of_the_format(params: Params, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight("ternary", params, shape)
    wanted = formats.decode(weight, torch.float32)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    products.forget()
    kernel = ternary.prepare(weight.tensors, params, shape)
    assert kernel is not None and torch.equal(kernel.decode(torch.float32), wanted)
    x = torch.randn(3, shape[1])
    assert kernel.most_rows(torch.float16) == (0 if params.group_size == 20 else 16)
    if kernel.most_rows(torch.float16):
        assert torch.equal(kernel(x), kernel(x))  # counters are 0 again, old contents of memory do not matter


SIGNATURE = {
    "codes": "*u8", "scales": "*fp16", "partials": "*fp32", "counters": "*i32", "rows": "i32", "in_features": "i32",
    "out_features": "i32", "stored_rows": "i32", "units": "i32", "steps": "i32", "parts": "i32",
}  # fmt: skip
# Instructions of a weight, triton 3.6. A budget of 0.97 * bits would saturate the memory of an H200.
COSTS: list[tuple[Params, int, str, float]] = [
    (Params("base3", -1), 8, "fp16", 9.0),
    (Params("planar", -1), 8, "bf16", 9.0),
    (Params("planar", 64), 8, "fp16", 9.0),
    (Params("base3", 64), 16, "fp16", 26.0),
]


def test_machine_code() -> None:
    cases = []
    for params, rows, dtype, _ in COSTS:
        settings: dict[str, Any] = {
            **ternary.constants(params), "BLOCK_N": ternary.BLOCK_ROWS, "BLOCK_M": rows, "SPLIT": True,
            "UNITS": ternary.step_units(params)[0], "IN_GROUP": ternary.step_units(params)[1], "USE_HALF": True,
        }  # fmt: skip
        signature = SIGNATURE | {"x": f"*{dtype}", "out": f"*{dtype}"}
        aligned = ("in_features", "out_features")
        cases.append(
            offline.Case(
                "compress.kernels.triton.ternary", "multiply", signature, settings, 90, ternary.WARPS, 3, aligned
            )
        )
    for cost, case, built in zip(COSTS, cases, neighbours.compile_cases(cases), strict=True):
        weights = ternary.BLOCK_ROWS * case.constants["UNITS"] * 4 * case.constants["DIGITS"] / (32 * case.warps)
        print(cost, built.loop_count / weights)
        assert built.spills == 0, cost
        assert built.loop_count / weights < cost[-1], (cost, built.loop_count / weights)
