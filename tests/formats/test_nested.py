"""Sums of parts, codes in planes below one scale, and the levels of both, against sums in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import CheckpointError
from compress.formats import dense, e8p, levels, nested, sliced, stored, trellis
from compress.formats import int as int_format
from compress.types import PackedWeight, Stored, WeightTransforms
from helpers.stored import random_weight

SHAPE = (40, 200)
PLANES = [(2, 2), (4, 4), (2, 2, 4), (4, 2), (3, 1, 4), (1, 1, 1)]


def of_ints(*settings: tuple[int, int, bool], shape: tuple[int, int] = SHAPE) -> list[PackedWeight]:
    """Random integers of so many bits, columns of a group, with zero points or without."""
    return [
        random_weight("int", int_format.params_for(bits, group, symmetric, shape[1]), shape, seed)
        for seed, (bits, group, symmetric) in enumerate(settings)
    ]


def planes(widths: tuple[int, ...], group: int = 32, symmetric: bool = True) -> PackedWeight:
    return random_weight("sliced", sliced.params_for(widths, group, symmetric, SHAPE[1]), SHAPE)


def through_json(weight: PackedWeight) -> Stored:
    return stored.from_dict(json.loads(json.dumps(stored.to_dict(weight.stored))), "here")


def exact(weight: PackedWeight) -> Tensor:
    """The weight in float64, from its codes, scales and zero points."""
    codes, scales, zeros = int_format.unpack(weight.tensors, weight.params, weight.shape)
    owner = torch.arange(weight.shape[1]) // weight.params.group_size
    zero = 2 ** (weight.params.bits - 1) if zeros is None else zeros.double()[:, owner]
    return scales.double()[:, owner] * (codes.double() - zero)


@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_is_that_of_its_parts(count: int) -> None:
    parts = of_ints((2, 32, True), (2, 64, False), (4, 32, True))[:count]
    weight = nested.join(parts, (2, 4, 8)[:count])
    formats.check(weight, "weight")
    assert through_json(weight) == weight.stored
    wanted = sum((exact(part) for part in parts), torch.zeros(SHAPE).double())
    assert torch.allclose(formats.decode(weight, torch.float32).double(), wanted, rtol=0, atol=1e-7)
    assert weight.nbytes == formats.nbytes(weight.stored, SHAPE) == sum(part.nbytes for part in parts)


def test_the_first_level_is_the_first_part_and_shares_its_tensors() -> None:
    parts = of_ints((2, 32, True), (2, 64, False), (4, 32, True))
    whole = nested.join(parts, (2, 4, 8))
    assert levels.levels(whole.stored) == (2, 4, 8)
    first = levels.view(whole, 2)
    assert first.stored == parts[0].stored and first.tensors.keys() == parts[0].tensors.keys()
    assert all(first.tensors[name] is tensor for name, tensor in parts[0].tensors.items())
    second = levels.view(whole, 4)
    assert second.stored == nested.join(parts[:2], (2, 4)).stored
    assert torch.equal(
        formats.decode(second, torch.bfloat16), formats.decode(nested.join(parts[:2], (2, 4)), torch.bfloat16)
    )
    assert levels.view(whole, 8) is whole and levels.view(whole, None) is whole


def test_a_level_between_two_is_the_lower_one() -> None:
    whole = nested.join(of_ints((2, 32, True), (2, 32, True)), (2, 4))
    assert levels.at_level(whole.stored, 3) == levels.at_level(whole.stored, 2) == levels.at_level(whole.stored, 1)
    assert levels.at_level(whole.stored, 9) == whole.stored
    plain = of_ints((4, 32, True))[0]
    assert levels.levels(plain.stored) == () and levels.view(plain, 2) is plain


def test_what_lies_around_a_weight_is_that_of_every_level() -> None:
    whole = nested.join(of_ints((2, 32, True), (2, 32, True)), (2, 4))
    around = Stored("nested", whole.params, WeightTransforms(("signs",), ()))
    assert levels.at_level(around, 2).ops == around.ops and levels.at_level(around, 2).format == "int"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("widths", PLANES)
def test_the_first_planes_are_the_middle_of_what_a_code_may_be(widths: tuple[int, ...], symmetric: bool) -> None:
    weight = planes(widths, symmetric=symmetric)
    bits = sum(widths)
    codes, scales, zeros = int_format.unpack(weight.tensors, weight.params, SHAPE)
    owner = torch.arange(SHAPE[1]) // 32
    zero = torch.tensor(2.0 ** (bits - 1)) if zeros is None else zeros.double()[:, owner]
    for level in levels.levels(weight.stored):
        low = 2 ** (bits - level)
        view = levels.view(weight, level)
        formats.check(view, "view")
        assert through_json(view) == view.stored
        middle = codes.double() // low * low + (low - 1) / 2
        wanted = scales.double()[:, owner] * (middle - zero)
        assert torch.equal(formats.decode(view, torch.float32).double(), wanted)
        rows = torch.tensor([39, 0, 7, 7])
        assert torch.equal(formats.decode_rows(view, rows, torch.float32).double(), wanted[rows])


def test_a_whole_code_is_that_of_int() -> None:
    """Equal codes and scales decode alike however their planes lie, and take as many bytes."""
    plain = of_ints((4, 128, True), shape=(32, 1024))[0]
    codes, scales, _ = int_format.unpack(plain.tensors, plain.params, plain.shape)
    params = sliced.params_for((2, 2), 128, True, 1024)
    weight = PackedWeight(Stored("sliced", params), sliced.pack(codes, scales, None, params), plain.shape)
    assert torch.equal(formats.decode(weight, torch.bfloat16), formats.decode(plain, torch.bfloat16))
    assert weight.nbytes == plain.nbytes


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_integers_that_lie_in_planes_have_levels(bits: int) -> None:
    weight = of_ints((bits, 32, True))[0]
    assert levels.levels(weight.stored)[0] == 4
    view = levels.view(weight, 4)
    low = 2 ** (bits - 4)
    codes, scales, _ = int_format.unpack(weight.tensors, weight.params, SHAPE)
    middle = codes.double() // low * low + (low - 1) / 2 - 2 ** (bits - 1)
    wanted = scales.double()[:, torch.arange(SHAPE[1]) // 32] * middle
    assert torch.equal(formats.decode(view, torch.float32).double(), wanted)
    assert view.nbytes < weight.nbytes


@pytest.mark.parametrize("bits", [3, 4])
def test_the_first_code_of_e8p_is_a_level(bits: int) -> None:
    weight = random_weight("e8p", e8p.Params(bits, True), SHAPE)
    assert levels.levels(weight.stored) == (2, bits)
    view = levels.view(weight, 2)
    assert view.stored == Stored("e8p", e8p.Params(2, True)) and "residual" not in view.tensors
    assert formats.decode(view, torch.float32).shape == SHAPE


def test_parts_may_be_of_any_format() -> None:
    params = trellis.Params(2, 12, 256)
    parts = [random_weight("trellis", params, (256, 64), seed) for seed in (0, 1)]
    weight = nested.join([*parts, *of_ints((4, 32, True), shape=(256, 64))], (2, 4, 8))
    formats.check(weight, "weight")
    assert through_json(weight) == weight.stored and not formats.has_rows(weight.stored)
    assert levels.view(weight, 2).stored == parts[0].stored
    wanted = sum(
        formats.decode(part, torch.float32).double()
        for part in nested.split(weight.tensors, weight.params, weight.shape)
    )
    assert torch.allclose(formats.decode(weight, torch.float32).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "weight", [nested.join(of_ints((4, 32, True), (4, 64, False)), (4, 8)), planes((2, 2, 4)), None]
)
def test_rows_lie_apart(weight: PackedWeight | None) -> None:
    weight = weight or beside_original((4, 32, True))
    assert formats.has_rows(weight.stored)
    whole = formats.decode(weight, torch.bfloat16)
    rows = torch.tensor([39, 0, 16, 5, 5])
    assert torch.equal(formats.decode_rows(weight, rows, torch.bfloat16), whole[rows])
    parts = [formats.cut(weight, part, range(SHAPE[1])) for part in (range(16), range(16, 32), range(32, 40))]
    joined = PackedWeight(weight.stored, formats.join_rows(parts), SHAPE)
    formats.check(joined, "joined")
    assert torch.equal(formats.decode(joined, torch.bfloat16), whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"levels": [4, 4]}, "levels"),
        ({"levels": [8, 4]}, "levels"),
        ({"levels": [4]}, "levels"),
        ({"parts": []}, "parts"),
        ({"parts": [{"format": "int"}, {"format": "int"}]}, "a part has no params"),
        ({"parts": [3, 4]}, "not a table"),
        ({"parts": "ab"}, "parts"),
    ],
)
def test_impossible_sums_are_refused(changes: dict[str, Any], said: str) -> None:
    weight = nested.join(of_ints((4, 32, True), (4, 32, True)), (4, 8))
    table = json.loads(json.dumps(stored.to_dict(weight.stored)))
    table["params"] |= changes
    with pytest.raises(CheckpointError, match=said) as raised:
        stored.from_dict(table, "here")
    assert "\n" not in str(raised.value)


def beside_original(*settings: tuple[int, int, bool], levels: tuple[int, ...] = (4, 16)) -> PackedWeight:
    """Random integers, and another weight of bfloat16 beside them."""
    original = random_weight("dense", dense.Params(), SHAPE, 9)
    return nested.join([*of_ints(*settings), original], levels)


@pytest.mark.parametrize("count", [1, 2])
def test_an_original_is_the_whole_weight_by_itself(count: int) -> None:
    weight = beside_original(*((4, 32, True), (4, 64, False))[:count], levels=(*(4, 8)[:count], 16))
    formats.check(weight, "weight")
    assert through_json(weight) == weight.stored
    assert levels.levels(weight.stored) == (*(4, 8)[:count], 16)
    values = weight.tensors["values"]
    assert torch.equal(formats.decode(weight, torch.bfloat16), values)
    assert torch.equal(formats.decode(weight, torch.float64), values.double())
    for level in (16, 20, None):
        view = levels.view(weight, level)
        assert view.stored == Stored("dense", dense.Params()) and [*view.tensors] == ["values"]
        assert view.tensors["values"] is values
    low, parts = levels.view(weight, 4), nested.split(weight.tensors, weight.params, SHAPE)
    assert low.stored == parts[0].stored and torch.equal(formats.decode(low, torch.float32).double(), exact(parts[0]))
    between = levels.view(weight, 9)
    assert between.nbytes == sum(part.nbytes for part in parts[:count])
    assert weight.nbytes == formats.nbytes(weight.stored, SHAPE) == between.nbytes + values.nbytes


def test_a_residual_is_not_an_original() -> None:
    original = random_weight("dense", dense.Params(), SHAPE)
    with pytest.raises(ValueError, match="a whole weight, of format dense, is not the last part"):
        nested.join([original, *of_ints((4, 32, True))], (4, 16))


def test_a_damaged_part_is_named() -> None:
    weight = nested.join(of_ints((4, 32, True), (4, 32, True)), (4, 8))
    scales = weight.tensors["scales_2"].clone()
    scales[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="here.scales_2 holds"):
        formats.check(PackedWeight(weight.stored, {**weight.tensors, "scales_2": scales}, weight.shape), "here")
    short = {name: tensor for name, tensor in weight.tensors.items() if name != "words4_2"}
    with pytest.raises(CheckpointError, match="here.words4_2 is missing"):
        formats.check(PackedWeight(weight.stored, short, weight.shape), "here")


@pytest.mark.parametrize("changes", [{"planes_of": (2, 3)}, {"planes_of": (4, 4)}, {"kept": 1}, {"planes_of": (5,)}])
def test_impossible_planes_are_refused(changes: dict[str, Any]) -> None:
    values = {"bits": 4, "group_size": 32, "symmetric": True, "tile_words": 16, "planes_of": (2, 2), "kept": 4}
    with pytest.raises(ValueError, match="planes_of|kept"):
        sliced.Params(**values | changes)
