"""Codes of E8P and trellises that move: nearest points and paths against searches that try all, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import e8p as e8p_format
from compress.formats import trellis as trellis_format
from compress.tune import blockwise
from compress.tune.codes import pv
from compress.tune.codes.pv import LatticePoints, Paths
from compress.tune.codes.vectors import Units
from compress.tune.trained import Rates
from compress.types import PackedWeight
from helpers import small_block
from helpers.stored import random_weight, samples

SHAPE = (40, 68)  # neither whole tiles nor whole vectors
RATES = Rates(steps=20, rate=0.01, codes_rate=2.0, start="codes")
E8P = [e8p_format.Params(bits, bits != 2) for bits in (2, 3, 4)]
TRELLIS = [
    trellis_format.Params(2, 6, 16),
    trellis_format.Params(3, 7, 16, "3inst", row_scales=True),
    trellis_format.Params(2, 8, 16, "hyb"),
    trellis_format.Params(1.5, 5, 32),
]
KINDS: list[tuple[str, Any]] = [*(("e8p", p) for p in E8P), *(("trellis", p) for p in TRELLIS)]


def units_of(packed: PackedWeight) -> Units:
    return LatticePoints(packed) if packed.format == "e8p" else Paths(packed)


def matrix_of(packed: PackedWeight) -> Tensor:
    return formats.decode_stored(packed, torch.float32)


def near(packed: PackedWeight, share: float, seed: int = 0) -> Tensor:
    matrix = matrix_of(packed)
    return matrix + share * matrix.std() * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1].bits}")
def packed(request: pytest.FixtureRequest) -> PackedWeight:
    return random_weight(*request.param, SHAPE)


def squares(matrix: Tensor, wanted: Tensor, units: Units) -> Tensor:
    """The squared distance of each unit, float64."""
    return units.units((matrix - wanted).detach().double()).square().sum(1)


def test_training_begins_with_what_is_stored_to_the_bit(packed: PackedWeight) -> None:
    assert pv.serves(packed)
    codes = pv.Codes(packed, near(packed, 0.1), RATES)
    assert torch.equal(codes.weight(), formats.decode(packed, torch.float32))
    rounded = codes.pack()
    assert all(torch.equal(rounded.tensors[name], tensor) for name, tensor in packed.tensors.items())
    assert codes.changed_share() == 0.0


def test_formats_without_units_keep_their_codes() -> None:
    assert not any(pv.serves(weight) for name in ("int", "nf") for weight in samples(name, (16, 64)))


def test_vectors_take_the_nearest_of_all_points() -> None:
    """At 3 and 4 bits the first points are tried in turn, so that no sum is further than that of the nearest first."""
    every = {bits: e8p_format.lookup(torch.arange(65536)[:, None].int(), 2).double() for bits in (2, 4)}
    every[3] = e8p_format.ball().double()
    for params in E8P:
        packed = random_weight("e8p", params, SHAPE)
        units, wanted = LatticePoints(packed), near(packed, 0.7)
        chosen = torch.tensor([0, 3, 200, 41])  # no vectors at the right edge
        units.encode(wanted, chosen)
        found = squares(units.matrix(), wanted, units)[chosen]
        scale = packed.tensors["scale"].double()
        for number, error in zip(chosen.tolist(), found, strict=True):
            row = packed.tensors["row_scales"][number // 9].double() if params.row_scales else 1.0
            x = units.units(wanted)[number].double() / (scale * row)
            first = every[2][(every[2] - x).square().sum(1).argmin()]
            least = (first - x).square().sum()
            if params.bits > 2:
                rest = (x - first) * e8p_format.RHO[params.bits]
                least = (every[params.bits] - rest).square().sum(1).min() / e8p_format.RHO[params.bits] ** 2
            reached = float(error / (scale * row) ** 2)
            assert reached == pytest.approx(float(least), rel=1e-4) or (params.bits > 2 and reached < least)


def best_path(table: Tensor, values: Tensor, params: trellis_format.Params) -> float:
    """The least squared error of a closed path, by Viterbi's algorithm from every node in turn; values [steps, dim]."""
    new = trellis_format.step_bits(params.symbol_bits) * (len(values) + 1)
    state = torch.arange(len(table))
    least = float("inf")
    for start in range(len(table) >> new[0]):
        cost = torch.full((len(table) >> new[0],), float("inf"), dtype=torch.float64)
        cost[start] = 0
        for t, value in enumerate(values):
            total = cost[state >> new[t]] + (table - value).square().sum(1)
            nodes = len(table) >> new[t + 1]
            cost = torch.full((nodes,), float("inf"), dtype=torch.float64)
            cost.scatter_reduce_(0, state % nodes, total, "amin")
        least = min(least, float(cost[start]))
    return least


