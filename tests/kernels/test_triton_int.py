"""The Triton kernel of the int format, interpreted, against the decoded weight in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats.int import Params
from compress.kernels import dispatch
from compress.kernels.triton import int as kernel
from compress.kernels.triton import products
from helpers import interpreter  # noqa: F401

H200 = products.Device(132, 227 * 1024)
A100 = products.Device(108, 163 * 1024, 8)


def stored(
    bits: int, group: int, symmetric: bool, shape: tuple[int, int], scale_dtype: str = "float16"
) -> tuple[Params, dict[str, Tensor]]:
    """Random codes, scales of both signs and zero points."""
    generator = torch.Generator().manual_seed(bits)
    params = int_format.params_for(bits, group, symmetric, shape[1], scale_dtype)
    count = 1 if group == -1 else -(-shape[1] // group)
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.randn(shape[0], count, generator=generator) / 50).to(getattr(torch, scale_dtype))
    zeros = None
    if not symmetric:
        zeros = torch.randint(0, 2**bits, scales.shape, generator=generator, dtype=torch.uint8)
    return params, int_format.pack(codes, scales, zeros, params)


def activations(rows: int, columns: int) -> Tensor:
    """float32 that float16 holds, with a mean of its own, as real ones have."""
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.5).half().float()


def reference(x: Tensor, tensors: dict[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    return x.double() @ int_format.decode(tensors, params, shape, torch.float64).T


def assert_product(
    found: Tensor, x: Tensor, tensors: dict[str, Tensor], params: Params, shape: tuple[int, int], bound: float = 2e-6
) -> None:
    wanted = reference(x, tensors, params, shape)
    assert found.shape == wanted.shape and found.dtype == x.dtype
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < bound, f"largest error {error:.2e} of the largest output"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory is not zero."""
    empty = torch.empty

    def poison(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(77)

    monkeypatch.setattr(torch, "empty", poison)
    products.forget()
    yield
    assert not products.workspace(torch.device("cpu")).counters.any(), "counters are not back at zero"
    products.forget()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_width(bits: int, symmetric: bool) -> None:
    shape = (24, 300)  # neither rows nor columns fill the stored blocks
    params, tensors = stored(bits, 32, symmetric, shape)
    x = activations(3, shape[1])
    assert_product(kernel.prepare(tensors, params, shape)(x), x, tensors, params, shape)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 33, 64, 65])
@pytest.mark.parametrize("bits", [3, 4])
def test_every_number_of_rows(bits: int, rows: int) -> None:
    shape = (48, 512)
    params, tensors = stored(bits, 64, bits == 3, shape)
    x = activations(rows, shape[1])
    assert_product(kernel.prepare(tensors, params, shape)(x), x, tensors, params, shape)


@pytest.mark.parametrize(
    ("bits", "group", "shape"),
    [(4, 64, (33, 1024)), (4, 128, (16, 1024)), (4, -1, (24, 1024)), (4, 16, (16, 256)), (4, 48, (16, 384)),
     (4, 96, (16, 768)), (4, 256, (16, 512)), (4, 1024, (16, 2048)), (2, 128, (16, 1024)), (2, -1, (17, 333)),
     (3, 64, (16, 576)), (2, 32, (17, 608)), (5, 96, (16, 1152)), (6, -1, (16, 96)), (4, 32, (16, 160)),
     (3, 128, (16, 2048)), (3, -1, (16, 300)), (5, 128, (16, 2048)), (7, -1, (16, 500)), (8, -1, (16, 257))],
)  # fmt: skip
def test_every_kind_of_group(bits: int, group: int, shape: tuple[int, int]) -> None:
    params, tensors = stored(bits, group, False, shape)
    assert dispatch.supported("cuda", "int", params, shape)
    x = activations(2, shape[1])
    assert_product(kernel.prepare(tensors, params, shape)(x), x, tensors, params, shape)


def test_groups_that_words_cannot_follow_are_declined() -> None:
    assert not dispatch.supported("cuda", "int", Params(4, 24, True, 16), (16, 240))
    assert dispatch.supported("cuda", "int", Params(4, -1, True, 16), (16, 240))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-7)])
def test_types_of_activations(dtype: torch.dtype, bound: float) -> None:
    shape = (32, 256)
    params, tensors = stored(4, 64, False, shape, "bfloat16")
    x = activations(3, shape[1]).to(dtype)
    assert_product(kernel.prepare(tensors, params, shape)(x), x, tensors, params, shape, bound)


