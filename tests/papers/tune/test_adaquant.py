"""AdaQuant: the squared error from sums, the least squares that scales approach, and a block that is never worse."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import api, formats
from compress.formats import int as int_format
from compress.papers.tune import adaquant
from compress.papers.tune.adaquant import (
    Config,
    HeldOutError,
    InputMoments,
    Inputs,
    Sums,
    TrainedLinear,
    fit,
)
from compress.tune import held_block
from compress.tune.codes import fixed, straight_through
from compress.tune.trained import Rates, Trained
from helpers.pico import round_to_nearest, save_pico
from helpers.runs import RTN, SMALL, contents, job, report_of, stored_tensors
from helpers.small_block import SmallBlock, batches, held_error, killed_behind_a_block, plain_copy, quantized

TUNED = ("tune.method=adaquant", "tune.steps=30", "tune.codes_rate=0.3")


def inputs(count: int = 3, columns: int = 24) -> list[Inputs]:
    """Batches whose tokens have a mean, and are not quite those of the full-precision block."""
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(count, 40, columns, generator=generator) + torch.randn(columns, generator=generator)
    return [Inputs(x + 0.1 * torch.randn(x.shape, generator=generator), x) for x in full]


def summed(weight: Tensor, bias: Tensor | None, given: list[Inputs]) -> Sums:
    sums = Sums(weight, bias, InputMoments(weight.shape[1], weight.device))
    for each in given:
        sums.moments.add(each)
        sums.add(each)
    return sums


def plain_error(weight: Tensor, bias: Tensor | None, new: Tensor, shifted: Tensor | None, given: list[Inputs]) -> Any:
    """The paper's error in float64: of the layer's output, over the square of what it gives in full precision."""
    error: Any = 0.0
    size = 0.0
    for each in given:
        expected = each.full.double() @ weight.double().T + (0 if bias is None else bias.double())
        found = each.quantized.double() @ new.T + (0 if shifted is None else shifted)
        error, size = error + (found - expected).square().sum(), size + expected.square().sum().item()
    return error / size


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_error_and_its_gradients_are_those_of_the_paper(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, new = torch.randn(2, 7, 24, generator=generator)
    bias, shifted = torch.randn(2, 7, generator=generator) if has_bias else (None, None)
    leaves = [t.double().requires_grad_() for t in (new, shifted) if t is not None]
    expected = plain_error(weight, bias, leaves[0], leaves[1] if has_bias else None, inputs())
    expected.backward()
    error, by_weight, by_bias = summed(weight, bias, inputs()).gradient(new, shifted)
    assert error == pytest.approx(expected.item(), rel=1e-5)
    assert HeldOutError(weight, bias, inputs()).error(new, shifted) == pytest.approx(expected.item(), rel=1e-5)
    for found, leaf in zip((by_weight, by_bias), leaves, strict=False):
        assert leaf.grad is not None and torch.allclose(found.double(), leaf.grad, rtol=1e-4, atol=1e-6)


def test_scales_and_bias_approach_the_least_squares() -> None:
    """With fixed codes each row is linear in its scales and its bias, so the best is known in closed form."""
    weight, bias = torch.randn(6, 24, generator=torch.Generator().manual_seed(3)), torch.linspace(-1, 1, 6)
    packed, config = round_to_nearest(weight, 2, 8), Config(steps=400, rate=0.1)
    codes, _, _ = int_format.unpack(packed.tensors, packed.params, packed.shape)
    centred = (codes.double() - 2).unflatten(1, (3, 8))  # [out, groups, columns]
    x = torch.cat([each.quantized for each in inputs()]).double()
    expected = torch.cat([each.full for each in inputs()]).double() @ weight.double().T + bias.double()
    best = 0.0
    for row in range(6):
        features = torch.einsum("ngc,gc->ng", x.unflatten(1, (3, 8)), centred[row])
        features = torch.cat((features, torch.ones(len(x), 1).double()), 1)
        solution = torch.linalg.lstsq(features, expected[:, row, None]).solution
        best += (features @ solution - expected[:, row, None]).square().sum().item()
    best /= expected.square().sum().item()
    held = HeldOutError(weight, bias, inputs())
    linear = TrainedLinear(fixed.Codes(packed, weight, Rates(400, 0.1, 1.0, "weights")), Trained(bias, unit=3.0))
    first = held.error(*linear.now())
    fit(linear, summed(weight, bias, inputs()), held, config)
    last = held.error(*linear.now())
    assert best * (1 - 1e-5) <= last < 1.001 * best < 0.5 * first


def test_codes_move_where_that_is_better() -> None:
    """Below the least squares of scales, and what is stored is what was measured."""
    weight = torch.randn(6, 24, generator=torch.Generator().manual_seed(3))
    packed, rates = round_to_nearest(weight, 2, 8), Rates(200, 0.005, 1.0, "weights")
    held, sums = HeldOutError(weight, None, inputs()), summed(weight, None, inputs())
    errors = []
    for way in (fixed, straight_through):
        linear = TrainedLinear(way.Codes(packed, weight, rates), None)
        fit(linear, sums, held, Config(steps=200, rate=0.005))
        errors.append(held.error(formats.decode(linear.weight.pack(), torch.float32), None))
    assert errors[1] < 0.9 * errors[0] and linear.weight.changed_share()


def test_the_block_is_better_and_what_is_stored_is_what_was_measured() -> None:
    block = SmallBlock().requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    given = batches(block)
    tuning = quantized(adaquant, block, given, steps=60, held_out=4)
    before = dict(tuning.packed)
    packed, vectors, note = tuning.finish()
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items()), "the block moved"
    assert vectors.keys() <= {"up.bias", "gate.bias", "down.bias"} and "down.bias" in vectors
    first, last = (held_error(plain_copy(block, p, v), given, 4) for p, v in ((before, {}), (packed, vectors)))
    assert last < 0.7 * first and f"block: {first:.3g} -> {last:.3g};" in note and "codes that moved: " in note
    for name, weight in packed.items():
        assert weight.stored == before[name].stored and weight.nbytes == before[name].nbytes
    again = quantized(adaquant, block, given, steps=60, held_out=4).finish()
    assert again[2] == note and all(torch.equal(tensor, again[1][name]) for name, tensor in vectors.items())
    for name, weight in packed.items():
        assert all(torch.equal(tensor, again[0][name].tensors[key]) for key, tensor in weight.tensors.items())


@pytest.mark.parametrize("target", ["full", "quantized"])
def test_linears_are_calibrated_one_behind_the_other(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reads what the tuned ones before it give; held-out batches are not among what is summed."""
    block, seen = SmallBlock().requires_grad_(False), list[Inputs]()
    given, add = batches(block), InputMoments.add

    def noted(self: InputMoments, inputs: Inputs) -> None:
        seen.append(inputs)
        add(self, inputs)

    monkeypatch.setattr(InputMoments, "add", noted)
    tuning = quantized(adaquant, block, given, steps=20, held_out=2, target_inputs=target)
    packed, vectors, note = tuning.finish()
    assert "as they were" not in note and len(seen) == 2 * 2  # gate and up read the same; two of four batches
    made = plain_copy(block, {k: packed[k] for k in ("up", "gate")}, {k: v for k, v in vectors.items() if k[0] in "ug"})
    for number, of_first, of_last in zip((1, 3), seen[:2], seen[2:], strict=True):
        hidden = list(given())[number][0].double()
        expected = []
        for each in (made, plain_copy(block, {}, {})):
            h = each.norm(hidden)
            assert torch.allclose(of_first.quantized.double(), h.flatten(0, 1), atol=1e-5)
            expected.append((torch.sigmoid(each.gate(h)) * each.up(h)).flatten(0, 1))
        assert torch.allclose(of_last.quantized.double(), expected[0], atol=1e-4)
        assert torch.allclose(of_last.full.double(), expected[1 if target == "full" else 0], atol=1e-4)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("what", ["linear", "block"])
