"""Norm tweaking: the paper's loss, norms alone that move, and a block that is never worse for it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from compress import api, recipe
from compress.errors import RecipeError
from compress.papers.tune import norm_tweaking
from compress.papers.tune.norm_tweaking import Config, distance, norms, workspace
from compress.tune import held_block
from compress.tune.held_block import BlockSizes
from helpers.pico import save_pico
from helpers.runs import GPTQ, contents, job, report_of, stored_tensors
from helpers.small_block import SmallBlock, batches, held_error, killed_behind_a_block, plain_copy, quantized

TWEAKED = ("tune.method=norm_tweaking", "tune.steps=8", "tune.rate=0.01")
FEW = {"steps": 24, "rate": 0.02, "held_out": 4}


def test_the_loss_is_that_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    found, expected = (torch.randn(3, 5, 7, generator=generator) * 2 + 1 for _ in range(2))
    total = 0.0
    for channel in range(7):
        columns = [[float(x) for row in states[..., channel] for x in row] for states in (found, expected)]
        means = [sum(column) / 15 for column in columns]
        variances = [sum((x - mean) ** 2 for x in column) / 15 for column, mean in zip(columns, means, strict=True)]
        total += abs(means[0] - means[1]) + abs(variances[0] - variances[1])
    assert distance(found, expected).item() == pytest.approx(total / 7, rel=1e-5)


def test_the_loss_sees_channels_and_not_the_order_of_tokens() -> None:
    states = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    assert distance(states.flatten(0, 1)[torch.randperm(15)].view(3, 5, 7), states).item() < 1e-6
    assert distance(states.flip(2), states) > 0.1
    assert distance(states + 0.5, states).item() == pytest.approx(0.5, rel=1e-4)


def test_its_gradient_is_the_slope_of_a_step() -> None:
    """Through the whole block, in float32, against differences in float64 of the loss written out."""
    block = SmallBlock().requires_grad_(False)
    given = batches(block)
    tuning = quantized(norm_tweaking, block, given)
    hidden, call, target = next(iter(given()))
    leaf = tuning.model.norm.weight.clone().requires_grad_()
    distance(tuning.run({"norm.weight": leaf}, hidden, call), target).backward()
    direction = torch.randn(32, generator=torch.Generator().manual_seed(3)).double()
    ends = []
    for side in (1, -1):
        weight = block.norm.weight.double() + side * 1e-5 * direction
        made = plain_copy(block, tuning.packed, {"norm.weight": weight})
        found, expected = made(hidden.double()).flatten(0, 1), target.double().flatten(0, 1)
        pairs = zip(
            (found.mean(0), found.var(0, correction=0)), (expected.mean(0), expected.var(0, correction=0)), strict=True
        )
        ends.append(sum((a - b).abs().mean() for a, b in pairs))
    assert leaf.grad is not None
    slope = (leaf.grad.double() @ direction).item()
    assert ((ends[0] - ends[1]) / 2e-5).item() == pytest.approx(slope, rel=1e-3)


def test_norms_alone_move_and_the_held_out_error_falls() -> None:
    block = SmallBlock().requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    given = batches(block)
    tuning = quantized(norm_tweaking, block, given, **FEW)
    before = dict(tuning.packed)
    packed, vectors, note = tuning.finish()
    assert vectors.keys() == {"norm.weight", "norm.bias"} and packed == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items()), "the block moved"
    first, last = (held_error(plain_copy(block, packed, x), given, 4) for x in ({}, vectors))
    assert last < 0.98 * first and note.endswith(f"{first:.3g} -> {last:.3g}")


def test_the_distance_falls_too() -> None:
    block = SmallBlock().requires_grad_(False)
    given = batches(block)
    packed, vectors, _ = quantized(norm_tweaking, block, given, **FEW).finish()
    first, last = (
        sum(distance(plain_copy(block, packed, x)(hidden.double()), target.double()) for hidden, _, target in given())
        for x in ({}, vectors)
    )
    assert last < 0.95 * first


def test_what_is_stored_in_16_bits_is_what_was_measured() -> None:
    block = SmallBlock().bfloat16().requires_grad_(False)
    given = batches(SmallBlock().bfloat16().float().requires_grad_(False))
    packed, vectors, note = quantized(norm_tweaking, block, given, **FEW).finish()
    assert {tensor.dtype for tensor in vectors.values()} == {torch.bfloat16}
    assert note.endswith(f"-> {held_error(plain_copy(block.float(), packed, vectors), given, 4):.3g}")


@pytest.mark.parametrize("count", [1, 4])
def test_steps_that_bring_nothing_leave_no_trace(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block, errors = SmallBlock().requires_grad_(False), itertools.count(1.0)
    tuning = quantized(norm_tweaking, block, batches(block, count), count, **FEW)
    monkeypatch.setattr(held_block.HeldBlock, "error", lambda self, parameters: next(errors))
    assert tuning.finish()[1:] == ({}, "norms tweaked; held-out error of the block: 1 -> 1")


def test_held_out_batches_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    block = SmallBlock().requires_grad_(False)
    known, seen = list(batches(block, 6)()), list[int]()
    run = held_block.HeldBlock.run

    def noted(self: held_block.HeldBlock, parameters: object, hidden: torch.Tensor, call: object) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append(next(i for i, batch in enumerate(known) if batch[0] is hidden))
        return run(self, parameters, hidden, call)  # type: ignore[arg-type]

    monkeypatch.setattr(held_block.HeldBlock, "run", noted)
    quantized(norm_tweaking, block, lambda: iter(known), 6, steps=9, held_out=3).finish()
    assert seen == [1, 2, 4, 5, 1, 2, 4, 5, 1]


def test_a_block_without_norms_is_left_alone() -> None:
    block = SmallBlock().requires_grad_(False)
    block.norm = nn.Identity()
    _, vectors, note = quantized(norm_tweaking, block, batches(block)).finish()
    assert vectors == {} and note.endswith("nothing was done")


def test_norms_are_told_from_linears() -> None:
    assert norms(SmallBlock()) == ["norm.weight", "norm.bias"]
    assert norms(SmallBlock(has_bias=False)) == ["norm.weight"]


def test_what_it_takes_is_counted() -> None:
    assert workspace(Config(), BlockSizes(1000, 50, 20, 4, 512)) == 1000 * 8 + 2 * 4 * 50


@pytest.mark.parametrize(
    ("setting", "said"),
    [("steps: 0", "less than 1"), ("rate: 1.5", "is not between 0 and 1"), ("held_out: 1", "nothing would be trained")],
)
def test_settings_that_cannot_be(setting: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe.load("int4", [f"tune={{method: norm_tweaking, {setting}}}"])


@pytest.mark.slow
def test_a_tweaked_model_is_the_same_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_pico("gpt_neox", tmp_path / "model", dtype=torch.bfloat16)
    setup = GPTQ.set("bits=2", *TWEAKED)
    api.quantize(job(model, GPTQ.set("bits=2"), tmp_path / "plain"))
    api.quantize(job(model, setup, tmp_path / "whole"))
    with killed_behind_a_block(monkeypatch, norm_tweaking.BlockTuning):
        api.quantize(job(model, setup, tmp_path / "out"))
    assert api.quantize(job(model, setup, tmp_path / "out"))["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    before, after = (stored_tensors(tmp_path / name) for name in ("plain", "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    of_first = {name for name in changed if ".0." in name}
    assert of_first and all("layernorm" in name for name in of_first)
    assert all("held-out error" in notes[-1] for notes in report_of(tmp_path / "out")["notes"].values())