def test_large_and_small_activations() -> None:
    shape = (16, 256)
    params, tensors = stored(8, 64, True, shape)
    sizes = torch.tensor([1e30, 1e6, 1.0, 1e-20, 0.0])
    x = (activations(5, shape[1]) * sizes[:, None]).bfloat16()
    found = kernel.prepare(tensors, params, shape)(x)
    wanted = reference(x, tensors, params, shape)
    for row in range(4):
        error = (found[row] - wanted[row]).abs().max() / wanted[row].abs().max()
        assert error < 2**-7, row
    assert not found[4].any()


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy
def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    shape = (16, 256)
    params, tensors = stored(4, 64, False, shape)
    x = activations(3, shape[1])
    alone = kernel.prepare(tensors, params, shape)(x)
    x[1, 7] = math.inf
    found = kernel.prepare(tensors, params, shape)(x)
    assert torch.equal(found[::2], alone[::2])
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_of_unequal_length(parts: int) -> None:
    shape = (24, 640)
    params, tensors = stored(4, 64, False, shape)
    x = activations(3, shape[1])
    plan = kernel.Launch(kernel.Config(16, 32, 4, 3, 4), 8, parts)
    found = [torch.empty(3, shape[0], dtype=torch.float32) for _ in range(2)]
    for out in found:
        kernel.launch(x.half(), tensors, params, out, plan)
    assert torch.equal(*found)
    assert_product(found[0], x, tensors, params, shape)


def test_no_rows() -> None:
    params, tensors = stored(4, 64, True, (16, 256))
    for dtype in (torch.float16, torch.float32):
        assert kernel.prepare(tensors, params, (16, 256))(torch.empty(0, 256, dtype=dtype)).shape == (0, 16)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group", "shape"),
    [(2, 32, (17, 300)), (3, 64, (20, 300)), (4, -1, (24, 300)), (4, 48, (16, 400)), (5, 32, (16, 300)),
     (7, 64, (5, 270)), (8, 128, (33, 512))],
)  # fmt: skip
def test_decode_is_that_of_the_format(bits: int, group: int, shape: tuple[int, int], symmetric: bool) -> None:
    params, tensors = stored(bits, group, symmetric, shape, "bfloat16" if bits == 4 else "float16")
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(
            kernel.prepare(tensors, params, shape).decode(dtype), int_format.decode(tensors, params, shape, dtype)
        )
    wanted = int_format.decode(tensors, params, shape, torch.float64)
    found = kernel.prepare(tensors, params, shape).decode(torch.bfloat16).double()
    assert ((found - wanted).abs() <= wanted.abs() * 2**-7).all()  # the interpreter cuts off instead of rounding


SHAPES = [
    (16, 64),
    (1024, 8192),
    (4096, 4096),
    (8192, 8192),
    (11008, 4096),
    (4096, 11008),
    (28672, 8192),
    (262144, 4096),
]


@pytest.mark.parametrize("device", [H200, A100, products.Device(20, 99 * 1024, 12)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_plans_fit_the_device_and_the_workspace(bits: int, device: products.Device) -> None:
    for shape in SHAPES:
        for rows in range(1, max(kernel.configurations(bits, device.major)) + 1):
            params = int_format.params_for(bits, 128, False, shape[1])
            config, block_m, parts = kernel.choose(params, shape, rows, device)
            assert rows <= block_m
            assert kernel.shared_bytes(config, bits, block_m) <= device.shared
            assert params.tile_words % config.block_words == 0 and 128 % config.block_words == 0
            if parts > 1:
                tiles = -(-int_format.padded_shape(params, shape)[0] // config.block_n)
                assert tiles * parts <= device.multiprocessors * config.programs
                assert tiles * parts * config.block_n * block_m <= products.FLOATS and tiles <= products.COUNTERS


def test_plans_fill_an_h200() -> None:
    for shape in [(4096, 4096), (8192, 8192), (28672, 8192)]:
        params = Params(4, 128, True, 128)
        config, _, parts = kernel.choose(params, shape, 1, H200)
        assert -(-shape[0] // config.block_n) * parts > 132 * 3


@pytest.mark.parametrize(("rank", "rows", "shape"), [(3, 1, (40, 256)), (16, 5, (64, 256)), (37, 9, (40, 512))])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_low_rank_part_is_added(rank: int, rows: int, shape: tuple[int, int], symmetric: bool) -> None:
    params, tensors = stored(3, 64, symmetric, shape)
    x = activations(rows, shape[1]).half()
    generator = torch.Generator().manual_seed(rank)
    hidden, factor = (torch.randn(size, generator=generator).half() for size in ((rows, rank), (rank, shape[0])))
    wanted = reference(x.double(), tensors, params, shape) + hidden.double() @ factor.double()
    found = kernel.prepare(tensors, params, shape).plus(x, hidden, factor)
    assert (found.double() - wanted).abs().max() < 1e-3 * wanted.abs().max()
    assert rank <= kernel._Int.most_rank
