"""SQuat (arXiv 2503.24358): the error of keys is turned away from the directions that queries look in.

Keys are coded as KIVI codes them, but `columns` channels at a time: the error of those is made up for by the channels
that are still to come, so that (k - k^)^T A (k - k^) is small, A = I + strength M, where M is the second moment of the
queries of the heads that share this KV head, over the mean of its diagonal, kept to its `rank` strongest directions.
With i the channels just coded and r the later ones, k_r += W_i (k^_i - k_i), W_i = -A_rr^-1 A_ri: one product for each
piece. Only the encoder knows of it: bytes, decoding and attention are KIVI's. Values are KIVI's too.

`subspace: calibrated` takes M from a calibration text, once for the model. `subspace: prompt` takes it from the queries
of the forward pass in which the first tokens are coded, as published. That works with path="fused" only; M is kept with
the sequences as float16, width (width - columns) / 2 numbers a KV head.

Differences from the published code: M is divided by its size, so that `strength` means the same for every length of
the prompt, where singular values there grow with it; one solve for each piece, which the published recursion equals;
ranges are rounded to float16 before codes are chosen; every row of a batch has its own subspace.

Queries turn with their position: a subspace taken from early positions only can do worse than none for later ones, so
calibrate with samples as long as the contexts that are meant, and expect less of a short prompt.

It does not use queries before RoPE, learns nothing from queries that come after the first coded tokens, and gives a
prompt that is shorter than what stays exact the subspace of very few queries.

Outside the core because at 2 bits it has a KL of 0.114 on SmolLM2-135M at 2,048 tokens, where principal components have
0.0077 in fewer bytes (docs/results/kv_frontier.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.kv.codec import Block, Codec, GroupSize, Spec
from compress.kv.codecs import kivi
from compress.numerics import checks

NEEDS = frozenset({"queries"})
WORK = 8  # bytes that calibrating takes for each number of its largest sample


@dataclass(frozen=True)
class Config:
    bits: int = 2  # [bits] of one code: 1 to 8
    group_size: GroupSize = "auto"  # [tokens or channels] that share a scale and a minimum: tokens for keys, channels
    # for values; auto: 32, or the most channels below that which divide a head
    columns: int = 8  # [channels] of keys that are coded before their error is passed on
    strength: float = 10.0  # weight of the queries' second moment (mean diagonal 1) beside the identity
    rank: int | None = None  # [directions] of the queries that count; null: all
    subspace: Literal["calibrated", "prompt"] = "calibrated"  # whose queries count: those of calibration, or those of
    # the prompt

    def __post_init__(self) -> None:
        kivi.Config(self.bits, self.group_size)
        if self.columns < 1:
            raise ValueError(f"columns {self.columns} is not 1 or more")
        if self.strength < 0 or (self.rank is not None and self.rank < 1):
            raise ValueError("strength is 0 or more, rank 1 or more")

    def needs_queries(self, kind: str) -> bool:
        """Return whether the codec of keys or values must be given queries."""
        return kind == "keys" and self.subspace == "prompt"


def moment(queries: Tensor, heads: int) -> Tensor:
    """Return the second moment [..., h, width, width] of queries [..., H, n, width], divided by its mean diagonal.

    Rows of zeros do not count.
    """
    grouped = queries.unflatten(-3, (heads, -1)).flatten(-3, -2).float()  # ..., h, query heads and tokens, width
    second = grouped.mT @ grouped
    return second / second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=torch.finfo().tiny)


def compensation(second: Tensor, config: Config) -> Tensor:
    """Return what later channels take over of each piece: all W_i [.., later channels, columns] in a row, float16.

    second: [..., width, width] as `moment` gives it.
    """
    second = second.double()
    width = second.shape[-1]
    if config.rank is not None and config.rank < width:
        values, vectors = torch.linalg.eigh(second)
        values, vectors = values[..., -config.rank :], vectors[..., -config.rank :]
        second = (vectors * values[..., None, :]) @ vectors.mT
    metric = torch.eye(width, dtype=second.dtype, device=second.device) + config.strength * second
    columns = []
    for start in range(0, width - config.columns, config.columns):
        stop = start + config.columns
        columns.append(-torch.linalg.solve(metric[..., stop:, stop:], metric[..., stop:, start:stop]).flatten(-2))
    if not columns:
        return second.new_zeros(*second.shape[:-2], 0, dtype=torch.float16)
    return torch.cat(columns, -1).half()


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """compensation [h, ...] float16 of keys; queries [tokens, H, width]."""
    if spec.kind == "values" or config.subspace == "prompt":
        return {}
    return {"compensation": compensation(moment(samples["queries"].transpose(0, 1), spec.heads), config)}


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives: the compensation of keys, unless it is that of the prompt."""
    if spec.kind == "values" or config.subspace == "prompt":
        return {}
    starts = range(0, spec.width - config.columns, config.columns)
    numbers = sum((spec.width - start - config.columns) * config.columns for start in starts)
    return {"compensation": ((spec.heads, numbers), torch.float16)}


class SquatKeys(kivi.ByChannel):
    """KIVI's keys, whose encoder passes errors on."""

    def __init__(self, config: Config, spec: Spec, static: Mapping[str, Tensor]) -> None:
        super().__init__(spec, kivi.Config(config.bits, config.group_size))
        self.config, self.static = config, dict(static)
        self.needs_queries = config.needs_queries(spec.kind)

    def begin(self, x: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        if not self.needs_queries:
            return {}
        if queries is None:
            raise CompressError(f"{self.spec.where}: squat with subspace: prompt is given no queries; use path='fused'")
        return {"compensation": compensation(moment(queries, self.spec.heads), self.config)}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        rest = x.clone()
        given = state["compensation"] if self.needs_queries else self.static["compensation"].to(x.device)[None]
        parts, used = [], 0
        for start in range(0, self.spec.width, self.config.columns):
            stop = min(start + self.config.columns, self.spec.width)
            piece = rest[..., start:stop].unflatten(2, (-1, self.granularity)).transpose(-1, -2)
            scales, minima, codes = kivi.fit(piece, self.bits)  # B, h, group, channel, token
            parts.append((codes.transpose(-1, -2).flatten(2, 3), scales[..., 0], minima[..., 0]))
            later = self.spec.width - stop
            if later:
                read = (codes * scales.float() + minima.float()).transpose(-1, -2).flatten(2, 3)
                own = given[..., used : used + later * (stop - start)].unflatten(-1, (later, stop - start))
                rest[..., stop:] += (read - rest[..., start:stop]) @ own.to(x).mT
                used += later * (stop - start)
        codes, scales, minima = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        return {**self.codes.pack(codes), "scales": scales, "minima": minima}


def check_heads(config: Config, spec: Spec) -> None:
    """Raise RecipeError unless heads of this width can be stored."""
    if spec.kind == "values":
        build(config, spec, {})


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    if spec.kind == "values":
        return kivi.build(kivi.Config(config.bits, config.group_size), spec, {})
    return SquatKeys(config, spec, static)
