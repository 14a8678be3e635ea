"""The low-rank part of a packed weight, and the format of its own: storage, products, checkpoints."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import CheckpointError
from compress.formats import lowrank, transforms
from compress.formats.stored import from_dict
from compress.kernels import dispatch
from compress.quant.incoherence import OPS
from compress.runtime.hf import CompressConfig, build_config, scheme
from compress.runtime.linear import PackedLinear
from compress.types import NO_TRANSFORMS, Activations, LowRank, PackedWeight, Stored, WeightTransforms
from helpers import problems
from helpers.pico import round_to_nearest

SHAPE = (48, 96)
KINDS = [
    LowRank(5),
    LowRank(5, dtype="bfloat16"),
    LowRank(5, 8),
    LowRank(5, 4, 32),
    LowRank(5, 4, -1),
    LowRank(5, 8, 7),
]
TOLERANCE = {16: 1e-3, 8: 0.01, 4: 0.15}


def factors(shape: tuple[int, int] = SHAPE, rank: int = 5) -> tuple[Tensor, Tensor]:
    return problems.random(rank, shape[1], seed=1), problems.random(rank, shape[0], seed=2) * 0.1


def with_part(
    kind: LowRank, around: WeightTransforms = NO_TRANSFORMS, activations: Activations | None = None
) -> PackedWeight:
    """A 4-bit weight with a low-rank part beside it."""
    weight = round_to_nearest(problems.random(*SHAPE), 4, 32)
    part = {lowrank.PREFIX + name: tensor for name, tensor in lowrank.pack(*factors(), kind).items()}
    signs = {key: torch.full(size, 0x5A, dtype=kind) for key, (size, kind) in transforms.specs(around, SHAPE).items()}
    stored = Stored("int", weight.params, around, activations, kind)
    return PackedWeight(stored, {**weight.tensors, **part, **signs}, weight.shape)


def read(name: str, tensors: dict[str, Tensor], kind: LowRank, size: int) -> Tensor:
    """A stored factor [rank, size], one number at a time, float64."""
    out = torch.zeros(kind.rank, size, dtype=torch.float64)
    group = size if kind.group_size == -1 else min(kind.group_size, size)
    for row in range(kind.rank):
        for column in range(size):
            if kind.bits == 16:
                out[row, column] = tensors[name][(row, column) if name == "a" else (column, row)].item()
                continue
            code = tensors[name][row, column if kind.bits == 8 else column // 2].item()
            if kind.bits == 4:
                code = code >> 4 * (column % 2) & 15
                code = code - 16 if code > 7 else code
            out[row, column] = code * tensors[f"{name}_scales"][row, column // group].item()
    return out


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [SHAPE, (7, 33)])
def test_factors_are_what_is_stored(kind: LowRank, shape: tuple[int, int]) -> None:
    a, b = factors(shape)
    packed = lowrank.pack(a, b, kind)
    assert {key: (tuple(t.shape), t.dtype) for key, t in packed.items()} == lowrank.specs(kind, shape)
    found = lowrank.factors(packed, kind, shape, torch.float32)
    for name, wanted, values in zip("ab", found, (a, b), strict=True):
        torch.testing.assert_close(wanted.double(), read(name, packed, kind, values.shape[1]), rtol=1e-6, atol=0)
        error = (wanted - values).norm() / values.norm()
        assert error < (TOLERANCE[kind.bits] if kind.dtype == "float16" else 3e-3)
    product = found[1].double().T @ found[0].double()
    torch.testing.assert_close(
        lowrank.decode(packed, kind, shape, torch.float32), product.float(), rtol=1e-4, atol=1e-5
    )


def test_zeros_are_stored_exactly() -> None:
    for kind in KINDS:
        packed = lowrank.pack(torch.zeros(5, 30), torch.zeros(5, 20), kind)
        assert not lowrank.decode(packed, kind, (20, 30), torch.float32).any()


def test_no_scale_is_worse_than_that_of_the_largest_entry() -> None:
    a, _ = factors((8, 256))
    kind = LowRank(5, 4, 64)
    found = lowrank.factor("a", lowrank.pack_factor("a", a, kind), kind, 256, torch.float32)
    grouped = a.unflatten(1, (-1, 64))
    step = grouped.abs().amax(2, keepdim=True) / 7
    plain = ((grouped / step).round().clamp(-8, 7) * step).flatten(1)
    assert (found - a).norm() < 0.97 * (plain - a).norm()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("around", [NO_TRANSFORMS, OPS], ids=["plain", "rotated"])
def test_the_part_is_counted_and_decoded(kind: LowRank, around: WeightTransforms) -> None:
    weight = with_part(kind, around)
    assert weight.nbytes == formats.nbytes(weight.stored, SHAPE)
    plain = formats.nbytes(Stored("int", weight.params, around), SHAPE)
    assert weight.nbytes - plain == sum(t.nbytes for k, t in weight.tensors.items() if k.startswith("lowrank_"))
    if kind.bits == 16:
        assert weight.nbytes - plain == 2 * kind.rank * sum(SHAPE)
    a, b = lowrank.part_factors(weight.tensors, kind, SHAPE, torch.float64)
    stored = formats.decode_stored(weight, torch.float64) + b.T @ a
    expected = transforms.effective(stored, around, weight.tensors) if around else stored
    torch.testing.assert_close(formats.decode(weight, torch.float32), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (200,)], ids=str)
@pytest.mark.parametrize("around", [NO_TRANSFORMS, OPS], ids=["plain", "rotated"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_by_the_whole_weight(
    dtype: torch.dtype, rows: tuple[int, ...], around: WeightTransforms, bias: bool
) -> None:
    weight = with_part(LowRank(5, 8), around)
    constant = problems.random(SHAPE[0], seed=4).to(dtype) if bias else None
    layer = PackedLinear.from_packed(weight, constant)
    x = problems.random(*rows, SHAPE[1], seed=3).to(dtype)
    expected = x.double() @ formats.decode(weight, torch.float64).T
    expected = expected if constant is None else expected + constant.double()
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(y, layer(x))
    assert y.shape == (*rows, SHAPE[0]) and y.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (y.double() - expected).abs().max() < tolerance * expected.abs().max()
    back = layer.packed()
    assert back.stored == weight.stored and back.tensors.keys() == weight.tensors.keys()
    plain = layer.to_linear(torch.float32)
    torch.testing.assert_close(plain.weight.detach(), formats.decode(weight, torch.float32))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_inputs_are_not_those_of_the_part(bits: int) -> None:
    """The inputs of M are rounded, those of the thin matrices are not."""
    kind, activations = LowRank(5), Activations(bits)
    weight = with_part(kind, OPS, activations)
    layer, x = PackedLinear.from_packed(weight), problems.random(6, SHAPE[1], seed=3)
    turned = transforms.apply_input(x, OPS, weight.tensors).double()
    step = turned.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    a, b = lowrank.part_factors(weight.tensors, kind, SHAPE, torch.float64)
    inner = (turned / step).round() * step @ formats.decode_stored(weight, torch.float64).T + turned @ a.T @ b
    expected = transforms.apply_output(inner, OPS, weight.tensors)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_pass_through_both_parts() -> None:
    weight = with_part(LowRank(5), OPS)
    layer, x = PackedLinear.from_packed(weight), problems.random(4, SHAPE[1], seed=3).requires_grad_()
    layer(x).square().sum().backward()
    plain = x.detach().clone().requires_grad_()
    (plain @ formats.decode(weight, torch.float32).T).square().sum().backward()
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-4, atol=1e-3)


def test_casting_keeps_the_factors() -> None:
    layer = PackedLinear.from_packed(with_part(LowRank(5)))
    layer.to(torch.bfloat16)
    assert layer.get_parameter("lowrank_a").dtype == torch.float16
    assert "+ rank 5" in repr(layer)


def test_a_compiled_layer_is_the_same() -> None:
    layer = PackedLinear.from_packed(with_part(LowRank(5, 4)))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = problems.random(3, SHAPE[1])
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


def test_the_configuration_names_the_part() -> None:
    weights = {"a": with_part(LowRank(5)), "b": with_part(LowRank(5)), "c": round_to_nearest(torch.ones(48, 96), 4, 32)}
    config = build_config({name: weight.stored for name, weight in weights.items()})
    again = CompressConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert [scheme(again, name).lowrank for name in "abc"] == [LowRank(5), LowRank(5), None]
    assert "lowrank" not in build_config({"c": weights["c"].stored}).default


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rank": 5}, "lowrank has no bits, group_size, dtype"),
        ([5], "lowrank is not a table"),
        ({"rank": 5, "bits": 3, "group_size": 64, "dtype": "float16"}, "bits 3 of a low-rank factor"),
        ({"rank": 0, "bits": 4, "group_size": 64, "dtype": "float16"}, "rank 0 is not positive"),
        ({"rank": 5, "bits": 4, "group_size": 64, "dtype": "float32"}, "dtype 'float32'"),
    ],
)
def test_a_part_that_cannot_be(values: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        from_dict({"format": "dense", "params": {}, "lowrank": values}, "somewhere")


def test_a_rank_above_the_dimension_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="rank 49 is above 48, the smaller side of the weight"):
        formats.specs(dataclasses.replace(with_part(LowRank(5)).stored, lowrank=LowRank(49)), SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_format_is_multiplied_as_two_thin_matrices(dtype: torch.dtype) -> None:
    params = lowrank.Params(5)
    weight = PackedWeight(Stored("lowrank", params), lowrank.pack(*factors(), params), SHAPE)
    layer, x = PackedLinear.from_packed(weight), problems.random(2, 3, SHAPE[1], seed=3).to(dtype)
    assert dispatch.taken("lowrank", params, SHAPE, x)
    expected = x.double() @ formats.decode(weight, torch.float64).T
    with torch.no_grad():
        y = layer(x)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert y.dtype == dtype and (y.double() - expected).abs().max() < tolerance * expected.abs().max()
    many = lowrank.Params(40)  # larger than the product: decoded
    assert not dispatch.taken("lowrank", many, SHAPE, x)
