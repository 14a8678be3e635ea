"""Ordered neurons: the function stays, runs of rows are alike, what would change the function is undone."""

from __future__ import annotations

import pytest
import torch

from compress.papers.transform import order_neurons
from compress.papers.transform.order_neurons import Config
from helpers.blocks import SITES, Case, difference, outputs


@pytest.mark.parametrize("name", SITES)
def test_the_function_stays(name: str) -> None:
    case = Case(name)
    generator = torch.Generator().manual_seed(3)
    for site in case.sites:
        if not site.is_norm and not site.head_dim:
            weight = case.block.get_submodule(site.producer).get_parameter("weight")
            weight.data *= torch.rand(len(weight), 1, generator=generator) + 0.1
    before = {key: value.clone() for key, value in case.block.state_dict().items()}
    expected = outputs(case.block, case.batches())
    (note,) = order_neurons.apply(case.block, case.sites, case.batches(), Config(), {})
    count = sum(not site.is_norm and not site.head_dim for site in case.sites)
    assert note == f"neurons of {count} of {count} MLPs are ordered by the distribution of their weights"
    assert difference(outputs(case.block, case.batches()), expected) < 1e-4
    for site in case.sites:
        if not site.is_norm and not site.head_dim:
            name_of = f"{site.producer}.weight"
            assert not torch.equal(case.block.state_dict()[name_of], before[name_of])


def test_runs_are_alike() -> None:
    """Neurons of three kinds, shuffled: each third of the order is of one kind, whatever linear tells them apart."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randperm(48, generator=generator) % 3
    up, gate = torch.randn(2, 48, 512, generator=generator)
    for weights in ([up * (2 * kinds + 1)[:, None], gate], [up, gate * (2 * kinds + 1)[:, None]]):
        order = order_neurons.order_of(weights)
        assert torch.equal(order.sort().values, torch.arange(48))
        for run in kinds[order].split(16):
            assert len(run.unique()) == 1


def test_a_permutation_that_changes_the_function_is_undone() -> None:
    case = Case("llama")
    before = {key: value.clone() for key, value in case.block.state_dict().items()}
    order = torch.arange(case.block.mlp.up_proj.weight.shape[0]).flip(0)
    only = (["mlp.up_proj"], "mlp.down_proj")  # without the gate
    assert not order_neurons.permute_if_unchanged(case.block, only, order, case.batches())
    for key, value in case.block.state_dict().items():
        assert torch.equal(value, before[key])
    both = (["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj")
    assert order_neurons.permute_if_unchanged(case.block, both, order, case.batches())
