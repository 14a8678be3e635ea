"""AWQ against a search by brute force and a clipping by loops, both in float64; uneven channels, families, batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.papers.quant import vptq
from compress.quant import rtn
from compress.transform import awq
from compress.transform.awq import Config, clamp, never_clipped
from compress.transform.search import trials
from compress.types import Scheme
from helpers.blocks import SITES, Case, difference, nearest, outputs, rounded_outputs, vectors
from helpers.problems import random

SCALE_ONLY = Config(clip=False)


def scales_by_loops(mean: Tensor, exponent: float) -> Tensor:
    average = sum(m for m in mean.tolist() if m > 0) / sum(m > 0 for m in mean.tolist())
    found = [max(m / average, 1e-4) ** exponent if m > 0 else None for m in mean.tolist()]
    alive = [s for s in found if s is not None]
    middle = (max(alive) * min(alive)) ** 0.5
    return torch.tensor([1.0 if s is None else s / middle for s in found], dtype=torch.float64)


@pytest.mark.parametrize("exponent", [0.0, 0.35, 0.95])
def test_scales(exponent: float) -> None:
    mean = random(20).exp().double() * 3
    mean[4], mean[9] = 0, 1e-9
    torch.testing.assert_close(awq.scales(mean, exponent), scales_by_loops(mean, exponent))
    assert torch.equal(awq.scales(torch.zeros(5), exponent), torch.ones(5))
    torch.testing.assert_close(awq.scales(mean * 1000, exponent), awq.scales(mean, exponent))


@pytest.mark.parametrize(("name", "index"), [("opt", 2), ("opt", 3), ("llama", 1), ("llama", 3)])
def test_search_against_brute_force(name: str, index: int) -> None:
    """Sites with one linear for a reader: the loss is that of its product."""
    case = Case(name)
    site = case.sites[index]
    x = vectors(case, site)
    linear = case.block.get_submodule(site.readers[0])
    weight = linear.weight.detach().double()
    repeats = [
        [(head * site.repeats + k) * 16 + inner for k in range(site.repeats)]
        for head in range(2)
        for inner in range(16)
    ]
    own = repeats if site.repeats > 1 else [[j] for j in range(x.shape[1])]
    mean = torch.stack([x[:, group].abs().mean() for group in own])
    errors = []
    for step in range(20):
        scale = torch.empty(x.shape[1], dtype=torch.float64)
        for value, group in zip(scales_by_loops(mean, step / 20), own, strict=True):
            scale[group] = value
        errors.append(((nearest(weight * scale, 3, 32) / scale - weight) @ x.T).square().sum().item())
    grids = {site.readers[0]: rtn.Config(3, 32, clip_search=False)}
    (_, seen, trial), *_ = trials(case.block, [site], case.batches(), 100, 100)
    found = awq.best_scale(case.block, site, seen, trial, 20, grids)
    assert found is not None
    assert found.before == pytest.approx(errors[0], rel=1e-3)
    assert found.after == pytest.approx(min(errors), rel=1e-3)
    assert found.exponent == errors.index(min(errors)) / 20
    torch.testing.assert_close(found.scale, scales_by_loops(mean, found.exponent), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group", [8, 24])
@pytest.mark.parametrize("tokens", [5, 40])
def test_clamping_against_loops(group: int, tokens: int) -> None:
    weight, x = random(16, 24) ** 3, random(tokens, 24, seed=1)
    expected = weight.double().clone()
    for row in range(16):
        for start in range(0, 24, group):
            part, y = weight[row, start : start + group].double(), x[:, start : start + group].double()
            tried = []
            for k in range(11):
                limit = (1 - 0.05 * k) * part.abs().max()
                clamped = part.clamp(-limit, limit)
                error = ((nearest(clamped[None], 3, group)[0] - part) @ y.T).square().sum().item()
                tried.append((error, k, clamped))
            expected[row, start : start + group] = min(tried, key=lambda t: t[:2])[2]
    before = weight.clone()
    changed = clamp(weight, x, rtn.Config(3, group, clip_search=False))
    assert changed == int((weight != before).sum()) > 0
    wrong = (weight.double() - expected).abs().amax(1) > 1e-6  # ties between ratios, up to rounding
    assert wrong.sum() <= 1


@pytest.mark.parametrize("name", SITES)
def test_scaling_keeps_the_function(name: str) -> None:
    case = Case(name)
    batches = case.batches()
    for index, site in enumerate(site for site in case.sites if site.is_norm):
        case.plant(site, range(0, 64, 4 + index), 8.0)
    before = outputs(case.block, batches)
    notes = awq.apply(case.block, case.sites, batches, SCALE_ONLY, case.schemes(3, 16, clip_search=False))
    assert difference(outputs(case.block, batches), before) < 1e-10
    assert " of " in notes[0] and "exponents" in notes[0]
    assert len(notes) == 1


@pytest.mark.parametrize("name", ["llama", "mixtral", "opt"])
def test_result_does_not_depend_on_batches(name: str) -> None:
    results = []
    for size in (1, 4, 6):
        case = Case(name)
        config = Config(ratios=6, tokens=8, sequences=3)
        awq.apply(case.block, case.sites, case.batches(size), config, case.schemes(3, 16, clip_search=False))
        results.append(case.copy())
    for other in results[1:]:
        for path, value in results[0].items():
            torch.testing.assert_close(other[path], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("config", [SCALE_ONLY, Config()])
def test_uneven_channels_cost_less(name: str, config: Config) -> None:
    case = Case(name)
    for site in case.sites:
        if site.is_norm:
            case.plant(site, range(0, 64, 6), 12.0)
    batches, schemes = case.batches(), case.schemes(3, 32, clip_search=False)
    exact = outputs(case.block, batches)
    before = difference(rounded_outputs(case.block, batches, schemes), exact)
    awq.apply(case.block, case.sites, batches, config, schemes)
    assert difference(rounded_outputs(case.block, batches, schemes), exact) < 0.9 * before


def test_what_has_no_grid_of_its_own_is_left_alone() -> None:
    case = Case("llama")
    before = case.copy()
    schemes = dict.fromkeys(case.linears(), Scheme("vptq", vptq.Config()))
    schemes["mlp.down_proj"] = Scheme("rtn", rtn.Config(3, 16), incoherence=True)
    del schemes["self_attn.q_proj"]
    notes = awq.apply(case.block, case.sites, case.batches(), Config(), schemes)
    assert all(torch.equal(value, before[name]) for name, value in case.copy().items())
    assert notes[0] == "0 of 4 sites are scaled"
    assert notes[1].startswith("4 sites are read by no linear")
    assert notes[2].startswith("0.00% of the weights of 0 linears")


def test_kept_linears_are_scaled_with_their_site_but_not_clipped() -> None:
    case = Case("llama")
    case.plant(case.sites[2], range(0, 64, 6), 12.0)
    batches, schemes = case.batches(), case.schemes(3, 16, clip_search=False)
    del schemes["mlp.gate_proj"]
    before, weights = outputs(case.block, batches), case.copy()
    awq.apply(case.block, case.sites[2:3], batches, SCALE_ONLY, schemes)
    assert not torch.equal(case.copy()["mlp.gate_proj.weight"], weights["mlp.gate_proj.weight"])
    assert difference(outputs(case.block, batches), before) < 1e-10
    scaled = case.copy()
    awq.apply(case.block, [], batches, Config(), schemes)
    clipped = {name for name, value in case.copy().items() if not torch.equal(value, scaled[name])}
    assert "mlp.gate_proj.weight" not in clipped
    assert "mlp.up_proj.weight" in clipped


def test_queries_and_keys_are_not_clipped() -> None:
    queries_and_keys = {"self_attn.q_proj", "self_attn.k_proj"}
    for name in SITES:
        assert never_clipped(SITES[name]) == queries_and_keys
    case = Case("llama")
    before = case.copy()
    notes = awq.apply(case.block, case.sites[1:2], case.batches(), Config(), case.schemes(3, 16, clip_search=False))
    assert never_clipped(case.sites[1:2]) == set()  # nothing says what they are
    assert "7 linears" in notes[-1]
    case = Case("llama")
    schemes = {n: s for n, s in case.schemes(3, 16, clip_search=False).items() if n in queries_and_keys}
    notes = awq.apply(case.block, case.sites, case.batches(), Config(ratios=1), schemes)
    assert all(torch.equal(value, before[name]) for name, value in case.copy().items())
    assert "0 linears" in notes[-1]


def test_experts_without_tokens_and_dead_channels() -> None:
    case = Case("mixtral")
    case.tokens = case.tokens[:1, :1]  # two of four experts
    with torch.no_grad():
        case.block.get_submodule("post_attention_layernorm").get_parameter("weight")[5] = 0
    batches = case.batches()
    before, weights = outputs(case.block, batches), case.copy()
    awq.apply(case.block, case.sites, batches, SCALE_ONLY, case.schemes(3, 16, clip_search=False))
    after = case.copy()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert torch.equal(after["mlp.gate.weight"][:, 5], weights["mlp.gate.weight"][:, 5])
    assert difference(outputs(case.block, batches), before) < 1e-10
    notes = awq.apply(case.block, [], batches, Config(), case.schemes(3, 16, clip_search=False))
    assert f"{4 + 2 * 3} linears" in notes[-1]


@pytest.mark.parametrize("field", ["ratios", "tokens", "sequences"])
def test_config(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} 0"):
        Config(**{field: 0})
