"""The general Triton kernel of the codebook format: its results in the interpreter, its machine code."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from compress.formats.codebook import Params
from compress.kernels import dispatch
from compress.kernels.triton import codebook, products
from helpers import (
    interpreter,  # noqa: F401
    offline,
)
from helpers.stored import product, random_weight


@pytest.mark.parametrize(
    ("params", "shape", "rows"),
    [
        (Params((6,), 2, 64), (70, 260), 3),  # recipes/gptvq2bit.yaml with vector_dim 2 and bits 6
        (Params((3,), 1, 32, group_columns=48, group_rows=40), (50, 200), 8),
        (Params((7,), 2, 16, group_columns=64, group_rows=16, permuted=True), (33, 150), 1),
        (Params((8,), 4, 32, codebook_dtype="float16"), (20, 300), 2),
        (Params((8, 8), 4, 32, axis="out", outliers=7), (70, 300), 9),  # vptq with residual_bits
        (Params((9, 5), 3, 8, axis="out", norm="columns", bias=True, outliers=5, outlier_bits=8), (50, 77), 2),
        (Params((4,), 1, 16, svd_rank=3, group_columns=32, group_rows=16), (40, 100), 4),
        (Params((8,), 4, 16, scale_columns=32, permuted=True, norm="rows", bias=True, outliers=4), (40, 130), 5),
        (Params((12,), 6, 4), (40, 100), 16),
        (Params((16,), 8, 1, axis="out"), (40, 50), 16),
        (Params((8,), 4, 8), (40, 100), 3),
        (Params((8,), 4, 128, group_columns=32), (20, 1024), 1),
    ],
)
def test_matmul_is_that_of_the_decoded_weight(params: Params, shape: tuple[int, int], rows: int) -> None:
    assert dispatch.supported("cuda", "codebook", params, shape) and not codebook.four_bytes(params)
    weight = random_weight("codebook", params, shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    wanted = product(x, weight)
    for dtype, bound in ((torch.float32, 1e-3), (torch.float16, 2e-3)):  # weights are rounded to float16
        found = codebook.prepare(weight.tensors, params, shape)(x.to(dtype))
        assert found.dtype == dtype and found.shape == wanted.shape
        assert (found - wanted).abs().max() < bound * wanted.abs().max()


@pytest.mark.parametrize("params", [Params((8,), 4, 16, permuted=True), Params((5,), 2, 16, permuted=True)])
def test_permuted_weights_take_any_number_of_rows(params: Params) -> None:
    shape = (20, 150)
    weight = random_weight("codebook", params, shape)
    assert dispatch.supported("cuda", "codebook", params, shape).most_rows(torch.float16) == sys.maxsize
    x = torch.randn(17, shape[1], generator=torch.Generator().manual_seed(1))
    wanted = product(x, weight)
    found = codebook.prepare(weight.tensors, params, shape)(x)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_old_contents_of_memory_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = Params((6,), 2, 64), (20, 600)
    weight, x = random_weight("codebook", params, shape), torch.randn(3, 600)
    first = codebook.prepare(weight.tensors, params, shape)(x)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    products.forget()
    assert torch.equal(codebook.prepare(weight.tensors, params, shape)(x), first)
    assert torch.equal(codebook.prepare(weight.tensors, params, shape)(x), first)  # the counters are 0 again


def test_what_is_supported() -> None:
    shape = (4096, 4096)
    assert not dispatch.supported("cuda", "codebook", Params((15,), 4, 16), shape)  # four planes
    assert not dispatch.supported("cuda", "codebook", Params((8, 8, 8), 4, 16), shape)
    assert not dispatch.supported("cuda", "codebook", Params((8,), 64, 16), shape)
    assert dispatch.supported("cuda", "codebook", Params((8,), 4, 16), shape).most_rows(torch.float16) == 16


PLANES = "words_a words_b words_c words2_a words2_b words2_c order"
HALVES = "x out codebook_scales codebook_scales2 norm_scale norm_bias outlier_scale"
SIZES = "rows code_rows tiles column_groups row_groups blocks in_features out_features steps parts"
SIGNATURE: dict[str, str] = dict.fromkeys(PLANES.split(), "*i16") | dict.fromkeys(HALVES.split(), "*fp16")
SIGNATURE |= dict.fromkeys(SIZES.split(), "i32") | dict.fromkeys(("scales", "outliers"), "*u8")
SIGNATURE |= dict.fromkeys(("slots", "counters"), "*i32") | dict.fromkeys(("factors", "partials"), "*fp32")
# Instructions of a weight, triton 3.6. An H200 has time for 15 while it reads a weight in bfloat16.
COSTS = [
    # params, rows, dtype, arch, columns, most
    (Params((6,), 2, 64), 8, "fp16", 80, 4096, 16),
    (Params((6,), 2, 64), 16, "bf16", 90, 4100, 20),
    (Params((8,), 2, 128), 16, "fp16", 100, 4096, 18),
    (Params((8,), 4, 128, codebook_dtype="float16"), 8, "fp16", 90, 4096, 8),
    (Params((8, 8), 4, 128, axis="out", outliers=82), 8, "bf16", 90, 4096, 40),
]


@pytest.mark.slow
def test_machine_code() -> None:
    cases = []
    for params, rows, dtype, arch, columns, _ in COSTS:
        constants: dict[str, Any] = codebook.multiply_constants(params, rows, (4096, columns)) | {"SPLIT": True}
        book = "*i8" if params.codebook_dtype == "int8" else "*fp16"
        kinds = {"x": f"*{dtype}", "out": f"*{dtype}", "codebook": book, "codebook2": book}
        aligned = ("code_rows", "in_features", "out_features") if columns % 16 == 0 else ("code_rows", "out_features")
        module = "compress.kernels.triton._gather"
        cases.append(offline.Case(module, "multiply", SIGNATURE | kinds, constants, arch, codebook.WARPS, 3, aligned))
    for cost, case, built in zip(COSTS, cases, offline.compile_cases(cases), strict=True):
        weights = case.constants["BLOCK_N"] * case.constants["BLOCK_C"] * cost[0].vector_dim / (32 * case.warps)
        assert built.spills == 0, cost
        assert built.loop_count / weights < cost[-1], (cost, built.loop_count / weights)
