"""Operations around a stored matrix: what a layer computes, what is decoded, and the way back, are the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import CheckpointError
from compress.formats import dense, transforms
from compress.kernels import dispatch, llvm
from compress.runtime.hf import build_config, scheme
from compress.runtime.linear import PackedLinear
from compress.types import NO_TRANSFORMS, PackedWeight, Stored, WeightTransforms
from helpers.pico import round_to_nearest
from helpers.problems import inputs, random

BOTH = WeightTransforms(("signs", "hadamard"), ("hadamard", "signs"))
VARIANTS = [
    BOTH,
    WeightTransforms(("signs",), ()),
    WeightTransforms((), ("signs",)),
    WeightTransforms(("hadamard",), ()),
    WeightTransforms((), ("hadamard",)),
    WeightTransforms(("signs", "hadamard"), ("hadamard", "channel_scale16")),
    WeightTransforms(("channel_scale16", "hadamard"), ("hadamard", "channel_scale8")),
    WeightTransforms(("channel_scale8",), ("channel_scale8", "hadamard")),
    NO_TRANSFORMS,
]
SHAPES = [(64, 96), (24, 50), (33, 40), (1, 8), (172, 12)]


def signs(ops_: WeightTransforms, shape: tuple[int, int]) -> dict[str, Tensor]:
    """What is stored of the diagonals: signs, and scales near 1."""
    names = [("out", name, shape[0]) for name in ops_.output] + [("in", name, shape[1]) for name in ops_.input]
    values = {size: random(size, seed=size) for size in shape}
    return {
        f"{side}_{name}": transforms.pack_diagonal(name, (1 + values[size].abs()).copysign(values[size]))
        for side, name, size in names
        if name in transforms.DIAGONAL
    }


def matrix(side: str, names: tuple[str, ...], size: int, tensors: dict[str, Tensor]) -> Tensor:
    """The product of operations as a matrix [size, size], float64, from unit vectors."""
    result = torch.eye(size, dtype=torch.float64)
    for name in names:  # columns are the images of the unit vectors
        result = transforms.TRANSFORMS[name].forward(result.T, tensors.get(f"{side}_{name}")).T
    return result


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65])
def test_signs_are_a_bitmap_with_the_lowest_bit_first(size: int) -> None:
    negative = random(size) < 0
    bitmap = transforms.pack_signs(negative)
    assert bitmap.dtype == torch.uint8 and bitmap.shape == (-(-size // 8),)
    for i in range(size):
        assert (int(bitmap[i // 8]) >> (i % 8)) & 1 == int(negative[i])
    assert torch.equal(transforms.unpack_signs(bitmap, size, torch.float32), torch.where(negative, -1.0, 1.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("around", VARIANTS)
def test_effective_is_out_m_in_and_rotate_undoes_it(around: WeightTransforms, shape: tuple[int, int]) -> None:
    stored, tensors = random(*shape), signs(around, shape)
    before = matrix("in", around.input, shape[1], tensors)
    after = matrix("out", around.output, shape[0], tensors)
    weight = transforms.effective(stored, around, tensors)
    assert torch.allclose(weight.double(), after @ stored.double() @ before, atol=1e-5)
    assert torch.allclose(transforms.rotate(weight, around, tensors), stored, atol=1e-5)
    assert weight.data_ptr() != stored.data_ptr() and torch.equal(stored, random(*shape))


@pytest.mark.parametrize("around", VARIANTS)
def test_the_loss_is_the_same_in_either_basis(around: WeightTransforms) -> None:
    x = inputs(300, 50)
    weight, other, tensors = random(24, 50), random(24, 50, seed=9), signs(around, (24, 50))
    hessian = (x.double().T @ x.double()).float()
    rotated = transforms.rotate_hessian(hessian, around, tensors)
    moved = transforms.apply_input(x.double(), around, tensors)
    assert torch.equal(rotated, rotated.T)
    assert torch.allclose(rotated.double(), moved.T @ moved, atol=1e-5 * float(hessian.abs().max()))
    residual = (weight - other).double()
    turned = transforms.rotate(residual, around, tensors)
    assert turned.dtype == torch.float64
    gradients = inputs(70, 24).double()
    of_products = transforms.transpose_output(gradients, around, tensors)
    moment = gradients.T @ gradients
    metric = transforms.transpose_output(transforms.transpose_output(moment, around, tensors).T, around, tensors)
    assert torch.allclose(metric, of_products.T @ of_products, rtol=0, atol=1e-12 * float(metric.abs().max()))
    there = (turned @ rotated.double() * (metric @ turned)).sum()  # tr(E H E^T G)
    here = (residual @ hessian.double() * (moment @ residual)).sum()
    assert abs(there / here - 1) < 1e-5
    product = inputs(9, 24, seed=3).double()  # g^T (Out u) = (Out^T g)^T u
    there = (of_products[:9] * product).sum(1)
    assert torch.allclose((gradients[:9] * transforms.apply_output(product, around, tensors)).sum(1), there)


def test_matrices_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, tensors = random(24, 40), signs(BOTH, (24, 40))
    hessian = inputs(99, 40).T @ inputs(99, 40)
    whole = transforms.effective(weight, BOTH, tensors), transforms.rotate_hessian(hessian, BOTH, tensors)
    monkeypatch.setattr(transforms, "CHUNK", 7 * 40)
    parts = transforms.effective(weight, BOTH, tensors), transforms.rotate_hessian(hessian, BOTH, tensors)
    assert torch.equal(parts[1], parts[1].T)
    for part, all_at_once in zip(parts, whole, strict=True):
        assert torch.allclose(part, all_at_once, rtol=1e-5, atol=1e-6 * float(all_at_once.abs().max()))


# ---------------------------------------------------------------- layers


def packed(weight: Tensor, around: WeightTransforms, bits: int = 4, group: int = 32) -> PackedWeight:
    shape = (weight.shape[0], weight.shape[1])
    rounded = round_to_nearest(weight, bits, group)
    stored = dataclasses.replace(rounded.stored, ops=around)
    return PackedWeight(stored, {**rounded.tensors, **signs(around, shape)}, shape)


@pytest.mark.parametrize("shape", [(64, 96), (24, 50)])
@pytest.mark.parametrize("around", VARIANTS)
def test_a_layer_equals_its_decoded_weight(around: WeightTransforms, shape: tuple[int, int]) -> None:
    weight, bias, x = packed(random(*shape), around), random(shape[0], seed=3), random(2, 5, shape[1], seed=4)
    layer = PackedLinear.from_packed(weight, bias)
    plain = layer.to_linear(torch.float32)
    assert torch.equal(plain.weight, formats.decode(weight, torch.float32))
    y = layer(x)
    assert y.shape == (2, 5, shape[0]) and (y - plain(x)).abs().max() < 1e-5 * float(y.abs().max())
    assert weight.nbytes == formats.nbytes(Stored("int", weight.params, around), shape)
    again = layer.packed()
    assert again.stored.ops == around and again.tensors.keys() == weight.tensors.keys()
    assert (around.input == () or "hadamard" not in around.input) or "hadamard" in repr(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_layer_in_other_types(dtype: torch.dtype) -> None:
    layer = PackedLinear.from_packed(packed(random(64, 96), BOTH), random(64, seed=1)).to(dtype)
    x = random(3, 96, seed=2)
    y = layer(x.to(dtype))
    exact = layer.to_linear(torch.float64)(x.to(dtype).double()).detach()
    tolerance = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float64: 1e-6}[dtype]
    assert y.dtype == dtype and (y.double() - exact).abs().max() < tolerance * float(exact.abs().max())
    assert layer.get_parameter("in_signs").dtype == torch.uint8


@pytest.mark.usefixtures("small_weights_too")
def test_a_kernel_multiplies_by_the_stored_matrix() -> None:
    if not llvm.available():
        pytest.skip("nothing can be compiled here")
    weight = packed(random(64, 96), BOTH)
    x = random(2, 96, seed=2).bfloat16()
    assert dispatch.taken("int", weight.params, weight.shape, x)
    exact = x.double() @ formats.decode(weight, torch.float64).T
    y = PackedLinear.from_packed(weight)(x).double()
    assert (y - exact).abs().max() < 0.03 * float(exact.abs().max())


def test_gradients_pass_to_the_inputs() -> None:
    layer, x = PackedLinear.from_packed(packed(random(24, 50), BOTH)), random(3, 50).requires_grad_()
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.dequantize(torch.float32).sum(0).expand(3, 50), atol=1e-5)


def test_decoding_leaves_a_dense_matrix_as_it_is() -> None:
    values = random(8, 12)
    params = dense.Params("float32")
    weight = PackedWeight(
        Stored("dense", params, BOTH), {**dense.pack(values, params), **signs(BOTH, (8, 12))}, (8, 12)
    )
    first = formats.decode(weight, torch.float32)
    assert torch.equal(first, formats.decode(weight, torch.float32))
    assert torch.equal(formats.decode_stored(weight, torch.float32), values)


# ---------------------------------------------------------------- config.json


def test_the_configuration_names_the_operations() -> None:
    plain, turned = packed(random(24, 50), NO_TRANSFORMS), packed(random(24, 50), BOTH)
    config = build_config({"a": turned.stored, "b": turned.stored, "c": plain.stored})
    assert config.default["ops"] == {"input": ["signs", "hadamard"], "output": ["hadamard", "signs"]}
    assert config.modules == {"a": {}, "b": {}, "c": {"ops": {"input": [], "output": []}}}
    assert [scheme(config, name).ops for name in "abc"] == [BOTH, BOTH, NO_TRANSFORMS]
    config = build_config({"a": plain.stored, "b": plain.stored, "c": turned.stored})
    assert config.default.keys() == {"format", "params"} and config.modules["c"].keys() == {"ops"}
    assert [scheme(config, name).ops for name in "abc"] == [NO_TRANSFORMS, NO_TRANSFORMS, BOTH]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"input": ["signs", "spin"]}, "x: transform 'spin' is unknown to this version; upgrade compress"),
        ({"input": [4]}, "x: transform 4 is unknown"),
        ({"input": "signs"}, "x: ops needs the lists 'input' and 'output'"),
        ({"inputs": []}, "x: ops needs the lists"),
        ([], "x: ops needs the lists"),
        (None, "x: ops needs the lists"),
        ({"output": ["signs", "signs"]}, "a transform twice"),
    ],
)
def test_operations_that_cannot_be(values: object, error: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        transforms.from_dict(values, "x")
    assert error in str(caught.value) and "\n" not in str(caught.value)


def test_operations_from_a_configuration() -> None:
    assert transforms.from_dict({}, "x") == NO_TRANSFORMS
    assert transforms.from_dict(dataclasses.asdict(BOTH), "x") == BOTH
    assert (
        transforms.describe(BOTH) == "hadamard"
        and transforms.describe(WeightTransforms(("signs",))) == transforms.describe(NO_TRANSFORMS) == ""
    )
