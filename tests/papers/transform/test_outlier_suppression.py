"""Outlier Suppression+ against a search by brute force in float64; planted outliers, shifts, families, batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.papers.quant import vptq
from compress.papers.transform import outlier_suppression
from compress.papers.transform.outlier_suppression import Change, Config, scales, substitutes
from compress.quant import rtn
from compress.transform.search import substitute_weights, trials
from compress.types import Activations, Scheme
from helpers.blocks import SITES, Case, difference, nearest, outputs, per_token, rounded_outputs, vectors
from helpers.problems import random

FEW = Config(thresholds=8)
W8A8 = {"bits": 8, "activations": Activations(8)}


def thresholds_by_loops(largest: Tensor, count: int) -> list[Tensor]:
    values = sorted(v for v in largest.tolist() if v > 0)
    top, median = values[-1], values[(len(values) - 1) // 2]
    found = [torch.ones_like(largest)]
    for k in range(1, count + 1):
        limit = top * (median / top) ** (k / count)
        found.append(torch.tensor([max(1.0, v / limit) for v in largest.tolist()], dtype=torch.float64))
    return found


def test_scales() -> None:
    largest = random(21).exp().double()
    largest[4] = 0
    for found, expected in zip(scales(largest, 7), thresholds_by_loops(largest, 7), strict=True):
        torch.testing.assert_close(found, expected)
    assert (scales(largest, 7)[-1] > 1).sum() == 10  # all above the median
    assert len(scales(torch.zeros(4), 7)) == len(scales(torch.ones(4), 7)) == 1


@pytest.mark.parametrize("index", [1, 2, 3])
def test_search_against_brute_force(index: int) -> None:
    """Sites of one linear: the loss is that of its product, W4A4; behind the norm there is a shift."""
    case = Case("opt")
    site = case.sites[index]
    if site.is_norm:
        with torch.no_grad():
            case.block.get_submodule(site.producer).get_parameter("bias")[:8] += 9 * random(8)
        case.plant(site, [3, 40], 10.0)
    x = vectors(case, site)
    linear = case.block.get_submodule(site.readers[0])
    weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
    exact = x @ weight.T + bias
    low, high = x.amin(0), x.amax(0)
    plain = [(s, torch.zeros_like(s)) for s in thresholds_by_loops(torch.maximum(high, -low), 12)]
    middle = (low + high) / 2
    shifted = [(s, middle) for s in thresholds_by_loops((high - low) / 2, 12)]
    errors = []
    for s, z in [plain[0], *shifted] if site.is_norm else plain:
        rounded = per_token((x - z) / s, 4) @ nearest(weight * s, 4, 32).T + bias + weight @ z
        errors.append((rounded - exact).square().sum().item())
    schemes = {site.readers[0]: Scheme("rtn", rtn.Config(4, 32, clip_search=False), activations=Activations(4))}
    (_, seen, trial), *_ = trials(case.block, [site], case.batches(), 100, 100)
    found = outlier_suppression.best_change(case.block, site, seen, trial, Config(thresholds=12), schemes)
    assert found is not None
    assert found.before == pytest.approx(errors[0], rel=1e-2)
    assert found.after == pytest.approx(min(errors), rel=1e-2)
    assert (found.change is None) == (min(errors) == errors[0])
    if site.is_norm:
        assert found.change is not None
        assert found.change.shift is not None
        torch.testing.assert_close(found.change.shift, middle, rtol=1e-4, atol=1e-4)


def test_static_scales_are_those_of_the_changed_vector() -> None:
    case = Case("opt")
    site = case.sites[2]
    x = vectors(case, site)
    low, high = x.amin(0), x.amax(0)
    scale, shift = random(64).exp().double(), random(64, seed=1).double()
    schemes = {"fc1": Scheme("rtn", rtn.Config(8), activations=Activations(8, "tensor", clip=0.8))}
    new = substitutes(case.block, site, Change(scale, shift), (low, high), schemes)["fc1"]
    changed = (x - shift) / scale
    step = 0.8 * changed.abs().max() / 127
    assert new.inputs is not None
    expected = (changed / step).round().clamp(-127, 127) * step
    assert ((new.inputs(x.float()) - expected).abs() > 1e-4).float().mean() < 1e-3  # ties


@pytest.mark.parametrize("name", SITES)
def test_substitutes_are_the_folded_block(name: str) -> None:
    """With nothing rounded a change must not change the module's output."""
    case = Case(name)
    for site, seen, trial in trials(case.block, case.sites, case.batches(), 8, 2):
        wanted = trial.outputs()
        channels = case.block.get_submodule(site.producer).get_parameter("weight").shape[0]
        change = Change(random(channels).exp().double())
        if name == "opt" and site.is_norm:
            change = change._replace(shift=random(channels, seed=1).double())
        assert seen.usable
        bounds = (torch.zeros(channels).double(), torch.zeros(channels).double())
        schemes = dict.fromkeys(case.linears(), Scheme("vptq", vptq.Config()))
        with substitute_weights(case.block, substitutes(case.block, site, change, bounds, schemes)):
            assert trial.loss(wanted) < 1e-9 * sum(out.square().sum().item() for out in wanted)


