"""What block transforms search with: nothing depends on batches, rounding is that of the methods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from compress import formats
from compress.model.blockwise import BlockArgs
from compress.model.graph import Site
from compress.papers.quant import vptq
from compress.quant import gptq, rtn
from compress.transform.folding import fold
from compress.transform.search import (
    Range,
    Substitute,
    Trial,
    fake_activations,
    fake_weight,
    observe,
    scalar_grid,
    substitute_weights,
    trials,
)
from compress.types import Activations, Scheme
from helpers.blocks import SAMPLES, SITES, TOKENS, Case, outputs, per_token, vectors
from helpers.problems import random


@pytest.mark.parametrize("name", SITES)
def test_ranges_are_those_of_all_tokens_however_batched(name: str) -> None:
    case = Case(name)
    wanted = [vectors(case, site) for site in case.sites]
    for size in (1, 2, 4, 6):
        ranges = [Range(case.block, site) for site in case.sites]
        observe(case.block, case.batches(size), ranges)
        for found, x, site in zip(ranges, wanted, case.sites, strict=True):
            assert found.count == len(x) > 0
            assert found.count == SAMPLES * TOKENS or "experts" in site.producer
            assert found.usable
            torch.testing.assert_close(found.low.double(), x.amin(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.high.double(), x.amax(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.largest.double(), x.abs().amax(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.mean, x.abs().mean(0), rtol=1e-4, atol=1e-5)


class Plain(nn.Module):
    """A block that calls what it is given on its hidden states."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.reader = norm, nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        self.reader(self.norm(hidden))
        return hidden


SITE = Site("norm", True, ("reader",), "reader")


def test_ranges_that_cannot_be_used() -> None:
    block = Plain(nn.Identity())
    for value in (float("inf"), float("nan")):
        broken = torch.zeros(1, 3, 4)
        broken[0, 1, 2] = value
        seen = Range(block, SITE)
        seen._add(broken)
        assert not seen.usable
    assert not Range(block, SITE).usable
    empty = Range(block, SITE)
    empty._add(torch.zeros(0, 4))
    assert not empty.usable


def kept_outputs(case: Case, path: str, size: int, tokens: int, sequences: int) -> tuple[Trial, Tensor]:
    trial = Trial(case.block.get_submodule(path), tokens, sequences)
    observe(case.block, case.batches(size), [trial])
    return trial, torch.cat([out.flatten(0, -2) for out in trial.outputs()])


@pytest.mark.parametrize(
    ("name", "path", "rows"),
    [
        ("llama", "self_attn", 3 * 5),
        ("llama", "mlp", 3 * 5),
        ("llama", "mlp.down_proj", 3 * 5),
        ("llama", "", 3 * 5),
        ("mixtral", "mlp", 3 * 5),
        ("mixtral", "mlp.experts.1.down_proj", 3 * 5),
        ("opt", "fc1", 3 * 5),
        ("opt", "self_attn", 3 * 5),
    ],
)
def test_trials_do_not_depend_on_batches(name: str, path: str, rows: int) -> None:
    case = Case(name)
    first = kept_outputs(case, path, 1, 5, 3)[1]
    assert first.shape[0] == rows
    for size in (2, 4, 6):
        torch.testing.assert_close(kept_outputs(case, path, size, 5, 3)[1], first, rtol=1e-4, atol=1e-5)


def test_trial_repeats_what_the_module_gave() -> None:
    case = Case("llama")
    seen: list[Tensor] = []
    batches = case.batches(2)
    for path in ("self_attn", "mlp", "mlp.down_proj", "self_attn.o_proj"):
        module = case.block.get_submodule(path)
        seen.clear()
        handle = module.register_forward_hook(lambda _, i, out: seen.append(out[0] if isinstance(out, tuple) else out))
        outputs(case.block, batches)
        handle.remove()
        given = torch.cat(seen)[:3, :5].flatten(0, 1)
        torch.testing.assert_close(kept_outputs(case, path, 2, 5, 3)[1], given, rtol=1e-4, atol=1e-5)


def test_rows_of_an_expert_come_from_all_batches_and_are_bounded() -> None:
    case = Case("mixtral")
    path = "mlp.experts.2.down_proj"
    site = next(site for site in case.sites if site.readers == (path,))
    wanted = vectors(case, site)
    few, many = Trial(case.block.get_submodule(path), 4, 2), Trial(case.block.get_submodule(path), 1000, 2)
    observe(case.block, case.batches(4), [few, many])
    assert few.full and not many.full
    assert few.rows_of_input().shape[0] == 8 < many.rows_of_input().shape[0] == len(wanted)
    torch.testing.assert_close(many.rows_of_input().double(), wanted, rtol=1e-4, atol=1e-5)


