"""Compiled decoders on the CPU: the bits of the formats' own, and products with weights that they decode."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compress import formats
from compress.formats import trellis
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.trellis import two_floats
from compress.runtime.linear import PackedLinear
from helpers import problems
from helpers.cpu_weights import WEIGHTS, int_weight, kernel_of

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]


@pytest.mark.parametrize(
    "make, case, dtype",
    [
        *((*weight.values, torch.bfloat16) for weight in WEIGHTS),
        *((*WEIGHTS[i].values, dtype) for i in (3, 12, 13, 21, 28, -1, -5) for dtype in (torch.float16, torch.float32)),
    ],
)
def test_decoders(make: Any, case: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the format's own decoder, any rows of it, on any number of threads, and nothing past the end."""
    monkeypatch.setattr(small_matmul, "WEIGHTS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    weight = make(*case)
    kernel: Any = kernel_of(weight)
    expected = formats.decode_stored(weight, dtype)
    if getattr(weight.params, "permuted", False):
        original, expected = expected, expected[:, weight.tensors["order"].int()]
        assert torch.equal(kernel.arranged(original), expected)
    write = kernel.decoder(dtype)
    for start in {0, weight.shape[0] // 32 * 16}:
        space = torch.full((weight.shape[0] - start + 1, weight.shape[1]), 7.0, dtype=dtype)
        write(space[:-1], start)
        assert torch.equal(space[:-1], expected[start:]) and (space[-1] == 7).all()


def test_rounding_to_the_middle_and_of_what_is_not_finite() -> None:
    """Scales 1 + 2^-10 put codes between two bfloat16 numbers; infinite scales and NaN, with every payload, stay."""
    weight = int_weight((32, 64), 4, 64, False)
    weight.tensors["scales"].fill_(1 + 2**-10)
    for bits, row in ((0x7C00, 3), (0x7FFF, 4), (0xFE01, 5)):
        weight.tensors["scales"][:, row] = torch.tensor([bits], dtype=torch.uint16).view(torch.float16)
    kernel: Any = kernel_of(weight)
    for dtype in (torch.bfloat16, torch.float16):
        found = torch.empty(32, 64, dtype=dtype)
        kernel.decoder(dtype)(found, 0)
        assert found[3:6].isfinite().logical_not().all()
        torch.testing.assert_close(found, formats.decode_stored(weight, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make, case", [WEIGHTS[i].values for i in (0, 13, 21, 29, -1, -9)])
def test_decoders_without_some_instructions(make: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older processor runs instead, on this one."""
    weight = make(*case)
    kernel: Any = kernel_of(weight)
    monkeypatch.setattr(llvm, "features", frozenset)
    monkeypatch.setattr(llvm, "function", lambda kind, *settings: llvm.compiled(kind(*settings)))
    for dtype in (torch.bfloat16, torch.float16):
        found = torch.empty(weight.shape, dtype=dtype)
        kernel.decoder(dtype)(found, 0)
        assert torch.equal(found, formats.decode_stored(weight, dtype))


@pytest.mark.parametrize("divisor", [divisor for _, _, divisor in trellis.BYTE_SUMS.values()])
def test_division_by_a_fused_multiply_add(divisor: float) -> None:
    """n * high + n * low, rounded once after the second product, is n / divisor for every sum of four bytes."""
    high, low = two_floats(1 / divisor)
    for n in range(-510, 511):
        product = Fraction(torch.tensor(n * low, dtype=torch.float64).float().item())
        exact = n * Fraction(high) + product
        nearest = torch.tensor(n, dtype=torch.float64).div(divisor).float()
        gap = abs(torch.nextafter(nearest, torch.tensor(torch.inf)) - nearest).item()
        assert abs(exact - Fraction(nearest.item())) < Fraction(gap) / 2


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make, case", [WEIGHTS[i].values for i in (0, 11, 25, 29)])
def test_many_rows_take_panels(make: Any, case: Any, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, multiplied in either type; with the same results as with the whole weight decoded to that type.

    But for an order of columns of its own, and for how float32 products of other sizes are summed.
    """
    monkeypatch.setattr(emitter, "widens", lambda dtype: kind == torch.float32)
    weight = make(*case)
    layer = PackedLinear.from_packed(weight)
    kernel_of(weight)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(torch.zeros(51, weight.shape[1] + 8, dtype=torch.bfloat16))
    x = problems.random(2, 51, weight.shape[1]).bfloat16()
    expected, both = F.linear(x.to(kind), layer.dequantize(kind)).bfloat16(), []
    for nbytes in (1 << 22, 1 << 13):
        monkeypatch.setattr(dispatch, "PANEL", nbytes)
        monkeypatch.setattr(dispatch, "PANELS", {})
        found = layer(x)
        both.append(found)
        if getattr(weight.params, "permuted", False) or kind == torch.float32:
            torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)
        else:
            assert torch.equal(found, expected)
    assert kind == torch.float32 or torch.equal(*both)


@pytest.mark.parametrize(
    "features, name, widens",
    [
        ({"sse2", "avx2"}, "haswell", True),
        ({"sse2", "avx512bf16"}, "emeraldrapids", True),
        ({"sse2", "avx512bf16", "amx-bf16"}, "emeraldrapids", False),
        ({"sse2", "avx512bf16"}, "znver4", False),
        ({"neon", "bf16"}, "neoverse-v1", False),
    ],
)
def test_which_processors_multiply_bfloat16_as_float32(
    features: set[str], name: str, widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm, "features", lambda: frozenset(features))
    monkeypatch.setattr(llvm, "processor_name", lambda: name)
    assert emitter.widens(torch.bfloat16) == widens and not emitter.widens(torch.float16)
