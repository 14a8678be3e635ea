"""Products that skip inputs on a GPU: against float64 in the interpreter, and their machine code."""

from __future__ import annotations

import pytest
import torch

from compress import formats
from compress.formats.columns import Params
from compress.kernels.triton import columns
from helpers import (
    interpreter,  # noqa: F401
    offline,
    problems,
)
from helpers.stored import columnar, random_weight

SHAPE = (150, 100)
CODES = (Params(4, 64, symmetric=False), Params(8, -1))


@pytest.mark.parametrize("params", [None, *CODES])
def test_products_with_kept_inputs(params: Params | None) -> None:
    weight = random_weight("columns", params, SHAPE) if params else columnar(problems.random(*SHAPE), ())[0]
    kernel = columns.prepare(weight.tensors, weight.params, SHAPE)
    assert kernel is not None and torch.equal(kernel.decode(torch.float32), formats.decode(weight, torch.float32))
    if params is None:  # the interpreter does not multiply bfloat16
        kernel = columns.ColumnsOnGpu({"values": weight.tensors["values"].half()}, Params(dtype="float16"), SHAPE)
    exact = formats.decode(weight, torch.float64).T
    x = problems.random(2, SHAPE[1])
    for threshold in (None, torch.linspace(0, 1, SHAPE[1]), torch.tensor([1e9])):
        y = kernel.sparse(x, threshold)
        kept = x if threshold is None else x * (x.abs() >= threshold)
        wanted = kept.double() @ exact
        bound = 2e-4 if params is None else 2e-6
        assert (y - wanted).abs().max() <= bound * (x.double().abs() @ exact.abs()).max()
    assert torch.equal(kernel(x), kernel.sparse(x, None))
    x[0, 7] = torch.nan
    assert kernel.sparse(x, torch.tensor([1e9]))[0].isnan().all()


def test_groups_are_whole_steps() -> None:
    assert columns.prepare({}, Params(4, 24), SHAPE) is None


@pytest.mark.slow
def test_machine_code() -> None:
    cases = []
    for params in (Params(), Params(4, 128, dtype="float16"), Params(8, 128, dtype="float16")):
        settings = {**columns.constants(params), "SPLIT": True}
        stored = "*bf16" if params.bits == 16 else "*u8"
        signature = {
            name: "i32" for name in ("each", "in_features", "out_features", "stride", "blocks", "steps", "parts")
        }
        signature |= {"x": "*bf16", "out": "*bf16", "thresholds": "*fp32", "stored": stored, "zeros": stored}
        signature |= {"scales": stored if params.bits == 16 else "*fp16", "partials": "*fp32", "counters": "*i32"}
        aligned = ("in_features", "out_features", "stride")
        cases.append(
            offline.Case(
                "compress.kernels.triton.columns", "multiply", signature, settings, 90, columns.WARPS, 3, aligned
            )
        )
    for case, built in zip(cases, offline.compile_cases(cases), strict=True):
        weights = columns.BLOCK * case.constants["FIELDS"] * columns.STEP / (32 * case.warps)
        print(case.constants["BITS"], built.registers, built.loop_count / weights)
        assert built.spills == 0
        assert built.loop_count / weights < 24
