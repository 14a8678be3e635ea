"""CLOVER: what only counts as a product inside attention is decomposed together, head by head, and the least is cut.

What a head adds to the residual stream is O V x, mixed over tokens: V [head_dim, hidden] and O [hidden, head_dim] only
count as their product, and O V = U S W^T gives V' = S^1/2 W^T and O' = U S^1/2, channels of a head in the order of what
they matter (arXiv 2411.17426). Heads of the output that share a head of values (grouped-query attention) are put on top
of each other: one decomposition of the whole group, exact as well, where the paper has only a QR decomposition. A bias
is one more column. Nothing changes but the basis; all is computed in float64 and rounded once.

With `prune_keys` (which may be 0) the same is done to queries and keys, whose product Q^T K makes the scores. Channels
that no rotary position touches (all, in a model without; most of some others) are decomposed as above. Two channels
that are turned together are one complex number, which may be multiplied by one of our choice (transform/qk_pairs.py):
the pair of the keys is turned until its two rows are orthogonal, the larger first, and both sides get the same norm.
The paper only makes the queries orthogonal there.

With `prune` the share of the block's value channels with the smallest S (the joint norm of a row of V' and a column of
O') becomes zero in both, and with `prune_keys` that of its query-key channels, turned ones in pairs. The size of a pair
is the product of the norms of its two sides, as in the paper, with `measure: weights`: half of the square of it is what
the pair adds to squared scores, averaged over all angles. With `measure: inputs` the root mean squares of what both
sides give on the calibration text take the place of the norms. The paper takes one quantile for the whole model: the
exact bytes of a plan would then depend on the weights. The layout of the model stays, because no configuration knows
heads of different sizes: the method `cut` (compress/quant/cut.py) stores what is not zero, and `cut` with the same
share is what makes a model smaller.

On tests/models/books-8m (8176 tokens of held-out text; calibrated on 32 samples of 512 tokens) a quarter of the
query-key channels costs a KL of 0.0123, 0.0278 with `measure: weights`, and half of them 0.069 and 0.132. Half of the
value channels cost 0.0013: behind rotary positions nothing concentrates. With both, a quarter and half, 0.0138, and
0.0100 after `train: 50`, in 194 s on one core in place of 10.

With `train`, a factor for each channel that is left (one for a pair) is trained so that the block gives what it gave
before it was cut, on the inputs that it gets in calibration, and multiplied into the rows of values and keys: the
paper's training, of the singular values alone, without its loss over the whole model. It costs `train` forward and
backward passes of each block on a batch, three passes over all batches, and a copy of the attention's weights.

Rotations (transform `rotate`) spread what this concentrates: not to be used together.

Not done: queries and keys with a norm between them and the scores (a row cut there changes all others); training of
anything but S; a measure of the inputs for values; blocks whose attention cannot be followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.model.blockwise import BlockInputs, run_block
from compress.model.graph import Attention, Site, Sites
from compress.transform import qk_pairs
from compress.transform.qk_pairs import Scores
from compress.tune import channel_scales
from compress.types import Scheme

SCOPE = "block"


@dataclass(frozen=True)
class Config:
    prune: float = 0.0  # share of the value channels of a block that become zero
    prune_keys: float | None = None  # share of its query-key channels that do; null: queries and keys are left alone
    measure: Literal["inputs", "weights"] = (
        "inputs"  # what query-key channels are sized by: as they come, or plain norms
    )
    train: int = 0  # steps in which what is left of the singular values is trained; 0: not at all
    train_rate: float = 1e-2  # the largest learning rate

    def __post_init__(self) -> None:
        for key in ("prune", "prune_keys"):
            if not 0 <= (getattr(self, key) or 0) < 1:
                raise ValueError(f"{key} {getattr(self, key)} is not at least 0 and below 1")
        if self.train < 0 or self.train_rate <= 0:
            raise ValueError(f"train {self.train}: steps, at a rate above 0")


class Pair(NamedTuple):
    """A head of values and the heads of the output that read it, channels in the order of their sizes."""

    values: Tensor  # [head_dim, hidden (+ 1)] float64
    outputs: Tensor  # [heads of the group, out, head_dim] float64
    sizes: Tensor  # [head_dim] float64, descending


class Cut(NamedTuple):
    """What became of the channels of a block."""

    zeroed: int
    lost: float  # share of the squared norm of all products
    groups: list[channel_scales.ScaledRows]  # rows of a linear that one factor may be trained for


def apply(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, config: Config, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """Decompose the attention of a loaded block in place; returns notes for the report."""
    attention = sites.attention if isinstance(sites, Sites) else None
    if attention is None:
        raise UnsupportedModelError("where attention has its values from cannot be seen; use a recipe without clover")
    found = None
    if config.prune_keys is not None:
        hidden, call = next(iter(batches()))
        found = qk_pairs.find(block, hidden, call)
        if found is None:
            raise UnsupportedModelError(
                "between queries or keys and the scores is something else than rotary positions; leave out prune_keys"
            )
    names = {attention.values, attention.output, *([found.queries.name, found.keys.name] if found else [])}
    before = _copied(block, names) if config.train else {}
    parts = [("value", decompose(block, attention, config.prune), attention.key_value_heads * attention.head_dim)]
    if found is not None:
        seen = batches if config.measure == "inputs" else None
        parts.append(("query-key", decompose_keys(block, found, config.prune_keys or 0, seen), found.keys.rows.numel()))
    notes = [
        f"{part.zeroed} of {total} {what} channels are zero: {100 * part.lost:.2f}% of the squared products"
        for what, part, total in parts
        if part.zeroed
    ]
    if config.train and notes:
        groups = [group for _, part, _ in parts for group in part.groups]
        notes.append(channel_scales.train(block, before, groups, batches, config.train, config.train_rate))
    return tuple(notes) or ("the products inside attention are decomposed",)


@torch.no_grad()
def decompose(block: nn.Module, attention: Attention, prune: float = 0.0) -> Cut:
    """Values and output, in place."""
    values, output = block.get_submodule(attention.values), block.get_submodule(attention.output)
    columns = output.get_parameter("weight").detach()
    heads = range(attention.key_value_heads)
    repeats, size = attention.heads // attention.key_value_heads, attention.head_dim
    rows = torch.stack([_rows(attention, head) for head in heads])
    pairs = [decomposed(_taken(values, rows[head]), _group(columns, head, repeats, size).double()) for head in heads]
    sizes = torch.stack([pair.sizes for pair in pairs])
    count = round(prune * sizes.numel())
    kept = torch.ones(sizes.numel(), dtype=torch.float64, device=sizes.device)
    kept[sizes.flatten().argsort(stable=True)[:count]] = 0
    kept = kept.view_as(sizes)
    for head, pair, mask in zip(heads, pairs, kept, strict=True):
        _put(values, rows[head], pair.values * mask[:, None])
        _group(columns, head, repeats, size).copy_(pair.outputs * mask)
    return Cut(
        count,
        _share(sizes.square(), kept),
        [channel_scales.ScaledRows(attention.values, rows[kept.cpu() > 0][:, None])],
    )


@torch.no_grad()
def decompose_keys(block: nn.Module, found: Scores, prune: float = 0.0, batches: BlockInputs | None = None) -> Cut:
    """Queries and keys, in place; at least the share `prune` of their channels becomes zero, the least on `batches`."""
    queries, keys = block.get_submodule(found.queries.name), block.get_submodule(found.keys.name)
    heads, repeats = len(found.keys.rows), len(found.queries.rows) // len(found.keys.rows)
    grouped = found.queries.rows.view(heads, repeats, -1)  # key/value head, head, channel
    units: list[tuple[Tensor, Tensor]] = []  # rows of keys [n] and queries [heads, n] that stay or go together
    for own, reading in zip(found.keys.rows, grouped, strict=True):
        _decompose_free(queries, keys, reading[:, found.free], own[found.free])
        for pair in found.pairs:
            _turn(queries, keys, reading[:, pair], own[pair])
        units += [(own[unit], reading[:, unit]) for unit in (*found.free[:, None], *found.pairs)]
    counts = torch.tensor([len(own) for own, _ in units])
    energies = _norms(queries, keys) if batches is None or not prune else _energies(block, queries, keys, batches)
    squares = (
        torch.stack([energies[0][reading].sum() * energies[1][own].sum() for own, reading in units]).cpu() / counts
    )
    order = (squares / counts).argsort(stable=True)
    before = counts[order].cumsum(0) - counts[order]  # channels that go before this one
    kept = torch.ones(len(units), dtype=torch.float64)
    kept[order[before < round(prune * found.keys.rows.numel())]] = 0
    for (own, reading), keep in zip(units, kept.tolist(), strict=True):
        if not keep:
            _put(keys, own, torch.zeros_like(_taken(keys, own)))
            _put(queries, reading.flatten(), torch.zeros_like(_taken(queries, reading.flatten())))
    left = [own for (own, _), keep in zip(units, kept.tolist(), strict=True) if keep]
    alike = [[own for own in left if len(own) == count] for count in (1, 2)]
    groups = [channel_scales.ScaledRows(found.keys.name, torch.stack(rows)) for rows in alike if rows]
    return Cut(int((counts * (1 - kept)).sum()), _share(squares, kept), groups)


def decomposed(values: Tensor, outputs: Tensor) -> Pair:
    """values [head_dim, n], outputs [g, out, head_dim], both float64: their product in its own basis, balanced."""
    count, out, size = outputs.shape
    left, above = torch.linalg.qr(outputs.reshape(count * out, size))
    right, below = torch.linalg.qr(values.T)
    turned, sizes, back = torch.linalg.svd(above @ below.T)
    root = sizes.sqrt()
    return Pair(root[:, None] * (back @ right.T), (left @ turned * root).view(count, out, size), sizes)


def _decompose_free(queries: nn.Module, keys: nn.Module, reading: Tensor, own: Tensor) -> None:
    """Channels `own` [n] of a head of keys and [heads, n] of the queries, that no position turns."""
    if not len(own):
        return
    sides = torch.stack([_taken(queries, rows).T for rows in reading])  # head, input, channel
    pair = decomposed(_taken(keys, own), sides)
    _put(keys, own, pair.values)
    for rows, columns in zip(reading, pair.outputs, strict=True):
        _put(queries, rows, columns.T)


def _turn(queries: nn.Module, keys: nn.Module, reading: Tensor, own: Tensor) -> None:
    """Two channels `own` [2] and [heads, 2] that are turned together: q c, k / conj(c), both of the same norm."""
    q, k = _taken(queries, reading.flatten()), _taken(keys, own)
    sides = torch.complex(q[::2], q[1::2]), torch.complex(k[0], k[1])
    norms = [side.norm() for side in sides]
    if not all(norms):
        return
    angle = torch.polar(torch.ones_like(norms[0]), -(sides[1] ** 2).sum().angle() / 2)
    stretch = (norms[0] / norms[1]).sqrt()
    turned_q, turned_k = sides[0] * angle / stretch, sides[1] * angle * stretch
    _put(queries, reading.flatten(), torch.stack((turned_q.real, turned_q.imag), 1).flatten(0, 1))
    _put(keys, own, torch.stack((turned_k.real, turned_k.imag)))


def _norms(*linears: nn.Module) -> list[Tensor]:
    """Squared norm of each row, its bias with it: the mean square of what it gives for inputs of all directions."""
    return [_taken(linear, torch.arange(len(linear.get_parameter("weight")))).square().sum(1) for linear in linears]


def _energies(block: nn.Module, queries: nn.Module, keys: nn.Module, batches: BlockInputs) -> list[Tensor]:
    """Sum over tokens of the square of what each row of both linears gives, float64."""
    sums: dict[int, Tensor] = {}

    def add(linear: nn.Module, inputs: object, output: Tensor) -> None:
        sums[id(linear)] = sums.get(id(linear), 0) + output.flatten(0, -2).double().square().sum(0)

    hooks = [linear.register_forward_hook(add) for linear in {queries, keys}]
    try:
        for hidden, call in batches():
            run_block(block, call, hidden, "a block")
    finally:
        for hook in hooks:
            hook.remove()
    return [sums[id(linear)] for linear in (queries, keys)]


def _copied(block: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """The parameters of some of its linears, by their paths."""
    owned = [(f"{name}.{key}", p) for name in sorted(names) for key, p in block.get_submodule(name).named_parameters()]
    return {path: parameter.detach().clone() for path, parameter in owned}


def _taken(linear: nn.Module, rows: Tensor) -> Tensor:
    """These rows of a weight, float64; the bias, if there is one, as one more column."""
    part = linear.get_parameter("weight").detach()[rows].double()
    bias = getattr(linear, "bias", None)
    return part if bias is None else torch.cat((part, bias.detach()[rows, None].double()), 1)


def _put(linear: nn.Module, rows: Tensor, part: Tensor) -> None:
    """The opposite of `_taken`."""
    weight, bias = linear.get_parameter("weight").detach(), getattr(linear, "bias", None)
    weight[rows] = part[:, : weight.shape[1]].to(weight.dtype)
    if bias is not None:
        bias.data[rows] = part[:, -1].to(bias.dtype)


def _share(squares: Tensor, kept: Tensor) -> float:
    """The share of the sum that is not kept."""
    return 1 - (squares * kept).sum().item() / max(squares.sum().item(), 1e-300)


def _rows(attention: Attention, head: int) -> Tensor:
    """The rows of the values' linear that are the channels of a head."""
    first = attention.first + head * attention.head_step
    return first + torch.arange(attention.head_dim) * attention.step


def _group(columns: Tensor, head: int, repeats: int, size: int) -> Tensor:
    """The columns [out, heads * size] that read a head of values: a view [repeats, out, size]."""
    part = columns[:, head * repeats * size : (head + 1) * repeats * size]
    return part.unflatten(1, (repeats, size)).transpose(0, 1)
