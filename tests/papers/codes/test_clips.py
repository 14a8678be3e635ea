"""Clip factors and low-rank factors (ApiQ): gradients of the formula, the first step, what is stored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from compress import formats
from compress.formats import int as int_format
from compress.formats import lowrank
from compress.model.blockwise import BlockArgs
from compress.papers.codes import clips
from compress.tune.blockwise import BlockTuning, Config
from compress.tune.descend import WARM_UP_STEPS, descend
from compress.tune.trained import Rates
from compress.types import LowRank, PackedWeight
from helpers.pico import round_to_nearest

RATES = Rates(steps=8, rate=0.01, codes_rate=1.0, start="weights")
SHAPE, RANK, GROUP = (24, 80), 4, 32


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def corrected(weight: Tensor, bits: int, symmetric: bool) -> PackedWeight:
    """The weight less a low-rank part, rounded to nearest, and that part beside it."""
    part = LowRank(RANK, 16, 64)
    left, size, right = torch.linalg.svd(weight, full_matrices=False)
    a, b = right[:RANK], (left[:, :RANK] * size[:RANK]).T
    tensors = {lowrank.PREFIX + name: tensor for name, tensor in lowrank.pack(a, b, part).items()}
    packed = round_to_nearest(
        weight - lowrank.decode(lowrank.pack(a, b, part), part, SHAPE, torch.float32), bits, GROUP, symmetric
    )
    return PackedWeight(dataclasses.replace(packed.stored, lowrank=part), {**packed.tensors, **tensors}, packed.shape)


@pytest.mark.parametrize("start", ["codes", "weights"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_first_step_sees_the_stored_weight_to_the_bit(symmetric: bool, start: str) -> None:
    weight = random(*SHAPE, seed=0)
    for packed in (round_to_nearest(weight, 2, GROUP, symmetric), corrected(weight, 3, symmetric)):
        trained = clips.Codes(packed, weight, dataclasses.replace(RATES, start=start))
        assert torch.equal(trained.weight(), formats.decode(packed, torch.float32))
        rounded = trained.pack()
        assert rounded.stored == packed.stored and rounded.tensors.keys() == packed.tensors.keys()
        assert all(torch.equal(tensor, rounded.tensors[key]) for key, tensor in packed.tensors.items())


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_are_those_of_the_formula(symmetric: bool) -> None:
    """In float64, from the definition: rounding has slope 1, clamping 0 outside."""
    weight, bits = random(*SHAPE, seed=1), 2
    packed, top = corrected(weight, bits, symmetric), 2**bits - 1
    trained = clips.Codes(packed, weight, RATES)
    for seed, part in enumerate(trained.trained.values()):
        part.moved.data = (0.3 * random(*part.start.shape, seed=seed)) / (part.unit if part.start.dim() == 3 else 1)
    values = {name: part.value().detach().double() for name, part in trained.trained.items()}
    mixing = random(*SHAPE, seed=9)
    (trained.weight() * mixing).sum().backward()

    _, scales, zeros = int_format.unpack(packed.tensors, packed.params, SHAPE)
    scale0 = scales.double()[..., None]
    zero0 = torch.full_like(scale0, 2 ** (bits - 1)) if zeros is None else zeros.double()[..., None]
    sigmoid = {name: torch.sigmoid(clips.BEGIN + values[name]) for name in trained.clips}
    factor = {name: clips.MAX_CLIP_FACTOR * each for name, each in sigmoid.items()}
    high, low = factor["high"], factor.get("low", factor["high"])
    below, above = zero0 * low, (top - zero0) * high
    scale = (scale0 * (below + above) / top).half().double()
    zero = zero0 if symmetric else (top * below / (below + above))
    whole = zero.round().clamp(0, top)
    rounded_from = trained.values.double()  # W less the product, in the cells of the stored codes
    code = (rounded_from / scale).round() + whole
    inside = ((code >= 0) & (code <= top)).double()
    assert 0.5 < inside.mean() < 1
    mix = torch.nn.functional.pad(mixing.double(), (0, -SHAPE[1] % GROUP)).unflatten(1, (-1, GROUP))
    by_scale = (mix * (code.clamp(0, top) - whole - inside * rounded_from / scale)).sum(-1, keepdim=True)
    by_zero = (mix * scale * (inside - 1)).sum(-1, keepdim=True)
    if symmetric:
        by_end = {"high": by_scale * scale0}
    else:
        slope = top / (below + above).square()
        by_end = {
            "high": by_scale * scale0 * (top - zero0) / top - by_zero * slope * below * (top - zero0),
            "low": by_scale * scale0 * zero0 / top + by_zero * slope * above * zero0,
        }
    expected = {name: by * clips.MAX_CLIP_FACTOR * sigmoid[name] * (1 - sigmoid[name]) for name, by in by_end.items()}
    a, b = values["lowrank_a"], values["lowrank_b"]  # [rank, in], [out, rank]
    expected |= {"lowrank_a": b.T @ mixing.double(), "lowrank_b": mixing.double() @ a.T}
    assert expected.keys() == trained.trained.keys()
    for name, part in trained.trained.items():
        assert part.moved.grad is not None
        assert torch.allclose(part.moved.grad.double() / part.unit, expected[name], rtol=1e-4, atol=1e-4), name


def test_a_first_step_moves_against_the_signs_of_gradients() -> None:
    """As AdamW's does, by the first rate; clip factors reach `codes_rate` at most in a stage, factors go faster."""
    weight = random(*SHAPE, seed=2)
    packed = corrected(weight, 2, symmetric=False)
    trained, plain = (clips.Codes(packed, weight, RATES) for _ in range(2))
    mixing = random(*SHAPE, seed=3)
    (plain.weight() * mixing).sum().backward()
    taken = []

    def loss(step: int) -> float:
        with torch.enable_grad():
            error = (trained.weight() * mixing).sum()
            error.backward()
        return error.item()

    def behind(step: int) -> None:
        taken.append({name: part.moved.detach().clone() for name, part in trained.trained.items()})

    descend([part.moved for part in trained.trained.values()], RATES.steps, RATES.rate, loss, behind)
    for name, part in plain.trained.items():
        assert part.moved.grad is not None
        clear = part.moved.grad.abs() > 1e-3 * part.moved.grad.abs().max()
        first = -RATES.rate / WARM_UP_STEPS * part.moved.grad.sign()
        assert torch.allclose(taken[0][name][clear], first[clear], rtol=1e-3), name
    for each in trained.clips.values():
        assert 0 < each.value().abs().max() <= RATES.codes_rate
    for name in ("lowrank_a", "lowrank_b"):
        size = packed.tensors[name].float().square().mean().sqrt().item()
        assert trained.trained[name].unit == pytest.approx(clips.FACTORS * size)


