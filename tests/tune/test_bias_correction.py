"""Bias correction: shifts against means in float64, layer by layer, and a block that is never worse for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress import api, recipe
from compress.errors import RecipeError
from compress.tune import bias_correction
from compress.tune.bias_correction import Config, workspace
from compress.tune.held_block import BlockSizes
from helpers.pico import save_pico
from helpers.runs import GPTQ, job, report_of, stored_tensors
from helpers.small_block import Batch, SmallBlock, batches, held_error, plain_copy, quantized

HELD_OUT = 4


def reference(block: SmallBlock, packed: object, given: object) -> dict[str, Tensor]:
    """The biases in float64: norm, up and gate together, down, and down once more towards the block's output."""
    rows = [batch for number, batch in enumerate(given()) if number % HELD_OUT]  # type: ignore[operator]
    own, changed = plain_copy(block, {}, {}), dict[str, Tensor]()

    def outputs(model: torch.nn.Module, name: str) -> Tensor:
        found: list[Tensor] = []
        with model.get_submodule(name).register_forward_hook(lambda m, a, out: found.append(out.flatten(0, -2))):
            for hidden, _, _ in rows:
                model(hidden.double())
        return torch.cat(found).mean(0)

    for group in (["norm"], ["up", "gate"], ["down"]):
        now = plain_copy(block, packed, changed)
        for name in group:
            bias = now.get_submodule(name).get_parameter("bias")
            changed[f"{name}.bias"] = bias - (outputs(now, name) - outputs(own, name))
    now = plain_copy(block, packed, changed)
    found = torch.cat([now(hidden.double()).flatten(0, -2) for hidden, _, _ in rows]).mean(0)
    target = torch.cat([target.double().flatten(0, -2) for _, _, target in rows]).mean(0)
    changed["down.bias"] = changed["down.bias"] - (found - target)
    return changed


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_biases_are_those_of_a_reference(drift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    block = SmallBlock().requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    given, errors = batches(block, 8, drift), itertools.count(0, -1)
    tuning = quantized(bias_correction, block, given, 8, held_out=HELD_OUT)
    monkeypatch.setattr(bias_correction.BlockTuning, "error", lambda self, parameters: float(next(errors)))
    packed, vectors, _ = tuning.finish()
    expected = reference(block, packed, given)
    assert vectors.keys() == expected.keys()
    for name, tensor in vectors.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items()), "the block moved"


def test_the_error_falls_and_the_mean_of_the_output_is_right() -> None:
    block = SmallBlock().requires_grad_(False)
    given = batches(block, 8, 0.5)
    packed, vectors, note = quantized(bias_correction, block, given, 8, held_out=HELD_OUT).finish()
    first, last = (held_error(plain_copy(block, packed, x), given, HELD_OUT, is_normed=True) for x in ({}, vectors))
    assert last < 0.9 * first and note.endswith(f"{first:.3g} -> {last:.3g}")
    made, measured = plain_copy(block, packed, vectors), [x for n, x in enumerate(given()) if n % HELD_OUT]
    distance = torch.cat([(made(hidden.double()) - target).flatten(0, -2) for hidden, _, target in measured]).mean(0)
    assert distance.abs().max() < 1e-5


def test_a_shrunken_block_is_left_alone() -> None:
    """Where all that a block gives is half as large, the next norm sees no error, and a mean of full size is one."""
    block = SmallBlock().requires_grad_(False)
    given = batches(block, 8)

    def halved() -> Iterator[Batch]:
        return ((hidden, call, 2 * target) for hidden, call, target in given())

    tuning = bias_correction.BlockTuning(block, (), halved, 8, Config(HELD_OUT))
    assert tuning.error({}) < 1e-12
    shifted = tuning.model.down.bias + sum(target.flatten(0, -2).mean(0) for *_, target in given()) / 8
    assert tuning.error({"down.bias": shifted}) > 1e-3
    assert "down.bias" not in tuning.finish()[1]


def test_weights_as_they_were_change_nothing() -> None:
    """A block that gives what it gave has biases that stay, but for the last digits."""
    block = SmallBlock().requires_grad_(False)
    tuning = bias_correction.BlockTuning(block, (), batches(block, 8), 8, Config(HELD_OUT))
    for name, tensor in tuning.finish()[1].items():
        torch.testing.assert_close(tensor, block.get_parameter(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 8])
def test_corrections_that_bring_nothing_leave_no_trace(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block, errors = SmallBlock().requires_grad_(False), itertools.count(1.0)
    tuning = quantized(bias_correction, block, batches(block, count), count)
    monkeypatch.setattr(bias_correction.BlockTuning, "error", lambda self, parameters: next(errors))
    assert tuning.finish()[1:] == ({}, "0 biases corrected; held-out error of the block: 1 -> 1")


def test_a_block_without_biases_is_left_alone() -> None:
    block = SmallBlock(has_bias=False).requires_grad_(False)
    _, vectors, note = quantized(bias_correction, block, batches(block)).finish()
    assert vectors == {}
    assert note == "bias correction: no linear or norm of the block has a bias, nothing was done"


def test_biases_in_16_bits_are_measured_as_they_are_stored() -> None:
    block = SmallBlock().bfloat16().requires_grad_(False)
    given = batches(SmallBlock().bfloat16().float().requires_grad_(False), 8, 0.5)
    packed, vectors, note = quantized(bias_correction, block, given, 8, held_out=HELD_OUT).finish()
    assert {tensor.dtype for tensor in vectors.values()} == {torch.bfloat16}
    last = held_error(plain_copy(block.float(), packed, vectors), given, HELD_OUT, is_normed=True)
    assert note.endswith(f"-> {last:.3g}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_a_corrected_model(name: str, tmp_path: Path) -> None:
    model = save_pico(name, tmp_path / "model", dtype=torch.bfloat16)
    plain = GPTQ.set("bits=2")
    api.quantize(job(model, plain, tmp_path / "plain"))
    corrected = plain.set("tune.method=bias_correction")
    reports = [api.quantize(job(model, corrected, tmp_path / folder)) for folder in ("out", "again")]
    assert reports[0]["nbytes"] == report_of(tmp_path / "plain")["nbytes"]
    before, after, again = (stored_tensors(tmp_path / folder) for folder in ("plain", "out", "again"))
    assert before.keys() == after.keys() and all(torch.equal(after[key], again[key]) for key in after)
    first_block = {key for key in before if "layers.0." in key and not torch.equal(before[key], after[key])}
    has_bias = name == "opt"
    assert bool(first_block) == has_bias and all(key.endswith("bias") for key in first_block)
    note = report_of(tmp_path / "out")["notes"]
    said = "biases corrected" if has_bias else "nothing was done"
    assert all(said in notes[-1] for key, notes in note.items() if "layers" in key)


def test_what_it_takes_is_counted() -> None:
    assert workspace(Config(), BlockSizes(1000, 50, 20, 4, 512)) == 1000 * 12 + 2 * 50


def test_settings_that_cannot_be() -> None:
    with pytest.raises(RecipeError, match="no mean would be measured"):
        recipe.load("int4", ["tune={method: bias_correction, held_out: 1}"])
