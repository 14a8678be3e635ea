"""Scales that are stored in place of signs around a rotated matrix: what is stored, what methods see, bytes, runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import api, recipe
from compress.calib.output_gradients import OutputGradients
from compress.errors import RecipeError
from compress.formats import transforms
from compress.formats.transforms import Diagonal
from compress.model.skeleton import Skeleton
from compress.quant import incoherence
from compress.run import plan, prepare, quantize_linear
from compress.storage.checkpoint import open_checkpoint
from compress.types import LayerPlan, Scheme, Stats, WeightTransforms
from helpers.problems import inputs, random
from helpers.runs import GPTQ, TEXT, cli, job, report_of, stored_tensors

ROTATED = GPTQ.set("incoherence=true")
CHOICES = [
    (*(f"{key}={value}" for key, value in zip(("out_scales", "in_vector", "vector_bits"), choice, strict=True)),)
    for choice in (("ones", "true", 16), ("rms", "false", 16), ("rms", "false", 8), ("sensitivity", "true", 8))
]


def planned(model: Path, *overrides: str) -> LayerPlan:
    return plan.make(ROTATED.set(*overrides).load(), Skeleton(open_checkpoint(model))).layers[0]


SENSITIVITIES = random(64, seed=9).square() + 0.1
GRADIENTS = OutputGradients(300, torch.diag(SENSITIVITIES))  # outputs whose sensitivities differ


def uneven(rows: int = 64, columns: int = 64) -> Tensor:
    """A weight whose rows differ in size."""
    return random(rows, columns) * random(rows, 1, seed=1).exp()


def test_operations_follow_the_scheme(pico_dir: Callable[..., Path]) -> None:
    model = pico_dir("llama")
    plain, scaled = planned(model), planned(model, "out_scales=rms", "in_vector=true")
    assert plain.stored.ops == incoherence.OPS
    assert scaled.stored.ops == WeightTransforms(("channel_scale16", "hadamard"), ("hadamard", "channel_scale16"))
    rows, columns = plain.spec.shape
    assert scaled.nbytes == plain.nbytes + 2 * (rows + columns) - rows // 8 - columns // 8
    narrow = planned(model, "out_scales=sensitivity", "vector_bits=8")
    assert narrow.stored.ops == WeightTransforms(("signs", "hadamard"), ("hadamard", "channel_scale8"))
    assert narrow.nbytes == plain.nbytes + rows - rows // 8
    assert transforms.describe(narrow.stored.ops) == "hadamard channel_scale8"


@pytest.mark.parametrize("override", ["out_scales=rms", "in_vector=true"])
def test_scales_need_a_rotated_basis(override: str) -> None:
    with pytest.raises(RecipeError, match="set incoherence: true"):
        GPTQ.set("incoherence=false", override).load()


def test_scales_are_those_of_the_definition() -> None:
    weight, sensitivities = uneven(), SENSITIVITIES
    weight[5] = 0
    exact = weight.double()
    sigma = exact.square().mean(1).sqrt()
    s = sensitivities.double() / sensitivities.double().mean() + 0.02
    others = torch.arange(64) != 5
    for kind, wanted in (
        ("ones", torch.ones(64).double()),
        ("rms", sigma),
        ("sensitivity", (sigma.square() / s) ** 0.25),
    ):
        wanted = wanted / wanted[others].log().mean().exp()
        found = incoherence.output_scales(kind, weight, sensitivities)
        torch.testing.assert_close(found[others].double(), wanted[others], rtol=1e-6, atol=0)
        assert found[5] == 1
    alike = incoherence.output_scales("sensitivity", weight, None)
    torch.testing.assert_close(alike, incoherence.output_scales("sensitivity", weight, torch.full((64,), 3.0)))
    assert torch.equal(incoherence.output_scales("rms", torch.zeros(4, 8), None), torch.ones(4))


def test_sensitivity_has_the_least_loss_of_all_scales() -> None:
    """Sum of s t^2 times that of sigma^2 / t^2, the loss of an error that is spread evenly over scaled outputs."""
    weight, sensitivities = uneven().double(), SENSITIVITIES.double()
    sigma = weight.square().mean(1)
    s = sensitivities / sensitivities.mean() + 0.02

    def loss(t: Tensor) -> float:
        return float((s * t.square()).sum() * (sigma / t.square()).sum())

    best = incoherence.output_scales("sensitivity", weight, sensitivities).double()
    least = loss(best)
    others = [
        torch.ones(64).double(),
        sigma.sqrt(),
        *(best * (0.1 * random(64, seed=i).double()).exp() for i in range(9)),
    ]
    assert all(loss(t) > least * 1.001 for t in others)
    (slope,) = torch.autograd.grad(_loss_of(s, sigma, leaf := best.log().requires_grad_()), leaf)
    assert slope.abs().max() < 1e-5 * least


def _loss_of(s: Tensor, sigma: Tensor, logarithms: Tensor) -> Tensor:
    return (s * (2 * logarithms).exp()).sum() * (sigma * (-2 * logarithms).exp()).sum()


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_methods_see_the_weight_divided_by_what_is_stored(
    choice: tuple[str, ...], pico_dir: Callable[..., Path]
) -> None:
    layer = planned(pico_dir("llama"), *choice)
    weight, sensitivities = uneven(*layer.spec.shape), SENSITIVITIES
    around = incoherence.surroundings(layer, 3, weight, sensitivities)
    ops = layer.stored.ops
    rows, columns = (
        Diagonal(name, around[f"{side}_{name}"]).values(size, torch.float64)
        for side, name, size in (("out", ops.output[1], 64), ("in", ops.input[0], 64))
    )
    signs = incoherence.draw(layer.spec, 3)
    assert torch.equal(columns, transforms.unpack_signs(signs["in_signs"], 64, torch.float64))
    assert torch.equal(rows.sign(), transforms.unpack_signs(signs["out_signs"], 64, torch.float64))
    wanted = incoherence.output_scales(layer.scheme.out_scales, weight, sensitivities).double()
    bits = layer.scheme.vector_bits
    torch.testing.assert_close(
        rows.abs(), wanted.clamp(1 / 16, 15.5) if bits == 8 else wanted, rtol=2.0 ** -(5 if bits == 8 else 11), atol=0
    )
    seen = incoherence.rotated_weight(weight, layer, around)
    divided = (weight.double() / rows[:, None]) * columns
    turned = transforms.rotate(divided, WeightTransforms(("hadamard",), ("hadamard",)), {})
    torch.testing.assert_close(seen.double(), turned, rtol=0, atol=1e-5)
    torch.testing.assert_close(transforms.effective(seen, ops, around), weight, rtol=1e-5, atol=1e-5)


def test_scales_depend_on_no_order_and_no_parts(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, weight = planned(pico_dir("llama"), "out_scales=rms"), uneven()
    first = incoherence.surroundings(layer, 3, weight)
    monkeypatch.setattr(incoherence, "CHUNK", 64)
    assert all(torch.equal(tensor, first[key]) for key, tensor in incoherence.surroundings(layer, 3, weight).items())


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_choice_from_the_command_line(
    choice: tuple[str, ...], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Quantized, verified, written; bytes as planned."""
    setup, out = ROTATED.set(*choice), tmp_path / "out"
    model = pico_dir("llama")
    words = ["quantize", str(model), *setup.options(), "--out", str(out), "--calib", str(TEXT)]
    assert (result := cli(*words)).code == 0, result
    report, tensors = report_of(out), stored_tensors(out)
    prepared = prepare.prepare(job(model, setup, tmp_path / "other"))
    assert report["nbytes"]["total"] == prepared.plan.nbytes == sum(t.nbytes for t in tensors.values())
    ops = incoherence.operations(prepared.plan.layers[0].scheme)
    assert all(row["ops"] == {"input": list(ops.input), "output": list(ops.output)} for row in report["layers"])
    assert all(0 < row["weight_error"] < 0.03 for row in report["layers"])
    assert ops.output[1] in cli("inspect", str(out)).out
    assert cli("verify", str(out)).code == 0
    assert (result := cli("generate", str(out), "--prompt", "a", "--max-new-tokens", "4")).code == 0, result


