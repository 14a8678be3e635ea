"""Products by tensor cores: what torch is given, by a stand-in for it that computes on a CPU, and when it is asked.

Nothing here ran on a GPU. Sizes, types and strides are also shown to torch's own checks of shapes, but for MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import decode_stored, grid
from compress.kernels.processors import Processor
from compress.runtime import activation_quant as inputs
from compress.runtime import integer, scaled
from compress.runtime.linear import PackedLinear
from compress.types import Activations, PackedWeight, Stored
from helpers import stored

BF16 = torch.bfloat16
FP8, STATIC_FP8 = Activations(dtype="fp8"), Activations(8, "tensor", dtype="fp8")
NVFP4, STATIC = Activations(4, dtype="nvfp4"), Activations(4, "tensor", dtype="nvfp4")
MXFP4, MXFP8, FP8_BLOCK = Activations(4, dtype="mxfp4"), Activations(dtype="mxfp8"), Activations(dtype="fp8-block")
PARAMS = {
    "nvfp4": grid.Params("e2m1", 16, "e4m3", tensor_scale=True),
    "mxfp4": grid.Params("e2m1", 32, "e8m0"),
    "mxfp8": grid.Params("e4m3", 32, "e8m0"),
    "fp8-block": grid.Params("e4m3", 128, "float32", 128),
    "fp8": grid.Params("e4m3", -1, "float32"),
}
IN_SCALE = torch.tensor([0.002])
SHAPE = (256, 640)


def weight_of(kind: Activations, shape: tuple[int, int] = SHAPE, params: grid.Params | None = None) -> PackedWeight:
    weight = stored.random_weight("grid", params or PARAMS[kind.dtype], shape)
    tensors = weight.tensors | ({"in_scale": IN_SCALE.clone()} if kind.scale == "tensor" else {})
    return PackedWeight(Stored("grid", weight.params, activations=kind), tensors, shape)


def unswizzled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales [rows, blocks] from the order of cuBLAS, one after another."""
    octets = scales.view(torch.uint8).flatten()
    across = -(-blocks // 4)
    out = torch.empty(rows, blocks, dtype=torch.uint8)
    for r in range(rows):
        for c in range(blocks):
            tile = (r // 128) * across + c // 4
            out[r, c] = octets[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4]
    return out.view(scales.dtype)


class Stand:
    """In the place of torch.nn.functional.scaled_mm."""

    def __init__(self) -> None:
        self.calls = 0
        self.real = F.scaled_mm
        self.error = 0.0

    def __call__(self, a: Tensor, b: Tensor, *scaling: Any, output_dtype: torch.dtype) -> Tensor:
        scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b = scaling
        self.calls += 1
        assert len(a) and len(a) % 16 == 0, "matrices without rows are left to no library"
        assert a.stride(1) == 1 and b.stride(0) == 1, "rows of the inputs, columns of the weight"
        is_mxfp4 = a.dtype == torch.float4_e2m1fn_x2 and scale_a.dtype == torch.float8_e8m0fnu
        if not is_mxfp4:  # of which torch's check counts half of the scales
            shown = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (a, b))
            scales = (
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (scale_a, scale_b)
            )
            (first, second), (one, other) = shown, scales
            checked = self.real(first, second, one, recipe_a, other, recipe_b, swizzle_a, swizzle_b,
                                output_dtype=output_dtype)  # fmt: skip
            assert (checked.shape, checked.dtype) == ((len(a), b.shape[1]), output_dtype)
        left, right = self._numbers(a), self._numbers(b.t())
        if recipe_a == F.ScalingType.BlockWise1x128:
            assert recipe_b == F.ScalingType.BlockWise128x128 and swizzle_a == F.SwizzleType.NO_SWIZZLE
            assert scale_a.stride() == (1, len(a)) and scale_b.stride(0) == 1 and scale_b.shape[0] % 4 == 0
            count = a.shape[1] // 128
            left = self._times(left, scale_a, 128)
            right = self._times(right, scale_b.t()[:, :count].repeat_interleave(128, 0), 128)
        else:
            size = 16 if recipe_a == F.ScalingType.BlockWise1x16 else 32
            assert recipe_a == recipe_b and swizzle_a == swizzle_b == F.SwizzleType.SWIZZLE_32_4_4
            assert scale_a.dtype == (torch.float8_e4m3fn if size == 16 else torch.float8_e8m0fnu)
            left, right = (
                self._times(x, unswizzled(scales, len(x), x.shape[1] // size), size)
                for x, scales in ((left, scale_a), (right, scale_b))
            )
        return (left @ right.T * (1 + self.error)).to(output_dtype)

    @staticmethod
    def _numbers(x: Tensor) -> Tensor:
        if x.dtype == torch.float8_e4m3fn:
            return x.float()
        params = PARAMS["nvfp4"]
        return grid.value_table("e2m1")[grid.unpack_codes(x.view(torch.uint8), params, 2 * x.shape[1]).int()]

    @staticmethod
    def _times(x: Tensor, scales: Tensor, size: int) -> Tensor:
        return x * scales.float().repeat_interleave(size, 1)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    stand = Stand()
    monkeypatch.setattr(F, "scaled_mm", stand)
    monkeypatch.setattr(scaled, "_missing", lambda *_: "")
    monkeypatch.setattr(integer, "_is_on_cpu", lambda _: False)
    monkeypatch.setattr(integer.dispatch, "taken", lambda *_: False)  # no kernel of packed weights is faster
    for cached in (integer._obstacle, scaled.failure):
        cached.cache_clear()
    yield stand
    for cached in (integer._obstacle, scaled.failure):
        cached.cache_clear()


def simulated(weight: PackedWeight, x: Tensor) -> Tensor:
    kind = weight.stored.activations
    assert kind is not None
    q, scale = inputs.quantize(x, kind, IN_SCALE)
    return (q.double() * scale.double()) @ decode_stored(weight, torch.float64).T


@pytest.mark.parametrize("kind", [NVFP4, STATIC, MXFP4, MXFP8, FP8_BLOCK], ids=inputs.describe)
@pytest.mark.parametrize("tokens", [1, 19])
def test_blocks_are_multiplied_as_they_are_stored(kind: Activations, tokens: int, tensor_cores: Stand) -> None:
    weight = weight_of(kind)
    layer = PackedLinear.from_packed(weight)
    x = torch.randn(tokens, SHAPE[1], generator=torch.Generator().manual_seed(1)).to(BF16)
    x[0] *= 50
    y, expected = layer(x), simulated(weight, x)
    assert tensor_cores.calls == 2, "the trial, and this product"
    assert y.dtype == BF16 and (y - expected).norm() < 4e-3 * expected.norm()
    name = f"{kind.dtype} x {kind.dtype} matmul"
    assert integer.describe("grid", weight.params, SHAPE, kind, "cpu").partition(";")[0] == name
    layer(x.float())
    assert tensor_cores.calls == 2, "other types are simulated"
    x[0, 3] = torch.nan
    assert layer(x)[0].isnan().all() and layer(x)[1:].isfinite().all()


@pytest.mark.parametrize("kind", [NVFP4, MXFP8, FP8_BLOCK], ids=inputs.describe)
def test_no_tokens_are_no_harm(kind: Activations, tensor_cores: Stand) -> None:
    """As those of an expert that no token has chosen."""
    layer = PackedLinear.from_packed(weight_of(kind))
    assert layer(torch.empty(0, SHAPE[1], dtype=BF16)).shape == (0, SHAPE[0])
    assert tensor_cores.calls == 2, "the trial, and this product"


@pytest.mark.parametrize("kind", [FP8, STATIC_FP8], ids=inputs.describe)
@pytest.mark.parametrize("rows", [1, -1])
@pytest.mark.parametrize("shape", [SHAPE, (37, 51)])
def test_fp8_by_torch(kind: Activations, rows: int, shape: tuple[int, int], tensor_cores: Stand) -> None:
    """torch._scaled_mm computes on a CPU, too."""
    weight = weight_of(kind, shape, grid.Params("e4m3", -1, "float32", rows))
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    y, expected = PackedLinear.from_packed(weight)(x), simulated(weight, x)
    assert integer.describe("grid", weight.params, shape, kind, "cpu").startswith("fp8 x fp8 matmul")
    assert (y - expected).norm() < 1e-5 * expected.norm()
    assert tensor_cores.calls == 0


def test_a_device_that_computes_otherwise_is_not_trusted(tensor_cores: Stand) -> None:
    weight = weight_of(MXFP8)
    tensor_cores.error = 0.05
    reason = integer.describe("grid", weight.params, SHAPE, MXFP8, "cpu")
    assert reason == "fake: torch multiplies mxfp8 with other results here"
    x = torch.randn(3, SHAPE[1]).to(BF16)
    expected = simulated(weight, x)
    assert (PackedLinear.from_packed(weight)(x) - expected).norm() < 1e-2 * expected.norm()
    assert tensor_cores.calls == 1


def test_a_device_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tensor_cores: Stand) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        tensor_cores.calls += 1
        raise NotImplementedError("needs another library\nand more")

    monkeypatch.setattr(F, "scaled_mm", refuse)
    weight = weight_of(MXFP4)
    for _ in range(2):
        PackedLinear.from_packed(weight)(torch.ones(3, SHAPE[1], dtype=BF16))
    assert tensor_cores.calls == 1
    reason = integer.describe("grid", weight.params, SHAPE, MXFP4, "cpu")
    assert reason == "fake: torch does not multiply mxfp4 here (needs another library)"


@pytest.mark.parametrize(
    ("kind", "capability", "reason"),
    [
        (FP8, (8, 9), ""),
        (FP8, (8, 6), "the GPU has no fp8 matrix multiplication"),
        (NVFP4, (10, 0), ""),
        (NVFP4, (12, 0), ""),
        (MXFP8, (9, 0), "the GPU has no mxfp8 matrix multiplication"),
        (FP8_BLOCK, (9, 0), ""),
        (FP8_BLOCK, (10, 0), "the GPU has no fp8-block matrix multiplication"),
        (FP8_BLOCK, None, "no fp8-block matrix multiplication on cuda"),
    ],
)
def test_capabilities(kind: Activations, capability: tuple[int, int] | None, reason: str) -> None:
    assert scaled.obstacle(PARAMS[kind.dtype], SHAPE, kind, Processor("cuda", capability)) == reason


def test_weights_of_other_types_and_widths() -> None:
    gpu = Processor("cuda", (10, 0))
    for kind, params in (
        (MXFP8, PARAMS["mxfp4"]),
        (NVFP4, PARAMS["mxfp4"]),
        (FP8, PARAMS["nvfp4"]),
        (Activations(), PARAMS["fp8"]),
    ):
        assert scaled.obstacle(params, SHAPE, kind, gpu) == f"the weight is not of the type of {inputs.describe(kind)}"
    reason = "256 x 320 weights are no multiples of 16 x 128"
    assert scaled.obstacle(PARAMS["mxfp8"], (256, 320), MXFP8, gpu) == reason


def test_scales_are_in_the_order_of_tiles() -> None:
    for rows, blocks in ((128, 4), (300, 13), (1, 1)):
        scales = torch.arange(rows * blocks).remainder(251).to(torch.uint8).view(rows, blocks)
        ordered = scaled.swizzle(scales)
        assert ordered.numel() == 512 * -(-rows // 128) * -(-blocks // 4)
        assert torch.equal(unswizzled(ordered, rows, blocks), scales)


def test_numbers_of_four_bits_are_their_codes() -> None:
    table = grid.value_table("e2m1")
    codes = torch.arange(16).repeat(2).view(1, 32)
    octets = scaled._nibbles(table[codes])
    assert torch.equal(grid.unpack_codes(octets, PARAMS["nvfp4"], 32), codes.to(torch.uint8))
