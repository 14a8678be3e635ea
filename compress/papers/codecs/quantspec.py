"""QuantSpec (arXiv 2502.10424): integers of 8 bits in two planes of 4, of which a draft reads the upper one alone.

The upper plane is KIVI of 4 bits (compress/kv/codecs/kivi.py): s = (max - min) / 15, x ~ u s + min. The lower plane
holds what is left of x in steps of s / 16, from -8 to 7, stored with 8 added:

    draft   x = min + s u                          4 bits and the scales are read
    target  x = min + s (u + (lower - 8) / 16)     8 bits and the scales

so that one cache serves self-speculation: the draft that reads half of it (compress/speculate), and the target that
checks what it says. The tail of newest tokens is exact for both; drafts extend it and are cropped off it, and it is
coded only as far as tokens were accepted (`KVCache.holds`).

Bits of a number: 8 + 32 / group_size; a draft reads 4 + 32 / group_size. Groups are those of the paper, 128 tokens of a
channel of keys and 128 channels of a token of values, or all of a narrower head. A rest above 7.5 / 16 s is stored as
7 / 16 s, so that the error is up to s / 16 there and s / 32 elsewhere.

Differences from the paper: scale and minimum are rounded to float16 before codes are chosen; the first tokens stay
exact (`sink`); both planes are read in one pass. What it does not do: code the draft's weights, which is what levels of
the weights are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.codec import Block, Codec, GroupSize, Spec, check_group_size, group_of
from compress.kv.codecs import kivi
from compress.kv.codecs.packed import PackedCodes

NEEDS: frozenset[str] = frozenset()
PLANE_BITS = 4
STEPS = 1 << PLANE_BITS  # a step of the upper plane is so many steps of the lower one
AUTO_GROUP_SIZE = 128


@dataclass(frozen=True)
class Config:
    group_size: GroupSize = "auto"  # [tokens or channels] that share a scale and a minimum: tokens for keys, channels
    # for values; auto: 128, or the most channels below that which divide a head

    def __post_init__(self) -> None:
        check_group_size(self.group_size)


class _Planes(kivi.PackedInts):
    """Two planes of codes; the grouping is that of the other base class."""

    upper: Codec

    def __init__(self, spec: Spec, config: kivi.Config, upper: Codec) -> None:
        super().__init__(spec, config)
        self.upper = upper
        self.lower = PackedCodes(spec.width, PLANE_BITS, "lower_")
        self.fields = {**self.fields, **self.lower.fields}
        self.layout = self.layout._replace(lower=True)

    def stored_tensors(self, block: Block) -> tuple[list[Tensor], Tensor, Tensor]:
        planes, scales, minima = super().stored_tensors(block)
        return [*planes, *(block[name] for name in self.lower.fields)], scales, minima

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        rows = super().encode(x, state)
        scales = rows["scales"].float().repeat_interleave(self.group, 3 if self.by_token else 2)
        rest = (x - self.upper.decode(rows)) / scales
        codes = (rest * STEPS).round_().clamp_(-STEPS // 2, STEPS // 2 - 1).add_(STEPS // 2)
        return {**rows, **self.lower.pack(codes.to(torch.uint8))}

    def numbers(self, block: Block) -> Tensor:
        return self.lower.unpack(block).float().sub_(STEPS // 2).div_(STEPS).add_(super().numbers(block))


class PlaneKeys(_Planes, kivi.ByChannel):
    """Groups of tokens of one channel."""


class PlaneValues(_Planes, kivi.ByToken):
    """Groups of channels of one token."""


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    is_keys = spec.kind == "keys"
    group = AUTO_GROUP_SIZE if config.group_size == "auto" else config.group_size
    inner = kivi.Config(PLANE_BITS, group if is_keys else group_of(config.group_size, AUTO_GROUP_SIZE, spec.width))
    upper = kivi.ByChannel(spec, inner) if is_keys else kivi.ByToken(spec, inner)
    return PlaneKeys(spec, inner, upper) if is_keys else PlaneValues(spec, inner, upper)
