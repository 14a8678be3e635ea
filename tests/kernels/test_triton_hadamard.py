"""The Triton kernel of the Hadamard transform: its results in the interpreter, its machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.formats.transforms import Diagonal, pack_diagonal
from compress.kernels.triton import hadamard
from compress.numerics import hadamard as reference
from helpers import (
    interpreter,  # noqa: F401
    offline,
)


@pytest.mark.parametrize(
    ("size", "rows"),
    [(16, 1), (16, 300), (128, 33), (2048, 3), (4096, 16), (32768, 1), (448, 5), (3072, 2), (13824, 1)],
)
def test_transform_is_that_of_the_package(size: int, rows: int) -> None:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).half()
    assert hadamard.supports(x)
    wanted = reference.transform(x.double())
    found = hadamard.transform(x)
    assert found.dtype == torch.float16
    assert torch.equal(found, wanted.half()) or (found - wanted).abs().max() < 2**-10 * wanted.abs().max()
    if reference.order(size).K == 1:
        torch.testing.assert_close(hadamard.transform(x.float()).double(), wanted, rtol=0, atol=5e-6)
        assert (hadamard.transform(x.bfloat16()) - wanted).abs().max() < 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("name", ["signs", "channel_scale16", "channel_scale8"])
@pytest.mark.parametrize("size", [64, 320])
def test_diagonals_before_and_after(size: int, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, size, generator=generator).half()
    before, after = (Diagonal(name, pack_diagonal(name, torch.randn(size, generator=generator))) for _ in range(2))
    exact = reference.transform(x.double() * before.values(size, torch.float64))
    both = exact * after.values(size, torch.float64)
    found = hadamard.transform(x, before, after)
    assert found.shape == x.shape
    torch.testing.assert_close(found.double(), both, rtol=2**-10, atol=3e-3)
    torch.testing.assert_close(hadamard.transform(x, before).double(), exact, rtol=0, atol=3e-3)


def test_memory_is_written_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows of a buffer of seven: the last two stay, and strides are honoured."""
    kept = torch.full((7, 128), float("nan"))
    monkeypatch.setattr(torch, "empty_like", lambda x: kept[: x.shape[0]])
    wide = torch.randn(5, 256)
    found = hadamard.transform(wide[:, ::2])
    torch.testing.assert_close(found, reference.transform(wide[:, ::2]), rtol=0, atol=2e-6)
    assert kept[5:].isnan().all()


@pytest.mark.parametrize("size", [8, 36, 172, 200, 65536, 11008])
def test_other_sizes_are_left_to_the_package(size: int) -> None:
    x = torch.randn(2, size)
    assert not hadamard.supports(x)
    for name in ("signs", "channel_scale16"):
        scales = Diagonal(name, pack_diagonal(name, torch.randn(size)))
        assert torch.equal(hadamard.transform(x, scales), reference.transform(x * scales.values(size, x.dtype)))


SIGNATURE = {
    "x": "*bf16", "table": "*bf16", "before": "*u8", "after": "*u8", "out": "*bf16", "count": "i32", "factor": "fp32",
}  # fmt: skip
# Instructions of a number, triton 3.6: 2 to 4 times as many as additions.
COSTS = [
    # size, arch, most
    (128, 90, 24),
    (4096, 80, 38),
    (32768, 90, 34),
    (14336, 100, 45),
    (13824, 90, 44),
]
MORE_COSTS = [
    (4096, 90, 34),
    (4096, 100, 34),
    (8192, 90, 34),
    (14336, 80, 45),
    (14336, 90, 44),
    (28672, 90, 38),
]


@pytest.mark.parametrize("costs", [COSTS, pytest.param(MORE_COSTS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_machine_code(costs: list[tuple[Any, ...]]) -> None:
    cases = []
    for size, arch, _ in costs:
        constants = hadamard.configuration(size) | {"BEFORE": 1, "AFTER": 0}
        warps = hadamard.warps(constants)
        cases.append(
            offline.Case("compress.kernels.triton.hadamard", "transform_rows", SIGNATURE, constants, arch, warps)
        )
    for cost, case, built in zip(costs, cases, offline.compile_cases(cases), strict=True):
        numbers = case.constants["SIZE"] * case.constants["BLOCK"] / (32 * case.warps)
        assert built.spills == 0, cost
        assert sum(built.opcodes.values()) / numbers < cost[-1], (cost, sum(built.opcodes.values()) / numbers)
