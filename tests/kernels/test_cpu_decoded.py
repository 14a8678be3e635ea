"""Products with rows that are decoded near: former layouts, calls of several weights, and no decoded copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compress import formats
from compress.errors import CheckpointError
from compress.formats import codebook, kquant
from compress.kernels import dispatch, llvm
from compress.kernels.calls import ActivationRows, run
from compress.kernels.cpu import decoded, emitter
from compress.kernels.cpu.codebook import AnyCodebook
from compress.papers.formats import lattice, pvq, structured
from compress.runtime import linear
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight
from helpers import problems, stored
from helpers.cpu_weights import ANY_CODEBOOK, CODEBOOK, codebook_weight, kernel_of, kquant_weight

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]
FORMER = stored.former_codebooks((48, 96))


@pytest.mark.parametrize("weight", [*FORMER, codebook_weight(*CODEBOOK[8])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_former_codebooks_decode(weight: PackedWeight, dtype: torch.dtype) -> None:
    """Two stages, scales of blocks, factors, and an order beside outliers: the bits of the format's own decoder."""
    kernel = AnyCodebook(weight.tensors, weight.params, weight.shape)
    assert torch.equal(kernel.decode(dtype), formats.decode_stored(weight, dtype))


@pytest.mark.parametrize("case", CODEBOOK[:8], ids=str)
def test_codebooks_without_byte_permutations(case: Any) -> None:
    """What processors without AVX-512 VBMI multiply with."""
    weight = codebook_weight(*case)
    kernel = AnyCodebook(weight.tensors, weight.params, weight.shape)
    x = problems.random(7, weight.shape[1]) + 0.5
    expected = stored.product(x, weight)
    assert (kernel(x) - expected).norm() < 1e-6 * expected.norm()
    assert torch.equal(kernel(x)[3:4], kernel(x[3:4]))
    for dtype in (torch.float32, torch.float16):
        whole = torch.empty(weight.shape, dtype=dtype)
        kernel.decoder_with({}, dtype)(whole, 0)
        assert torch.equal(kernel.arranged(formats.decode_stored(weight, dtype)), whole)


@pytest.mark.parametrize("case", ANY_CODEBOOK[:2], ids=str)
def test_outliers_of_a_damaged_file_stay_inside(case: Any) -> None:
    weight = codebook_weight(case[0], {**case[1], "outliers": 2})
    kernel, x = kernel_of(weight), problems.random(2, weight.shape[1])
    results = []
    for wrong in (weight.shape[1] - 1, 1 << 30, -5):
        weight.tensors["outlier_index"][0] = wrong
        results.append(kernel(x))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_widths_of_a_damaged_lattice_stay_inside() -> None:
    """Groups that are all of the widest codes, or of unknown widths."""
    weight = stored.random_weight("lattice", lattice.Params(2, 8, 64, False, False), (20, 512))
    kernel, x = kernel_of(weight), problems.random(2, 512)
    for bits in (3, 200):
        weight.tensors["group_bits"].fill_(bits)
        assert kernel(x).shape == (2, 20) and kernel.decode(torch.float32).shape == (20, 512)
        with pytest.raises(CheckpointError, match="group_bits"):
            formats.check(weight, "a weight")


def test_weights_that_read_the_same_activations_share_them() -> None:
    """In one list of calls, outputs behind each other, more rows than are widened at once."""
    first, second = kquant_weight((40, 300), "q4_k"), codebook_weight((24, 300), ANY_CODEBOOK[1][1])
    kernels = [kernel_of(first), kernel_of(second)]
    x = problems.random(decoded.TOGETHER + 5, 300).bfloat16()
    expected = torch.cat([kernel(x) for kernel in kernels], 1)
    out, memory = torch.empty_like(expected), []

    def take(nbytes: int) -> int:
        memory.append(torch.empty(nbytes, dtype=torch.uint8))
        return memory[-1].data_ptr()

    calls = kernels[0].calls(ActivationRows(len(x), x.dtype, x.data_ptr(), out.data_ptr(), 64), take, kernels[1:])
    assert calls is not None
    run(calls)
    assert torch.equal(out, expected)
    joined = kernels[0].fuse(kernels[1:])
    assert joined is not None and torch.equal(joined(kernels, x), expected)
    permuted = kernel_of(codebook_weight((40, 300), {"bits": (5,), "vector_dim": 4, "permuted": True}))
    assert kernels[0].fuse([permuted]) is None


@pytest.mark.parametrize("rows", [1, 200])
def test_no_decoded_copy_is_kept(rows: int) -> None:
    linear.CACHE.clear()
    weight = kquant_weight((64, 512), "q4_k")
    layer = PackedLinear.from_packed(weight)
    layer(problems.random(rows, 512).bfloat16())
    assert linear.CACHE.nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(20, 64), (37, 64), (20, 300)])
def test_structured_weights_multiply_what_is_kept(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = stored.random_weight("structured", structured.Params(rows, columns), (37, 300))
    x = problems.random(3, 300).to(dtype)
    y, expected = kernel_of(weight)(x), stored.product(x, weight)
    assert y.dtype == dtype and (y - expected).norm() < (1e-2 if dtype == torch.bfloat16 else 1e-6) * expected.norm()
    assert dispatch.taken("structured", weight.params, weight.shape, problems.random(999, 300).bfloat16())


def test_what_is_left_to_the_formats() -> None:
    """Codes of two codebooks among eight neighbours."""
    params = codebook.Params((4,), 1, 16, group_columns=4)
    assert dispatch.supported("cpu", "codebook", params, (64, 64)) is None


def test_rows_of_activations_are_limited_where_matrices_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = dispatch.supported("cpu", "kquant", kquant.Params("q4_k"), (64, 512))
    assert kernel is not None
    for widens, most in ((True, decoded.MOST_WHERE_WIDE), (False, decoded.MOST)):
        monkeypatch.setattr(emitter, "widens", lambda dtype, widens=widens: widens)
        assert kernel.most_rows(torch.bfloat16) == most


@pytest.mark.parametrize("rows", [1, 40])
def test_kept_weights_are_multiplied_in_float32_where_bfloat16_is_slow(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a format without a kernel; a bias of another type is added to them."""
    monkeypatch.setattr(emitter, "widens", lambda dtype: dtype == torch.bfloat16)
    weight = stored.random_weight("pvq", pvq.Params(8, 6, 3), (40, 128))
    bias = problems.random(40)
    layer = PackedLinear.from_packed(weight, bias)
    x = problems.random(rows, 128).bfloat16()
    rounded = formats.decode_stored(weight, torch.bfloat16)
    exact = x.double() @ rounded.double().T + bias
    y = layer(x)
    assert y.dtype == torch.bfloat16 and (y - exact).norm() < 4e-3 * exact.norm()
    plain = F.linear(x, rounded) + bias
    monkeypatch.setattr(emitter, "widens", lambda dtype: False)
    assert torch.equal(layer(x), plain.to(x.dtype))
