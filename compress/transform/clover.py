"""CLOVER: the values and the output of attention are decomposed together, head by head, and their least directions cut.

What a head adds to the residual stream is O V x, mixed over tokens: V [head_dim, hidden] and O [hidden, head_dim] only
count as their product, and O V = U S W^T gives V' = S^1/2 W^T and O' = U S^1/2, channels of a head in the order of what
they matter (arXiv 2411.17426). Heads of the output that share a head of values (grouped-query attention) are put on top
of each other: one decomposition of the whole group, exact as well, where the paper has only a QR decomposition. A bias
of the values is one more column of V. Nothing changes but the basis; all is computed in float64 and rounded once.

With `prune` the share of the block's value channels with the smallest S (the joint norm of a row of V' and a column of
O') becomes zero in both. The paper takes one quantile for the whole model: the exact bytes of a plan would then depend
on the weights. The layout of the model stays, because no configuration knows heads of different sizes: the method `cut`
(compress/quant/cut.py) stores what is not zero, and `cut` with the same share is what makes a model smaller.

Rotations (transform `rotate`) spread what this concentrates: not to be used together.

Not done: queries and keys (with rotary positions between them nothing but a turn of each pair of channels is free);
training of S; a measure of the inputs in place of the plain norm; blocks whose attention cannot be followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.propagate import Batches
from compress.structure import Attention, Site, Sites
from compress.types import Scheme

SCOPE = "block"


@dataclass(frozen=True)
class Config:
    prune: float = 0.0  # share of the value channels of a block that become zero

    def __post_init__(self) -> None:
        if not 0 <= self.prune < 1:
            raise ValueError(f"prune {self.prune} is not at least 0 and below 1")


class Pair(NamedTuple):
    """A head of values and the heads of the output that read it, channels in the order of their sizes."""

    values: Tensor  # [head_dim, hidden (+ 1)] float64
    outputs: Tensor  # [heads of the group, out, head_dim] float64
    sizes: Tensor  # [head_dim] float64, descending


def apply(
    block: nn.Module, sites: Sequence[Site], batches: Batches, config: Config, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """Decompose the attention of a loaded block in place; returns notes for the report."""
    attention = sites.attention if isinstance(sites, Sites) else None
    if attention is None:
        raise UnsupportedModelError("where attention has its values from cannot be seen; use a recipe without clover")
    zeroed, lost = decompose(block, attention, config.prune)
    if not zeroed:
        return ("values and output of attention are decomposed together",)
    total = attention.key_value_heads * attention.head_dim
    return (
        f"{zeroed} of {total} value channels are zero: {100 * lost:.2f}% of the squared norm of output times values",
    )


@torch.no_grad()
def decompose(block: nn.Module, attention: Attention, prune: float = 0.0) -> tuple[int, float]:
    """In place; returns how many channels became zero, and the share of the squared norm of all O V that they had."""
    values, output = block.get_submodule(attention.values), block.get_submodule(attention.output)
    weight, bias = values.get_parameter("weight").detach(), getattr(values, "bias", None)
    columns = output.get_parameter("weight").detach()
    heads = range(attention.key_value_heads)
    repeats, size = attention.heads // attention.key_value_heads, attention.head_dim
    pairs = []
    for head in heads:
        own = weight[_rows(attention, head)].double()
        if bias is not None:
            own = torch.cat((own, bias.detach()[_rows(attention, head), None].double()), 1)
        pairs.append(decomposed(own, _group(columns, head, repeats, size).double()))
    sizes = torch.stack([pair.sizes for pair in pairs])
    count = round(prune * sizes.numel())
    kept = torch.ones(sizes.numel(), dtype=torch.float64, device=sizes.device)
    kept[sizes.flatten().argsort(stable=True)[:count]] = 0
    for head, pair, mask in zip(heads, pairs, kept.view_as(sizes), strict=True):
        new = pair.values * mask[:, None]
        rows = _rows(attention, head)
        weight[rows] = new[:, : weight.shape[1]].to(weight.dtype)
        if bias is not None:
            bias.data[rows] = new[:, -1].to(bias.dtype)
        _group(columns, head, repeats, size).copy_(pair.outputs * mask)
    squares = sizes.square()
    return count, 1 - (squares * kept.view_as(sizes)).sum().item() / max(squares.sum().item(), 1e-300)


def decomposed(values: Tensor, outputs: Tensor) -> Pair:
    """values [head_dim, n], outputs [g, out, head_dim], both float64: their product in its own basis, balanced."""
    count, out, size = outputs.shape
    left, above = torch.linalg.qr(outputs.reshape(count * out, size))
    right, below = torch.linalg.qr(values.T)
    turned, sizes, back = torch.linalg.svd(above @ below.T)
    root = sizes.sqrt()
    return Pair(root[:, None] * (back @ right.T), (left @ turned * root).view(count, out, size), sizes)


def _rows(attention: Attention, head: int) -> Tensor:
    """The rows of the values' linear that are the channels of a head."""
    first = attention.first + head * attention.head_step
    return first + torch.arange(attention.head_dim) * attention.step


def _group(columns: Tensor, head: int, repeats: int, size: int) -> Tensor:
    """The columns [out, heads * size] that read a head of values: a view [repeats, out, size]."""
    part = columns[:, head * repeats * size : (head + 1) * repeats * size]
    return part.unflatten(1, (repeats, size)).transpose(0, 1)
