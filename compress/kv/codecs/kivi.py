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
from typing import Any, Literal

import torch
from torch import Tensor

from compress.kernels import contract, dispatch
from compress.kv.codec import (
    ALL,
    Block,
    Codec,
    Field,
    GroupSize,
    Spec,
    check_bits,
    check_group_size,
    check_groups,
    group_of,
)
from compress.kv.codecs.packed import PackedCodes

NEEDS: frozenset[str] = frozenset()
AUTO_GROUP_SIZE = 32
MIN_SCALE = 1e-5  # scale of a constant group


@dataclass(frozen=True)
class Config:
    bits: int = 2  # [bits] of one code: 1 to 8
    group_size: GroupSize = "auto"  # [tokens or channels] that share a scale and a minimum: tokens for keys, channels
    # for values, at most those of a head; auto: 32, or the most channels below that which divide a head
    axis: Literal["channel", "token"] | None = None  # what a group of numbers lies in; null: the channel for keys, the
    # token for values

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_group_size(self.group_size)


def fit(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """groups [..., n] float32 -> scale, minimum [..., 1] float16, codes uint8 [..., n] that are nearest with these."""
    return quantize(groups, groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), bits)


def quantize(groups: Tensor, low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, minimum [..., 1] float16 and the nearest codes uint8 [..., n] for the range from low to high."""
    scale, low = ((high - low) / (2**bits - 1)).clamp(min=MIN_SCALE).half(), low.half()
    codes = ((groups - low.float()) / scale.float()).round_().clamp_(0, 2**bits - 1)
    return scale, low, codes.to(torch.uint8)


class PackedInts(Codec):
    """Codes, scales and minima of either grouping, decoded by compiled code where there is any."""

    group: int
    by_token: bool

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__(spec)
        self.bits = config.bits
        self.codes = PackedCodes(spec.width, config.bits)
        self.layout = contract.PlanarCodes(config.bits, self.codes.padded_channels, self.group)

    def at_once(self, rows: Tensor) -> int:
        return ALL if self.reader(rows) is not None else self.block

    def write_at_once(self, out: Tensor) -> int:
        return ALL if self._writer(out) is not None else self.block

    def write(self, block: Block, out: Tensor) -> None:
        kernel = self._writer(out)
        if kernel is None:
            return super().write(block, out)
        return kernel.decode(*self.stored_tensors(block), self.layout, self.by_token, out)

    def stored_tensors(self, block: Block) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the planes of words, the scales and the minima, as kernels take them."""
        return [block[name] for name in self.codes.fields], block["scales"], block["minima"]

    def numbers(self, block: Block) -> Tensor:
        """Return what scales are multiplied with, [B, h, n, width] float32: the codes."""
        return self.codes.unpack(block).float()

    def reader(self, rows: Tensor, block: Block | None = None) -> Any:
        """Return the kernel that reads the codes (of a block) for queries or probabilities [B, h, m, ...], or None."""
        codes = None if block is None else block["scales"].numel() * self.group
        return self._kernel("affine", rows) if contract.is_worthwhile(rows, codes) else None

    def _writer(self, out: Tensor) -> Any:
        is_large = out.dtype in contract.DTYPES and out.numel() > contract.SMALL
        return self._kernel("decode", out) if is_large and self._kernel("affine", out) is not None else None

    def _kernel(self, name: str, like: Tensor) -> Any:
        kernel = dispatch.kv(like.device, name) if self.codes.padded_channels == self.spec.width else None
        return kernel if kernel is not None and kernel.supports(self.layout, self.by_token) else None


class ByChannel(PackedInts):
    """Groups of `group_size` tokens of one channel: scales and minima [B, h, n / group_size, width]."""

    by_token = False

    def __init__(self, spec: Spec, config: Config) -> None:
        self.group = self.granularity = AUTO_GROUP_SIZE if config.group_size == "auto" else config.group_size
        super().__init__(spec, config)
        group = Field("scales", self.group)
        self.fields = {**self.codes.fields, "scales": group, "minima": group}
        self.block = -(-512 // self.granularity) * self.granularity

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        kernel = self.reader(query, block)
        if kernel is None:
            super().write_scores(query, block, out)
        else:
            kernel.scores(query, *self.stored_tensors(block), self.layout, out)

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        grouped = x.unflatten(2, (-1, self.granularity)).transpose(-1, -2)  # B, h, group, channel, token
        scales, minima, codes = fit(grouped, self.bits)
        codes = codes.transpose(-1, -2).flatten(2, 3)
        return {**self.codes.pack(codes), "scales": scales[..., 0], "minima": minima[..., 0]}

    def decode(self, block: Block) -> Tensor:
        codes = self._group_codes(block)
        return (
            codes.mul_(block["scales"].float()[..., None, :]).add_(block["minima"].float()[..., None, :]).flatten(2, 3)
        )

    def scores(self, query: Tensor, block: Block) -> Tensor:
        groups = query[:, :, None] * block["scales"].float()[..., None, :]  # B, h, group, m, channel
        bias = query @ block["minima"].float().transpose(-1, -2)  # B, h, m, group
        products = groups @ self._group_codes(block).transpose(-1, -2)  # B, h, group, m, token
        return (products.transpose(2, 3) + bias[..., None]).flatten(3, 4)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        grouped = p.unflatten(-1, (-1, self.granularity)).transpose(2, 3)  # B, h, group, m, token
        mixed = grouped @ self._group_codes(block) * block["scales"].float()[..., None, :]
        return mixed.sum(2) + p.unflatten(-1, (-1, self.granularity)).sum(-1) @ block["minima"].float()

    def _group_codes(self, block: Block) -> Tensor:
        """Codes [B, h, group, token, channel] float32."""
        return self.numbers(block).unflatten(2, (-1, self.granularity))


class ByToken(PackedInts):
    """Groups of `group_size` channels of one token: scales and minima [B, h, n, width / group_size]."""

    by_token = True

    def __init__(self, spec: Spec, config: Config) -> None:
        group = group_of(config.group_size, AUTO_GROUP_SIZE, spec.width)
        self.group = min(group, spec.width)  # as of the narrow part of latents
        check_groups(spec, self.group, spec.width, f"head's {spec.width} channels")
        super().__init__(spec, config)
        self.fields = {**self.codes.fields, "scales": Field("scales"), "minima": Field("scales")}

    def mix(self, p: Tensor, block: Block) -> Tensor:
        whole = p.shape[-1] // contract.BLOCK * contract.BLOCK
        kernel = self.reader(p, block) if whole else None
        if kernel is None:
            return super().mix(p, block)
        mixed = kernel.mix(p[..., :whole], *self.stored_tensors(block), self.layout)
        if whole < p.shape[-1]:
            mixed += super().mix(p[..., whole:], {name: block[name][:, :, whole:] for name in self.fields})
        return mixed

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        scales, minima, codes = fit(x.unflatten(-1, (-1, self.group)), self.bits)
        return {**self.codes.pack(codes.flatten(-2)), "scales": scales[..., 0], "minima": minima[..., 0]}

    def decode(self, block: Block) -> Tensor:
        codes = self.numbers(block).unflatten(-1, (-1, self.group))
        return codes.mul_(block["scales"].float()[..., None]).add_(block["minima"].float()[..., None]).flatten(-2)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    axis = config.axis or ("channel" if spec.kind == "keys" else "token")
    return ByChannel(spec, config) if axis == "channel" else ByToken(spec, config)
