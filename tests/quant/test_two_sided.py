"""Two-sided rounding: every target by its definition, the identity as metric, and all methods that can do it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import plugins
from compress.quant import feedback, gptq, trellis, two_sided
from compress.run import sizes
from compress.types import LayerPlan, LinearSpec, OutputMetric, PackedWeight, Scheme, Stats, Stored
from helpers import problems

METHODS = [name for name in plugins.names("quant") if getattr(plugins.load("quant", name), "TWO_SIDED", False)]
IN_TILES = [name for name in METHODS if hasattr(plugins.load("quant", name), "quantize_rows")]
ROWS, COLUMNS = 192, 256  # a weight for all methods
SETTINGS: dict[str, dict[str, Any]] = {"trellis": {"state_bits": 8, "tile_rows": 48}, "e8p": {"sweeps": 1}}  # faster


def output_hessian(rows: int, seed: int = 5) -> Tensor:
    """Return G [rows, rows] float32: gradients that lie near a few directions, mean diagonal 1, plus 0.2 I."""
    directions = problems.random(rows, rows, seed=seed) * torch.arange(1, rows + 1).float().pow(-1.0)
    moments = (directions @ directions.T).double()
    return (moments / moments.diagonal().mean() + 0.2 * torch.eye(rows)).float()


def as_metric(moments: Tensor) -> OutputMetric:
    return OutputMetric(lambda rows: moments[rows, rows].clone())


def both_losses(weight: Tensor, values: Tensor, hessian: Tensor, moments: Tensor) -> float:
    """tr(E^T H E G) for weights [rows, columns]."""
    lost = weight.double() - values.double()
    return (moments.double() @ lost @ hessian.double() * lost).sum().item()


def layer(rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=7), problems.stats(problems.inputs(4 * columns, columns, 2))


def levels(values: Tensor) -> Tensor:
    """Return the nearest of eight levels."""
    return ((values / 0.6 - 0.5).round() + 0.5).clamp(-3.5, 3.5) * 0.6


class Rounder(feedback.Rounder):
    width = 1

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        return levels(target)


def round_groups(target: Tensor, factor: Tensor, output: OutputMetric, size: int, cut: int = 0) -> Tensor:
    """Return values [in, rows], one group after the other."""

    def quantize(_: slice, part: Tensor) -> tuple[Tensor, Tensor]:
        values = part - feedback.run(part, factor, Rounder()).residual
        return values, values

    rows = slice(0, target.shape[1])
    return torch.cat(two_sided.by_groups(target, output, rows, quantize, size, cut), 1)


def round_front(target: Tensor, factor: Tensor, moments: Tensor, size: int, width: int = 1) -> Tensor:
    return two_sided.wavefront(target, factor, moments, lambda _, goal: levels(goal), size, width)


class Problem:
    """A small weight [in, rows] with both factors, and what every place of it should have been rounded to."""

    def __init__(self, columns: int = 48, rows: int = 64) -> None:
        self.weight = problems.random(columns, rows, seed=3)
        hessian = problems.stats(problems.inputs(4 * columns, columns)).hessian
        self.hessian = problems.damped(hessian / hessian.diagonal().mean(), 0.01)
        self.moments = output_hessian(rows)
        self.left, self.right = problems.upper(self.hessian), problems.upper(self.moments)  # C and D

    def targets(self, values: Tensor, groups: list[slice]) -> tuple[Tensor, float]:
        """Return the target of each weight when all before it have these values, and the sum of what they lose."""
        residual, total = (self.weight - values).double(), 0.0
        targets = torch.zeros_like(residual)
        for j, rows in itertools.product(range(len(residual)), groups):
            seen, own = torch.zeros_like(residual), self.right[rows, rows]
            seen[: j + 1, : rows.stop] = residual[: j + 1, : rows.stop]
            seen[j, rows] = 0
            fixed = (self.left.T @ seen @ self.right)[j, rows]
            targets[j, rows] = self.weight[j, rows] + torch.linalg.solve(own.T, fixed) / self.left[j, j]
            total += (self.left[j, j] * (targets[j, rows] - values[j, rows]) @ own).square().sum().item()
        return targets, total

    def check(self, values: Tensor, groups: list[slice]) -> None:
        """Each value is the nearest level to its target, and the parts of the loss add up to all of it."""
        targets, total = self.targets(values, groups)
        nearest = (levels(targets) - targets).abs()
        assert ((values - targets).abs() <= nearest + 1e-4).all()
        assert total == pytest.approx(both_losses(self.weight.T, values.T, self.hessian, self.moments), rel=1e-5)


def cut_rows(edges: list[int]) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("size", "cut", "edges"),
    [(16, 0, [0, 16, 32, 48, 64]), (24, 0, [0, 24, 48, 64]), (16, 40, [0, 16, 32, 40, 56, 64]), (64, 0, [0, 64])],
)
def test_targets_of_groups_are_those_of_the_definition(size: int, cut: int, edges: list[int]) -> None:
    problem = Problem()
    values = round_groups(problem.weight, problem.left.float(), as_metric(problem.moments), size, cut)
    problem.check(values, cut_rows(edges))


@pytest.mark.parametrize(("columns", "size"), [(48, 16), (48, 32), (45, 8), (37, 16)])
def test_targets_of_a_wavefront_are_those_of_the_definition(columns: int, size: int) -> None:
    problem = Problem(columns)
    values = round_front(problem.weight, problem.left.float(), problem.moments, size)
    problem.check(values, cut_rows([*range(0, 65, size)]))
    one_by_one = round_groups(problem.weight, problem.left.float(), as_metric(problem.moments), size)
    assert torch.allclose(values, one_by_one, atol=1e-3)


def test_blocks_of_columns_in_a_wavefront() -> None:
    """Two columns at a time: a target is the block's, which the triangle C_BB holds together."""
    problem = Problem()
    values = round_front(problem.weight, problem.left.float(), problem.moments, 16, width=2)
    identity = round_front(problem.weight, problem.left.float(), torch.eye(64), 16, width=2)

    class Pairs(Rounder):
        width = 2

    one_sided = problem.weight - feedback.run(problem.weight, problem.left.float(), Pairs()).residual
    assert torch.allclose(identity, one_sided, atol=1e-5)
    losses = [both_losses(problem.weight.T, x.T, problem.hessian, problem.moments) for x in (values, identity)]
    assert losses[0] < 0.9 * losses[1]