def test_what_brings_nothing_leaves_no_trace(what: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a linear that is not better itself, nor one with which the block is worse."""
    block, errors = SmallBlock().requires_grad_(False), itertools.count(1.0)
    tuning = quantized(adaquant, block, batches(block, count), count, steps=9)
    before, state = dict(tuning.packed), {k: v.clone() for k, v in tuning.model.state_dict().items()}
    of = HeldOutError if what == "linear" else held_block.HeldBlock
    monkeypatch.setattr(of, "error", lambda *_: next(errors))
    packed, vectors, note = tuning.finish()
    assert vectors == {} and packed == before and "none is better" in note
    assert all(torch.equal(tensor, state[name]) for name, tensor in tuning.model.state_dict().items())


@pytest.mark.slow
def test_a_tuned_model_is_the_same_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_pico("gpt_neox", tmp_path / "model", dtype=torch.bfloat16)
    setup = RTN.set(*SMALL, "bits=2", *TUNED)
    api.quantize(job(model, RTN.set(*SMALL, "bits=2"), tmp_path / "plain"))
    api.quantize(job(model, setup, tmp_path / "whole"))
    with killed_behind_a_block(monkeypatch, adaquant.BlockTuning):
        api.quantize(job(model, setup, tmp_path / "out"))
    assert api.quantize(job(model, setup, tmp_path / "out"))["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    before, after = (stored_tensors(tmp_path / name) for name in ("plain", "out"))
    assert {name: tensor.dtype for name, tensor in before.items()} == {n: tensor.dtype for n, tensor in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"words2", "scales", "bias"}
    assert not any("norm" in name for name in changed)
    assert all("AdaQuant: held-out" in notes[-1] for notes in report_of(tmp_path / "out")["notes"].values())
