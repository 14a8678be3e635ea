"""PTQ1.61: the paper's formulas in float64, its bits, its loss, and scales that are learned."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.calib.stats import HessianSum
from compress.papers.formats import salient as salient_format
from compress.papers.quant import ptq161
from compress.papers.tune import ptq161 as learning
from compress.tune.held_block import HeldBlock
from compress.types import Stats, Stored
from helpers import problems
from helpers.small_block import LINEARS, SmallBlock, batches, held_error, plain_copy, quantized

Layer = tuple[Tensor, Stats, Tensor]


def layer(rows: int = 24, columns: int = 50) -> Layer:
    x = problems.inputs(300, columns)
    total = HessianSum(columns, x.device)
    total.add(x, 64)
    return problems.random(rows, columns, seed=3) + 0.2, total.finish("x"), x


def slow(weight: Tensor, x: Tensor, share: float) -> Tensor:
    """The weight that the paper's formulas give, number by number in float64, with vectors as they are stored."""
    weight, columns = weight.double(), weight.shape[1]
    tops = x.double().abs().amax(0)
    chosen = set(sorted(range(columns), key=lambda c: -float(tops[c]))[: int(share * columns)])
    made = torch.zeros_like(weight)
    for r, row in enumerate(weight.tolist()):
        others = [row[c] for c in range(columns) if c not in chosen]
        mean = rounded(sum(others) / len(others))
        alpha = rounded(sum(map(abs, others)) / len(others))
        low, high = min(0.0, *(row[c] for c in chosen)), max(0.0, *(row[c] for c in chosen))
        scale = rounded((high - low) / 15)
        zero = min(15, max(0, round(-low / scale)))
        for c, w in enumerate(row):
            code = min(15, max(0, round(w / scale) + zero))
            made[r, c] = scale * (code - zero) if c in chosen else mean + math.copysign(alpha, w - mean)
    return made


def rounded(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).bfloat16())


def test_it_is_the_papers_formulas() -> None:
    weight, stats, x = layer()
    packed = ptq161.quantize(weight, stats, ptq161.Config()).weight
    torch.testing.assert_close(problems.decoded(packed), slow(weight, x, 0.2), rtol=1e-6, atol=1e-7)


def test_columns_are_chosen_by_the_largest_magnitude_of_their_inputs() -> None:
    """One outlier token decides, however large the others' mean squares are."""
    weight, stats, x = layer()
    quiet = int(stats.hessian.diagonal().argmin())
    assert torch.equal(stats.largest_inputs, x.abs().amax(0))
    largest = stats.largest_inputs.clone()
    largest[quiet] = 100
    packed = ptq161.quantize(weight, replace(stats, largest_inputs=largest), ptq161.Config()).weight
    assert salient_format.unpack(packed.tensors, packed.params, packed.shape).mask[quiet]
    result = ptq161.quantize(weight, replace(stats, largest_inputs=None), ptq161.Config())
    assert not salient_format.unpack(result.weight.tensors, packed.params, packed.shape).mask[quiet]
    assert "mean squares" in result.notes[0]


def test_largest_magnitudes_do_not_depend_on_batches() -> None:
    x = problems.inputs(300, 50)
    for chunk in (1, 7, 300):
        total = HessianSum(50, x.device)
        for part in x.split(100):
            total.add(part, chunk)
        assert torch.equal(total.finish("x").largest_inputs, x.abs().amax(0))


def test_bits_are_counted() -> None:
    params = ptq161.plan_params(ptq161.Config(), (4096, 4096))
    bits = 8 * formats.nbytes(Stored("salient", params), (4096, 4096)) / 4096**2
    share = 819 / 4096
    assert bits == pytest.approx(1 + 3 * share + 1 / 4096 + 56 / 4096 + 16 * (1 - share) / 4096, abs=1e-5)
    assert 1.61 < bits < 1.63


def test_zero_counts_as_plus_one_and_rows_of_zeros_stay() -> None:
    weight, stats, _ = layer()
    weight[3] = 0
    weight[4] = torch.tensor([1.0, -1.0] * 25)
    decoded = problems.decoded(ptq161.quantize(weight, stats, ptq161.Config(salient=0.0)).weight)
    assert not decoded[3].any() and torch.equal(decoded[4].float(), weight[4])