def test_equal_clips_scale_a_range() -> None:
    """Both ends by one factor: the zero point stays, the scale has the factor."""
    weight = random(*SHAPE, seed=4)
    packed = round_to_nearest(weight, 3, GROUP, symmetric=False)
    trained = clips.Codes(packed, weight, RATES)
    for each in trained.clips.values():
        each.moved.data.fill_(0.5 / each.unit)
    factor = clips.MAX_CLIP_FACTOR / (1 + (clips.MAX_CLIP_FACTOR - 1) * torch.tensor(-0.5).exp())
    _, before, zeros = int_format.unpack(packed.tensors, packed.params, SHAPE)
    _, after, same = int_format.unpack(trained.pack().tensors, packed.params, SHAPE)
    assert zeros is not None and same is not None and torch.equal(zeros, same)
    torch.testing.assert_close(after.float(), before.float() * factor, rtol=1e-3, atol=0)


class Pair(nn.Module):
    """Two linears with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down = nn.Linear(80, 24), nn.LayerNorm(24), nn.Linear(24, 80, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 80] -> [..., 80]."""
        return x + self.down(torch.nn.functional.silu(self.norm(self.up(x))))


def tuned(codes: str, steps: int = 60) -> tuple[PackedWeight, BlockTuning]:
    block, x = Pair().requires_grad_(False), random(4, 16, 8, 80, seed=5)
    config = Config(steps=steps, between=0, rate=0.01, codes=codes, tokens=128)
    tuning = BlockTuning(block, ["up"], lambda: ((b, BlockArgs((), {}), block(b)) for b in x), 4, config)
    tuning.add("up", corrected(tuning.weight("up"), 2, symmetric=False))
    return tuning.finish()[0]["up"], tuning


def test_factors_and_clips_are_trained_together() -> None:
    found, tuning = tuned("clips")
    start = corrected(Pair().up.weight.detach(), 2, symmetric=False)
    [stage] = tuning.stages
    assert stage.after < 0.9 * stage.before and stage.after == pytest.approx(tuning.error({}), rel=1e-6)
    assert found.stored == start.stored and found.nbytes == start.nbytes
    same = {name for name, tensor in start.tensors.items() if torch.equal(tensor, found.tensors[name])}
    assert not same & {"scales", "lowrank_a", "lowrank_b"}
    again = tuned("clips")[0]
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in found.tensors.items())
