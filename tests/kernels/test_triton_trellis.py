"""The Triton kernel of the trellis format: its assembly, its results in the interpreter, its machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import Params
from compress.kernels import dispatch
from compress.kernels.triton import products, trellis
from helpers import (
    interpreter,  # noqa: F401
    neighbours,
    offline,
    ptx,
)

WINDOWS = [(2, 16), (3, 16), (4, 16), (1, 16), (8, 16), (2, 12), (3, 14), (5, 11)]  # bits, state_bits
PARTS = [
    (1.25, 14),
    (1.75, 12),
    (2.25, 16),
    (3.75, 11),
    (1.5, 12),
    (1.5, 16),
    (2.5, 14),
    (2.5, 16),
    (3.5, 7),
    (3.5, 16),
]


def stored(params: Params, shape: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = trellis_format.padded_rows(params, shape[0])
    words = torch.randint(-(2**15), 2**15, (trellis_format.count_words(params, rows), shape[1]), generator=generator)
    tensors = {"words": words.to(torch.int16), "scale": torch.tensor([0.03])}
    if params.row_scales:
        tensors["row_scales"] = (torch.rand(rows, generator=generator) + 0.5).half()
    return tensors


def operands(params: Params, words: Tensor) -> Tensor:
    """Values [rows, columns] float64 of the words of one tile, as the assembly makes them."""
    made = []
    code = trellis.computed(params.code)
    for row in range(params.tile_rows):
        end = int((row + 1) * params.bits)
        at = (end - 1) // 16
        text = trellis.row_text(end, params.state_bits, code.factor, code.addend, code.halves, False)
        both = ptx.run(text, 2, [ptx.pairs(words[at - 1]), ptx.pairs(words[at])])
        made.append(torch.stack([sum(half.double() for half in ptx.halves(r)) for r in both], -1).flatten())
    return torch.stack(made)


@pytest.mark.parametrize(
    ("bits", "state_bits", "code"),
    [(*window, code) for code in ("mul1", "1mad", "3inst", "mcg") for window in WINDOWS]
    + [(*window, "mul1") for window in PARTS],
)
def test_assembly_gives_the_values_of_the_format(bits: float, state_bits: int, code: str) -> None:
    rows = max(32, trellis_format.row_multiple(bits))
    params = Params(bits, state_bits, rows, code)
    tensors = stored(params, (rows, 2048)) | {"scale": torch.tensor([trellis.computed(code).divisor])}
    wanted = trellis_format.decode(tensors, params, (rows, 2048), torch.float64)
    found = operands(params, tensors["words"])
    if trellis.computed(code).halves:  # the format rounds the sum of the halves to float16
        torch.testing.assert_close(found.half().double(), wanted, rtol=0, atol=0)
    else:
        assert torch.equal(found, wanted.round())
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("params", "shape", "rows"),
    [
        (Params(2, 16, 128), (256, 256), 1),
        (Params(2, 16, 128), (272, 300), 3),
        (Params(2, 14, 64, "1mad", True), (50, 129), 8),
        (Params(3, 16, 48, "mul1", True), (80, 136), 16),
        (Params(4, 16, 256, "mcg"), (300, 65), 9),
        (Params(1, 12, 16, "3inst"), (16, 40), 1),
        (Params(8, 16, 32), (33, 70), 2),
        (Params(1.5, 12, 96), (600, 40), 1),
        (Params(2.5, 14, 64, "mul1", True), (50, 129), 9),
        (Params(3.5, 16, 32), (33, 70), 2),
        (Params(1.25, 14, 128), (300, 70), 2),
        (Params(1.75, 16, 64, "mul1", True), (150, 129), 9),
        (Params(2.75, 14, 64), (64, 40), 1),
    ],
)
def test_matmul_is_that_of_the_decoded_weight(params: Params, shape: tuple[int, int], rows: int) -> None:
    tensors = stored(params, shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    wanted = x.double() @ trellis_format.decode(tensors, params, shape, torch.float64).T
    exact = 1e-3 if trellis.computed(params.code).halves else 1e-5  # the format rounds the sums of halves
    for dtype, bound in ((torch.float32, exact), (torch.float16, 2e-3)):
        found = trellis.prepare(tensors, params, shape)(x.to(dtype))
        assert found.dtype == dtype and found.shape == wanted.shape
        assert (found - wanted).abs().max() < bound * wanted.abs().max()


def test_results_do_not_depend_on_old_contents_of_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = Params(2, 16, 32), (40, 600)
    tensors, x = stored(params, shape), torch.randn(3, 600)
    first = trellis.prepare(tensors, params, shape)(x)
    empty = torch.empty

    def poisoned(*size: int, **options: Any) -> Tensor:
        return empty(*size, **options).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)
    products.forget()
    assert torch.equal(trellis.prepare(tensors, params, shape)(x), first)
    assert torch.equal(trellis.prepare(tensors, params, shape)(x), first)  # the counters are 0 again


def test_large_activations_of_wide_types_fit() -> None:
    params, shape = Params(2, 16, 32), (32, 64)
    tensors = stored(params, shape)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 3] = 5e5
    wanted = x.double() @ trellis_format.decode(tensors, params, shape, torch.float64).T
    found = trellis.prepare(tensors, params, shape)(x)
    assert (found - wanted).abs().max() < 2**-7 * wanted.abs().max()


def test_what_is_supported() -> None:
    assert dispatch.supported("cuda", "trellis", Params(2, 16, 128), (4096, 4096))
    assert not dispatch.supported("cuda", "trellis", Params(2, 16, 128, "hyb"), (4096, 4096))


SIGNATURE = {name: "*fp32" for name in ("scale", "partials")} | {
    "x": "*fp16", "out": "*fp16", "words": "*i16", "row_scales": "*fp16", "counters": "*i32",
    "rows": "i32", "in_features": "i32", "out_features": "i32", "groups": "i32", "steps": "i32", "parts": "i32",
}  # fmt: skip
# Instructions of a weight, triton 3.6. A budget of 0.97 * bits would saturate the memory of an H200.
COSTS = [
    # bits, state_bits, code, rows, dtype, arch, columns, most
    (2, 16, "mul1", 8, "fp16", 80, 4096, 4.1),
    (2, 16, "mul1", 8, "bf16", 90, 4096, 4.25),
    (4, 16, "mul1", 16, "bf16", 90, 4096, 4.85),
    (2, 12, "1mad", 8, "fp16", 90, 4096, 4.7),
    (3, 16, "mul1", 16, "fp16", 100, 4100, 8.6),
    (2.5, 16, "mul1", 8, "fp16", 90, 4096, 4.8),
]
MORE_COSTS = [
    (2, 16, "mul1", 8, "fp16", 90, 4096, 4.1),
    (2, 16, "mul1", 8, "fp16", 100, 4096, 4.1),
    (2, 16, "mul1", 16, "fp16", 90, 4096, 4.6),
    (3, 16, "mul1", 8, "fp16", 90, 4096, 4.8),
    (4, 16, "mul1", 8, "fp16", 90, 4096, 4.3),
    (2, 16, "3inst", 8, "fp16", 90, 4096, 4.1),
    (2, 16, "mul1", 8, "bf16", 90, 4100, 6.0),
]


@pytest.mark.parametrize("costs", [COSTS, pytest.param(MORE_COSTS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_machine_code(costs: list[tuple[Any, ...]]) -> None:
    cases = []
    for bits, state_bits, code, rows, dtype, arch, columns, _ in costs:
        params = Params(bits, state_bits, 128, code)
        constants = trellis.configuration(params, rows, (4096, columns)) | {"SPLIT": True, "USE_ASM": True}
        signature = SIGNATURE | {"x": f"*{dtype}", "out": f"*{dtype}"}
        aligned = ("in_features",) if columns % 16 == 0 else ()
        cases.append(
            offline.Case("compress.kernels.triton.trellis", "multiply", signature, constants, arch, aligned=aligned)
        )
    for cost, case, built in zip(costs, cases, neighbours.compile_cases(cases), strict=True):
        weights = trellis.GROUP**2 * case.constants["BLOCK_K"] / 32  # of a thread
        assert built.spills == 0, cost
        assert built.loop_count / weights < cost[-1], (cost, built.loop_count / weights)
        assert built.loop["HMMA"] > 0, cost
        assert cost[-2] % 16 or built.loop.get("STS", 0) <= 2, cost  # activations that are scaled, never weights
