"""Inputs in the types of tensor cores: numbers, scales of blocks, ties, gradients, and layers that read them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import CheckpointError
from compress.formats import int as int_format
from compress.formats.stored import from_dict, from_table
from compress.runtime import activation_quant as inputs
from compress.runtime import integer
from compress.runtime.activation_quant import LargestInput, fake_quantize, quantize, split
from compress.runtime.linear import PackedLinear
from compress.types import Activations, PackedWeight, Stored

BF16 = torch.bfloat16
NVFP4, STATIC = Activations(4, dtype="nvfp4"), Activations(4, "tensor", dtype="nvfp4")
MXFP4, MXFP8, FP8_BLOCK = Activations(4, dtype="mxfp4"), Activations(dtype="mxfp8"), Activations(dtype="fp8-block")
KINDS = [NVFP4, STATIC, MXFP4, MXFP8, FP8_BLOCK]
IN_SCALE = torch.tensor([2.0**-9])
each_kind = pytest.mark.parametrize("kind", KINDS, ids=inputs.describe)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by their codes: of two neighbours one is even
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator))
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


def nearest(value: float, points: list[float]) -> float:
    """The nearest of points >= 0 with the sign of the value; of two the one with the even code."""
    distances = [(abs(abs(value) - point), code % 2, point) for code, point in enumerate(points)]
    return math.copysign(min(distances)[2], value)


def slow_block(block: list[float], kind: Activations, s: float) -> list[float]:
    """b q of a block, one number after another, in float64."""
    top = max(map(abs, block))
    if top == 0:
        return [0.0] * len(block)
    points = E2M1 if kind.bits == 4 else E4M3
    if kind.dtype == "nvfp4":
        b = nearest(top / 6 / s, E4M3)
    elif kind.dtype == "fp8-block":
        b = top / 448
    else:
        b = 2.0 ** (math.floor(math.log2(top)) - (2 if kind.bits == 4 else 8))
    return [b * nearest(x / (b * s), points) if b else 0.0 for x in block]


def slow(token: list[float], kind: Activations) -> tuple[list[float], float]:
    """b q and s of a token."""
    s = 1.0
    if kind.dtype == "nvfp4":
        s = float(IN_SCALE) if kind.scale == "tensor" else max(map(abs, token)) / 2688
    size = kind.block
    return [y for at in range(0, len(token), size) for y in slow_block(token[at : at + size], kind, s)], s


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_numbers_are_those_of_a_slow_reference(kind: Activations, dtype: torch.dtype) -> None:
    x = random(6, 300, dtype=dtype)  # the last block is shorter
    q, scale = quantize(x, kind, IN_SCALE)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (torch.float32, x.shape, torch.float32, (6, 1))
    for token, numbers, s in zip(x, q, scale, strict=True):
        expected, whole = slow(token.double().tolist(), kind)
        torch.testing.assert_close(s.double(), torch.tensor([whole]).double(), rtol=2e-7, atol=0)
        torch.testing.assert_close(numbers.double(), torch.tensor(expected).double(), rtol=3e-7, atol=0)


@each_kind
def test_ties_and_powers_of_two(kind: Activations) -> None:
    """Numbers halfway between two points, exactly: the even one is taken."""
    points = E2M1 if kind.bits == 4 else E4M3
    middles = [(a + b) / 2 for a, b in zip(points, points[1:], strict=False)]
    below = [m for m in middles if m <= points[-1]]
    for exponent in (-6, 0, 5):
        # the largest number of each block makes its scale a power of two; for nvfp4 the token's s, too
        largest = 448.0 * 6 if kind.dtype == "nvfp4" else points[-1]
        rows = []
        for at in range(0, len(below), kind.block - 1):
            block = [points[-1], *below[at : at + kind.block - 1]]
            rows += [*block, *[0.0] * (kind.block - len(block))]
        token = [*rows, *([largest] + [0.0] * (kind.block - 1))] if kind.dtype == "nvfp4" else rows
        x = torch.tensor([token]) * 2.0**exponent
        expected, s = slow(x[0].double().tolist(), kind)
        q, scale = quantize(x, kind, IN_SCALE)
        if kind.scale == "token":
            assert scale.item() == s
        assert q[0].tolist() == expected


def test_exponents_follow_the_specification() -> None:
    """floor(log2) to the last bit, beside powers of two and down to subnormal numbers."""
    for power in (-149, -140, -126, -20, 0, 20, 127):
        for size in (2.0**power, math.nextafter(2.0**power, 0.0), 1.75 * 2.0**power):
            x = torch.zeros(1, 32)
            x[0, 3] = size
            top = float(x[0, 3])
            for kind, offset in ((MXFP4, 2), (MXFP8, 8)):
                made, _ = inputs.quantize_blocks(x, kind)
                if top:
                    expected = max(math.floor(math.log2(top)) - offset, -127)
                    assert made.scales.item() == 2.0**expected
    assert inputs.quantize_blocks(torch.zeros(1, 32), MXFP4)[0].scales.item() == 2.0**-127


def test_the_largest_of_a_block_of_mx_may_saturate() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([7.5, -7.5, 6.9, 1.0])
    assert quantize(x, MXFP4)[0][0, :4].tolist() == [6, -6, 6, 1]


def test_a_static_scale_saturates_as_engines_do() -> None:
    x = torch.full((1, 16), 1e4)
    q, scale = quantize(x, STATIC, torch.tensor([1.0]))
    assert q.unique().tolist() == [2688] and scale.item() == 1


def test_blocks_that_e4m3_rounds_to_nothing_are_zeros() -> None:
    x = torch.cat((torch.full((1, 16), 2688.0), torch.full((1, 16), 0.005)), 1)  # 0.005 / 6 is less than 2^-10
    q, _ = quantize(x, NVFP4)
    assert (q[0, :16] == 2688).all() and (q[0, 16:] == 0).all()


@each_kind
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_split_loses_nothing(kind: Activations, dtype: torch.dtype) -> None:
    x = random(9, 256, dtype=dtype) * 5
    q, scale = quantize(x, kind, IN_SCALE)
    part, factor = split(x, kind, IN_SCALE)
    assert part.dtype == dtype
    if kind.dtype == "nvfp4":
        assert part.abs().max() < 2
    if kind != FP8_BLOCK:
        assert torch.equal(part.double() * factor.double(), q.double() * scale.double())
    else:
        assert torch.equal(part, q.to(dtype))
    assert torch.equal(fake_quantize(x, kind, IN_SCALE), (q * scale).to(dtype))


@each_kind
def test_blocks_are_the_parts_of_what_quantize_gives(kind: Activations) -> None:
    x = random(3, 200)
    parts, scale = inputs.quantize_blocks(x, kind, IN_SCALE)
    q, same = quantize(x, kind, IN_SCALE)
    assert torch.equal(scale, same) and torch.equal((parts.numbers * parts.scales).flatten(1)[:, :200], q)
    assert (parts.numbers.shape, parts.scales.shape) == (
        (3, -(-200 // kind.block), kind.block),
        (3, -(-200 // kind.block), 1),
    )
    if kind.dtype == "nvfp4":
        assert torch.equal(parts.scales, parts.scales.to(torch.float8_e4m3fn).float())
    elif kind != FP8_BLOCK:
        assert (torch.frexp(parts.scales).mantissa == 0.5).all()


# ---------------------------------------------------------------- gradients


@each_kind
def test_gradients_pass_the_rounding_and_not_what_is_clipped(kind: Activations) -> None:
    weight, x = random(256, seed=1), random(6, 256).requires_grad_()
    x.data[0, 5] = 5000 * x.detach().abs().max()
    (fake_quantize(x, kind, IN_SCALE) * weight).sum().backward()
    parts, scale = inputs.quantize_blocks(x, kind, IN_SCALE)
    unit = x.detach().unflatten(1, (-1, kind.block)) / (parts.scales * scale[..., None])
    clipped = (unit.abs() > (7 if kind.bits == 4 else 464)) & (parts.scales > 0)
    assert x.grad is not None and clipped.any() == (kind not in (NVFP4, FP8_BLOCK))
    torch.testing.assert_close(x.grad, torch.where(clipped.flatten(1), 0, weight.expand(6, -1)))


# ---------------------------------------------------------------- settings


def test_a_static_scale_maps_the_largest_input_to_the_largest_number() -> None:
    running = LargestInput()
    running.add(random(40, 64))
    assert running.top is not None
    torch.testing.assert_close(running.in_scale(STATIC, "layer"), running.top.view(1) / (6 * 448))


@each_kind
def test_dictionaries_and_back(kind: Activations) -> None:
    assert from_table(Activations, dataclasses.asdict(kind), "here") == kind


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "nvfp4"}, "bits 8: nvfp4 has 4"),
        ({"dtype": "mxfp8", "bits": 4}, "bits 4: mxfp8 has 8"),
        ({"dtype": "mxfp4", "bits": 4, "clip": 0.9}, "clip 0.9: blocks of mxfp4 keep their largest magnitude"),
        ({"dtype": "fp8-block", "scale": "tensor"}, "scale tensor: fp8-block has scales of blocks alone"),
    ],
)
def test_settings_that_do_not_fit_are_errors(values: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"a.b: .*{message}"):
        from_dict({"format": "dense", "params": {}, "activations": values}, "a.b")


def test_descriptions() -> None:
    assert [inputs.describe(kind) for kind in (STATIC, MXFP8)] == ["static nvfp4 inputs", "mxfp8 inputs"]


# ---------------------------------------------------------------- layers


def weight_of(kind: Activations, shape: tuple[int, int]) -> PackedWeight:
    params = int_format.params_for(8, 128, True, shape[1])
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    scales = torch.rand(shape[0], -(-shape[1] // 128), generator=torch.Generator().manual_seed(4)).div(128).half()
    tensors = int_format.pack(codes, scales, None, params)
    if kind.scale == "tensor":
        tensors["in_scale"] = IN_SCALE.clone()
    return PackedWeight(Stored("int", params, activations=kind), tensors, shape)


@each_kind
def test_layers_multiply_with_what_inputs_become(kind: Activations) -> None:
    weight = weight_of(kind, (48, 256))
    x = random(5, 256)
    expected = fake_quantize(x, kind, IN_SCALE).double() @ formats.decode(weight, torch.float64).T
    torch.testing.assert_close(PackedLinear.from_packed(weight)(x).double(), expected, rtol=1e-4, atol=1e-3)
    assert integer.describe("int", weight.params, (48, 256), kind, "cpu") == f"fake: inputs of {kind.dtype}"


def test_layers_are_cut_where_inputs_allow_it() -> None:
    whole = PackedLinear.from_packed(weight_of(FP8_BLOCK, (48, 512)))
    x = random(5, 512)
    parts = [formats.cut(whole.packed(), range(48), part) for part in (range(256), range(256, 512))]
    joined = sum(PackedLinear.from_packed(part)(x[:, at : at + 256]) for part, at in zip(parts, (0, 256), strict=True))
    torch.testing.assert_close(joined, whole(x), rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="scale of a whole token"):
        formats.cut(weight_of(NVFP4, (48, 512)), range(48), range(256))
    weight = weight_of(FP8_BLOCK, (48, 512))
    with pytest.raises(ValueError, match="column 64 lies within a block of 128 quantized inputs"):
        formats.cut(weight, range(48), range(64))