@pytest.mark.parametrize("name", SITES)
def test_function_stays(name: str) -> None:
    case = Case(name)
    for site in case.sites:
        if site.is_norm:
            case.plant(site, [3, 17], 60.0)
    batches = case.batches()
    before = outputs(case.block, batches)
    notes = outlier_suppression.apply(case.block, case.sites, batches, FEW, case.schemes(**W8A8))
    assert difference(outputs(case.block, batches), before) < 1e-10
    assert "the searched error falls to" in notes[0]
    assert len(notes) == 1


@pytest.mark.parametrize("scale", ["token", "tensor"])
@pytest.mark.parametrize("name", SITES)
def test_outliers_cost_less(name: str, scale: str) -> None:
    case = Case(name)
    for site in case.sites:
        if site.is_norm:
            case.plant(site, [3, 17], 60.0)
    batches = case.batches()
    schemes = case.schemes(8, activations=Activations(8, scale))  # type: ignore[arg-type]
    exact = outputs(case.block, batches)
    measured = case.schemes(**W8A8)
    before = difference(rounded_outputs(case.block, batches, measured), exact)
    outlier_suppression.apply(case.block, case.sites, batches, FEW, schemes)
    assert difference(rounded_outputs(case.block, batches, measured), exact) < 0.1 * before


def test_shift_helps_where_channels_are_off_their_middle() -> None:
    errors = {}
    for config in (Config(thresholds=8, shift=False), FEW):
        case = Case("opt")
        with torch.no_grad():
            for norm in ("self_attn_layer_norm", "final_layer_norm"):
                case.block.get_submodule(norm).get_parameter("bias")[:10] += 40 * random(10).sign()
        batches, schemes = case.batches(), case.schemes(**W8A8)
        exact = outputs(case.block, batches)
        notes = outlier_suppression.apply(case.block, case.sites, batches, config, schemes)
        assert difference(outputs(case.block, batches), exact) < 1e-9
        assert ("2 of them shifted" in notes[0]) == config.shift
        errors[config.shift] = difference(rounded_outputs(case.block, batches, schemes), exact)
    assert errors[True] < 0.5 * errors[False]


@pytest.mark.parametrize("name", ["llama", "mixtral", "opt"])
def test_result_does_not_depend_on_batches(name: str) -> None:
    results = []
    for size in (1, 4, 6):
        case = Case(name)
        for site in case.sites:
            if site.is_norm:
                case.plant(site, [3, 17], 30.0)
        config = Config(thresholds=6, tokens=8, sequences=3)
        outlier_suppression.apply(case.block, case.sites, case.batches(size), config, case.schemes(**W8A8))
        results.append(case.copy())
    for other in results[1:]:
        for path, value in results[0].items():
            torch.testing.assert_close(other[path], value, rtol=1e-3, atol=1e-4)


def test_what_is_not_rounded_as_it_is_is_left_alone() -> None:
    case = Case("llama")
    before = case.copy()
    schemes = dict.fromkeys(case.linears(), Scheme("vptq", vptq.Config()))
    schemes["mlp.down_proj"] = Scheme("rtn", rtn.Config(3), incoherence=True, activations=Activations())
    notes = outlier_suppression.apply(case.block, case.sites, case.batches(), FEW, schemes)
    assert all(torch.equal(value, before[name]) for name, value in case.copy().items())
    assert notes[0].startswith("0 of 4 sites are scaled")
    assert notes[1].startswith("4 sites are read by no linear")


def test_experts_without_tokens_and_dead_channels() -> None:
    case = Case("mixtral")
    case.tokens = case.tokens[:1, :1]  # two of four experts
    with torch.no_grad():
        case.block.get_submodule("post_attention_layernorm").get_parameter("weight")[5] = 0
    batches = case.batches()
    before, weights = outputs(case.block, batches), case.copy()
    outlier_suppression.apply(case.block, case.sites, batches, FEW, case.schemes(**W8A8))
    after = case.copy()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert torch.equal(after["mlp.gate.weight"][:, 5], weights["mlp.gate.weight"][:, 5])
    assert difference(outputs(case.block, batches), before) < 1e-10


@pytest.mark.parametrize("field", ["thresholds", "tokens", "sequences"])
def test_config(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} 0"):
        Config(**{field: 0})
