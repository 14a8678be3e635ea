"""The Triton kernel of the codebook format: its assembly, its results in the interpreter, its machine code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import codebook as codebook_format
from compress.formats.codebook import Params
from compress.kernels import dispatch
from compress.kernels.triton import codebook, products
from helpers import (
    interpreter,  # noqa: F401
    neighbours,
    offline,
    ptx,
)

GPTVQ = Params((8,), 4, 128, group_columns=256, group_rows=256, permuted=True)  # what recipes/gptvq2bit.yaml makes
VPTQ = Params((8,), 4, 128, axis="out", outliers=82)  # and vptq2bit.yaml, of 4096 columns


def stored(params: Params, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Random bits of everything."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (size, dtype) in codebook_format.specs(params, shape).items():
        if name in ("order", "outlier_index"):
            tensors[name] = torch.randperm(shape[1], generator=generator)[: size[0]].to(dtype)
        elif dtype.is_floating_point:
            tensors[name] = (torch.rand(size, generator=generator) * 0.01 + 0.005).to(dtype)
        else:
            limits = torch.iinfo(dtype)
            tensors[name] = torch.randint(limits.min, limits.max + 1, size, generator=generator).to(dtype)
    return tensors


@pytest.mark.parametrize("along_rows", [False, True])
def test_assembly_widens_every_byte(along_rows: bool) -> None:
    entries = torch.randint(-128, 128, (512, 8), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    entries[:256] = torch.arange(-128, 128)[:, None]
    words = entries.view(torch.int32)  # two entries
    made = ptx.run(codebook.entries_text(along_rows), 4, [words[:, 0], words[:, 1]])
    found = torch.stack([half for register in made for half in ptx.halves(register)], -1)
    order = [0, 4, 1, 5, 2, 6, 3, 7] if along_rows else list(range(8))
    assert torch.equal(found, entries[:, order].half())


@pytest.mark.parametrize(
    ("params", "shape", "rows"),
    [
        (replace(GPTVQ, tile_words=64), (300, 1024), 1),
        (Params((8,), 4, 32, group_columns=256, group_rows=16), (100, 500), 3),
        (Params((8,), 4, 16, group_columns=64, group_rows=48, permuted=True), (60, 136), 8),
        (Params((8,), 4, 128), (70, 2048), 16),
        (Params((8,), 4, 64, axis="out", outliers=19), (70, 300), 9),
        (Params((8,), 4, 16, axis="out", group_columns=64, group_rows=64), (301, 77), 1),
        (Params((8,), 4, 128, axis="out", outliers=16), (260, 512), 3),
    ],
)
def test_matmul_is_that_of_the_decoded_weight(params: Params, shape: tuple[int, int], rows: int) -> None:
    assert codebook.four_bytes(params) and dispatch.supported("cuda", "codebook", params, shape)
    tensors = stored(params, shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    wanted = x.double() @ codebook_format.decode(tensors, params, shape, torch.float64).T
    for dtype, bound in ((torch.float32, 1e-4 if params.outliers else 1e-6), (torch.float16, 2e-3)):
        found = codebook.prepare(tensors, params, shape)(x.to(dtype))  # outlier activations are scaled in float16
        assert found.dtype == dtype and found.shape == wanted.shape
        assert (found - wanted).abs().max() < bound * wanted.abs().max()


def test_old_contents_of_memory_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = replace(VPTQ, tile_words=32, outliers=3), (40, 600)
    tensors, x = stored(params, shape), torch.randn(3, 600)
    first = codebook.prepare(tensors, params, shape)(x)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    products.forget()
    assert torch.equal(codebook.prepare(tensors, params, shape)(x), first)
    assert torch.equal(codebook.prepare(tensors, params, shape)(x), first)  # the counters are 0 again


def test_what_the_kernel_of_four_bytes_takes() -> None:
    shape = (4096, 4096)
    assert codebook.four_bytes(GPTVQ) and codebook.four_bytes(VPTQ)
    for other in (
        replace(GPTVQ, bits=(6,)),
        replace(GPTVQ, bits=(8, 8)),
        replace(GPTVQ, vector_dim=2),
        replace(GPTVQ, codebook_dtype="float16"),
        replace(GPTVQ, scale_columns=64),
        replace(GPTVQ, tile_words=8),
        replace(GPTVQ, group_columns=32),
        replace(GPTVQ, norm="columns"),
        replace(GPTVQ, outliers=4),
        replace(VPTQ, outlier_bits=8),
        Params((4,), 1, 128, svd_rank=3),
    ):
        assert not codebook.four_bytes(other) and dispatch.supported("cuda", "codebook", other, shape), other


SIGNATURE = {
    "x": "*fp16", "out": "*fp16", "words": "*i16", "codebook": "*i8", "scales": "*fp16", "outliers": "*u8",
    "outlier_scale": "*fp16", "outlier_index": "*i32", "partials": "*fp32", "counters": "*i32", "rows": "i32",
    "in_features": "i32", "out_features": "i32", "code_rows": "i32", "code_columns": "i32", "column_groups": "i32",
    "row_groups": "i32", "steps": "i32", "parts": "i32",
}  # fmt: skip
# Instructions of a weight, triton 3.6. A budget of 0.97 * bits would saturate the memory of an H200.
COSTS = [
    # params, rows, dtype, arch, columns, most
    (GPTVQ, 8, "fp16", 80, 4096, 3.3),
    (GPTVQ, 8, "fp16", 100, 4096, 3.3),
    (GPTVQ, 16, "fp16", 90, 4096, 3.7),
    (VPTQ, 8, "bf16", 90, 4096, 3.9),
    (VPTQ, 16, "fp16", 90, 4100, 5.0),
]
MORE_COSTS = [
    (GPTVQ, 8, "fp16", 90, 4096, 3.3),
    (GPTVQ, 8, "bf16", 90, 4096, 3.9),
    (VPTQ, 8, "fp16", 90, 4096, 3.6),
    (VPTQ, 16, "fp16", 90, 4096, 4.0),
    (GPTVQ, 8, "bf16", 90, 4100, 4.5),
]


@pytest.mark.parametrize("costs", [COSTS, pytest.param(MORE_COSTS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_machine_code(costs: list[tuple[Any, ...]]) -> None:
    cases = []
    for params, rows, dtype, arch, columns, _ in costs:
        constants = codebook.configuration(params, rows, (4096, columns)) | {"SPLIT": True, "USE_ASM": True}
        signature = SIGNATURE | {"x": f"*{dtype}", "out": f"*{dtype}"}
        aligned = ("code_columns", "in_features") if columns % 16 == 0 else ("code_columns",)
        cases.append(
            offline.Case("compress.kernels.triton.codebook", "multiply", signature, constants, arch, aligned=aligned)
        )
    for cost, case, built in zip(costs, cases, neighbours.compile_cases(cases), strict=True):
        weights = case.constants["BLOCK_N"] * case.constants["BLOCK_WORDS"] * 8 / (32 * case.warps)
        assert built.spills == 0, cost
        assert built.loop_count / weights < cost[-1], (cost, built.loop_count / weights)