@pytest.mark.parametrize("columns", [1, 16, 17, 48])
def test_the_identity_as_metric_changes_nothing(columns: int) -> None:
    problem = Problem(columns)
    factor, eye = problem.left.float(), torch.eye(64)
    one_sided = problem.weight - feedback.run(problem.weight, factor, Rounder()).residual
    assert torch.allclose(round_front(problem.weight, factor, eye, 16), one_sided, atol=1e-5)
    assert torch.allclose(round_groups(problem.weight, factor, as_metric(eye), 16), one_sided, atol=1e-5)


def test_without_a_metric_all_rows_are_one_group() -> None:
    asked = []

    def quantize(rows: slice, part: Tensor) -> tuple[int, Tensor]:
        asked.append(rows)
        return part.shape[1], part

    target = problems.random(8, 200)
    assert two_sided.by_groups(target, None, slice(32, 232), quantize) == [200]
    assert two_sided.by_tiles(target, None, quantize) == [200]
    assert asked == [slice(32, 232), slice(0, 200)]


def test_padding_does_not_matter() -> None:
    problem = Problem(rows=40)
    factor, padded = problem.left.float(), two_sided.pad_rows(as_metric(problem.moments), 40)
    moments = padded.block(slice(0, 48))
    assert torch.equal(moments[:40, :40], problem.moments) and torch.equal(moments[40:], torch.eye(48)[40:])
    assert torch.equal(padded.block(slice(8, 24)), problem.moments[8:24, 8:24])
    some, others = (
        torch.cat([problem.weight, fill * problems.random(48, 8, seed=9)], 1) for fill in (torch.zeros(()), 3.0)
    )
    values = [round_front(target, factor, moments, 16)[:, :40] for target in (some, others)]
    assert torch.equal(*values)
    assert torch.equal(*(round_groups(target, factor, as_metric(moments), 16)[:, :40] for target in (some, others)))