@pytest.mark.parametrize("salient", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (24, 50), (3, 64)])
def test_any_shape(shape: tuple[int, int], salient: float) -> None:
    weight, stats = problems.random(*shape), problems.stats(problems.inputs(100, shape[1]))
    packed = ptq161.quantize(weight, stats, ptq161.Config(salient)).weight
    formats.check(packed, "x")
    assert packed.nbytes == formats.nbytes(Stored("salient", packed.params), shape)
    assert torch.isfinite(problems.decoded(packed)).all()


def test_no_tokens() -> None:
    result = ptq161.quantize(problems.random(8, 16), Stats(torch.zeros(16, 16), 0), ptq161.Config())
    assert "no calibration token" in result.notes[0]


@pytest.mark.parametrize("salient", [-0.1, 1.0])
def test_bad_settings(salient: float) -> None:
    with pytest.raises(ValueError, match="^salient"):
        ptq161.Config(salient)


# Learning.


def test_the_loss_is_that_of_the_paper() -> None:
    states, first, second = (torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(i)) for i in range(3))
    first, second = first + states, second + 2 * states
    wanted = 0.0
    for target in (first, second):
        pairs = list(zip(states.flatten(0, 1).tolist(), target.flatten(0, 1).tolist(), strict=True))
        wanted += sum((a - b) ** 2 for x, y in pairs for a, b in zip(x, y, strict=True)) / 70
        cosines = [sum(map(math.prod, zip(x, y, strict=True))) / (math.hypot(*x) * math.hypot(*y)) for x, y in pairs]
        wanted -= math.log(abs(sum(cosines) / 10))
    assert learning.loss_of(states, (first, second)).item() == pytest.approx(wanted, rel=1e-5)


def test_a_weight_is_the_stored_one_before_the_first_step_and_behind_the_last() -> None:
    weight, stats, _ = layer()
    learned = learning.LearnedScales(ptq161.quantize(weight, stats, ptq161.Config()).weight)
    torch.testing.assert_close(learned.weight(), formats.decode(learned.packed, torch.float32))
    with torch.no_grad():
        for each in learned.trained.values():
            each.moved += 0.1 * torch.rand(each.moved.shape, generator=torch.Generator().manual_seed(0))
    decoded = formats.decode(learned.pack(), torch.float32)
    torch.testing.assert_close(learned.weight(), decoded, rtol=0.03, atol=0.01)
    fixed = salient_format.unpack(learned.packed.tensors, learned.packed.params, learned.packed.shape).mask
    assert torch.equal(decoded[:, fixed], formats.decode(learned.packed, torch.float32)[:, fixed])


def test_learning_lowers_the_held_out_error_and_moves_nothing_else() -> None:
    block = SmallBlock().requires_grad_(False)
    given = batches(block, drift=0.1)
    tuning = learning.BlockTuning(block, LINEARS, given, 4, learning.Config(steps=60, rate=0.01, held_out=4))
    for name in LINEARS:
        weight = tuning.weight(name)
        x = problems.inputs(200, weight.shape[1])
        tuning.add(name, ptq161.quantize(weight, problems.stats(x), ptq161.Config()).weight)
    before = dict(tuning.packed)
    packed, vectors, note = tuning.finish()
    first, last = (held_error(plain_copy(block, each, {}), given, 4) for each in (before, packed))
    assert last < 0.9 * first and vectors == {} and note.endswith(f"{first:.3g} -> {last:.3g}")
    for name, weight in packed.items():
        changed = {key for key, tensor in weight.tensors.items() if not torch.equal(tensor, before[name].tensors[key])}
        assert changed <= {"alphas", "means", "column_scales"}


def test_steps_that_bring_nothing_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    block = SmallBlock().requires_grad_(False)
    tuning = learning.BlockTuning(block, ("up",), batches(block), 4, learning.Config(steps=8))
    weight = tuning.weight("up")
    tuning.add("up", ptq161.quantize(weight, problems.stats(problems.inputs(99, 32)), ptq161.Config()).weight)
    before, errors = dict(tuning.packed), iter(range(1, 100))
    monkeypatch.setattr(HeldBlock, "error", lambda self, parameters: float(next(errors)))
    packed, _, note = tuning.finish()
    assert packed["up"] is before["up"] and note.endswith("1 -> 1")


def test_other_formats_are_left_alone() -> None:
    block = SmallBlock().requires_grad_(False)
    tuning = quantized(learning, block, batches(block))
    assert "no scales were learned" in tuning.finish()[2]
