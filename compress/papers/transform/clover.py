"""CLOVER: decompose the products inside attention, head by head, and cut their least channels (arXiv 2411.17426).

A head adds O V x to the residual stream, mixed over tokens. V [head_dim, hidden] and O [hidden, head_dim] only count as
their product, and O V = U S W^T gives V' = S^1/2 W^T and O' = U S^1/2: the head's channels in the order of what they
matter. Heads of the output that share a head of values (grouped-query attention) are decomposed together, which is
exact, where the paper has only a QR decomposition. A bias is one more column. All is computed in float64, rounded once.

What a channel counts in the paper is the joint norm of its row and column, which takes inputs of all directions for
equally frequent. With `measure: inputs` values are decomposed for what attention hands to the output on the calibration
text: with second moments C = L L^T of a head's mixed values, and M = O^T O, L^T M L = U S^2 U^T gives V' = S^1/2 U^T
L^-1 V and O' = O L U S^-1/2. The product is the same, and cutting the channels of least S is then the best cut of so
many for the head's outputs (the optimum of LoRD, arXiv 2309.14021, inside a head). Where several heads of the output
share one of values, C is their mean and M their sum, which is that optimum only if their mixed values are alike.

With `prune_keys` (which may be 0) the same is done to queries and keys, whose product Q^T K makes the scores. Channels
that no rotary position touches are decomposed as above. Two channels that are turned together are one complex number
that may be multiplied by another (qk_pairs.py): the pair of the keys is turned until its two rows are orthogonal, the
larger first, and both sides get the same norm. The paper only makes the queries orthogonal there.

With `prune`, the share of the block's value channels with the smallest S becomes zero in V' and O'; with `prune_keys`,
that of its query-key channels, turned ones in pairs. With `measure: weights` sizes are products of norms: a row of one
side and a row or column of the other, as in the paper (half the square of a pair's is what it adds to squared scores,
averaged over all angles); with `measure: inputs` root mean squares on the calibration text replace the norms. The paper
takes one quantile for the whole model, with which the exact bytes of a plan would depend on the weights. The model's
layout stays, because no configuration knows heads of different sizes: the method `structured` with the same share
stores what is not zero, and makes the model smaller.

With `train`, a factor for each channel that is left (one for a pair) is trained so that the block gives what it gave
before it was cut, on its calibration inputs, and multiplied into the rows of values and keys: the paper's training of
the singular values, without its loss over the whole model. It takes `train` forward and backward passes of each block
on a batch, three passes over all batches, and a copy of the attention's weights.

On tests/models/books-8m (8176 tokens of held-out text; calibrated on 32 samples of 512 tokens) a quarter of the
query-key channels costs a KL of 0.0123, 0.0278 with `measure: weights`, and half of them 0.069 and 0.132. Half of the
value channels cost 0.0013: behind rotary positions nothing concentrates. With both, a quarter and half, 0.0138, and
0.0100 after `train: 50`, in 194 s on one core in place of 10. On a real model of 135M weights half of the value
channels cost a KL of 0.41, and 8.19 by norms of weights, which keeps this out of the core.

Not done: queries and keys with a norm between them and the scores (a row cut there changes all others); training of
anything but S; blocks whose attention cannot be followed. Not to be used with `rotate`, which spreads energy again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.errors import UnsupportedModelError
from compress.model.blockwise import BlockArgs, BlockInputs, call_block, run_block
from compress.model.graph import Attention, Site, Sites
from compress.papers.transform import qk_pairs
from compress.papers.transform.qk_pairs import ScoreChannels
from compress.transform.bases import value_rows
from compress.tune.descend import match, relative_error
from compress.types import Scheme

SCOPE = "block"
TRAIN_RATE = 0.01  # learning rate of the training, at its largest
MOMENT_DAMP = 1e-6  # times the mean of the diagonal, so that moments have an inverse


@dataclass(frozen=True)
class Config:
    prune: float = 0.0  # [fraction] of the value channels of a block that become zero
    prune_keys: float | None = None  # [fraction] of the query-key channels of a block that become zero; null: queries
    # and keys are left alone
    measure: Literal["inputs", "weights"] = "inputs"  # size of a channel: with its inputs as they come, or the norm of
    # its weights alone
    train: int = 0  # [steps] in which the singular values that are left are trained; 0: none

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {"train_rate": TRAIN_RATE}

    def __post_init__(self) -> None:
        for key in ("prune", "prune_keys"):
            if not 0 <= (getattr(self, key) or 0) < 1:
                raise ValueError(f"{key} {getattr(self, key)} is not at least 0 and below 1")
        if self.train < 0:
            raise ValueError(f"train {self.train} is negative")


class HeadProduct(NamedTuple):
    """A head of values and the heads of the output that read it, channels in the order of their sizes."""

    values: Tensor  # [head_dim, hidden (+ 1)] float64
    outputs: Tensor  # [heads of the group, out, head_dim] float64
    sizes: Tensor  # [head_dim] float64, descending


class Decomposition(NamedTuple):
    """The outcome for the channels of a block."""

    zeroed: int
    lost: float  # share of the squared norm of all products
    groups: list[ScaledRows]  # rows of a linear that one factor may be trained for


def apply(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, config: Config, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """Decompose the attention of a loaded block in place; returns notes for the report."""
    attention = sites.attention if isinstance(sites, Sites) else None
    if attention is None:
        raise UnsupportedModelError("where attention has its values from cannot be seen; use a recipe without clover")
    channels = None
    if config.prune_keys is not None:
        hidden, call = next(iter(batches()))
        channels = qk_pairs.find(block, hidden, call)
        if channels is None:
            raise UnsupportedModelError(
                "between queries or keys and the scores is something else than rotary positions; leave out prune_keys"
            )
    names = {attention.values, attention.output, *([channels.queries.name, channels.keys.name] if channels else [])}
    before = _copy_parameters(block, names) if config.train else {}
    seen = batches if config.measure == "inputs" else None
    parts = [("value", decompose(block, attention, config.prune, seen), attention.key_value_heads * attention.head_dim)]
    if channels is not None:
        parts.append(
            ("query-key", decompose_keys(block, channels, config.prune_keys or 0, seen), channels.keys.rows.numel())
        )
    notes = [
        f"{part.zeroed} of {total} {what} channels are zero: {100 * part.lost:.2f}% of the squared products"
        for what, part, total in parts
        if part.zeroed
    ]
    if config.train and notes:
        groups = [group for _, part, _ in parts for group in part.groups]
        notes.append(train(block, before, groups, batches, config.train))
    return tuple(notes) or ("the products inside attention are decomposed",)


@torch.no_grad()
def decompose(
    block: nn.Module, attention: Attention, prune: float = 0.0, batches: BlockInputs | None = None
) -> Decomposition:
    """Decompose the products of values and output, in place, for what attention hands on for `batches`.

    The share `prune` of the channels becomes zero, those that count least; without `batches` by the weights alone.
    """
    moments = None if batches is None or not prune else _mix_moments(block, attention, batches)
    values, output = block.get_submodule(attention.values), block.get_submodule(attention.output)
    columns = output.get_parameter("weight").detach()
    heads = range(attention.key_value_heads)
    repeats, size = attention.heads // attention.key_value_heads, attention.head_dim
    rows = value_rows(attention)
    pairs = [
        decompose_product(
            _take_rows(values, rows[head]),
            _group(columns, head, repeats, size).double(),
            None if moments is None else moments[head],
        )
        for head in heads
    ]
    sizes = torch.stack([pair.sizes for pair in pairs])
    count = round(prune * sizes.numel())
    kept = torch.ones(sizes.numel(), dtype=torch.float64, device=sizes.device)
    kept[sizes.flatten().argsort(stable=True)[:count]] = 0
    kept = kept.view_as(sizes)
    for head, pair, mask in zip(heads, pairs, kept, strict=True):
        _put(values, rows[head], pair.values * mask[:, None])
        _group(columns, head, repeats, size).copy_(pair.outputs * mask)
    return Decomposition(
        count,
        _share(sizes.square(), kept),
        [ScaledRows(attention.values, rows[kept.cpu() > 0][:, None])],
    )


@torch.no_grad()
def decompose_keys(
    block: nn.Module, channels: ScoreChannels, prune: float = 0.0, batches: BlockInputs | None = None
) -> Decomposition:
    """Decompose the products of queries and keys, in place.

    At least the share `prune` of their channels becomes zero, the least on `batches`.
    """
    queries, keys = block.get_submodule(channels.queries.name), block.get_submodule(channels.keys.name)
    heads, repeats = len(channels.keys.rows), len(channels.queries.rows) // len(channels.keys.rows)
    grouped = channels.queries.rows.view(heads, repeats, -1)  # key/value head, head, channel
    units: list[tuple[Tensor, Tensor]] = []  # rows of keys [n] and queries [heads, n] that stay or go together
    for key_rows, query_rows in zip(channels.keys.rows, grouped, strict=True):
        _decompose_free(queries, keys, query_rows[:, channels.free], key_rows[channels.free])
        for pair in channels.pairs:
            _turn(queries, keys, query_rows[:, pair], key_rows[pair])
        units += [(key_rows[unit], query_rows[:, unit]) for unit in (*channels.free[:, None], *channels.pairs)]
    counts = torch.tensor([len(key_rows) for key_rows, _ in units])
    energies = _norms(queries, keys) if batches is None or not prune else _energies(block, queries, keys, batches)
    squares = (
        torch.stack(
            [energies[0][query_rows].sum() * energies[1][key_rows].sum() for key_rows, query_rows in units]
        ).cpu()
        / counts
    )
    order = (squares / counts).argsort(stable=True)
    before = counts[order].cumsum(0) - counts[order]  # channels that go before this one
    kept = torch.ones(len(units), dtype=torch.float64)
    kept[order[before < round(prune * channels.keys.rows.numel())]] = 0
    for (key_rows, query_rows), keep in zip(units, kept.tolist(), strict=True):
        if not keep:
            _put(keys, key_rows, torch.zeros_like(_take_rows(keys, key_rows)))
            _put(queries, query_rows.flatten(), torch.zeros_like(_take_rows(queries, query_rows.flatten())))
    left = [key_rows for (key_rows, _), keep in zip(units, kept.tolist(), strict=True) if keep]
    alike = [[key_rows for key_rows in left if len(key_rows) == count] for count in (1, 2)]
    groups = [ScaledRows(channels.keys.name, torch.stack(rows)) for rows in alike if rows]
    return Decomposition(int((counts * (1 - kept)).sum()), _share(squares, kept), groups)


def decompose_product(values: Tensor, outputs: Tensor, moments: Tensor | None = None) -> HeadProduct:
    """Return values [head_dim, n] and outputs [g, out, head_dim], float64, in the basis of their product, balanced.

    moments [head_dim, head_dim]: of what the outputs are given; None: of values whose inputs have all directions alike.
    """
    count, out, size = outputs.shape
    if moments is not None:
        return _decompose_weighted(values, outputs, moments)
    left, above = torch.linalg.qr(outputs.reshape(count * out, size))
    right, below = torch.linalg.qr(values.T)
    turned, sizes, back = torch.linalg.svd(above @ below.T)
    root = sizes.sqrt()
    return HeadProduct(root[:, None] * (back @ right.T), (left @ turned * root).view(count, out, size), sizes)


def _decompose_weighted(values: Tensor, outputs: Tensor, moments: Tensor) -> HeadProduct:
    """Return a head in the basis in which moments are the identity and the squares of outputs are diagonal."""
    mean = moments.diagonal().mean()
    if not mean > 0:
        return decompose_product(values, outputs)
    eye = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
    root = torch.linalg.cholesky(moments + MOMENT_DAMP * mean * eye)
    flat = outputs.flatten(0, 1) @ root
    squares, basis = torch.linalg.eigh(flat.T @ flat)
    sizes, basis = squares.flip(0).clamp(min=0).sqrt(), basis.flip(1)
    balance = sizes.clamp(min=1e-12 * sizes[0].clamp(min=1e-30)).sqrt()
    turned = balance[:, None] * (basis.T @ torch.linalg.solve_triangular(root, values, upper=False))
    return HeadProduct(turned, (flat @ basis / balance).view_as(outputs), sizes)


def _mix_moments(block: nn.Module, attention: Attention, batches: BlockInputs) -> Tensor:
    """Return the mean of a a^T of what attention hands to the output, over tokens and the heads of a group.

    float64 [key-value heads, head_dim, head_dim].
    """
    sums: list[Tensor] = []
    counts: list[int] = []
    shape = (attention.key_value_heads, -1, attention.head_dim)

    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mixed = inputs[0].flatten(0, -2).unflatten(1, shape).double()  # token, key-value head, head of the group
        sums.append(torch.einsum("tkgi,tkgj->kij", mixed, mixed))
        counts.append(mixed[:, 0, :, 0].numel())

    hook = block.get_submodule(attention.output).register_forward_pre_hook(add)
    try:
        for hidden, call in batches():
            run_block(block, call, hidden, "a block")
    finally:
        hook.remove()
    return torch.stack(sums).sum(0) / sum(counts)


def _decompose_free(queries: nn.Module, keys: nn.Module, query_rows: Tensor, key_rows: Tensor) -> None:
    """Decompose channels [n] of a head of keys and [heads, n] of its queries that no position turns."""
    if not len(key_rows):
        return
    sides = torch.stack([_take_rows(queries, rows).T for rows in query_rows])  # head, input, channel
    pair = decompose_product(_take_rows(keys, key_rows), sides)
    _put(keys, key_rows, pair.values)
    for rows, columns in zip(query_rows, pair.outputs, strict=True):
        _put(queries, rows, columns.T)


def _turn(queries: nn.Module, keys: nn.Module, query_rows: Tensor, key_rows: Tensor) -> None:
    """Change two channels [2] of keys and [heads, 2] of queries that turn together: q c, k / conj(c), of one norm."""
    q, k = _take_rows(queries, query_rows.flatten()), _take_rows(keys, key_rows)
    sides = torch.complex(q[::2], q[1::2]), torch.complex(k[0], k[1])
    norms = [side.norm() for side in sides]
    if not all(norms):
        return
    angle = torch.polar(torch.ones_like(norms[0]), -(sides[1] ** 2).sum().angle() / 2)
    stretch = (norms[0] / norms[1]).sqrt()
    turned_q, turned_k = sides[0] * angle / stretch, sides[1] * angle * stretch
    _put(queries, query_rows.flatten(), torch.stack((turned_q.real, turned_q.imag), 1).flatten(0, 1))
    _put(keys, key_rows, torch.stack((turned_k.real, turned_k.imag)))


def _norms(*linears: nn.Module) -> list[Tensor]:
    """Return each row's squared norm, bias included: the mean square of what it gives for inputs of all directions."""
    return [_take_rows(linear, torch.arange(len(linear.get_parameter("weight")))).square().sum(1) for linear in linears]


