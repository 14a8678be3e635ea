"""CommVQ (arXiv 2506.18879): sums of codebook entries that commute with the rotary embedding; calibrated, 1 and 2 bits.

A key before the rotary embedding is a sum of entries of M small codebooks, chosen stage by stage; a token stores the
indices. In a pair of channels that turn together an entry is a rotation and scaling C = [[x, -y], [y, x]] of a unit
vector, and such matrices commute with the turn R_t of position t. So C^T q is computed once for each entry and query,
in place of C^T for each token, summed over the entries of a token, and multiplied with (cos, sin):

    q R_t k = sum over pairs j of (cos_tj, sin_tj) . sum_m z[m, c_m, j],   z[m, a, j] = (q_j . T_maj, q_j x T_maj)

Codebooks come in stages of two. `tied`, the second is the first one turned by a right angle, as in the paper: entries
a and b give C_a e1 + C_b e2. That halves the memory of codebooks; any sum of entries commutes. Values are sums of
entries too. A query's attention is added up for each entry, and one product turns those sums into values.

Codebooks are learned by expectation maximization with soft assignments at a falling temperature, and refined all
together (additive.py). The error of a key is measured by the second moment of the queries after the rotary embedding,
the part of it that commutes with turns: distances between tokens are as spread as positions.

Bits per element: 2 stages log2(entries) / width with stages = floor(bits width / (2 log2 entries)); a norm of 8 bits is
one for each token (`norm: token`), for each head (`head`), or there is none. The codes of all heads of a token share a
row, filled up to whole bytes in each plane of 4, 2 and 1 bits.
Static, float16: of keys and of values the mean, h width numbers, and the codebooks, h stages entries width numbers if
tied, else twice as many; the metric of keys, h width^2. At run time all codebooks are held once more in float32.

Differences from the paper: errors of keys are those of scores, as above; coordinate descent improves the codes of the
greedy search; all codebooks are solved for together at the end; the number of entries, 64 in the paper, can be chosen;
the mean is taken off, and the norm is left out by default; values have codebooks of this sort in place of a
trained encoder.
What it does not do: follow text that is unlike the calibration text, but for its norms where these are stored.

Outside the core because its codebooks are larger than its codes (at one bit 22,342 bytes a token at 2,048 tokens of
SmolLM2-135M, beside 3,328), and principal components of one bit lose no more there: 0.061 of KL in 3,549 bytes, 0.069
here (docs/results/kv_frontier.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import CalibrationError, RecipeError
from compress.kernels.contract import NORM_STEPS, PLANES
from compress.kv.codec import Block, Codec, Field, Spec
from compress.kv.codecs.lloyd import Norms
from compress.numerics import checks
from compress.papers.codecs.additive import (
    BookTraining,
    CodeSearch,
    all_books,
    encode,
    learn,
    own_books,
    quarter_turn,
    total,
)

NEEDS = frozenset({"keys_pre", "queries", "values"})
WORK = 32  # bytes that calibrating takes for each number of its largest sample
QUERY_DAMP = 1e-3  # the second moment of queries gets this share of its mean diagonal
PAIRED = 16  # entries up to which both codes of a stage are searched at once
MOST_DIRECT = 1  # queries of a KV head up to which entries meet queries before they are summed


@dataclass(frozen=True)
class Config:
    bits: float = 1.0  # [bits] of one element on average, at most: the codes
    entries: int = 64  # of a codebook: 2, 4, 8, ... 256
    tied: bool = True  # the second codebook of a stage is the first one turned by a right angle
    norm: Literal["none", "token", "head"] = "none"  # what has a length of its own, of 8 bits
    steps: int = 4  # of soft assignment for each stage
    rounds: int = 2  # of all codebooks together, at most
    sweeps: int = 2  # of coordinate descent over the codes of a vector
    seed: int = 0  # of the samples that codebooks start from

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 8:
            raise ValueError(f"bits {self.bits} is not above 0 and at most 8")
        if self.entries not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"entries {self.entries} is not a power of 2 from 2 to 256")
        for name in ("steps", "rounds", "sweeps"):
            if not 0 <= getattr(self, name) <= 1000:
                raise ValueError(f"{name} {getattr(self, name)} is not between 0 and 1000")

    @property
    def code_bits(self) -> int:
        return self.entries.bit_length() - 1

    @property
    def search(self) -> CodeSearch:
        return CodeSearch(self.sweeps, self.entries <= PAIRED)

    def stages(self, width: int) -> int:
        """Return how many stages of two codes a vector of this width has."""
        return math.floor(self.bits * width / (2 * self.code_bits) + 1e-6)


def check_heads(config: Config, spec: Spec) -> None:
    """Raise RecipeError for a head that these settings leave without a code, or whose channels make no pairs."""
    if spec.width % 2:
        raise RecipeError(f"{spec.where}: {spec.width} channels of a head make no pairs; choose another method")
    if not config.stages(spec.width):
        least = 2 * config.code_bits / spec.width
        raise RecipeError(
            f"{spec.where}: bits {config.bits:g} is less than one stage of two codes takes, {least:g}; raise bits or "
            "lower entries"
        )


def metric(queries: Tensor) -> Tensor:
    """Return F [h, width, width], |e F|^2 being the mean squared error of scores that an error e of a key makes.

    queries [h, samples, width] of the heads that share a KV head, after the rotary embedding, any scale. Of their
    second moment that part counts which commutes with turning all pairs by a right angle, so that F does, too.
    """
    queries = queries.double()
    moment = queries.mT @ queries / queries.shape[1]
    quarter = quarter_turn(torch.eye(moment.shape[1], dtype=torch.float64, device=moment.device))
    moment = (moment + quarter @ moment @ quarter.mT) / 2
    size = moment.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30)[:, None, None]
    values, vectors = torch.linalg.eigh(moment / size)
    return (vectors * (values.clamp(min=0) + QUERY_DAMP).sqrt()[:, None]) @ vectors.mT


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return mean, codebooks and, of keys, metric. samples: keys_pre or values [tokens, h, width], queries."""
    check_heads(config, spec)
    x = samples["keys_pre" if spec.kind == "keys" else "values"].transpose(0, 1).float()
    if x.shape[1] < config.entries:
        raise CalibrationError(
            f"{spec.where}: {x.shape[1]} calibration tokens are too few for {config.entries} entries"
        )
    mean = x.mean(1, keepdim=True, dtype=torch.float64).half()
    x = x - mean.float()
    learned = {"mean": mean[:, 0]}
    factor = torch.eye(spec.width, dtype=torch.float64, device=x.device).expand(spec.heads, -1, -1)
    if spec.kind == "keys":
        factor = metric(samples["queries"].unflatten(1, (spec.heads, -1)).transpose(0, 1).flatten(1, 2))
        learned["metric"] = factor.half()
        x = x @ factor.float()
    if config.norm != "none":
        x = x / _sizes(x[None], config.norm)[0].clamp(min=1e-12)
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + 2 * spec.layer + (spec.kind == "values"))
    training = BookTraining(config.entries, config.stages(spec.width), config.tied, config.steps, config.rounds)
    tables = own_books(learn(x.contiguous(), training, config.search, generator), config.tied)
    back = torch.linalg.inv(factor)[:, None]
    return {**learned, "codebooks": (tables.double() @ back).half()}


