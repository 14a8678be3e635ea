"""Products with sums of stored weights: against float64, integers of activations made once, and as compiled calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from compress import formats
from compress.formats import e8p, levels, nested, trellis
from compress.formats import int as int_format
from compress.kernels import dispatch, llvm
from compress.kernels.calls import ActivationRows
from compress.kernels.cpu.activations import Quantize
from compress.papers.formats import pvq
from compress.types import PackedWeight
from helpers import problems, stored
from helpers.cpu_weights import kernel_of

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]
CASES: list[tuple[tuple[int, int], tuple[tuple[int, int, bool], ...]]] = [  # shape; bits, group, symmetric of parts
    ((64, 512), ((4, 128, True), (4, 128, True))),
    ((33, 576), ((4, 64, True), (4, 64, True))),
    ((48, 1024), ((2, 128, True), (2, 128, True), (4, 128, True))),
    ((40, 576), ((2, 64, True), (2, 64, False), (4, 64, True))),
    ((16, 640), ((4, 32, True), (3, 32, False))),
    ((20, 1130), ((4, 128, True), (2, 32, False))),  # other spans
    ((17, 300), ((2, -1, True), (8, -1, True))),
    ((32, 576), ((4, 64, True), (2, 64, True))),  # integers lie in another way for 5 to 7 rows
]


def summed(shape: tuple[int, int], parts: Sequence[tuple[int, int, bool]]) -> PackedWeight:
    weights = [
        stored.random_weight("int", int_format.params_for(bits, group, symmetric, shape[1]), shape, seed)
        for seed, (bits, group, symmetric) in enumerate(parts)
    ]
    return nested.join(weights, range(1, len(parts) + 1))


def others() -> list[PackedWeight]:
    """Sums of other formats."""
    params = trellis.Params(2, 12, 128)
    trellises = [stored.random_weight("trellis", params, (128, 512), seed) for seed in (0, 1)]
    scaled = trellis.Params(2, 12, 128, row_scales=True)
    rows = [stored.random_weight("trellis", scaled, (128, 512), seed) for seed in (0, 1)]
    points = stored.random_weight("e8p", e8p.Params(2, True), (64, 512))
    integers = stored.random_weight("int", int_format.params_for(4, 64, True, 512), (64, 512))
    return [nested.join(trellises, (2, 4)), nested.join(rows, (2, 4)), nested.join([points, integers], (2, 6))]


WEIGHTS = [summed(*case) for case in CASES] + others()


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 9, 40])
@pytest.mark.parametrize("weight", WEIGHTS, ids=range(len(WEIGHTS)))
def test_products(weight: PackedWeight, rows: int) -> None:
    kernel: Any = kernel_of(weight)
    x = problems.random(rows, weight.shape[1])
    expected = stored.product(x, weight)
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        y = kernel(x.to(dtype))
        assert y.dtype == dtype and (y.double() - expected).norm() < error * expected.norm()
    rounded = kernel(x.bfloat16().float()).bfloat16()
    assert torch.equal(kernel(x.bfloat16()), rounded), "outputs are rounded once"


@pytest.mark.parametrize("weight", WEIGHTS, ids=range(len(WEIGHTS)))
def test_decoding(weight: PackedWeight) -> None:
    kernel: Any = kernel_of(weight)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = formats.decode_stored(weight, dtype)
        assert torch.equal(kernel.decode(dtype), whole)
        out = torch.empty(5, weight.shape[1], dtype=dtype)
        kernel.decoder(dtype)(out, 0)
        assert torch.equal(out, whole[:5])


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_rows_are_looked_up(case: Any) -> None:
    weight = summed(*case)
    ids = torch.tensor([3, 0, weight.shape[0] - 1, 3])
    for dtype in (torch.float32, torch.bfloat16):
        looked_up = dispatch.rows(ids, weight.tensors, weight.format, weight.params, weight.shape, dtype)
        assert torch.equal(looked_up, formats.decode_rows(weight, ids, dtype))


@pytest.mark.parametrize(("number", "times"), [(0, 1), (2, 1), (5, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_activations_become_integers_once_for_each_kind_of_spans(number: int, times: int, rows: int) -> None:
    weight = WEIGHTS[number]
    kernel: Any = kernel_of(weight)
    x, out = problems.random(rows, weight.shape[1]).bfloat16(), torch.empty(rows, weight.shape[0]).bfloat16()
    memory = []

    def take(nbytes: int) -> int:
        memory.append(torch.empty(nbytes, dtype=torch.uint8))
        return memory[-1].data_ptr()

    calls = list(kernel.calls(ActivationRows(rows, x.dtype, x.data_ptr(), out.data_ptr(), weight.shape[0]), take))
    quantizations = sum(call.function is llvm.function(Quantize, x.dtype) for call in calls)
    assert quantizations == times * len({call.arguments[0] for call in calls if call.function is calls[0].function})
    for call in calls:
        call.run()
    assert torch.equal(out, kernel(x))


def test_sums_share_integers_with_each_other_and_with_their_parts() -> None:
    """Keys and values of several weights are multiplied in one call, whatever their levels."""
    sums = [summed((rows, 512), ((4, 128, True), (4, 128, True))) for rows in (64, 32)]
    kernels: list[Any] = [kernel_of(weight) for weight in (*sums, levels.view(sums[0], 1))]
    x = problems.random(3, 512).bfloat16()
    for first in range(3):
        chosen = kernels[first:] + kernels[:first]
        joined = chosen[0].fuse(chosen[1:])
        assert joined is not None
        assert torch.equal(joined(chosen, x), torch.cat([kernel(x) for kernel in chosen], -1))
    assert kernels[0].fuse([kernel_of(summed((16, 512), ((4, 32, True), (4, 32, True))))]) is None


def test_a_part_without_a_kernel_is_decoded() -> None:
    part = stored.random_weight("int", int_format.params_for(4, 64, True, 512), (64, 512))
    rest = stored.random_weight("pvq", pvq.Params(8, 6, 3), (64, 512))
    weight = nested.join([part, rest], (4, 8))
    x = problems.random(3, 512)
    expected = stored.product(x, weight)
    y = dispatch.product(x, weight.tensors, weight.format, weight.params, weight.shape)
    assert dispatch.supported("cpu", weight.format, weight.params, weight.shape) is None
    assert (y - expected).norm() < 1e-4 * expected.norm()
