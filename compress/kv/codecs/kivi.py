"""KIVI (arXiv 2402.02750): min-max integers, keys grouped along tokens, values along channels.

Outliers of keys sit in channels, those of values do not: a key group is `group_size` consecutive tokens of one channel,
a value group `group_size` consecutive channels of one token. In a group, s = (max - min) / (2^bits - 1), x = s code +
min, both stored as float16. Bits per element: bits + 32 / group_size, 3-bit codes included.

Attention reads the codes: scores fold s of a token group into the query (q s) code + q min, values fold s of a token
into its probability.

Differences from the published code: the codes are chosen for the rounded float16 s and min; a constant group has a
least scale instead of 0 / 0; the exact tail holds at least `residual_length` tokens of keys too, where the published
one can be empty; the first tokens are exact (`sink`). `axis` sets another grouping, for comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.kernels.cpu import kv_affine, kv_decode
from compress.kv.codec import ALL, Block, Codec, Field, Spec, check_bits, check_groups
from compress.kv.codecs.packed import Codes

NEEDS: frozenset[str] = frozenset()
LEAST = 1e-5  # scale of a constant group


@dataclass(frozen=True)
class Config:
    bits: int = 2  # [bits] of one code: 1 to 8
    group_size: int = 32  # [tokens or channels] that share a scale and a minimum: tokens for keys, channels for values
    axis: Literal["channel", "token"] | None = None  # what a group of numbers lies in; null: the channel for keys, the
    # token for values

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.group_size < 2:
            raise ValueError(f"group_size {self.group_size} is not 2 or more")


def fit(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """groups [..., n] float32 -> scale, minimum [..., 1] float16, codes uint8 [..., n] that are nearest with these."""
    return quantize(groups, groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), bits)


def quantize(groups: Tensor, low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, minimum [..., 1] float16 and the nearest codes uint8 [..., n] for the range from low to high."""
    scale, low = ((high - low) / (2**bits - 1)).clamp(min=LEAST).half(), low.half()
    codes = ((groups - low.float()) / scale.float()).round_().clamp_(0, 2**bits - 1)
    return scale, low, codes.to(torch.uint8)


class Packed(Codec):
    """Codes, scales and minima of either grouping, decoded by compiled code where there is any."""

    group: int
    by_token: bool

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__(spec)
        self.bits, self.group = config.bits, config.group_size
        self.codes = Codes(spec.width, config.bits)
        self.sizes = kv_affine.Sizes(config.bits, self.codes.padded, config.group_size)
        supports = kv_affine.supports_values if self.by_token else kv_affine.supports_keys
        self.is_compiled = self.codes.padded == spec.width and supports(self.sizes)
        self.is_written = self.is_compiled and kv_decode.supports(self.sizes, self.by_token)

    def at_once(self, rows: Tensor) -> int:
        return ALL if self.is_compiled and _few(rows) else self.block

    def write_at_once(self, out: Tensor) -> int:
        return ALL if self._writes(out) else self.block

    def write(self, block: Block, out: Tensor) -> None:
        if not self._writes(out):
            return super().write(block, out)
        planes = [block[name] for name in self.codes.fields]
        return kv_decode.decode(planes, block["scales"], block["minima"], self.sizes, self.by_token, out)

    def _writes(self, out: Tensor) -> bool:
        return self.is_written and out.is_cpu and out.dtype in kv_decode.DTYPES and out.numel() > kv_affine.SMALL


class ByChannel(Packed):
    """Groups of `group_size` tokens of one channel: scales and minima [B, h, n / group_size, width]."""

    by_token = False

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__(spec, config)
        self.granularity = config.group_size
        group = Field("scales", config.group_size)
        self.fields = {**self.codes.fields, "scales": group, "minima": group}
        self.block = -(-512 // self.granularity) * self.granularity

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        if self.is_compiled and _few(query) and _many(block, self.granularity):
            planes = [block[name] for name in self.codes.fields]
            kv_affine.scores(query, planes, block["scales"], block["minima"], self.sizes, out)
        else:
            super().write_scores(query, block, out)

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        grouped = x.unflatten(2, (-1, self.granularity)).transpose(-1, -2)  # B, h, group, channel, token
        scales, minima, codes = fit(grouped, self.bits)
        codes = codes.transpose(-1, -2).flatten(2, 3)
        return {**self.codes.pack(codes), "scales": scales[..., 0], "minima": minima[..., 0]}

    def decode(self, block: Block) -> Tensor:
        codes = self._grouped(block)
        return (
            codes.mul_(block["scales"].float()[..., None, :]).add_(block["minima"].float()[..., None, :]).flatten(2, 3)
        )

    def scores(self, query: Tensor, block: Block) -> Tensor:
        groups = query[:, :, None] * block["scales"].float()[..., None, :]  # B, h, group, m, channel
        bias = query @ block["minima"].float().transpose(-1, -2)  # B, h, m, group
        found = groups @ self._grouped(block).transpose(-1, -2)  # B, h, group, m, token
        return (found.transpose(2, 3) + bias[..., None]).flatten(3, 4)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        grouped = p.unflatten(-1, (-1, self.granularity)).transpose(2, 3)  # B, h, group, m, token
        found = grouped @ self._grouped(block) * block["scales"].float()[..., None, :]
        return found.sum(2) + p.unflatten(-1, (-1, self.granularity)).sum(-1) @ block["minima"].float()

    def _grouped(self, block: Block) -> Tensor:
        """Codes [B, h, group, token, channel] float32."""
        return self.codes.unpack(block).float().unflatten(2, (-1, self.granularity))


class ByToken(Packed):
    """Groups of `group_size` channels of one token: scales and minima [B, h, n, width / group_size]."""

    by_token = True

    def __init__(self, spec: Spec, config: Config) -> None:
        check_groups(spec, config.group_size, spec.width, f"head's {spec.width} channels")
        super().__init__(spec, config)
        self.fields = {**self.codes.fields, "scales": Field("scales"), "minima": Field("scales")}

    def mix(self, p: Tensor, block: Block) -> Tensor:
        whole = p.shape[-1] // kv_affine.BLOCK * kv_affine.BLOCK
        if not (self.is_compiled and whole and _few(p) and _many(block, self.group)):
            return super().mix(p, block)
        planes = [block[name] for name in self.codes.fields]
        found = kv_affine.mix(p[..., :whole], planes, block["scales"], block["minima"], self.sizes)
        if whole < p.shape[-1]:
            found += super().mix(p[..., whole:], {name: block[name][:, :, whole:] for name in self.fields})
        return found

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        scales, minima, codes = fit(x.unflatten(-1, (-1, self.group)), self.bits)
        return {**self.codes.pack(codes.flatten(-2)), "scales": scales[..., 0], "minima": minima[..., 0]}

    def decode(self, block: Block) -> Tensor:
        codes = self.codes.unpack(block).float().unflatten(-1, (-1, self.group))
        return codes.mul_(block["scales"].float()[..., None]).add_(block["minima"].float()[..., None]).flatten(-2)


def _few(rows: Tensor) -> bool:
    """Return whether the compiled kernels read the codes for these queries or probabilities [B, h, m, ...]."""
    return rows.is_cpu and rows.dtype == torch.float32 and rows.shape[2] <= kv_affine.MOST_ROWS


def _many(block: Block, group: int) -> bool:
    """Return whether there are so many codes that a compiled kernel saves time."""
    return block["scales"].numel() * group > kv_affine.SMALL


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    axis = config.axis or ("channel" if spec.kind == "keys" else "token")
    return ByChannel(spec, config) if axis == "channel" else ByToken(spec, config)
