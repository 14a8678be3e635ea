"""ApiQ and saliency-aware retraining: the formulas in float64, the published start, AdamW, blocks and linears."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import RecipeError
from compress.formats import int as int_format
from compress.formats import lowrank
from compress.papers.tune import adaquant, apiq, partial_retraining
from compress.papers.tune.apiq import ClippedWeight, Config, rate_share, train
from compress.types import Fisher, LowRank, PackedWeight
from helpers.pico import round_to_nearest
from helpers.small_block import LINEARS, SmallBlock, batches, held_error, plain_copy

RANK, GROUP, SHAPE = 4, 16, (12, 40)
SIGMOID = 1 / (1 + torch.tensor(-4.0, dtype=torch.float64).exp())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor, bits: int = 2, entry_bits: int = 16, seed: int = 1) -> PackedWeight:
    """A weight rounded to nearest, with a low-rank part beside it that has nothing to do with it."""
    packed, part = round_to_nearest(weight, bits, GROUP, symmetric=False), LowRank(RANK, entry_bits)
    factors = random(RANK, weight.shape[1], seed=seed), random(RANK, weight.shape[0], seed=seed + 1)
    tensors = {lowrank.PREFIX + name: tensor for name, tensor in lowrank.pack(*factors, part).items()}
    return PackedWeight(dataclasses.replace(packed.stored, lowrank=part), {**packed.tensors, **tensors}, packed.shape)


def plain_quantized(weight: Tensor, low: Tensor | float, high: Tensor | float, bits: int) -> tuple[Tensor, ...]:
    """The paper's weight, its scales and zero points, in float64; scales as they are stored."""
    padded = torch.nn.functional.pad(weight.double(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    ends = padded.amin(-1, keepdim=True).clamp(max=0) * low, padded.amax(-1, keepdim=True).clamp(min=0) * high
    scale = ((ends[1] - ends[0]) / (2**bits - 1)).float().half().double()
    zero = (-ends[0] / scale).round()
    code = ((padded / scale).round() + zero).clamp(0, 2**bits - 1)
    return ((code - zero) * scale).flatten(1)[:, : weight.shape[1]], scale, zero


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_start_is_the_published_one(bits: int) -> None:
    """Ends of ranges times sigmoid(4), A random as LoRA's, B = 0, whatever was stored before."""
    weight = random(*SHAPE)
    starts = [ClippedWeight(rounded(weight, bits, seed=seed), weight, 5) for seed in (1, 7)]
    expected, scale, zero = plain_quantized(weight, SIGMOID, SIGMOID, bits)
    for each in starts:
        assert torch.allclose(each.weight().double(), expected, atol=1e-6)
        packed = each.pack()
        _, scales, zeros = int_format.unpack(packed.tensors, packed.params, SHAPE)
        assert zeros is not None and torch.equal(zeros.double(), zero[..., 0])
        assert torch.allclose(scales.double(), scale[..., 0], rtol=1e-3)
        assert torch.equal(formats.decode(packed, torch.float32), each.weight())
        a, b = (packed.tensors[lowrank.PREFIX + side] for side in "ab")
        assert not b.any() and 0.8 * SHAPE[1] ** -0.5 < a.abs().max() <= SHAPE[1] ** -0.5 * 1.001
    for key, tensor in starts[0].pack().tensors.items():
        assert torch.equal(tensor, starts[1].pack().tensors[key]), key


def test_gradients_are_those_of_the_formula() -> None:
    """In float64: rounding has slope 1, clamping 0 outside, a zero point none; the product has LoRA's factor."""
    weight, bits = random(*SHAPE, seed=3), 2
    trained, mixing = ClippedWeight(rounded(weight, bits), weight, 5), random(*SHAPE, seed=9)
    for seed, part in enumerate(trained.trained.values()):
        part.moved.data += 0.5 * random(*part.start.shape, seed=seed)
    (trained.weight() * mixing).sum().backward()
    moved = {name: part.moved.detach().double() for name, part in trained.trained.items()}
    factor = {name: torch.sigmoid(moved[name]) for name in ("low", "high")}
    _, scale, zero = plain_quantized(weight, factor["low"], factor["high"], bits)
    padded, mix = (
        torch.nn.functional.pad(x.double(), (0, -SHAPE[1] % GROUP)).unflatten(1, (-1, GROUP)) for x in (weight, mixing)
    )
    code = (padded / scale).round() + zero
    inside = ((code >= 0) & (code <= 3)).double()
    by_scale = (mix * (code.clamp(0, 3) - zero - inside * padded / scale)).sum(-1, keepdim=True)
    ends = {"low": -padded.amin(-1, keepdim=True).clamp(max=0), "high": padded.amax(-1, keepdim=True).clamp(min=0)}
    expected = {name: by_scale * ends[name] / 3 * factor[name] * (1 - factor[name]) for name in ends}
    share = apiq.LORA_ALPHA / RANK
    a, b = moved["lowrank_a"], share * moved["lowrank_b"]
    expected |= {"lowrank_a": b.T @ mixing.double(), "lowrank_b": share * mixing.double() @ a.T}
    for name, gradient in expected.items():
        found = trained.trained[name].moved.grad
        assert found is not None and torch.allclose(found.double(), gradient, rtol=1e-3, atol=1e-3), name


def test_training_is_adamw_with_two_rates_and_decay() -> None:
    weight, config = random(*SHAPE), Config(steps=8, rate=0.01, clip_rate=0.05, held_out=2)
    trained, mixing = ClippedWeight(rounded(weight), weight, 5), random(*SHAPE, seed=4)
    plain = {name: part.moved.detach().clone().requires_grad_() for name, part in trained.trained.items()}
    twin, errors = ClippedWeight(rounded(weight), weight, 5), iter(range(0, -99, -1))

    def loss(which: ClippedWeight) -> float:
        with torch.enable_grad():
            value = (which.weight() * mixing).sum()
            value.backward()
        return value.item()

    assert train({"": trained}, config, lambda step: loss(trained), lambda: next(errors)) == (0, -8)
    rates = {name: 0.05 if name in twin.clips else 0.01 for name in plain}
    optimizer = torch.optim.AdamW([{"params": [p], "lr": rates[n]} for n, p in plain.items()], weight_decay=0.1)
    for step in range(8):
        for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
            group["lr"] = rate * rate_share(step, 8)
        for name, part in twin.trained.items():
            part.moved.data.copy_(plain[name].detach())
            part.moved.grad = None
        loss(twin)
        for name, part in twin.trained.items():
            plain[name].grad = part.moved.grad
        optimizer.step()
    for name, tensor in plain.items():
        assert torch.allclose(tensor, trained.trained[name].moved, atol=1e-6), name


def tuned(method: Any = apiq, count: int = 4, **settings: Any) -> tuple[Any, dict[str, PackedWeight], str, Any]:
    block = SmallBlock().requires_grad_(False)
    given = batches(block, count, drift=0.1)
    tuning = method.BlockTuning(block, LINEARS, given, count, method.Config(held_out=2, **settings))
    for name in LINEARS:
        tuning.add(name, rounded(tuning.weight(name)))
        tuning.fisher[name] = Fisher(torch.linspace(0.5, 2, 32 if name == "down" else 48), torch.ones(1))
    packed, vectors, note = tuning.finish()
    assert vectors == {}
    return block, packed, note, given


@pytest.mark.parametrize("settings", [{}, {"own_target": True}, {"scope": "linear"}])
def test_what_is_trained_beats_the_start_and_is_what_is_stored(settings: dict[str, Any]) -> None:
    block, start, _, given = tuned(steps=0)
    _, packed, note, _ = tuned(steps=60, **settings)
    first, last = (held_error(plain_copy(block, each, {}), given, 2) for each in (start, packed))
    assert last < 0.6 * first and f"{first:.3g} as it began, {last:.3g} trained" in note
    for name, weight in packed.items():
        assert weight.stored == start[name].stored and weight.nbytes == start[name].nbytes
        assert weight.tensors["lowrank_b"].any() and not torch.equal(
            weight.tensors["scales"], start[name].tensors["scales"]
        )
    again = tuned(steps=60, **settings)[1]
    assert all(torch.equal(t, again[name].tensors[key]) for name in packed for key, t in packed[name].tensors.items())


def test_linears_are_trained_one_behind_the_other() -> None:
    """Each is nearer to its own output in the full-precision block, for what the trained ones before it give."""
    block, start, _, given = tuned(steps=0)
    packed = tuned(steps=60, scope="linear")[1]
    hidden, _, _ = next(iter(given()))
    full, made = plain_copy(block, {}, {}), plain_copy(block, {k: packed[k] for k in ("up", "gate")}, {})
    states = [torch.sigmoid(each.gate(h)) * each.up(h) for each in (full, made) for h in [each.norm(hidden.double())]]
    expected = states[0] @ full.down.weight.T
    errors = [
        (states[1] @ formats.decode(each["down"], torch.float64).T - expected).square().sum()
        for each in (start, packed)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_a_linear_that_no_held_out_token_reaches_keeps_its_start() -> None:
    weight = random(*SHAPE)
    trained, moments = ClippedWeight(rounded(weight), weight, 0), adaquant.InputMoments(SHAPE[1], weight.device)
    sums, inputs = adaquant.Sums(weight, None, moments), adaquant.Inputs(*[random(8, SHAPE[1], seed=3)] * 2)
    for each in (moments, sums):
        each.add(inputs)
    before = trained.weight()
    apiq._train_linear(trained, sums, [], Config(steps=3))
    assert torch.equal(trained.weight(), before)


def test_without_a_low_rank_part_ranges_alone_are_trained() -> None:
    weight = random(*SHAPE)
    trained = ClippedWeight(round_to_nearest(weight, 2, GROUP, symmetric=True), weight, 0)
    assert set(trained.trained) == {"low", "high"} and trained.pack().nbytes == trained.packed.nbytes
    with pytest.raises(RecipeError, match="16 bits, not 8"):
        ClippedWeight(rounded(weight, entry_bits=8), weight, 0)


@pytest.mark.parametrize("held", ["after_lora", "before_lora"])
def test_salient_weights_are_held_in_the_stages_that_say_so(held: str) -> None:
    block, config = SmallBlock().requires_grad_(False), partial_retraining.Config
    given = batches(block)
    settings = config(steps=10, held_steps=4, output_steps=3, weight=0.3, held=held)  # type: ignore[arg-type]
    tuning = partial_retraining.BlockTuning(block, LINEARS, given, 4, settings)
    weights, expected = {}, 0.0
    for seed, name in enumerate(LINEARS):
        original = block.get_submodule(name).get_parameter("weight")
        weights[name] = ClippedWeight(rounded(original), original, seed)
        weights[name].beside["lowrank_b"].moved.data.fill_(0.1)
        rows = torch.linspace(0.5, 2, len(original))
        tuning.fisher[name] = Fisher(rows, torch.ones(original.shape[1]))
        now = weights[name].effective(has_part=held == "after_lora").detach().double()
        squares = rows.double().square()[:, None]
        change, size = (squares * x.square() for x in (now - original.double(), original.double()))
        expected += 0.3 * (change.sum() / size.sum()).item() / 3
    with torch.no_grad():
        found = [tuning._penalty(step, weights) for step in range(10)]
    assert [each is None for each in found] == [False] * 7 + [True] * 3
    assert found[0] is not None and found[0].item() == pytest.approx(expected, rel=1e-4)
    assert [tuning._output_share(step) for step in range(10)] == [0.0] * 4 + [1.0] * 6


def test_held_weights_stay_nearer_to_the_original() -> None:
    def change(packed: dict[str, PackedWeight], block: SmallBlock) -> float:
        return sum(
            (formats.decode(each, torch.float32) - block.get_submodule(name).get_parameter("weight"))
            .square()
            .sum()
            .item()
            for name, each in packed.items()
        )

    block, free, _, _ = tuned(steps=60)
    held = tuned(partial_retraining, steps=60, weight=3.0)[1]
    assert change(held, block) < 0.9 * change(free, block)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (apiq, {"steps": -1}, "steps -1"),
        (apiq, {"decay": 1.0}, r"decay 1\.0"),
        (apiq, {"scope": "linear", "own_target": True}, "own_target"),
        (partial_retraining, {"scope": "linear"}, "scope: linear"),
        (partial_retraining, {"steps": 5, "held_steps": 6}, "held_steps 6"),
        (partial_retraining, {"held_steps": 6, "weight": 0.0}, "would train by nothing"),
        (partial_retraining, {"weight": -1.0}, r"weight -1\.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(method: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method.Config(**settings)
