"""Folding of scales and shifts: against float64 by definition, on blocks of several families, in narrow types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compress.model.graph import Site
from compress.transform import folding
from compress.transform.folding import by_producer, can_shift, fold, to_readers
from helpers.blocks import SITES, Case, difference, outputs
from helpers.problems import random

NORM = Site("norm", True, ("a", "b"), "")


class Small(nn.Module):
    """A norm or a linear "norm", and two linears that read it, in a type; every number is random."""

    def __init__(self, producer: nn.Module, width: int, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.a, self.b = producer, nn.Linear(width, 7, bias), nn.Linear(width, 5, bias)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, seed=i).to(dtype)


def layer_norm(width: int = 12, dtype: torch.dtype = torch.float32) -> Small:
    return Small(nn.LayerNorm(width), width, dtype)


def producer_channels(case: Case, site: Site) -> int:
    return case.block.get_submodule(site.producer).get_parameter("weight").shape[0]


def scale_of(channels: int, seed: int = 0) -> Tensor:
    return random(channels, seed=seed).exp().double()


@pytest.mark.parametrize("name", SITES)
def test_function_of_a_block_stays(name: str) -> None:
    case = Case(name)
    before, weights = outputs(case.block, case.batches()), case.copy()
    for seed, site in enumerate(case.sites):
        channels = producer_channels(case, site)
        shift = random(channels, seed=seed + 50).double() if site.is_norm and can_shift(case.block, site) else None
        assert fold(case.block, site, scale_of(channels, seed), shift)
    assert difference(outputs(case.block, case.batches()), before) < 1e-10  # squared
    touched = {s.producer for s in case.sites} | {r for s in case.sites for r in s.readers}
    changed = {n.rpartition(".")[0] for n, p in case.block.named_parameters() if not torch.equal(p, weights[n])}
    assert changed == touched


@pytest.mark.parametrize("name", SITES)
def test_vector_is_changed_as_asked(name: str) -> None:
    for index in range(len(SITES[name])):
        case = Case(name)
        site, batches = case.sites[index], case.batches(6)
        seen: list[Tensor] = []
        reader = case.block.get_submodule(site.readers[-1])
        handle = reader.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].double()))
        outputs(case.block, batches)
        scale = scale_of(producer_channels(case, site))
        shift = random(len(scale), seed=9).double() if site.is_norm and can_shift(case.block, site) else None
        assert fold(case.block, site, scale, shift)
        outputs(case.block, batches)
        handle.remove()
        moved = 0 if shift is None else to_readers(site, shift)
        torch.testing.assert_close(seen[1], (seen[0] - moved) / to_readers(site, scale), rtol=1e-4, atol=1e-4)


def test_shift_of_values_passes_attention() -> None:
    case = Case("opt")
    site, before = case.sites[1], outputs(case.block, case.batches())
    assert site.producer.endswith("v_proj")
    assert fold(case.block, site, scale_of(64), random(64, seed=1).double())
    assert difference(outputs(case.block, case.batches()), before) < 1e-10


@pytest.mark.parametrize("offset", [False, True])
def test_against_the_definition(offset: bool) -> None:
    small = layer_norm(dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in small.named_parameters()}
    scale, shift = scale_of(12), random(12, seed=20).double()
    assert fold(small, NORM._replace(offset=offset), scale, shift)
    for j in range(12):
        gain = before["norm.weight"][j] + int(offset)
        torch.testing.assert_close(small.norm.weight[j], gain / scale[j] - int(offset))
        torch.testing.assert_close(small.norm.bias[j], (before["norm.bias"][j] - shift[j]) / scale[j])
        for reader in ("a", "b"):
            column = small.get_submodule(reader).get_parameter("weight")[:, j]
            torch.testing.assert_close(column, before[f"{reader}.weight"][:, j] * scale[j])
    for reader in ("a", "b"):
        expected = before[f"{reader}.bias"] + before[f"{reader}.weight"] @ shift
        torch.testing.assert_close(small.get_submodule(reader).get_parameter("bias").detach(), expected)


def test_linear_producer_against_the_definition() -> None:
    small = Small(nn.Linear(9, 12), 12, torch.float64)
    before = {name: p.detach().clone() for name, p in small.named_parameters()}
    scale, shift = scale_of(12), random(12, seed=20).double()
    assert fold(small, NORM._replace(is_norm=False), scale, shift)
    torch.testing.assert_close(small.norm.weight.detach(), before["norm.weight"] / scale[:, None])
    torch.testing.assert_close(small.norm.bias.detach(), (before["norm.bias"] - shift) / scale)
    torch.testing.assert_close(small.a.weight.detach(), before["a.weight"] * scale)
    torch.testing.assert_close(small.b.bias.detach(), before["b.bias"] + before["b.weight"] @ shift)


def test_heads_that_are_repeated() -> None:
    site = Site("v", False, ("o",), "o", repeats=3, head_dim=4)
    producer, readers = torch.arange(8.0), torch.arange(24.0)
    for channel in range(24):
        head, inner = divmod(channel, 4)
        assert to_readers(site, producer)[channel] == producer[head // 3 * 4 + inner]
        assert by_producer(site, readers)[head % 3, head // 3 * 4 + inner] == readers[channel]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [False, True])
def test_rounding_of_a_norm_is_taken_back_in_its_readers(dtype: torch.dtype, offset: bool) -> None:
    """Gain times weight keeps its value up to the rounding of the weight, even where 1 + w is small."""
    small = layer_norm(64, dtype)
    products = {r: (small.norm.weight.double() + offset) * small.get_submodule(r).weight.double() for r in "ab"}
    sums = {r: small.get_submodule(r).bias.double() + small.get_submodule(r).weight.double() @ small.norm.bias.double()
            for r in "ab"}  # fmt: skip
    assert fold(small, NORM._replace(offset=offset), scale_of(64) * 30, random(64, seed=3).double())
    for r in "ab":
        reader = small.get_submodule(r)
        found = (small.norm.weight.double() + offset) * reader.weight.double()
        assert ((found - products[r]).abs() <= products[r].abs() * torch.finfo(dtype).eps).all()
        constant = reader.bias.double() + reader.weight.double() @ small.norm.bias.double()
        size = reader.bias.abs().double() + reader.weight.abs().double() @ small.norm.bias.abs().double()
        assert ((constant - sums[r]).abs() <= 2 * torch.finfo(dtype).eps * size).all()


def test_dead_gain_and_underflow() -> None:
    small = layer_norm(4, torch.float16)
    small.norm.weight.data = torch.tensor([0.0, 1e-6, 1.0, 1.0]).half()
    before = small.a.weight.detach().clone()
    assert fold(small, NORM, torch.tensor([2.0, 1000.0, 4.0, 1.0]))
    assert torch.equal(small.norm.weight.detach()[2:], torch.tensor([0.25, 1]).half())
    assert small.norm.weight[0] == 0
    assert small.norm.weight[1] == torch.tensor(1e-6).half()  # 1e-9 is no float16: not scaled
    assert torch.equal(small.a.weight.detach(), before * torch.tensor([2.0, 1, 4, 1]).half())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0, 1e-6, 1e6])
@pytest.mark.parametrize("is_norm", [True, False])
def test_what_cannot_be_stored_changes_nothing(bad: float, is_norm: bool) -> None:
    producer = nn.LayerNorm(12) if is_norm else nn.Linear(9, 12)
    small = Small(producer, 12, torch.float16)
    before = {name: p.detach().clone() for name, p in small.named_parameters()}
    scale = scale_of(12)
    scale[3] = bad
    assert not fold(small, NORM._replace(is_norm=is_norm), scale)
    assert all(torch.equal(p, before[name]) for name, p in small.named_parameters())


def test_bias_that_would_overflow_changes_nothing() -> None:
    small = layer_norm(12, torch.float16)
    before = {name: p.detach().clone() for name, p in small.named_parameters()}
    assert not fold(small, NORM, torch.ones(12), torch.full((12,), 6e4))
    assert all(torch.equal(p, before[name]) for name, p in small.named_parameters())


def test_shift_needs_biases_everywhere() -> None:
    assert can_shift(Case("opt").block, SITES["opt"][0])
    for name in ("llama", "qwen2", "mixtral"):
        case = Case(name)
        assert not any(can_shift(case.block, site) for site in case.sites)
    small = layer_norm()
    small.b.register_parameter("bias", None)
    with pytest.raises(AssertionError, match="cannot take a shift"):
        fold(small, NORM, torch.ones(12), torch.ones(12))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (folding.CHUNK, 20):
        monkeypatch.setattr(folding, "CHUNK", chunk)
        small = Small(nn.Linear(9, 12), 12, torch.bfloat16)
        assert fold(small, NORM._replace(is_norm=False), scale_of(12), random(12, seed=4))
        results.append([p.detach().clone() for p in small.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