def test_groups_of_tiles_are_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "ROWS_PER_TILE", 100)
    target, asked = problems.random(8, 250), []
    metric = OutputMetric(lambda rows: asked.append((rows.start, rows.stop)) or torch.eye(rows.stop - rows.start))  # type: ignore[func-returns-value]
    groups = two_sided.by_tiles(target, metric, lambda rows, part: ((rows.start, rows.stop), part), unit=3)
    assert asked == [(0, 99), (99, 198), (198, 250)]
    assert groups == [(0, 63), (63, 99), (99, 162), (162, 198), (198, 250)]


def test_the_objective_is_the_loss_of_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "ROWS_PER_TILE", 32)
    problem = Problem(rows=80)
    layer = feedback.Objective(problem.weight, problem.hessian.float() - 0.25 * torch.eye(48), 0.25)
    both = two_sided.objective(layer, as_metric(problem.moments))
    apart = torch.block_diag(*(problem.moments[rows, rows] for rows in cut_rows([0, 32, 64, 80])))
    values = problems.random(48, 80, seed=4)
    assert both.loss(values) == pytest.approx(both_losses(problem.weight.T, values.T, problem.hessian, apart), rel=1e-5)


@pytest.mark.parametrize("name", ["gptq", "gptvq"])
def test_the_plan_adds_what_the_metric_takes(name: str) -> None:
    """Its factor in float64 and G for a tile of 4096 rows, however many there are."""
    shape, method = (8192, 2048), plugins.load("quant", name)
    config = method.Config()
    stored = Stored(method.FORMAT, method.plan_params(config, shape))
    spec = LinearSpec("model.layers.0.up", shape, torch.bfloat16, 0, "model.layers.0.in")
    schemes = [Scheme(name, config, two_sided=is_two_sided) for is_two_sided in (False, True)]
    needs = [sizes.layer_workspace(LayerPlan(spec, scheme, stored, 0)) for scheme in schemes]
    assert needs[1] == needs[0] + two_sided.workspace(shape)
    assert two_sided.workspace(shape) > 8 * 2 * 4096**2 + 4 * 4096**2 + 3 * 4 * shape[0] * shape[1]


# Methods.


