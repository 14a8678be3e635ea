"""GEAR (arXiv 2403.05527): min-max integers, and a low-rank and a sparse part of what they miss.

In each block of `block_tokens` tokens the extremes are set aside (keys: the `sparse` share of each channel's tokens,
values: of each token's channels over all heads; half of them the largest, half the smallest) and replaced by the mean
of the rest; the block is coded as KIVI does it; the error that is left is approximated for each head by a product of
rank `rank`, U [tokens, rank] P^T [rank, width], found by subspace iteration; last, the set-aside entries are made exact
by float16 differences. Attention reads scores of the integers plus (q P) U^T plus the differences, and the values
alike. `sparse: 0` is the published GEAR-L, `group_size: null` its KCVT: one range for each channel of a block (keys)
and each head of a token (values).

Bits per element: bits + 32 / group_size + 16 rank (1 / width + 1 / block_tokens) + s (16 + i), where s is the share of
entries that whole slots make of `sparse` (at least one at each end), i = 8 bits for vectors of up to 256, else 16.

Differences from the published code. Blocks are the same in prompt and generation, so that what is stored does not
depend on how the tokens came; published prompts are one block of rank 4, generated tokens blocks of 64 with rank 2.
The share of outliers counts along the axis on which they are taken; published keys count it along the channels and take
it along the tokens. Integers of b bits have 2^b levels for every b. The iteration starts from the same directions in
every block. The mean that fills in leaves the outliers out.

It pays only where the error of the integers has structure: of an i.i.d. error rank 4 catches a few percent of the
energy, and the same bits buy more as a finer group_size. There is no kernel for the added parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.codec import (
    Block,
    Codec,
    Field,
    GroupSize,
    Spec,
    check_bits,
    check_group_size,
    check_groups,
    group_of,
    head_rows,
    token_rows,
)
from compress.kv.codecs import kivi

NEEDS: frozenset[str] = frozenset()
AUTO_GROUP_SIZE = 64
SUBSPACE_ITERATIONS = 3
START_SEED = 0  # its first directions are drawn
EXTRA = 4  # directions beyond the rank that the iteration carries


@dataclass(frozen=True)
class Config:
    bits: int = 2  # [bits] of one code: 1 to 8
    group_size: GroupSize | None = "auto"  # [tokens or channels] of a scale and a minimum: tokens for keys, channels
    # for values; null: all of them; auto: 64, or the most below that which divide a block or a head
    rank: int = 2  # of the low-rank part of each head; 0: none
    sparse: float = 0.02  # [fraction] of the entries, the extremes, that float16 differences make exact, below 0.5; 0:
    # none
    block_tokens: int = 128  # [tokens] that are coded together

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.rank < 0 or not 0 <= self.sparse < 0.5:
            raise ValueError("rank is 0 or more, sparse a share below 0.5")
        if self.group_size is not None:
            check_group_size(self.group_size)
        if self.block_tokens < 2:
            raise ValueError(f"block_tokens {self.block_tokens} is not 2 or more")

    def ends(self, length: int) -> int:
        """Return how many entries are set aside at each end of a vector."""
        return max(1, round(self.sparse * length / 2)) if self.sparse else 0


def low_rank(error: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """error [..., n, d] -> U [..., n, rank], P [..., rank, d] float16 with U P about the best of this rank."""
    start = torch.randn(error.shape[-1], rank + EXTRA, generator=torch.Generator().manual_seed(START_SEED))
    basis = start.to(error).expand(*error.shape[:-2], -1, -1)
    for _ in range(SUBSPACE_ITERATIONS):
        basis = torch.linalg.qr(error.mT @ (error @ basis)).Q
    small = error @ basis
    turn = torch.linalg.eigh((small.mT @ small).float()).eigenvectors[..., -rank:].to(error)  # the strongest come last
    right = (basis @ turn).half()
    return (error @ right.to(error)).half(), right.mT.contiguous()


class Gear(Codec):
    """Integers, coded by `base`, and corrections.

    length: of the vectors whose extremes are set aside; tokens: how many a row of outliers stands for.
    """

    def __init__(self, config: Config, spec: Spec, length: int, tokens: int) -> None:
        super().__init__(spec)
        self.length = length
        self.config, self.base = config, _base(config, spec)
        self.granularity = self.block = config.block_tokens
        self.block *= max(1, 512 // config.block_tokens)
        self.fields = dict(self.base.fields)
        if config.rank:
            self.fields |= {"left": Field("extras"), "right": Field("extras", config.block_tokens)}
        self.ends = config.ends(self.length)
        self.index = torch.uint8 if self.length <= 256 else torch.int16
        if self.ends:
            field = Field("extras", tokens)
            self.fields |= {"outliers": field, "places": field}

    def vectors(self, x: Tensor) -> Tensor:
        """x [B, h, n, width] -> [B, h or 1, rows, ..., length], the vectors whose extremes are set aside; a copy."""
        raise NotImplementedError

    def whole(self, vectors: Tensor) -> Tensor:
        """Undo `vectors`."""
        raise NotImplementedError

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        vectors, places = self.vectors(x), None
        if self.ends:
            places = torch.cat([vectors.topk(self.ends, largest=most).indices for most in (True, False)], -1)
            kept = torch.ones_like(vectors, dtype=torch.bool).scatter_(-1, places, False)
            mean = (vectors * kept).sum(-1, keepdim=True) / (self.length - 2 * self.ends)
            filled = self.whole(torch.where(kept, vectors, mean))
        else:
            filled = x
        rows = self.base.encode(filled, {})
        coded = self.base.decode(rows)
        if self.config.rank:
            error = x - coded
            if places is not None:
                error = self.whole(self.vectors(error).scatter_(-1, places, 0.0))
            left, right = low_rank(error.unflatten(2, (-1, self.granularity)), self.config.rank)
            rows |= {"left": left.flatten(2, 3), "right": right}
            coded = coded + self._product(rows)
        if places is not None:
            missed = self.vectors(x - coded).gather(-1, places)
            rows |= {"outliers": missed.half(), "places": places.to(self.index)}
        return rows

    def decode(self, block: Block) -> Tensor:
        x = self.base.decode(block)
        if self.config.rank:
            x = x + self._product(block)
        if not self.ends:
            return x
        return self.whole(self.vectors(x).scatter_add_(-1, block["places"].long(), block["outliers"].float()))

    def _product(self, block: Block) -> Tensor:
        """Return the low-rank part [B, h, n, width]."""
        left = block["left"].float().unflatten(2, (-1, self.granularity))
        return (left @ block["right"].float()).flatten(2, 3)


class GearKeys(Gear):
    """Outliers of each channel of a block: [B, h, n / block_tokens, width, slots]."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec, config.block_tokens, config.block_tokens)

    def vectors(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.granularity)).transpose(-1, -2).contiguous()

    def whole(self, vectors: Tensor) -> Tensor:
        return vectors.transpose(-1, -2).flatten(2, 3)

    def at_once(self, rows: Tensor) -> int:
        return self.base.at_once(rows)

    def scores(self, query: Tensor, block: Block) -> Tensor:
        out = query.new_empty(*query.shape[:3], _tokens(block))
        self.write_scores(query, block, out)
        return out

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        self.base.write_scores(query, block, out)
        groups = out.unflatten(-1, (-1, self.granularity)).transpose(2, 3)  # B, h, block, m, token: shares memory
        if self.config.rank:
            short = query[:, :, None] @ block["right"].float().mT  # B, h, block, m, rank
            groups += short @ block["left"].float().unflatten(2, (-1, self.granularity)).mT
        if self.ends:
            terms = query[:, :, None, :, :, None] * block["outliers"].float()[:, :, :, None]
            places = block["places"].long()[:, :, :, None].expand(terms.shape)
            groups.scatter_add_(-1, places.flatten(-2), terms.flatten(-2))