def test_linears_that_share_an_input_share_its_numbers(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    setup = ROTATED.set("in_vector=true", "out_scales=rms")
    api.quantize(job(pico_dir("llama"), setup, tmp_path / "out"))
    tensors = stored_tensors(tmp_path / "out")
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.in_channel_scale16"] for part in "qkv")
    assert torch.equal(q, k) and torch.equal(q, v) and torch.equal(q.abs(), torch.ones_like(q))


def test_defaults_store_signs_as_before(pico_dir: Callable[..., Path]) -> None:
    """The bytes of a linear without scales, and the fingerprint of its recipe, are those without the keys."""
    explicit = ROTATED.set("out_scales=none", "in_vector=false", "vector_bits=16")
    assert recipe.fingerprint(explicit.load()) == recipe.fingerprint(ROTATED.load())
    layer = planned(pico_dir("llama"))
    drawn = incoherence.draw(layer.spec, 3)
    assert {key: tensor.dtype for key, tensor in drawn.items()} == {"out_signs": torch.uint8, "in_signs": torch.uint8}
    around = incoherence.surroundings(layer, 3, uneven())
    assert around.keys() == drawn.keys() and all(torch.equal(around[key], drawn[key]) for key in drawn)
    assert drawn["in_signs"].tolist() == OLD_SIGNS


OLD_SIGNS = [235, 121, 244, 2, 137, 24, 92, 108]


def test_sensitivity_without_gradients_is_noted(pico_dir: Callable[..., Path]) -> None:
    layer = planned(pico_dir("llama"), "out_scales=sensitivity")
    x = inputs(300, 64)
    given = quantize_linear.InputStatistics(Stats(x.T @ x, 300), seed=3)
    notes: dict[bool, Any] = {}
    for known in (None, GRADIENTS):
        task = quantize_linear.LinearTask(layer, "", uneven(), given, None, None, known)
        made = quantize_linear.quantize(task, 3)
        notes[known is None] = [note for note in made.notes if "no gradients" in note]
        assert made.weight.nbytes == layer.nbytes
    assert len(notes[True]) == 1 and not notes[False]


def test_auto_stores_scales_where_a_linear_has_many_inputs() -> None:
    scheme = Scheme("trellis", None, incoherence=True, out_scales="auto")
    chosen = [incoherence.with_chosen_scales(scheme, (64, inputs)).out_scales for inputs in (511, 512)]
    assert chosen == ["none", "rms"]
    assert (
        incoherence.with_chosen_scales(dataclasses.replace(scheme, out_scales="ones"), (64, 512)).out_scales == "ones"
    )
