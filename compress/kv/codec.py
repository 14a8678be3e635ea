"""Define what a KV codec is: how keys or values become rows of stored fields, and how attention reads these.

Shapes everywhere: keys and values [B, h, n, width] (batch, KV heads, tokens, head dim), queries [B, h, m, width] in
float32 with m = query heads of a KV head times query tokens; the token axis of every stored field is axis 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import RecipeError

ALL = 1 << 40  # tokens that a compiled reader takes at once: all of them

Block = Mapping[str, Tensor]  # name -> rows of the stored fields of some tokens; with the state and, pre-RoPE, cos, sin
Part = Literal["codes", "scales", "extras"]
GroupSize = int | Literal["auto"]


@dataclass(frozen=True)
class Spec:
    """The place of a codec: one for each layer and each of keys and values."""

    kind: Literal["keys", "values", "read"]  # read: what chooses the tokens that attention reads
    layer: int
    layers: int  # of the model
    heads: int  # KV heads, h
    width: int  # of a head: keys and values may differ
    queries: int  # query heads of a KV head
    dtype: torch.dtype = torch.float32  # of the model's keys or values

    @property
    def where(self) -> str:
        """For messages."""
        return f"kv_cache: layer {self.layer}, {self.kind}"


@dataclass(frozen=True)
class Field:
    """A stored tensor [B, h or 1, rows, ...] of a codec; what follows axis 2 is free, ragged ranks are flattened there.

    tokens: how many tokens a row stands for, a divisor of the codec's granularity; 0: a row for each run of tokens that
    was encoded together (at most `store.ENCODE_TOKENS`), then blocks never cross runs.
    """

    part: Part
    tokens: int = 1


class Codec:
    """Base of all codecs; what is not overridden works from `encode` and `decode` alone.

    A codec holds no data of a sequence: that is in the fields it returns and in its state, so that every operation of
    the cache acts on them without asking. `static`, its calibrated tensors, is counted apart.
    """

    granularity = 1  # tokens that are encoded together, or a multiple of them
    fields: Mapping[str, Field] = {}
    rope: Literal["post", "pre"] = "post"  # keys only: "pre" is given and gives keys before the rotary embedding
    needs_queries = False  # `begin` is given the queries of the first tokens: "fused" only
    reconstructs = True  # False: no `decode`, only `scores` (or `mix`): "fused" only
    block = 512  # tokens that are read at a time; a multiple of granularity
    upper: Codec | None = None  # reads a part of the same fields, as drafts do

    def __init__(self, spec: Spec, static: Mapping[str, Tensor] | None = None) -> None:
        self.spec, self.static = spec, dict(static or {})

    def begin(self, x: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """Return the state of a sequence, [B, ...] each, from the first tokens x [B, h, n, width] that are encoded."""
        return {}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        """x [B, h, n, width] float32, n a multiple of `granularity` -> rows of all `fields`; x is not changed.

        `state` holds what `begin` returned and, pre-RoPE, cos and sin [B or 1, n, rotary width] of these tokens.
        """
        raise NotImplementedError

    def decode(self, block: Block) -> Tensor:
        """Decode rows of the fields to [B, h, n, width]: float32, or the model's type where that holds the numbers."""
        raise NotImplementedError

    def write(self, block: Block, out: Tensor) -> None:
        """Write `dense` into out [B, h, n, width] of the model's type, for at most `write_at_once(out)` tokens."""
        out.copy_(self.dense(block))

    def write_at_once(self, out: Tensor) -> int:
        return self.block

    def dense(self, block: Block) -> Tensor:
        """Return what attention reads, [B, h, n, width]: `decode`, rotated if it is pre-RoPE. Not to be overridden."""
        x = self.decode(block)
        return rotate(x, block["cos"], block["sin"]) if self.rope == "pre" else x

    def query(self, q: Tensor, state: Block) -> Tensor:
        """q [B, h, m, width] in the basis of `scores`, once a step."""
        return q

    def scores(self, query: Tensor, block: Block) -> Tensor:
        """query (what `query` returned) -> [B, h, m, n] float32, the products with the keys of the block."""
        return query @ self.dense(block).float().transpose(-1, -2)

    def at_once(self, rows: Tensor) -> int:
        """Return how many tokens `scores` (rows: its queries) and `mix` (its p) take at a time; compiled ones take ALL.

        A codec of keys before RoPE that takes more than `block`, here or in `write_at_once`, is given `halves` [B or 1,
        2, n, rotary width / 2] (cos and sin) in place of cos and sin.
        """
        return self.block

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        """Write `scores` into out [B, h, m, n] float32, whose last axis is contiguous."""
        out.copy_(self.scores(query, block))

    def mix(self, p: Tensor, block: Block) -> Tensor:
        """p [B, h, m, n] float32 -> sums of values in any basis, added up over blocks."""
        return p @ self.dense(block).float()

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        """Turn the sum of what `mix` returned into values [B, h, m, width]; mass [B, h, m, 1]: the sum of p."""
        return mixed

    def _static(self, name: str, like: Tensor) -> Tensor:
        """Return a calibrated tensor on the device of `like`, float32, or float64 where `like` is.

        It stays there: a CUDA graph that is captured later cannot copy from the host.
        """
        if self.static[name].device != like.device:
            self.static[name] = self.static[name].to(like.device)
        return self.static[name].to(torch.promote_types(like.dtype, torch.float32))


def check_bits(bits: int) -> None:
    """Raise ValueError unless codes may have so many bits."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits {bits} is not between 1 and 8")


def check_group_size(group_size: GroupSize) -> None:
    """Raise ValueError unless groups may have so many numbers."""
    if group_size != "auto" and group_size < 2:
        raise ValueError(f"group_size {group_size} is not 2 or more")


def check_groups(spec: Spec, group_size: int, count: int, what: str) -> None:
    """Raise RecipeError unless groups of this size fill `count` of something."""
    if count % group_size:
        raise RecipeError(
            f"{spec.where}: group_size {group_size} does not divide the {what}; set kv_cache.{spec.kind}.group_size to "
            "one that does, or to auto"
        )


def group_of(given: GroupSize, most: int, count: int) -> int:
    """Return the group size that is given; "auto": the largest up to `most` whose groups fill `count` of something.

    Where only groups of one would, all of `count` are one group.
    """
    if given != "auto":
        return given
    fitting = max(size for size in range(1, min(most, count) + 1) if count % size == 0)
    return fitting if fitting > 1 else count


def token_rows(x: Tensor) -> Tensor:
    """Return x [B, h, n, width] as one row for each token, [B, n, h width]."""
    return x.transpose(1, 2).flatten(2)


def head_rows(rows: Tensor, heads: int) -> Tensor:
    """Return rows [B, n, h width] as [B, h, n, width], the inverse of `token_rows`."""
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of x [B, h, n, width] with cos, sin [B or 1, n, rotary width], in float32."""
    return _turn(x, cos.float(), sin.float())


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo `rotate`, also where cos and sin carry a factor (cos^2 + sin^2 != 1)."""
    cos, sin = cos.float(), sin.float()
    size = cos.square() + sin.square()
    return _turn(x, cos / size, -sin / size)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    turned = turned * cos[:, None] + half * sin[:, None]
    return turned if not rest.shape[-1] else torch.cat((turned, rest.float()), -1)