def test_observing_stops_when_nothing_more_is_wanted() -> None:
    case, pulled = Case("llama"), []
    batches = case.batches(1)

    def counted() -> Iterator[tuple[Tensor, BlockArgs]]:
        for batch in batches():
            pulled.append(1)
            yield batch

    observe(case.block, counted, [Trial(case.block.get_submodule("mlp"), 8, 2)])
    assert len(pulled) == 3  # the third is looked at and not run
    assert not any(module._forward_pre_hooks for module in case.block.modules())


def test_kept_inputs_are_never_written_to() -> None:
    class Careless(nn.Module):
        def forward(self, hidden: Tensor, scale: float) -> Tensor:
            return hidden.mul_(scale)

    module = Careless()
    trial = Trial(module, 8, 8)
    trial.begin(1)
    handle, given = trial.attach(), torch.ones(1, 2, 3)
    module(given, 3.0)
    handle.remove()
    assert given.max() == 3
    for _ in range(2):
        assert torch.equal(trial.outputs()[0], torch.full((1, 2, 3), 3.0))


@pytest.mark.parametrize("name", SITES)
def test_trials_hold_while_sites_are_changed(name: str) -> None:
    """Each site's trial gives what it gave before any site was changed, though its weights have been scaled since."""
    case, untouched = Case(name), Case(name)
    batches = case.batches(2)
    wanted = {site: trial.outputs() for site, _, trial in trials(untouched.block, case.sites, batches, 6, 3)}
    seen = []
    for site, found, trial in trials(case.block, case.sites, batches, 6, 3):
        if site in wanted and trial.kept:
            loss = trial.loss(wanted[site])
            assert loss < 1e-8 * sum(out.square().sum().item() for out in wanted[site])
        channels = case.block.get_submodule(site.producer).get_parameter("weight").shape[0]
        assert found.usable
        assert fold(case.block, site, random(channels, seed=len(seen)).exp())
        seen.append(site)
    assert sorted(seen) == sorted(case.sites)


def test_substitutes_are_taken_back() -> None:
    case = Case("opt")
    before, pointers = case.copy(), {n: p.data_ptr() for n, p in case.block.named_parameters()}
    fc1 = case.block.get_submodule("fc1")
    x = random(3, 64)
    weight, bias = random(128, 64, seed=1), random(128, seed=2)
    with substitute_weights(case.block, {"fc1": Substitute(weight, bias, lambda x: 2 * x)}):
        torch.testing.assert_close(fc1(x), 2 * x @ weight.T + bias)
    with pytest.raises(RuntimeError, match="stop"), substitute_weights(case.block, {"fc1": Substitute(weight)}):
        raise RuntimeError("stop")
    assert {n: p.data_ptr() for n, p in case.block.named_parameters()} == pointers
    assert all(torch.equal(p, before[n]) for n, p in case.block.named_parameters())
    assert not fc1._forward_pre_hooks


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [-1, 16, 40])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip_search", [True, False])
def test_fake_weight_is_what_round_to_nearest_stores(bits: int, group: int, symmetric: bool, clip_search: bool) -> None:
    weight = random(48, 96)
    weight[3], weight[:, :16] = 0, weight[:, :16] * 9
    config = rtn.Config(bits, group, symmetric, clip_search)
    packed = rtn.quantize(weight, None, config).weight
    before = weight.clone()
    assert torch.equal(fake_weight(weight, config), formats.decode(packed, torch.float32))
    assert torch.equal(weight, before)


def test_fake_activations() -> None:
    x = random(5, 7, 16) * random(5, 7, 1, seed=1).exp()
    x[0, 0] = 0
    torch.testing.assert_close(fake_activations(x, Activations(4), 99.0), per_token(x, 4))
    fixed = Activations(8, "tensor", clip=0.5)
    expected = (x / (2.0 / 127)).round().clamp(-127, 127) * (2.0 / 127)
    torch.testing.assert_close(fake_activations(x, fixed, 4.0), expected)
    assert torch.equal(fake_activations(torch.zeros(2, 3), fixed, 0.0), torch.zeros(2, 3))
    eight = fake_activations(x, Activations(dtype="fp8"), 1.0)
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    torch.testing.assert_close(eight, (x / step).to(torch.float8_e4m3fn).float() * step)
    assert 0 < (eight - x).abs().max() < 0.07 * x.abs().max()
    assert fake_activations(x.bfloat16(), Activations(), 1.0).dtype == torch.bfloat16


def test_which_linears_have_a_grid() -> None:
    assert scalar_grid(Scheme("gptq", gptq.Config(bits=3, group_size=32))) == gptq.Config(bits=3, group_size=32)
    assert scalar_grid(None) is None
    assert scalar_grid(Scheme("rtn", rtn.Config(), incoherence=True)) is None
    assert scalar_grid(Scheme("vptq", vptq.Config())) is None
