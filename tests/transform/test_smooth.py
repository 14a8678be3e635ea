"""SmoothQuant against its formula, on blocks of several families and with planted outliers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.model.graph import Site
from compress.transform import smooth
from compress.transform.smooth import Config
from compress.types import Activations, Scheme
from helpers.blocks import SITES, Case, difference, outputs, rounded_outputs, vectors

W8A8 = {"bits": 8, "activations": Activations(8)}


def by_loops(case: Case, site: Site, x: Tensor, alpha: float) -> Tensor:
    """s = max|x|^alpha / max|w|^(1 - alpha) of each channel of the producer."""
    weights = [case.block.get_submodule(r).get_parameter("weight").detach().double() for r in site.readers]
    weights = [w for r, w in zip(site.readers, weights, strict=True) if r in case.linears()]
    channels = case.block.get_submodule(site.producer).get_parameter("weight").shape[0]
    scale = torch.ones(channels, dtype=torch.float64)
    for c in range(channels):
        head, inner = divmod(c, site.head_dim) if site.head_dim else (c, 0)
        own = [(head * site.repeats + k) * site.head_dim + inner for k in range(site.repeats)] if site.head_dim else [c]
        largest = max(x[:, j].abs().max().item() for j in own)
        weight = max(w[:, j].abs().max().item() for j in own for w in weights)
        if largest > 0:  # else a ReLU that never opens
            scale[c] = largest**alpha / weight ** (1 - alpha)
    return scale


@pytest.mark.parametrize("name", SITES)
def test_against_the_formula(name: str) -> None:
    alpha = 0.7
    for index in range(len(SITES[name])):
        case = Case(name)
        site = case.sites[index]
        x = vectors(case, site)
        scale = by_loops(case, site, x, alpha)
        smooth.apply(case.block, [site], case.batches(), Config(alpha), case.schemes(8))
        fresh = Case(name)
        before = fresh.block.get_submodule(site.producer).get_parameter("weight").detach().double()
        after = case.block.get_submodule(site.producer).get_parameter("weight").detach().double()
        one = float(site.offset)
        expected = (before + one) / (scale if site.is_norm else scale[:, None])
        torch.testing.assert_close(after + one, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", SITES)
def test_function_stays(name: str) -> None:
    case = Case(name)
    batches = case.batches()
    before = outputs(case.block, batches)
    notes = smooth.apply(case.block, case.sites, batches, Config(0.5), case.schemes(**W8A8))
    assert difference(outputs(case.block, batches), before) < 1e-10
    assert notes[0].startswith(f"{len(case.sites)} of {len(case.sites)} sites are smoothed")
    assert len(notes) == 1


@pytest.mark.parametrize("name", ["llama", "mixtral", "opt"])
def test_result_does_not_depend_on_batches(name: str) -> None:
    results = []
    for size in (1, 4, 6):
        case = Case(name)
        smooth.apply(case.block, case.sites, case.batches(size), Config(0.5), case.schemes(8))
        results.append(case.copy())
    for other in results[1:]:
        for path, value in results[0].items():
            torch.testing.assert_close(other[path], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SITES)
def test_outliers_cost_less(name: str) -> None:
    case = Case(name)
    norm = next(site for site in case.sites if site.is_norm)
    case.plant(norm, [3, 17], 60.0)
    batches, schemes = case.batches(), case.schemes(**W8A8)
    exact = outputs(case.block, batches)
    before = difference(rounded_outputs(case.block, batches, schemes), exact)
    smooth.apply(case.block, case.sites, batches, Config(0.5), schemes)
    after = difference(rounded_outputs(case.block, batches, schemes), exact)
    assert after < 0.3 * before


def test_only_norms() -> None:
    case = Case("llama")
    before = case.copy()
    smooth.apply(case.block, case.sites, case.batches(), Config(sites="norms"), case.schemes(8))
    after = case.copy()
    for kept in ("self_attn.o_proj", "mlp.down_proj"):
        assert torch.equal(after[f"{kept}.weight"], before[f"{kept}.weight"])
    assert not torch.equal(after["mlp.up_proj.weight"], before["mlp.up_proj.weight"])


def test_sites_without_quantized_readers_stay() -> None:
    case = Case("llama")
    before = case.copy()
    schemes: dict[str, Scheme] = {"mlp.down_proj": case.schemes(8)["mlp.down_proj"]}
    notes = smooth.apply(case.block, case.sites, case.batches(), Config(), schemes)
    changed = {name for name, value in case.copy().items() if not torch.equal(value, before[name])}
    assert changed == {"mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert notes[0].startswith("1 of 4 sites")


def test_dead_channels_keep_their_scale() -> None:
    case = Case("llama")
    site = case.sites[2]
    with torch.no_grad():
        case.block.get_submodule(site.producer).get_parameter("weight")[5] = 0
        for reader in site.readers:
            case.block.get_submodule(reader).get_parameter("weight")[:, 7] = 0
    before = case.copy()
    smooth.apply(case.block, [site], case.batches(), Config(), case.schemes(8))
    after = case.copy()
    for name, j in (("mlp.gate_proj.weight", 5), ("mlp.up_proj.weight", 5), ("mlp.gate_proj.weight", 7)):
        assert torch.equal(after[name][:, j], before[name][:, j])
    norm = "post_attention_layernorm.weight"
    assert (after[norm][5], after[norm][7]) == (0, before[norm][7])
    assert all(torch.isfinite(value).all() for value in after.values())


def test_experts_without_tokens_stay() -> None:
    case = Case("mixtral")
    case.tokens = case.tokens[:1, :1]  # two of four experts
    before = case.copy()
    notes = smooth.apply(case.block, case.sites, case.batches(), Config(), case.schemes(8))
    after = case.copy()
    same = [i for i in range(4) if torch.equal(after[f"mlp.experts.{i}.down_proj.weight"],
                                               before[f"mlp.experts.{i}.down_proj.weight"])]  # fmt: skip
    assert len(same) == 2
    assert notes[1].startswith("2 sites stay as they are")


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_config(alpha: float) -> None:
    with pytest.raises(ValueError, match="^alpha"):
        Config(alpha)
    with pytest.raises(ValueError, match="^sites"):
        Config(sites="some")  # type: ignore[arg-type]
