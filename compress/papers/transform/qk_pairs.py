"""Find how a block's queries and keys come from its linears, and what may be changed between them, by running it.

The outputs of the linears are replaced by known numbers while the block runs up to its attention, where the queries and
keys that arrive are looked at. Which row of which linear is a channel of a head is read off where there is no rotation,
at the first token. A channel that is the same at all tokens is free: any basis of the free channels of a head gives the
same scores. Two channels that rotary positions turn into each other are a pair: seen as one complex number, what they
add to a score is Re(conj(q) k e^(i angle)), so that q may be multiplied by a complex c, and k by 1 / conj(c), and
nothing else.

Not found, None: where something else than scales and rotations lies in between (norms of queries and keys), or where
channels come from more than one linear (latent attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.model.blockwise import BlockArgs
from compress.model.graph import watch_attention

CLOSE = 1e-4  # relative


class Heads(NamedTuple):
    """Rows of a linear that are the channels of heads."""

    name: str  # path of the linear in the block
    rows: Tensor  # [heads, head_dim] int64


class ScoreChannels(NamedTuple):
    """Where the scores of a block come from."""

    queries: Heads
    keys: Heads
    free: Tensor  # [n] int64: channels of a head that no position turns
    pairs: Tensor  # [n, 2] int64: those that are turned together


class _SeenError(Exception):
    """Attention has been called: the rest of the block is not needed."""


Made = Callable[[str, int], Tensor]  # (linear, its rows) -> the numbers that its outputs are to be [rows]
QueriesKeys = tuple[Tensor, Tensor]  # [batch, heads, tokens, head_dim]


@torch.no_grad()
def find(block: nn.Module, hidden: Tensor, call: BlockArgs) -> ScoreChannels | None:
    """Find the channels of scores of a block that receives hidden [batch, tokens, hidden] and `call`.

    The parameters of the block stay as they are.
    """
    counts = {name: module.out_features for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    firsts = dict(zip(counts, torch.tensor([0, *counts.values()]).cumsum(0).tolist(), strict=False))

    def run(made: Made) -> QueriesKeys | None:
        return _attention_inputs(block, hidden, call, made)

    ones = run(lambda _, rows: torch.ones(rows))
    numbers = run(lambda name, rows: 1.0 + firsts[name] + torch.arange(rows))
    if ones is None or numbers is None:
        return None
    queries, keys = (_heads(one, number, firsts, counts) for one, number in zip(ones, numbers, strict=True))
    if queries is None or keys is None:
        return None
    generator = torch.Generator().manual_seed(0)
    probes = []
    for size in (1.0, 3.0):  # a norm would take the size away
        noise = {name: size * torch.randn(rows, generator=generator) for name, rows in counts.items()}
        given = [noise[heads.name][heads.rows] for heads in (queries, keys)]
        arrived = run(lambda name, _, noise=noise: noise[name])  # type: ignore[misc]
        if arrived is None:
            return None
        probes.append([(x[:, None], y[0].cpu()) for x, y in zip(given, arrived, strict=True)])  # head, token, channel
    split = _split([pair for probe in probes for pair in probe])
    return None if split is None else ScoreChannels(queries, keys, *split)


def _attention_inputs(block: nn.Module, hidden: Tensor, call: BlockArgs, made: Made) -> QueriesKeys | None:
    """Return queries and keys [batch, heads, tokens, head_dim] as attention gets them if linears give `made`."""
    config = next((m.config for m in block.modules() if hasattr(m.__dict__.get("config"), "get_text_config")), None)
    if config is None:
        return None
    seen: list[QueriesKeys] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((query.float(), key.float()))
        raise _SeenError

    def replace(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return made(name, output.shape[-1]).to(output.device).expand(output.shape)

        return hook

    linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(replace(name)) for name, module in linears]
    try:
        with watch_attention(config, attend):
            block(hidden, *call.args, **call.kwargs)
    except _SeenError:
        return seen[0]
    except RuntimeError:  # a type that the attention of this model does not mix with float32
        return None
    finally:
        for handle in hooks:
            handle.remove()
    return None


def _heads(ones: Tensor, numbers: Tensor, firsts: dict[str, int], counts: dict[str, int]) -> Heads | None:
    """Return which rows these are, from what a one and the row's number plus one have become at the first token."""
    rows = (numbers[0, :, 0] / ones[0, :, 0]).cpu() - 1  # head, channel
    whole = rows.round()
    if not torch.isfinite(rows).all() or (rows - whole).abs().max() > 0.1 or whole.unique().numel() < whole.numel():
        return None
    for name, first in firsts.items():
        if whole.min() >= first and whole.max() < first + counts[name]:
            return Heads(name, (whole - first).long())
    return None


def _split(probes: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Return free channels and pairs, from (given [heads, 1, head_dim], arrived [heads, tokens, head_dim]).

    The probes are for queries and keys in turn, twice.
    """
    moving = torch.stack([(y != y[:, :1]).any(0).any(0) for _, y in probes]).any(0)  # channel
    free, turned = (~moving).nonzero()[:, 0], moving.nonzero()[:, 0]
    still = [(y / x)[..., free] for x, y in probes]
    if any(not _close(ratio, ratio.flatten()[0]) for ratio in still if ratio.numel()):
        return None
    if len(turned) % 2:
        return None
    for pairs in (turned.view(2, -1).T, turned.view(-1, 2)):  # halves of the channels, neighbours
        ratios = [_complex(y, pairs) / _complex(x, pairs) for x, y in probes]
        if all(_close(first, second) for first, second in zip(ratios[:2], ratios[2:], strict=True)):
            return free, pairs.contiguous()
    return None


def _complex(values: Tensor, pairs: Tensor) -> Tensor:
    return torch.complex(values[..., pairs[:, 0]], values[..., pairs[:, 1]])


def _close(values: Tensor, expected: Tensor) -> bool:
    return bool(((values - expected).abs() <= CLOSE * expected.abs().max()).all()) if values.numel() else True