def _sizes(x: Tensor, norm: str) -> Tensor:
    """Return the root mean square [B, h, n, 1] of x [B, h, n, width], that of all heads alike if norm is "token"."""
    sizes = x.square().mean(-1, keepdim=True)
    return (sizes.mean(1, keepdim=True).expand_as(sizes) if norm == "token" else sizes).sqrt()


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives, for keys and for values."""
    books = config.stages(spec.width) * (1 if config.tied else 2)
    shapes = {
        "mean": ((spec.heads, spec.width), torch.float16),
        "codebooks": ((spec.heads, books, config.entries, spec.width), torch.float16),
    }
    if spec.kind == "keys":
        shapes["metric"] = ((spec.heads, spec.width, spec.width), torch.float16)
    return shapes


def planes(bits: int) -> list[int]:
    """Return the widths of the planes of a code: 6 bits are 4 and 2."""
    widths: list[int] = []
    while left := bits - sum(widths):
        widths.append(next(width for width in PLANES if width <= left))
    return widths


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [..., count] below 2^bits in planes, highest bits first, each filled up to whole bytes."""
    parts, low = [], bits
    for width in planes(bits):
        low -= width
        fields = (codes >> low) & ((1 << width) - 1)
        fields = torch.nn.functional.pad(fields, (0, -codes.shape[-1] % (8 // width))).unflatten(-1, (-1, 8 // width))
        moved = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
        parts.append((fields << moved).sum(-1, dtype=torch.uint8))
    return torch.cat(parts, -1)


def unpack(rows: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack`: codes uint8 [..., count]."""
    codes, low, start = torch.zeros(*rows.shape[:-1], count, dtype=torch.uint8, device=rows.device), bits, 0
    for width in planes(bits):
        low -= width
        size = -(-count * width // 8)
        moved = torch.arange(0, 8, width, dtype=torch.uint8, device=rows.device)
        fields = (rows[..., start : start + size, None] >> moved) & ((1 << width) - 1)
        codes += fields.flatten(-2)[..., :count] << low
        start += size
    return codes


class Additive(Codec):
    """Codes of all heads in one row of bytes for each token, [B, 1, n, bytes]; norms uint8 [B, h or 1, n, 1]."""

    block = 2048

    def __init__(self, config: Config, spec: Spec, static: Mapping[str, Tensor]) -> None:
        self.config = config
        tables = all_books(static["codebooks"].float(), config.tied)
        tensors = {"mean": static["mean"].float()[:, None], "tables": tables}
        if "metric" in static:
            tensors |= {"metric": static["metric"].float()}
            tensors |= {"measured": tables @ tensors["metric"][:, None]}
        self.count = tables.shape[1]  # codes of a vector
        super().__init__(spec, tensors)
        self.rope = "pre" if spec.kind == "keys" else "post"
        self.norms = Norms(8, NORM_STEPS)
        self.fields = {"codes": Field("codes")} | ({} if config.norm == "none" else {"norms": Field("scales")})

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        x = x - self._static("mean", x)
        tables = self._static("tables", x)
        if "metric" in self.static:
            x, tables = x @ self._static("metric", x), self._static("measured", x)
        rows = {}
        if self.config.norm != "none":
            stored_norms = self.norms.store(_sizes(x, self.config.norm))
            rows["norms"] = stored_norms[:, :1] if self.config.norm == "token" else stored_norms
            x = x / self.norms.load(rows["norms"]).clamp(min=1e-12)
        batch, heads, count, _ = x.shape
        codes = encode(x.transpose(0, 1).reshape(heads, batch * count, -1), tables, self.config.search)
        codes = codes.view(heads, batch, count, -1).permute(1, 2, 0, 3).flatten(2)  # B, n, h M
        return {"codes": pack(codes, self.config.code_bits)[:, None], **rows}

    def codes(self, block: Block) -> Tensor:
        """Return codes [B, h, n, M] uint8."""
        codes = unpack(block["codes"][:, 0], self.config.code_bits, self.spec.heads * self.count)
        return codes.unflatten(-1, (self.spec.heads, -1)).transpose(1, 2)

    def decode(self, block: Block) -> Tensor:
        x = self._sums(block)
        if "norms" in block:
            x = x * self.norms.load(block["norms"])
        return x + self._static("mean", x)

    def _sums(self, block: Block) -> Tensor:
        """Return what the codes stand for, [B, h, n, width], without norms and the mean."""
        codes = self.codes(block)
        batch, heads, count, _ = codes.shape
        flat = codes.transpose(0, 1).reshape(heads, batch * count, -1)
        tables = self.static["tables"].to(flat.device)
        return total(flat, tables).view(heads, batch, count, -1).transpose(0, 1)

    def scores(self, query: Tensor, block: Block) -> Tensor:
        if query.shape[2] > MOST_DIRECT:
            return super().scores(query, block)
        return self.direct_scores(query, block)

    def direct_scores(self, query: Tensor, block: Block) -> Tensor:
        """`scores` by products of the query with all entries, summed over those of a token: no key is decoded."""
        half = block["cos"].shape[-1] // 2
        cos, sin = (block[name][:, None, None, :, :half].to(query.dtype) for name in ("cos", "sin"))
        tables, mean = self._static("tables", query), self._static("mean", query)
        rest = torch.ones_like(cos[..., :1])
        weights = torch.cat((cos, sin, rest), -1)  # B or 1, 1, 1, n, rotary width + 1
        codes = self.codes(block)
        sums_by_row = []
        for q, own in zip(query, codes, strict=True):  # [h, m, width], [h, n, M]
            products = meet(q, tables, half)  # h, m, M, A, rotary width + 1
            heads, m = q.shape[:2]
            places = own[:, None].expand(-1, m, -1, -1).flatten(0, 1)
            sums_by_row.append(total(places, products.flatten(0, 1)).unflatten(0, (heads, m)))
        sums = torch.stack(sums_by_row)  # B, h, m, n, rotary width + 1
        if "norms" in block:
            sums = sums * self.norms.load(block["norms"])[:, :, None]
        offset = torch.stack([meet(q, mean[:, None], half) for q in query])[:, :, :, 0]
        return ((sums + offset) * weights).sum(-1)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        if "norms" in block:
            p = p * self.norms.load(block["norms"]).mT
        return p @ self._sums(block) if p.shape[2] > MOST_DIRECT else self.direct_mix(p, block)

    def direct_mix(self, p: Tensor, block: Block) -> Tensor:
        """`mix` without norms: p [B, h, m, n] added up for each entry, then one product with the codebooks."""
        entries = self.config.entries
        first = torch.arange(self.count, device=p.device) * entries
        places = (self.codes(block).long() + first).flatten(2)[:, :, None].expand(-1, -1, p.shape[2], -1)
        shares = p[..., None].expand(*p.shape, self.count).flatten(3)
        sums = p.new_zeros(*p.shape[:3], self.count * entries).scatter_add_(-1, places, shares)
        return sums @ self._static("tables", p).flatten(1, 2)

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        return mixed + mass * self._static("mean", mixed)


def meet(q: Tensor, tables: Tensor, half: int) -> Tensor:
    """q [h, m, width], tables [h, M, A, width] -> [h, m, M, A, 2 half + 1]: what cos, sin and 1 are multiplied with."""
    q, tables = q[:, :, None, None], tables[:, None]
    qx, qy, rest = q[..., :half], q[..., half : 2 * half], q[..., 2 * half :]
    x, y, still = tables[..., :half], tables[..., half : 2 * half], tables[..., 2 * half :]
    return torch.cat((qx * x + qy * y, qy * x - qx * y, (rest * still).sum(-1, keepdim=True)), -1)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    check_heads(config, spec)
    return Additive(config, spec, static)
