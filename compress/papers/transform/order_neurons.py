"""Order neurons so that those whose weights are alike lie side by side (JLCM, arXiv 2309.17361).

JLCM gives groups of neurons codebooks of their own. It clusters neurons whose weights are distributed alike and puts
them into an order in which a cluster is a run of rows, so that nothing has to say which codebook a row has. Methods of
the format `codebook` (gptvq) have a codebook for each run of rows already; this transform makes the runs alike.

The order of the neurons of an MLP is free: rows of the linears that make a neuron (up, and gate beside it) and columns
of the one that reads them (down) are permuted together, which changes nothing but the order of sums. What is permuted
is tried: the block has to give what it gave, else the site stays as it is.

A neuron is described by quantiles of the weights of its rows, in each linear that makes it. Runs of a format have equal
sizes, which clusters would not keep; so neurons are sorted along the direction in which their descriptions vary most
(the leading principal component), and any cut into equal runs gives runs that are alike.

Differences from the paper, whose abstract leaves open how neurons are clustered: quantiles and a sort in place of
clusters. Not done: heads (their channels belong to positions and to other heads), rows that the residual stream reads,
experts. Codes that are learned with weights by distance, the other half of JLCM, are compress/papers/codes/proximal.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.model.blockwise import BlockInputs, call_block
from compress.model.graph import Site
from compress.types import Scheme

SCOPE = "block"
QUANTILES_PER_ROW = 16  # they describe its weights
CLOSE = 1e-2  # relative error that another order of sums may make, in 16 bits


@dataclass(frozen=True)
class Config:
    """There is nothing to set."""


def apply(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, config: Config, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """Order the neurons of a loaded block in place; returns notes for the report."""
    ordered = 0
    tried = [site for site in sites if not site.is_norm and not site.head_dim and len(site.readers) == 1]
    for site in tried:
        makers = makers_of(block, site)
        order = order_of([block.get_submodule(name).get_parameter("weight") for name in makers])
        ordered += permute_if_unchanged(block, (makers, site.readers[0]), order, batches)
    return (f"neurons of {ordered} of {len(tried)} MLPs are ordered by the distribution of their weights",)


def makers_of(block: nn.Module, site: Site) -> list[str]:
    """Return the linears whose rows are the neurons: the producer and those beside it of as many rows."""
    parent, _, _ = site.producer.rpartition(".")
    count = block.get_submodule(site.producer).get_parameter("weight").shape[0]
    prefix = f"{parent}." if parent else ""
    beside = [
        prefix + name
        for name, module in block.get_submodule(parent).named_children()
        if isinstance(module, nn.Linear) and module.out_features == count and prefix + name != site.readers[0]
    ]
    return sorted({site.producer, *beside})


def order_of(weights: Sequence[Tensor]) -> Tensor:
    """Return the neurons [rows] int64 in the order of their descriptions; weights [rows, in] of all that make them."""
    shares = torch.linspace(0, 1, QUANTILES_PER_ROW, dtype=torch.float32)
    described = torch.cat([torch.quantile(w.detach().float().cpu(), shares, dim=1).T for w in weights], 1).double()
    described = described - described.mean(0)
    described = described / described.std(0).clamp(min=torch.finfo(torch.float32).tiny)
    direction = torch.linalg.eigh(described.T @ described)[1][:, -1]
    direction = direction * torch.sign(direction[-1] if direction[-1] != 0 else direction.sum())
    return (described @ direction).argsort(stable=True)


@torch.no_grad()
def permute_if_unchanged(
    block: nn.Module, linears: tuple[Sequence[str], str], order: Tensor, batches: BlockInputs
) -> bool:
    """Permute rows of the makers and columns of the reader; undo it unless the block gives the same. Return whether so.

    linears: the makers, and the reader.
    """
    hidden, call = next(iter(batches()))
    before = call_block(block, call, hidden)[0].float()
    _permute(block, linears, order)
    after = call_block(block, call, hidden)[0].float()
    moved = before - hidden.float()
    if (after - before).norm() <= CLOSE * moved.norm():
        return True
    _permute(block, linears, order.argsort())
    return False


def _permute(block: nn.Module, linears: tuple[Sequence[str], str], order: Tensor) -> None:
    makers, reader = linears
    for name in makers:
        for parameter in block.get_submodule(name).parameters():
            parameter.data.copy_(parameter.data[order.to(parameter.device)].clone())
    weight = block.get_submodule(reader).get_parameter("weight")
    weight.data.copy_(weight.data[:, order.to(weight.device)].clone())