def test_paths_are_as_good_as_the_best_closed_ones() -> None:
    for params in TRELLIS:
        packed = random_weight("trellis", params, (2 * params.tile_rows, 6))
        if params.code == "hyb":
            table = torch.randn(packed.tensors["table"].shape, generator=torch.Generator().manual_seed(4)).half()
            packed = PackedWeight(packed.stored, {**packed.tensors, "table": table}, packed.shape)
        units = Paths(packed)
        wanted = near(packed, 1.0) - matrix_of(packed)  # within the range of what states emit
        before = squares(units.matrix(), wanted, units)
        units.encode(wanted, torch.arange(12))
        after = squares(units.matrix(), wanted, units)
        assert (after <= before).all() and units.changed_share() > 0.1
        if params.row_scales:
            continue  # weighed alike in the search
        table = trellis_format.states_table(params, packed.tensors.get("table")).double()
        scale = packed.tensors["scale"].double()
        values = (units.units(wanted).double() / scale).unflatten(1, (-1, params.vector_dim))
        least = torch.tensor([best_path(table, each, params) for each in values], dtype=torch.float64)
        reached = after / scale**2
        assert (reached >= least * (1 - 1e-5)).all() and (reached <= least * (1 + 1e-5)).sum() >= 6
        assert float(reached.sum()) < 1.08 * float(least.sum())  # where a path closes is not searched in these 16 steps


def test_only_the_chosen_units_move_and_only_nearer(packed: PackedWeight) -> None:
    units, wanted = units_of(packed), near(packed, 1.5)
    before = matrix_of(packed)
    chosen = torch.tensor([1, 7, 8, len(units.units(before)) - 1])  # the last: at the right or lower edge
    units.encode(wanted, chosen)
    after = matrix_of(units.packed)
    formats.check(units.packed, "w")
    assert torch.equal(after, units.matrix())
    moved = units.units((before != after).float()).sum(1).nonzero()[:, 0].tolist()
    assert moved and set(moved) <= set(chosen.tolist())
    assert (squares(after, wanted, units) <= squares(before, wanted, units) * (1 + 1e-6)).all()
    again = matrix_of(units.packed)
    units.encode(again, torch.arange(len(units.units(again))))
    assert torch.equal(matrix_of(units.packed), again)  # nothing is nearer than what is there
    units.restore()
    assert torch.equal(matrix_of(units.packed), before) and units.changed_share() == 0


def descended(packed: PackedWeight, wanted: Tensor, steps: int) -> tuple[pv.Codes, list[float]]:
    """Least squares to a matrix; nothing but codes is trained."""
    codes = pv.Codes(packed, wanted, RATES)
    errors = []
    for step in range(steps):
        loss = 0.5 * (codes.weight() - wanted).square().sum()
        loss.backward()
        errors.append(float(loss.detach()))
        codes.behind(step)
    return codes, errors


def test_codes_come_nearer_and_are_stored_as_they_are(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    for units in (LatticePoints, Paths):
        monkeypatch.setattr(units, "share", 0.05)  # the weight is small
    wanted = near(packed, 0.7)
    codes, errors = descended(packed, wanted, 60)
    assert min(errors) < 0.9 * errors[0]
    assert 0 < codes.changed_share() < 1
    assert torch.equal(formats.decode(codes.pack(), torch.float32), codes.weight())
    other, _ = descended(packed, wanted, 60)
    tensors = other.pack().tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in codes.pack().tensors.items())


def test_what_training_holds_is_counted(packed: PackedWeight) -> None:
    """A probe and its gradient, what a move makes, and the codes three times."""
    codes = pv.Codes(packed, near(packed, 0.1), RATES)
    codes.weight().sum().backward()
    held = sum(each.nbytes for each in (*codes.units.codes, *codes.units.first, *codes.units.best))
    probe = codes.target.straight()
    assert probe.grad is not None
    assert probe.nbytes + probe.grad.nbytes + held <= (pv.BYTES - 4 * 4) * probe.numel()


@pytest.mark.parametrize("format", ["e8p", "trellis"])
def test_a_block_is_never_worse_for_moves(format: str) -> None:
    block = small_block.SmallBlock()
    given = small_block.batches(block, drift=0.2)
    tuning = blockwise.BlockTuning(block, small_block.LINEARS, given, 4, blockwise.Config(40, 0, codes="pv", tokens=16))
    params = E8P[0] if format == "e8p" else TRELLIS[0]
    for seed, name in enumerate(small_block.LINEARS):
        weight = tuning.weight(name)
        units = units_of(random_weight(format, params, (weight.shape[0], weight.shape[1]), seed))
        units.trained["scale"].start.fill_(float(weight.std()) / 1.1)
        units.encode(weight, torch.arange(len(units.units(weight))))
        tuning.add(name, units.pack())
    packed, _, said = tuning.finish()
    stage = tuning.stages[-1]
    assert stage.after < stage.before and "codes that moved" in said and "cannot" not in said
    assert tuning.error({}) == pytest.approx(stage.after)
    for name, stored in packed.items():
        assert torch.equal(tuning.model.get_parameter(f"{name}.weight"), formats.decode(stored, torch.float32))