def _energies(block: nn.Module, queries: nn.Module, keys: nn.Module, batches: BlockInputs) -> list[Tensor]:
    """Sum the squares of what each row of both linears gives over tokens, float64."""
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


def _copy_parameters(block: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """Return copies of the parameters of these linears of a block, by their paths."""
    owned = [(f"{name}.{key}", p) for name in sorted(names) for key, p in block.get_submodule(name).named_parameters()]
    return {path: parameter.detach().clone() for path, parameter in owned}


def _take_rows(linear: nn.Module, rows: Tensor) -> Tensor:
    """Return these rows of a weight, float64; the bias, if there is one, as one more column."""
    part = linear.get_parameter("weight").detach()[rows].double()
    bias = getattr(linear, "bias", None)
    return part if bias is None else torch.cat((part, bias.detach()[rows, None].double()), 1)


def _put(linear: nn.Module, rows: Tensor, part: Tensor) -> None:
    """Write rows back that `_take_rows` gave."""
    weight, bias = linear.get_parameter("weight").detach(), getattr(linear, "bias", None)
    weight[rows] = part[:, : weight.shape[1]].to(weight.dtype)
    if bias is not None:
        bias.data[rows] = part[:, -1].to(bias.dtype)


def _share(squares: Tensor, kept: Tensor) -> float:
    """Return the share of the sum that is not kept."""
    return 1 - (squares * kept).sum().item() / max(squares.sum().item(), 1e-300)


def _group(columns: Tensor, head: int, repeats: int, size: int) -> Tensor:
    """Return the columns [out, heads * size] that read a head of values: a view [repeats, out, size]."""
    part = columns[:, head * repeats * size : (head + 1) * repeats * size]
    return part.unflatten(1, (repeats, size)).transpose(0, 1)


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

    def output_now(hidden: Tensor, call: BlockArgs) -> Tensor:
        return run(_scale_rows(block, groups, factors), hidden, call)

    def present(hidden: Tensor, call: BlockArgs) -> Tensor:
        return call_block(block, call, hidden)[0]

    first = relative_error(original, present, batches)
    match([factors], steps, TRAIN_RATE, original, output_now, batches)
    last = relative_error(original, output_now, batches)
    note = f"{factors.numel()} factors trained for {steps} steps: error of the block {first:.3g} -> {last:.3g}"
    if not last < first:
        return f"{note}; no better, so they are left out"
    with torch.no_grad():
        for name, tensor in _scale_rows(block, groups, factors).items():
            block.get_parameter(name).copy_(tensor)
    return note


def _scale_rows(block: nn.Module, groups: Sequence[ScaledRows], factors: Tensor) -> dict[str, Tensor]:
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