def loss_of(packed: PackedWeight, hessian: Tensor, moments: Tensor) -> float:
    return both_losses(layer()[0], problems.decoded(packed), hessian, moments)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_loses_less(name: str) -> None:
    method = plugins.load("quant", name)
    (weight, stats), moments, config = layer(), output_hessian(ROWS), method.Config(**SETTINGS.get(name, {}))
    output = as_metric(moments)
    one, two = (method.quantize(weight, Stats(stats.hessian, stats.count, None, x), config) for x in (None, output))
    assert two.weight.stored.format == one.weight.stored.format and two.weight.nbytes == one.weight.nbytes
    lost = [loss_of(result.weight, stats.hessian, moments) for result in (one, two)]
    assert lost[1] < 0.8 * lost[0]
    again = method.quantize(weight, Stats(stats.hessian, stats.count, None, output), config).weight
    assert all(torch.equal(tensor, again.tensors[key]) for key, tensor in two.weight.tensors.items())


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_different_tiles_know_nothing_of_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No method asks for more of the metric than a tile has, and what lies between tiles is never read."""
    monkeypatch.setattr(feedback, "ROWS_PER_TILE", 96)
    method, (weight, stats), moments = plugins.load("quant", name), layer(), output_hessian(ROWS)
    config = method.Config(**SETTINGS.get(name, {}))
    tiles = feedback.row_tiles((ROWS, COLUMNS), method.row_unit(config, weight.shape) if name in IN_TILES else 1)
    assert len(tiles) == 2

    def block(rows: slice) -> Tensor:
        assert any(tile.start <= rows.start < rows.stop <= tile.stop for tile in tiles), rows
        return moments[rows, rows].clone()

    given = Stats(stats.hessian, stats.count, output=OutputMetric(block))
    if name not in IN_TILES:
        packed = method.quantize(weight, given, config).weight
    else:
        rounding = method.prepare(weight, given, config)
        packed = method.join(rounding, [method.quantize_rows(rounding, rows) for rows in tiles]).weight
        made: list[Any] = []
        for rows in reversed(tiles):  # each by another process, the last of which joins them
            rounding = method.prepare(weight, given, config)
            made.insert(0, method.quantize_rows(rounding, rows))
            rounding.release()
        shared = method.join(rounding, made).weight
        assert all(torch.equal(tensor, shared.tensors[key]) for key, tensor in packed.tensors.items())
    plain = method.quantize(weight, stats, config).weight
    apart = torch.block_diag(*(moments[rows, rows] for rows in tiles))
    assert loss_of(packed, stats.hessian, apart) < 0.85 * loss_of(plain, stats.hessian, apart)


def test_gptq_with_the_identity_gives_the_same_bytes() -> None:
    """Groups of rows are rounded by the products of all rows, so only one group is the same to the bit."""
    weight, stats = layer(two_sided.GROUP)
    given = Stats(stats.hessian, stats.count, None, as_metric(torch.eye(len(weight))))
    for config in (gptq.Config(), gptq.Config(bits=2, group_size=64, static_groups=False, sweeps=2)):
        one, two = (gptq.quantize(weight, x, config).weight.tensors for x in (stats, given))
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def test_trellis_with_the_identity_takes_the_same_paths() -> None:
    weight, stats = problems.random(150, 48, seed=7), problems.stats(problems.inputs(200, 48, 2))
    config = trellis.Config(state_bits=8, tile_rows=64, block_columns=1)
    given = Stats(stats.hessian, stats.count, None, as_metric(torch.eye(len(weight))))
    one, two = (problems.decoded(trellis.quantize(weight, x, config).weight) for x in (stats, given))
    assert (one - two).abs().lt(1e-4).double().mean() > 0.95
    assert problems.loss(weight, two, stats.hessian) == pytest.approx(
        problems.loss(weight, one, stats.hessian), rel=0.01
    )


def test_sweeps_that_are_not_done_are_reported() -> None:
    weight, stats = layer(32, 16)
    config = trellis.Config(state_bits=8, sweeps=1)
    given = Stats(stats.hessian, stats.count, None, as_metric(torch.eye(32)))
    assert trellis.quantize(weight, given, config).notes == (trellis.NO_SWEEPS,)
    assert trellis.quantize(weight, stats, config).notes == ()


@pytest.mark.parametrize(("name", "settings"), [("e8p", {}), ("e8p", {"row_scales": True}), ("trellis", {})])
def test_the_scale_of_the_tensor_is_the_best_in_the_metric(name: str, settings: dict[str, Any]) -> None:
    method, (weight, stats), moments = plugins.load("quant", name), layer(), output_hessian(ROWS)
    config = method.Config(**settings)
    packed = method.quantize(weight, Stats(stats.hessian, stats.count, None, as_metric(moments)), config).weight
    values = problems.decoded(packed)
    pulled = moments.double() @ values @ problems.damped(stats.hessian, config.damp)
    assert ((pulled * weight).sum() / (pulled * values).sum()).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 4, "group_weights": 20000}, {"bits": 4, "vector_dim": 1}])
def test_codebooks_of_some_rows_serve_groups_of_these(settings: dict[str, Any]) -> None:
    """Codebooks of 78 rows: no group of rows that is rounded again has two of them."""
    method, (weight, stats), moments = plugins.load("quant", "gptvq"), layer(), output_hessian(ROWS)
    config = method.Config(sweeps=0, iterations=4, **settings)
    given = Stats(stats.hessian, stats.count, None, as_metric(moments))
    one, two = (method.quantize(weight, x, config).weight for x in (stats, given))
    assert loss_of(two, stats.hessian, moments) < 0.8 * loss_of(one, stats.hessian, moments)
