"""Train one factor for each of some channels of a block, so that the block gives what it gave before it was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.model.blockwise import BlockArgs, BlockInputs, call_block
from compress.tune.descend import match, relative_error


class ScaledRows(NamedTuple):
    """Rows of a linear that are multiplied together: those of one row of `rows` by one factor."""

    name: str  # path of the linear in the block
    rows: Tensor  # [factors, rows of each] int64


def train(
    block: nn.Module,
    before: Mapping[str, Tensor],
    groups: Sequence[ScaledRows],
    batches: BlockInputs,
    steps: int,
    rate: float,
) -> str:
    """Train the factors and multiply them into the block, in place; return a note for the report.

    `before`: those parameters of the block that have been changed, as they were. If the error over all batches does
    not fall, the block stays as it is.
    """
    device = next(block.parameters()).device
    factors = nn.Parameter(torch.ones(sum(len(group.rows) for group in groups), device=device))

    def run(parameters: dict[str, Tensor], hidden: Tensor, call: BlockArgs) -> Tensor:
        return call_block(lambda *args, **kwargs: functional_call(block, parameters, args, kwargs), call, hidden)[0]

    def original(hidden: Tensor, call: BlockArgs) -> Tensor:
        return run(dict(before), hidden, call)

    def scaled(hidden: Tensor, call: BlockArgs) -> Tensor:
        return run(_scaled(block, groups, factors), hidden, call)

    def present(hidden: Tensor, call: BlockArgs) -> Tensor:
        return call_block(block, call, hidden)[0]

    first = relative_error(original, present, batches)
    match([factors], steps, rate, original, scaled, batches)
    last = relative_error(original, scaled, batches)
    note = f"{factors.numel()} factors trained for {steps} steps: error of the block {first:.3g} -> {last:.3g}"
    if not last < first:
        return f"{note}; no better, so they are left out"
    with torch.no_grad():
        for name, tensor in _scaled(block, groups, factors).items():
            block.get_parameter(name).copy_(tensor)
    return note


def _scaled(block: nn.Module, groups: Sequence[ScaledRows], factors: Tensor) -> dict[str, Tensor]:
    """Return the parameters of the linears whose rows have factors, times these."""
    scaled: dict[str, Tensor] = {}
    for group, chosen in zip(groups, factors.split([len(group.rows) for group in groups]), strict=True):
        for key, parameter in block.get_submodule(group.name).named_parameters():
            path = f"{group.name}.{key}"
            current = scaled.get(path, parameter.detach())
            scale = torch.ones(len(current), device=current.device)
            scale = scale.index_put((group.rows.to(current.device),), chosen[:, None].expand(group.rows.shape))
            scaled[path] = (current * scale.view(-1, *[1] * (current.dim() - 1))).to(parameter.dtype)
    return scaled