class GearValues(Gear):
    """Outliers of each token over all heads: [B, 1, n, slots]."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec, spec.heads * spec.width, 1)

    def vectors(self, x: Tensor) -> Tensor:
        return token_rows(x)[:, None].contiguous()

    def whole(self, vectors: Tensor) -> Tensor:
        return head_rows(vectors[:, 0], self.spec.heads)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        mixed = self.base.mix(p, block)
        if self.config.rank:
            left = block["left"].float().unflatten(2, (-1, self.granularity))
            short = p.unflatten(-1, (-1, self.granularity)).transpose(2, 3) @ left  # B, h, block, m, rank
            mixed = mixed + (short @ block["right"].float()).sum(2)
        if self.ends:
            sparse = p.new_zeros(p.shape[0], 1, p.shape[-1], self.length)
            sparse.scatter_(-1, block["places"].long(), block["outliers"].float())
            mixed = mixed + p @ self.whole(sparse)
        return mixed


def _base(config: Config, spec: Spec) -> Codec:
    """Return the codec of the integers."""
    whole = config.block_tokens if spec.kind == "keys" else spec.width
    group = min(whole if config.group_size is None else group_of(config.group_size, AUTO_GROUP_SIZE, whole), whole)
    check_groups(spec, group, whole, f"block_tokens {whole}" if spec.kind == "keys" else f"head's {whole} channels")
    return kivi.build(kivi.Config(config.bits, group), spec, {})


def _tokens(block: Mapping[str, Tensor]) -> int:
    """Return the tokens of a block, from its codes."""
    return next(rows for name, rows in block.items() if name.startswith("codes")).shape[2]


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return (GearKeys if spec.kind == "keys" else GearValues)(config, spec)
