"""Find the weights that make the keys and the values of a block, by what the gradients of these reach.

No name and no order of rows is relied on: of a projection that gives queries, keys and values at once, the rows of each
are told apart, and a norm of keys behind the projection does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def projection_weights(block: nn.Module, run: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return for each kind of states that `run` gives the rows of the weight they come from, float32 [rows, columns].

    run: a pass through the block, whose keys and values it returns. [0, 0] where a kind comes from no floating-point
    matrix of the block, or from several, as latent keys do.
    """
    weights = [p for p in block.parameters() if p.dim() == 2 and p.is_floating_point()]
    before = [p.requires_grad for p in weights]
    weights_by_kind = {}
    try:
        for p in weights:
            p.requires_grad_(True)
        with torch.enable_grad():
            for kind, states in run().items():
                slope = torch.linspace(-1, 1, states.numel(), device=states.device).view_as(states).to(states.dtype)
                weights_by_kind[kind] = _rows_reached(weights, states, slope)
    finally:
        for p, required in zip(weights, before, strict=True):
            p.requires_grad_(required)
    return weights_by_kind


def _rows_reached(weights: list[nn.Parameter], states: Tensor, slope: Tensor) -> Tensor:
    """Return the rows of the one weight that the gradient of states reaches; [0, 0] if it is not one."""
    if not states.requires_grad:
        return torch.zeros(0, 0)
    slopes = torch.autograd.grad(states, weights, slope, allow_unused=True, retain_graph=True)
    rows = [w.detach()[g.abs().amax(1) > 0] for w, g in zip(weights, slopes, strict=True) if g is not None]
    rows = [each for each in rows if len(each)]
    return rows[0].float().cpu() if len(rows) == 1 else torch.zeros(0, 0)
