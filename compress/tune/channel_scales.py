"""One factor for each of some channels of a block, trained so that the block gives what it gave before it was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.model.blockwise import Batches, Call
from compress.tune import low_rank as lowrank


class Group(NamedTuple):
    """Rows of a linear that are multiplied together: those of one row of `rows` by one factor."""

    name: str  # path of the linear in the block
    rows: Tensor  # [factors, rows of each] int64


def train(
    block: nn.Module, before: Mapping[str, Tensor], groups: Sequence[Group], batches: Batches, steps: int, rate: float
) -> str:
    """Train the factors and multiply them into the block, in place; returns a note for the report.

    `before`: those parameters of the block that have been changed, as they were. If the error over all batches does
    not fall, the block stays as it is.
    """
    device = next(block.parameters()).device
    factors = nn.Parameter(torch.ones(sum(len(group.rows) for group in groups), device=device))
    stream = lowrank.endless(batches)

    def loss(step: int) -> float:
        hidden, call = next(stream)
        with torch.no_grad():
            wanted = _states(block, before, hidden, call)
        with torch.enable_grad():
            found = _states(block, _scaled(block, groups, factors), hidden, call)
            error = (found - wanted).square().mean() / wanted.square().mean()
            error.backward()
        return error.item()

    first = _error(block, before, {}, batches)
    lowrank.descend([factors], steps, rate, loss)
    with torch.no_grad():
        scaled = _scaled(block, groups, factors)
        last = _error(block, before, scaled, batches)
        note = f"{factors.numel()} factors trained for {steps} steps: error of the block {first:.3g} -> {last:.3g}"
        if not last < first:
            return f"{note}; no better, so they are left out"
        for name, tensor in scaled.items():
            block.get_parameter(name).copy_(tensor)
    return note


def _scaled(block: nn.Module, groups: Sequence[Group], factors: Tensor) -> dict[str, Tensor]:
    """The parameters of the linears whose rows have factors, times these."""
    found: dict[str, Tensor] = {}
    for group, own in zip(groups, factors.split([len(group.rows) for group in groups]), strict=True):
        for key, parameter in block.get_submodule(group.name).named_parameters():
            path = f"{group.name}.{key}"
            current = found.get(path, parameter.detach())
            scale = torch.ones(len(current), device=current.device)
            scale = scale.index_put((group.rows.to(current.device),), own[:, None].expand(group.rows.shape))
            found[path] = (current * scale.view(-1, *[1] * (current.dim() - 1))).to(parameter.dtype)
    return found


@torch.no_grad()
def _error(block: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor], batches: Batches) -> float:
    """Relative squared error of what the block gives with the parameters `after`, over all batches."""
    error = size = 0.0
    for hidden, call in batches():
        wanted, found = (_states(block, tensors, hidden, call) for tensors in (before, after))
        error += (found - wanted).square().sum(dtype=torch.float64).item()
        size += wanted.square().sum(dtype=torch.float64).item()
    return error / size


def _states(block: nn.Module, parameters: Mapping[str, Tensor], hidden: Tensor, call: Call) -> Tensor:
    """What the block gives with some of its parameters replaced, float32."""
    output: Any = functional_call(block, dict(parameters), (hidden, *call.args), call.kwargs)
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found.float()
