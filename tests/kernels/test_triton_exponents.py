"""The Triton decoder of ranked codes: every bit in the interpreter, and its machine code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compress.formats import exponents
from compress.kernels import dispatch
from helpers import (
    interpreter,  # noqa: F401
    offline,
)

from compress.kernels.triton import exponents as kernel  # isort: skip

EVERY = torch.arange(1 << 16).sub(1 << 15).to(torch.int16).view(torch.bfloat16)
MOST = 17.0  # instructions for each weight: 16 with triton 3.6, over half of them address and move its two bytes


@pytest.mark.parametrize("shape", [(128, 512), (64, 1024), (3, 1031), (5, 7)])
def test_decode_gives_every_bit(shape: tuple[int, int]) -> None:
    weight = EVERY[: shape[0] * shape[1]].view(shape)
    params, tensors = exponents.pack(weight, "ranked")
    prepared = kernel.prepare(tensors, params, shape)
    assert prepared is not None
    assert torch.equal(prepared.decode(torch.bfloat16).view(torch.int16), weight.view(torch.int16))


def test_products_are_those_of_the_plain_weight() -> None:
    weight = (torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    params, tensors = exponents.pack(weight, "ranked")
    prepared = kernel.prepare(tensors, params, (40, 96))
    assert prepared is not None and prepared.most_rows(torch.bfloat16) == 0
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(3, 96).to(dtype)
        assert torch.equal(dispatch.decoded_product(prepared, x), F.linear(x, weight.to(dtype)))
    huffman, coded = exponents.pack(weight, "huffman")
    assert kernel.prepare(coded, huffman, (40, 96)) is None


@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code(arch: int) -> None:
    signature = {"fractions": "*u8", "codes": "*u8", "out": "*i16", "columns": "i32", "pitch": "i32", "base": "i32"}
    constants = {"BLOCK": kernel.BLOCK}
    aligned = ("columns", "pitch")
    case = offline.Case(
        "compress.kernels.triton.exponents", "join", signature, constants, arch, kernel.WARPS, 1, aligned
    )
    (built,) = offline.compile_cases([case])
    assert not any(opcode.startswith(("LDL", "STL")) for opcode in built.opcodes)
    assert sum(built.opcodes.values()) * 32 * kernel.WARPS / (2 * kernel.BLOCK) < MOST
