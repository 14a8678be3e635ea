"""Narrower keys: of each head, only the rotary pairs of channels that matter most to scores are stored.

DiffQKV (Sigma, arXiv 2501.13629) trains models whose heads of keys are narrower than those of values, because scores
need fewer channels than outputs do. This is the nearest that a trained model allows without training: a score is a sum
over the pairs of channels that the rotary embedding turns together, and the pairs of least weight are left out of it.
The weight of pair j of a head is mean |q_j|^2 mean |k_j|^2 on a calibration text, over the query heads that read it: up
to a factor the mean square of what the pair adds to a score, averaged over all angles. Positions do not change it.

What is stored are the kept channels behind the rotary embedding, exactly or by a codec of their own (`codes`), and
attention reads a key whose other channels are zero. Values keep all their channels, stored by the same codec. Bits per
element: those of `codes`, of keys times the share that is kept.

Differences from the paper: nothing is trained, nothing is removed from the weights, and heads of keys are not fewer. A
checkpoint with narrower projections would need a model class with two widths of heads, and transformers' has one
`head_dim` for queries, keys and values wherever it has rotary embeddings of all channels; so it is a codec. The pairs
are the two halves of a head's channels; where a model pairs others, or turns not all, they are two channels that are
kept or left out together, no more. At equal bytes fewer bits cost much less than fewer pairs: docs/results/kv_heads.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv.codec import Block, Codec, Spec
from compress.kv.codecs import fp8, identity, kivi
from compress.numerics import checks

NEEDS = frozenset({"keys", "queries"})
WORK = 8  # bytes that calibrating takes for each number of its largest sample


@dataclass(frozen=True)
class Config:
    keep: float = 0.75  # [fraction] of the pairs of each head of keys that are stored
    codes: Literal["exact", "kivi", "fp8"] = "exact"  # how the channels that are kept are stored
    bits: int = 4  # [bits] of one code of kivi: 1 to 8
    group_size: int = 32  # [tokens, channels of values] that share a scale and a minimum of kivi

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep {self.keep} is not above 0 and at most 1")
        kivi.Config(self.bits, self.group_size)


def kept_pairs(config: Config, width: int) -> int:
    """Return how many pairs of a head of this width are kept: at least one."""
    return max(1, round(config.keep * (width // 2)))


def weights(keys: Tensor, queries: Tensor) -> Tensor:
    """Return the weight [h, pairs] float64 of each pair; keys [tokens, h, width], queries [tokens, H, width].

    Means of products of squares over the query heads of each head; a token of queries meets every token of keys.
    """
    k, q = ((x.unflatten(-1, (2, -1)).square().sum(-2)).mean(0, dtype=torch.float64) for x in (keys, queries))
    return k * q.unflatten(0, (len(k), -1)).sum(1)


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """keys [tokens, h, width], queries [tokens, H, width] -> kept [h, channels] int16, ascending; values have none."""
    if spec.kind == "values":
        return {}
    order = weights(samples["keys"], samples["queries"]).argsort(dim=1, descending=True, stable=True)
    pairs = order[:, : kept_pairs(config, spec.width)].sort(1).values
    return {"kept": torch.cat((pairs, pairs + spec.width // 2), 1).to(torch.int16)}


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives: the channels that are kept of keys, nothing for values."""
    if spec.kind == "values":
        return {}
    return {"kept": ((spec.heads, 2 * kept_pairs(config, spec.width)), torch.int16)}


def typical(config: Config, spec: Spec) -> dict[str, Tensor]:
    """Return channels of which as many are kept as calibration keeps."""
    return checks.distinct_numbers(specs(config, spec))


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that each head keeps different channels; ValueError."""
    for row in static.get("kept", ()):
        checks.distinct("kept", row, spec.width)


def check_heads(config: Config, spec: Spec) -> None:
    """Raise RecipeError for heads that have no pairs of channels."""
    if spec.kind == "keys" and (spec.width % 2 or spec.width > 2**15):
        raise RecipeError(f"{spec.where}: heads of {spec.width} channels have no pairs; choose another method")


class KeyPairs(Codec):
    """Some channels of each head of keys, in the fields of an inner codec of heads of that width."""

    def __init__(self, spec: Spec, inner: Codec, static: Mapping[str, Tensor]) -> None:
        super().__init__(spec, static)
        self.inner = inner
        self.granularity, self.fields, self.block = inner.granularity, inner.fields, inner.block

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        return self.inner.encode(self._take_channels(x), state)

    def decode(self, block: Block) -> Tensor:
        narrow = self.inner.decode(block)
        wide = narrow.new_zeros(*narrow.shape[:-1], self.spec.width)
        return wide.scatter_(-1, self._index(narrow).expand(*narrow.shape), narrow)

    def query(self, q: Tensor, state: Block) -> Tensor:
        return self.inner.query(self._take_channels(q), state)

    def scores(self, query: Tensor, block: Block) -> Tensor:
        return self.inner.scores(query, block)

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        self.inner.write_scores(query, block, out)

    def at_once(self, rows: Tensor) -> int:
        return self.inner.at_once(rows)

    def _take_channels(self, x: Tensor) -> Tensor:
        """Return the kept channels of x [B, h, n, width]."""
        index = self._index(x)
        return x.gather(-1, index.expand(*x.shape[:-1], index.shape[-1])).contiguous()

    def _index(self, like: Tensor) -> Tensor:
        """Return the kept channels [1, h, 1, channels] int64 on a device."""
        return self.static["kept"].to(like.device).long()[None, :, None]


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    check_heads(config, spec)
    narrow = replace(spec, width=2 * kept_pairs(config, spec.width)) if spec.kind == "keys" else spec
    inner: Codec
    if config.codes == "kivi":
        inner = kivi.build(kivi.Config(config.bits, config.group_size), narrow, {})
    elif config.codes == "fp8":
        inner = fp8.build(fp8.Config(), narrow, {})
    else:
        inner = identity.build(identity.Config(), narrow, {})
    return KeyPairs(spec, inner, static) if spec.kind == "keys" else inner
