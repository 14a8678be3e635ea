"""Weights that are quantized some rows at a time: tiles know nothing of each other, whoever makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.quant import feedback, gptq, trellis
from compress.types import PackedWeight, Stats
from helpers import problems

ROWS, COLUMNS = 300, 64
CASES: list[tuple[Any, Any]] = [
    (gptq, gptq.Config()),
    (gptq, gptq.Config(bits=3, static_groups=False, group_size=16, sweeps=2)),
    (gptq, gptq.Config(sweeps=0, symmetric=False, group_size=-1)),
    (trellis, trellis.Config(state_bits=8, tile_rows=64, block_columns=2)),
    (trellis, trellis.Config(state_bits=8, tile_rows=64, block_columns=2, sweeps=1, row_scales=True)),
    (trellis, trellis.Config(bits=3, state_bits=12, tile_rows=32, block_columns=2, code="hyb", act_order=False)),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "ROWS_PER_TILE", 128)


def row_tiles(method: Any, config: Any) -> list[slice]:
    return feedback.row_tiles((ROWS, COLUMNS), method.row_unit(config, (ROWS, COLUMNS)))


def layer(rows: int = ROWS) -> tuple[Tensor, Stats]:
    return problems.random(rows, COLUMNS, seed=7), problems.stats(problems.inputs(4 * COLUMNS, COLUMNS, 2))


def same(a: PackedWeight, b: PackedWeight) -> bool:
    return a.stored == b.stored and all(torch.equal(tensor, b.tensors[key]) for key, tensor in a.tensors.items())


def in_tiles(method: Any, config: Any, shares: Sequence[Sequence[int]]) -> PackedWeight:
    """Make the tiles `shares` each as another process would, the last of which joins them."""
    weight, stats = layer()
    rows, tiles = row_tiles(method, config), dict[int, Any]()
    for share in shares:
        rounding = method.prepare(weight, stats, config)
        tiles.update((number, method.quantize_rows(rounding, rows[number])) for number in share)
        rounding.release()
    packed: PackedWeight = method.join(rounding, [tiles[number] for number in range(len(rows))]).weight
    return packed


@pytest.mark.slow
@pytest.mark.parametrize(("method", "config"), CASES)
def test_it_does_not_matter_who_makes_a_tile(method: Any, config: Any) -> None:
    assert len(row_tiles(method, config)) == 3
    whole = in_tiles(method, config, [[0, 1, 2]])
    for shares in ([[0], [1], [2]], [[1, 2], [0]], [[2], [1, 0]]):
        assert same(in_tiles(method, config, shares), whole)


@pytest.mark.parametrize("config", [config for method, config in CASES if method is gptq])
def test_a_tile_of_gptq_is_a_weight_of_its_rows(config: gptq.Config) -> None:
    """The only thing that rows have in common is the type of the scales."""
    weight, stats = layer()
    parts = [gptq.quantize(weight[rows], stats, config).weight.tensors for rows in row_tiles(gptq, config)]
    whole = in_tiles(gptq, config, [[0, 1, 2]])
    assert whole.tensors.keys() == parts[0].keys()
    joined = int_format.join_rows(parts, whole.params)
    assert all(torch.equal(tensor, joined[key]) for key, tensor in whole.tensors.items())


@pytest.mark.parametrize("config", [config for method, config in CASES if method is trellis])
def test_tiles_share_the_scale_of_the_tensor(config: trellis.Config) -> None:
    """It is the one that fits all of them, and the loss is that of one tile."""
    weight, stats = layer()
    tiled = in_tiles(trellis, config, [[0, 1, 2]])
    alone = trellis.quantize(weight, stats, config).weight
    losses = [problems.loss(weight, problems.decoded(packed), stats.hessian) for packed in (tiled, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    damping = config.damp * stats.hessian.diagonal().mean() * torch.eye(COLUMNS)
    values, metric = problems.decoded(tiled), (stats.hessian + damping).double()
    pulled = values @ metric
    assert (pulled * weight).sum() / (pulled * values).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (128, 64), (129, 64), (5000, 3), (300, 1 << 19)])
@pytest.mark.parametrize("unit", [1, 48, 128, 256])
def test_spans_are_whole_units_of_all_rows(shape: tuple[int, int], unit: int) -> None:
    spans = feedback.row_tiles(shape, unit)
    assert [row for rows in spans for row in range(rows.start, rows.stop)] == list(range(shape[0]))
    assert all(rows.start % unit == 0 for rows in spans)
    most = 64 if 128 * shape[1] > feedback.MAX_WEIGHTS_PER_TILE else 128
    assert all(rows.stop - rows.start <= max(unit, most) for rows in spans)
