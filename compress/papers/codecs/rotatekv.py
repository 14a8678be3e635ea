"""RotateKV (arXiv 2501.16383): keys rotated across heads before RoPE, channels reordered, min-max integers by token.

Keys before the rotary embedding have channels that stand out, heads that stand out, and no others. A Hadamard rotation
over groups of up to MAX_ROTATED_HEADS heads spreads them; what differs still (the mean, mostly) is met by sorting the
channels of the layer, so that channels of a similar level share a group of `group_size`, each with a scale and a
minimum for each token. The order comes from calibration: ascending sums, over tokens, of the rotated keys. Values are
rotated head by head and grouped in their own order. At 2 bits a group's range is shrunk to `clip` of itself (0.8), else
not. Bits per element: bits + 32 / group_size. Sinks: the first `sink` tokens are exact.

Differences from the published code: 2^bits - 1 steps for any number of bits (there bits^2 - 1, right for 2 and 4 only);
the order is learned from calibration text, not from the text that is tested; both rotations are done here and not
folded into weights, so that models with norms between projection and cache (k_norm) and biases need no care; the group
of heads is the largest power of two that divides their number; sinks are the first tokens of a sequence and not those
with the largest hidden states of a layer, which a cache does not see; what is stored is the minimum, not a zero point.
What it does not do: read keys without decoding them, because the rotary embedding comes after; centre keys: the minimum
of a group stands in for that.

Outside the core because principal components have a ninth of its KL in about the same bytes at 2 bits on SmolLM2-135M
(0.0077 and 0.0688, docs/results/kv_frontier.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.codec import Block, Codec, Field, GroupSize, Spec, check_groups, group_of, head_rows, token_rows
from compress.kv.codecs import kivi
from compress.kv.codecs.packed import PackedCodes
from compress.numerics import checks, hadamard

NEEDS = frozenset({"keys_pre"})
WORK = 32  # bytes that calibrating takes for each number of its largest sample
AUTO_GROUP_SIZE = 128  # channels
MAX_ROTATED_HEADS = 4  # heads that one rotation of keys spans
LOW_BIT_CLIP = 0.8  # share of a group's range at 2 bits and below


@dataclass(frozen=True)
class Config:
    bits: int = 2  # [bits] of one code: 1 to 8
    group_size: GroupSize = "auto"  # [channels] of a token, across heads, that share a scale and a minimum; auto: 128,
    # or the most below that which divide those of a token
    clip: float | None = None  # [fraction] of the range of a group that is coded; null: 0.8 up to 2 bits, 1 above

    def __post_init__(self) -> None:
        kivi.Config(self.bits, self.group_size)
        if self.clip is not None and not 0 < self.clip <= 1:
            raise ValueError(f"clip {self.clip} is not above 0 and at most 1")


def fit(groups: Tensor, bits: int, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """groups [..., n] float32 -> scale, minimum [..., 1] float16, codes uint8 [..., n] that are nearest with these.

    A range that holds 0 shrinks towards 0, as published; one that does not shrinks to its middle.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    still = torch.where((low < 0) & (high > 0), 0, (low + high) / 2)
    return kivi.quantize(groups, still + (low - still) * clip, still + (high - still) * clip, bits)


def heads_together(heads: int) -> int:
    """Return the largest power of two, up to MAX_ROTATED_HEADS, that divides the number of heads."""
    return min(MAX_ROTATED_HEADS, heads & -heads)


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """keys_pre [tokens, h, width] -> the order of a layer's channels, int16 or int32 [h width]; values have none."""
    if spec.kind == "values":
        return {}
    x = samples["keys_pre"].double().flatten(1)
    turned = hadamard.transform(x.unflatten(1, (-1, heads_together(spec.heads) * spec.width))).flatten(1)
    order = turned.sum(0).argsort(stable=True)
    return {"order": order.to(_index_type(len(order)))}


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives: the order of keys, nothing for values."""
    channels = spec.heads * spec.width
    return {"order": ((channels,), _index_type(channels))} if spec.kind == "keys" else {}


def typical(config: Config, spec: Spec) -> dict[str, Tensor]:
    """Return an order of the channels of keys."""
    return checks.distinct_numbers(specs(config, spec))


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that the order is one of all channels: what it left out would never be written; ValueError."""
    checks.distinct("order", static["order"], spec.heads * spec.width)


def _index_type(count: int) -> torch.dtype:
    return torch.int16 if count < 2**15 else torch.int32


class Rotated(Codec):
    """Codes of all heads in one row for each token, [B, 1, n, words]; scales and minima [B, 1, n, groups]."""

    def __init__(self, spec: Spec, config: Config, static: Mapping[str, Tensor]) -> None:
        super().__init__(spec, static)
        self.rope = "pre" if spec.kind == "keys" else "post"
        self.bits, self.group = config.bits, group_of(config.group_size, AUTO_GROUP_SIZE, spec.heads * spec.width)
        self.clip = config.clip or (LOW_BIT_CLIP if config.bits <= 2 else 1.0)
        self.span = spec.width * (heads_together(spec.heads) if spec.kind == "keys" else 1)
        self.codes = PackedCodes(spec.heads * spec.width, config.bits)
        self.fields = {**self.codes.fields, "scales": Field("scales"), "minima": Field("scales")}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        rows = hadamard.transform(token_rows(x).unflatten(-1, (-1, self.span))).flatten(-2)
        if "order" in self.static:
            rows = rows[..., self._order(x)]
        scales, minima, codes = fit(rows.unflatten(-1, (-1, self.group)), self.bits, self.clip)
        packed = self.codes.pack(codes.flatten(-2)[:, None])
        return {**packed, "scales": scales[:, None, ..., 0], "minima": minima[:, None, ..., 0]}

    def decode_rotated(self, block: Block) -> Tensor:
        """Return the coded rows, still rotated, in the order of the heads: [B, n, h width] float32."""
        groups = self.codes.unpack(block)[:, 0].float().unflatten(-1, (-1, self.group))
        groups = groups.mul_(block["scales"][:, 0].float()[..., None]).add_(block["minima"][:, 0].float()[..., None])
        rows = groups.flatten(-2)
        if "order" not in self.static:
            return rows
        ordered = torch.empty_like(rows)
        ordered[..., self._order(rows)] = rows
        return ordered

    def decode(self, block: Block) -> Tensor:
        rows = hadamard.transpose(self.decode_rotated(block).unflatten(-1, (-1, self.span)))
        return head_rows(rows.flatten(-2), self.spec.heads)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        return p @ head_rows(self.decode_rotated(block), self.spec.heads)

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        return hadamard.transpose(mixed)

    def _order(self, like: Tensor) -> Tensor:
        return self.static["order"].to(like.device).long()


def check_heads(config: Config, spec: Spec) -> None:
    """Raise RecipeError unless heads of this width can be stored."""
    channels = spec.heads * spec.width
    check_groups(
        spec, group_of(config.group_size, AUTO_GROUP_SIZE, channels), channels, f"{channels} channels of a token"
    )


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    check_heads(config, spec)
    return Rotated(spec, config, static)
