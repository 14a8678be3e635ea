"""The Triton decoders of trellis, codebook and e8p: what they write in the interpreter, their machine code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import codebook as codebook_format
from compress.formats import e8p as e8p_format
from compress.formats import trellis as trellis_format
from compress.kernels import dispatch
from compress.kernels.triton import codebook, e8p, trellis
from helpers import (
    interpreter,  # noqa: F401
    offline,
    ptx,
)
from helpers.stored import random_weight

Book = codebook_format.Params
Trellis = trellis_format.Params
E8P = e8p_format.Params
KERNELS: dict[str, Any] = {"trellis": trellis, "codebook": codebook, "e8p": e8p}
WEIGHTS = [
    ("trellis", Trellis(2, 16, 32), (20, 70)),
    ("trellis", Trellis(2, 14, 64, "1mad", True), (18, 66)),
    ("trellis", Trellis(3, 16, 48, "mul1", True), (33, 66)),
    ("trellis", Trellis(4, 16, 16, "mcg"), (30, 33)),
    ("trellis", Trellis(1, 12, 16, "3inst"), (16, 40)),
    ("trellis", Trellis(1.5, 14, 32), (33, 40)),
    ("trellis", Trellis(1.25, 14, 64), (100, 40)),
    ("trellis", Trellis(1.75, 14, 64), (130, 40)),
    ("trellis", Trellis(2.5, 16, 64, "mul1", True), (50, 66)),
    ("trellis", Trellis(3.5, 12, 32), (20, 70)),
    ("e8p", E8P(2, False), (20, 768)),
    ("e8p", E8P(3, True), (17, 300)),
    ("e8p", E8P(4, False), (5, 77)),
    ("codebook", Book((8,), 4, 64, group_columns=256, group_rows=16, permuted=True), (36, 600)),
    ("codebook", Book((8,), 4, 128, axis="out", outliers=9), (70, 300)),
    ("codebook", Book((6,), 2, 64, group_columns=64), (19, 260)),
    ("codebook", Book((3,), 1, 32, group_columns=48, group_rows=40), (50, 200)),
    ("codebook", Book((3, 11), 5, 2, codebook_dtype="float16"), (40, 50)),
    ("codebook", Book((9, 5), 3, 8, axis="out", norm="columns", bias=True, outliers=5, outlier_bits=8), (50, 77)),
    ("codebook", Book((4,), 1, 16, svd_rank=3, group_columns=32, group_rows=16), (40, 100)),
    ("codebook", Book((7,), 4, 16, scale_columns=32, permuted=True, norm="rows", bias=True, outliers=4), (40, 130)),
    ("codebook", Book((16,), 8, 1, axis="out"), (40, 50)),
    ("codebook", Book((8,), 2, 1), (20, 6)),
]


@pytest.mark.parametrize(("format", "params", "shape"), WEIGHTS, ids=lambda v: v if isinstance(v, str) else "")
def test_decode_is_that_of_the_format(
    format: str, params: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, weight = KERNELS[format], random_weight(format, params, shape)
    assert dispatch.supported("cuda", weight.format, params, shape) is not None
    wanted = {dtype: formats.decode_stored(weight, dtype) for dtype in (torch.float32, torch.float64)}
    monkeypatch.setattr(trellis, "DECODED", 64)  # columns of a program, here several
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(math.nan))
    assert torch.equal(kernel.prepare(weight.tensors, params, shape).decode(torch.float32), wanted[torch.float32])
    found = kernel.prepare(weight.tensors, params, shape).decode(torch.bfloat16).double()
    exact = wanted[torch.float64]
    assert ((found - exact).abs() <= exact.abs() * 2**-7).all()  # the interpreter cuts off instead of rounding


@pytest.mark.parametrize("code", ["mul1", "1mad", "3inst", "mcg"])
@pytest.mark.parametrize(("bits", "state_bits"), [(2, 16), (3, 14), (5, 11)])
def test_assembly_sums_the_halves(bits: int, state_bits: int, code: str) -> None:
    known = trellis.computed(code)
    params = Trellis(bits, state_bits, 16, code)
    weight = random_weight("trellis", params, (16, 512))
    weight.tensors["scale"].fill_(known.divisor)
    wanted = formats.decode_stored(weight, torch.float64)
    words = weight.tensors["words"]
    for row in range(16):
        end = (row + 1) * bits
        at = (end - 1) // 16
        text = trellis.row_text(end, state_bits, known.factor, known.addend, known.halves, True)
        register = ptx.run(text, 2, [ptx.pairs(words[at - 1]), ptx.pairs(words[at])])[0]
        found = torch.stack(ptx.halves(register), -1).flatten().double()
        assert torch.equal(found, wanted[row] if known.halves else wanted[row].round()), row


def quotients(value: Tensor, divisor: float) -> Tensor:
    """What `_parts.divided` does with fused multiply-adds, each rounded once; float32."""
    inverse, rounded = (torch.tensor(v, dtype=torch.float32).double() for v in (1 / divisor, divisor))
    quotient = (value.double() * inverse).float().double()
    remainder = (value.double() - quotient * rounded).float().double()
    return (quotient + remainder * inverse).float()


def test_divisions_are_exact() -> None:
    sums = torch.arange(-510, 511)
    for code in trellis_format.BYTE_SUMS:
        constants = trellis.decode_constants(Trellis(2, 16, 16, code))
        found = quotients((sums * constants["NUMERATOR"]).float(), constants["DENOMINATOR"])
        assert torch.equal(found, (sums.double() / trellis.computed(code).divisor).float())
    for bits, rho in e8p_format.RHO.items():
        values = torch.arange(-16, 17) / (2 if bits == 3 else 4)
        assert torch.equal(quotients(values, rho), values / rho)


POINTERS = {
    "i8": "codebook codebook2", "i16": "words words_a words_b words_c words2_a words2_b words2_c codes order",
    "i32": "magnitudes ball slots", "fp16": "codebook_scales codebook_scales2 norm_scale norm_bias outlier_scale",
    "fp32": "scale factors", "u8": "scales outliers",
}  # fmt: skip
SIZES = "in_features out_features code_groups code_rows tiles column_groups row_groups blocks"
SIGNATURE = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names.split()}
SIGNATURE |= {name: "i32" for name in SIZES.split()} | {"row_scales": "*fp16"}
ALIGNED = ("in_features", "out_features", "code_groups", "code_rows")
# Instructions of a weight, triton 3.6. At the rate of its memory an H200 has time for 17 of them while a weight is
# written as bfloat16 and read as 2 bits.
COSTS = [
    # format, params, dtype, arch, most
    ("trellis", Trellis(2, 16, 128), "bf16", 80, 15.5),
    ("trellis", Trellis(4, 16, 128, row_scales=True), "bf16", 90, 17.0),
    ("trellis", Trellis(2, 16, 128, "3inst"), "fp16", 100, 13.0),
    ("trellis", Trellis(2.5, 16, 128), "bf16", 90, 2 * 17.0),  # the code of both kinds of groups
    ("e8p", E8P(2, True), "bf16", 80, 14.0),
    ("e8p", E8P(3, True), "fp16", 100, 26.0),
    ("e8p", E8P(4, True), "bf16", 90, 26.0),
    ("codebook", Book((8,), 4, 128), "bf16", 80, 14.0),
    ("codebook", Book((8,), 4, 128, axis="out", outliers=82), "bf16", 90, 33.0),
    ("codebook", Book((6,), 2, 64, group_columns=128, group_rows=128, permuted=True), "fp16", 100, 30.0),
]


def decoder_case(format: str, params: Any, dtype: str, arch: int) -> tuple[offline.Case, int]:
    """A case and the weights of its program."""
    if format == "codebook":
        constants, warps = codebook.decode_constants(params, ordered=params.permuted), codebook.WARPS
        weights = constants["BLOCK_N"] * constants["BLOCK_C"] * params.vector_dim
    elif format == "e8p":
        constants, warps = e8p.decode_constants(params) | {"USE_ASM": True}, e8p.WARPS
        weights = constants["BLOCK_N"] * constants["BLOCK_CODES"] * 8
    else:
        constants, warps = trellis.decode_constants(params) | {"USE_ASM": True}, trellis.WARPS
        weights = 16 * constants["BLOCK"]
    file = "_gather" if format == "codebook" else format
    residual = "*u8" if getattr(params, "bits", 0) == 3 else "*i16"
    signature = SIGNATURE | {"out": f"*{dtype}", "residual": residual}
    module = f"compress.kernels.triton.{file}"
    return offline.Case(module, "decode", signature, constants, arch, warps, aligned=ALIGNED), weights


@pytest.mark.slow
def test_machine_code() -> None:
    cases = [decoder_case(*cost[:-1]) for cost in COSTS]
    for cost, (case, weights), built in zip(COSTS, cases, offline.compile_cases([c for c, _ in cases]), strict=True):
        assert built.spills == 0, cost
        each = sum(built.opcodes.values()) * 32 * case.warps / weights
        assert each < cost[-1], (cost, each)
