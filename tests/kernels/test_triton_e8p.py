"""The Triton kernel of the e8p format: its assembly, its results in the interpreter, its machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import e8p as e8p_format
from compress.formats.e8p import Params
from compress.kernels import dispatch
from compress.kernels.triton import e8p, products
from helpers import (
    interpreter,  # noqa: F401
    neighbours,
    offline,
    ptx,
)

PAIRS = [0, 2, 4, 6, 1, 3, 5, 7]  # columns of the four registers of a code
STEP = 2.0**-24  # of a subnormal float16


def stored(params: Params, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Random bits of everything."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (size, dtype) in e8p_format.specs(params, shape).items():
        if dtype.is_floating_point:
            tensors[name] = (torch.rand(size, generator=generator) * 0.1 + 0.5).to(dtype)
        else:
            limits = torch.iinfo(dtype)
            tensors[name] = torch.randint(limits.min, limits.max + 1, size, generator=generator).to(dtype)
    return tensors


def values(made: list[Tensor], offset: float) -> Tensor:
    """Registers of two codes -> their points [n, 2, 8]."""
    halves = torch.stack([half.double() for register in made for half in ptx.halves(register)], -1) / STEP
    nibbles = halves.view(-1, 2, 4, 2)  # code, register of it, half
    nibbles[:, :, 1::2] /= 16
    points = torch.empty(len(nibbles), 2, 8, dtype=torch.float64)
    points[..., PAIRS] = (nibbles.flatten(2) - offset) / 2
    return points


def test_assembly_gives_the_point_of_every_code() -> None:
    codes = torch.arange(1 << 16).view(-1, 2)
    word = e8p.tables(codes.device)[0][codes >> 8]
    made = ptx.run(e8p.point_text(True), 8, [word[:, 0], word[:, 1], codes[:, 0] | codes[:, 1] << 16])
    assert torch.equal(values(made, 7.5), e8p_format.points().double().view(-1, 2, 8) / 4)


def test_assembly_gives_every_residual_point() -> None:
    word = e8p.tables(torch.device("cpu"))[1].view(-1, 2)
    made = ptx.run(e8p.point_text(False), 8, [word[:, 0], word[:, 1]])
    assert torch.equal(values(made, 8), e8p_format.ball().double().view(-1, 2, 8))


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize(
    ("params", "shape"),
    [
        (Params(2, False), (100, 768)),
        (Params(2, True), (50, 333)),
        (Params(3, True), (70, 300)),
        (Params(4, False), (30, 77)),
    ],
)
def test_matmul_is_that_of_the_decoded_weight(params: Params, shape: tuple[int, int], rows: int) -> None:
    assert dispatch.supported("cuda", "e8p", params, shape)
    tensors = stored(params, shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    wanted = x.double() @ e8p_format.decode(tensors, params, shape, torch.float64).T
    for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
        found = e8p.prepare(tensors, params, shape)(x.to(dtype))
        assert found.dtype == dtype and found.shape == wanted.shape
        assert (found - wanted).abs().max() < bound * wanted.abs().max()


def test_old_contents_of_memory_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = Params(2, False), (40, 1100)
    tensors, x = stored(params, shape), torch.randn(3, 1100)
    first = e8p.prepare(tensors, params, shape)(x)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    products.forget()
    assert torch.equal(e8p.prepare(tensors, params, shape)(x), first)
    assert torch.equal(e8p.prepare(tensors, params, shape)(x), first)  # the counters are 0 again


SIGNATURE = {
    "x": "*fp16", "out": "*fp16", "codes": "*i16", "magnitudes": "*i32", "ball": "*i32", "scale": "*fp32",
    "row_scales": "*fp16", "partials": "*fp32", "counters": "*i32", "rows": "i32", "in_features": "i32",
    "out_features": "i32", "stored_rows": "i32", "code_groups": "i32", "steps": "i32", "parts": "i32",
}  # fmt: skip
# Instructions of a weight, triton 3.6. A budget of 0.97 * bits would saturate the memory of an H200.
COSTS = [
    # bits, rows, dtype, arch, columns, most
    (2, 8, "fp16", 80, 4096, 4.0),
    (2, 8, "bf16", 90, 4096, 4.7),
    (3, 16, "fp16", 90, 4000, 8.1),
    (4, 8, "fp16", 100, 4000, 8.0),
]
MORE_COSTS = [
    (2, 8, "fp16", 90, 4096, 4.0),
    (2, 8, "fp16", 100, 4096, 4.0),
    (2, 16, "fp16", 90, 4096, 5.2),
    (3, 8, "fp16", 90, 4096, 6.2),
    (4, 8, "fp16", 90, 4096, 7.7),
    (2, 8, "bf16", 90, 4000, 4.9),
]


@pytest.mark.parametrize("costs", [COSTS, pytest.param(MORE_COSTS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_machine_code(costs: list[tuple[Any, ...]]) -> None:
    cases = []
    for bits, rows, dtype, arch, columns, _ in costs:
        constants = e8p.configuration(Params(bits, False), rows, (4096, columns)) | {"SPLIT": True, "USE_ASM": True}
        residual = "*u8" if bits == 3 else "*i16"
        signature = SIGNATURE | {"x": f"*{dtype}", "out": f"*{dtype}", "residual": residual}
        aligned = [name for name, size in (("in_features", columns), ("code_groups", columns // 64)) if size % 16 == 0]
        cases.append(
            offline.Case(
                "compress.kernels.triton.e8p", "multiply", signature, constants, arch, e8p.WARPS, 3, tuple(aligned)
            )
        )
    for cost, case, built in zip(costs, cases, neighbours.compile_cases(cases), strict=True):
        weights = case.constants["BLOCK_N"] * case.constants["BLOCK_CODES"] * 8 / (32 * case.warps)
        assert built.spills == 0, cost
        assert built.loop_count / weights < cost[-1], (cost, built.loop_count / weights)
