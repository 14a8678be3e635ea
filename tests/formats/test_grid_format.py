"""The grid format: values of the tables, and decoding against a loop in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compress import formats
from compress.formats import grid
from compress.types import PackedWeight
from helpers.stored import random_weight

CASES: list[dict[str, Any]] = [
    {"values": "e2m1", "block_columns": 16, "scale_type": "e4m3", "tensor_scale": True},
    {"values": "e2m1", "block_columns": 32, "scale_type": "e8m0"},
    {"values": "e4m3", "block_columns": 32, "scale_type": "e8m0"},
    {"values": "e4m3", "block_columns": -1, "block_rows": -1, "scale_type": "float32"},
    {"values": "e4m3", "block_columns": -1, "scale_type": "bfloat16"},
    {"values": "e4m3", "block_columns": 20, "block_rows": 3, "scale_type": "float32"},
    {"values": "nf4", "block_columns": 7, "scale_type": "nested"},
    {"values": "fp4", "block_columns": 64, "scale_type": "float16"},
    {"values": "dynamic8", "block_columns": 5, "scale_type": "nested"},
]


def slow_decode(weight: PackedWeight) -> list[list[float]]:
    """Number by number, as the docstring of the format says; in float64 where nothing is rounded."""
    params, (rows, columns), t = weight.params, weight.shape, weight.tensors
    table = grid.value_table(params.values).tolist()
    high, wide = params.block(weight.shape)
    across = -(-columns // wide)
    matrix = []
    for i in range(rows):
        line = []
        for j in range(columns):
            octets = t["codes"].view(torch.uint8)[i]
            code = int(octets[j]) if params.bits == 8 else int(octets[j // 2]) >> (4 * (j % 2)) & 15
            r, c = i // high, j // wide
            scale = float(t["scales"][r, c])
            if params.scale_type == "e8m0":
                scale = 2.0 ** (scale - 127)
            if params.scale_type == "nested":
                size = float(t["scale_sizes"][(r * across + c) // 256])
                scale = float(grid.value_table("dynamic8")[int(scale)]) * size + float(t["scale_mean"])
            line.append(table[code] * scale * (float(t["tensor_scale"]) if params.tensor_scale else 1.0))
        matrix.append(line)
    return matrix


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("shape", [(9, 64), (5, 33)])
def test_decoding_is_the_formula(settings: dict[str, Any], shape: tuple[int, int]) -> None:
    weight = random_weight("grid", grid.Params(**settings), shape)
    formats.check(weight, "weight")
    wanted = torch.tensor(slow_decode(weight), dtype=torch.float64)
    decoded = formats.decode(weight, torch.float32).double()
    assert torch.allclose(decoded, wanted, rtol=3e-7, atol=0 if settings["scale_type"] != "nested" else 1e-9)
    assert decoded.abs().max() > 0


@pytest.mark.parametrize("settings", CASES)
def test_packed_codes_are_unpacked(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = grid.Params(**settings), (6, 33)
    weight = random_weight("grid", params, shape)
    codes = grid.unpack_codes(weight.tensors["codes"], params, shape[1])
    again = grid.pack(codes, {k: v for k, v in weight.tensors.items() if k != "codes"}, params)
    whole = formats.decode(weight, torch.float32)
    assert torch.equal(formats.decode(PackedWeight(weight.stored, again, shape), torch.float32), whole)
    monkeypatch.setattr(grid, "DECODE_CHUNK", 70)
    assert torch.equal(formats.decode(weight, torch.float32), whole)


@pytest.mark.parametrize("settings", [case for case in CASES if grid.has_rows(grid.Params(**case))])
def test_single_rows_are_those_of_the_weight(settings: dict[str, Any]) -> None:
    weight = random_weight("grid", grid.Params(**settings), (9, 40))
    rows = torch.tensor([7, 0, 7, 3])
    assert formats.has_rows(weight.stored)
    assert torch.equal(formats.decode_rows(weight, rows, torch.float32), formats.decode(weight, torch.float32)[rows])


@pytest.mark.parametrize("settings", [case for case in CASES if not grid.has_rows(grid.Params(**case))])
def test_rows_that_share_something_are_not_single(settings: dict[str, Any]) -> None:
    assert not formats.has_rows(random_weight("grid", grid.Params(**settings), (9, 40)).stored)


def test_tables_have_the_published_values() -> None:
    assert grid.value_table("e2m1").tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert grid.value_table("e2m1").tolist()[9:] == [-0.5, -1, -1.5, -2, -3, -4, -6]
    assert grid.value_table("nf4").tolist()[::15] == [-1, 1] and grid.value_table("nf4")[7] == 0
    assert sorted(grid.value_table("fp4")[:8].tolist())[-1] == 1
    dynamic = grid.value_table("dynamic8")
    assert len(dynamic.unique()) == 256 and dynamic[-1] == 1 and float(dynamic.abs().min()) == 0
    assert math.isclose(float(dynamic[-2]), 0.9929687, rel_tol=1e-6)  # the midpoint of the last of 64 parts
    e4m3 = grid.value_table("e4m3")
    assert float(e4m3[0x7E]) == 448 and int(e4m3.isnan().sum()) == 2


def test_damage_is_named() -> None:
    weight = random_weight("grid", grid.Params(**CASES[1]), (4, 64))
    weight.tensors["scales"][1, 1] = 255
    with pytest.raises(formats.CheckpointError, match="weight.scales holds an exponent"):
        formats.check(weight, "weight")
    weight = random_weight("grid", grid.Params(**CASES[0]), (4, 64))
    weight.tensors["tensor_scale"].zero_()
    with pytest.raises(formats.CheckpointError, match="weight.tensor_scale is 0"):
        formats.check(weight, "weight")
