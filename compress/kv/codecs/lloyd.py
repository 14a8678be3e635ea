"""Rotation and Lloyd-Max levels, with one norm for each token and head; no calibration (TurboQuant, arXiv 2504.19874).

A random rotation (signs, then Hadamard) makes the channels of a head nearly Gaussian with equal variance, whatever the
outliers were. One table of levels, optimal for a Gaussian, then serves all channels, and a norm is all that a token
stores besides its codes: x = s R^T level(code). Relative squared error on Gaussian data 0.118, 0.0345, 0.0095 at 2, 3,
4 bits, where min-max integers of the same bytes have two to three times as much. Bits: bits + norm_bits / width.

Rotation leaves a mean that all tokens share as it is, and there is a large one in keys before the rotary embedding. So
keys are stored as they were before it (`rope: pre`), and the mean of the first MEAN_TOKENS coded tokens of the sequence
is taken off (`centre: first`) and kept with it. That serves attention only through decoding; keys after the rotary
embedding (`rope: post`) and values are read in the coded basis: the query is rotated once, the sum of values turned
back once, norms are folded into scores and probabilities. Left padding: pads, which are coded as copies of a token, do
not count for the mean; a row with fewer than MIN_DISTINCT_VECTORS other tokens among them is not centred.

`norm: preserved` stores what gives the coded vector the length of the exact one (unbiased enough for scores: "norm
correction"), `least_squares` what gives it the least error, and codes once more with it. 8-bit norms are rounded to
2^(1/8), 9 % apart, and the codes are chosen for the rounded one.

Differences from the paper: no 1-bit sketch of the residual, whose variance costs more than its bias saves once softmax
is applied; no separate treatment of outlier channels, which the rotation has already spread; centring is ours.
What it does not do: a width that is no product of a known Hadamard order and a power of two is rotated by a table that
is orthogonal but less mixing (compress/numerics/hadamard.py); channels are not told apart (compress/kv/codecs/pca.py
does that).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from compress.kernels import contract, dispatch
from compress.kv.codec import ALL, Block, Codec, Field, Spec, check_bits
from compress.kv.codecs.packed import PackedCodes
from compress.numerics import hadamard

NEEDS: frozenset[str] = frozenset()
MEAN_TOKENS = 32  # their mean is taken off
MIN_DISTINCT_VECTORS = 8  # their mean counts where so many are no copies
MIN_RMS = 1e-12  # root mean square of a vector that is not zero
NORM_STEPS_PER_OCTAVE = 8  # 8-bit norms
LLOYD_ROUNDS = 400


@dataclass(frozen=True)
class Config:
    bits: int = 2  # [bits] of one code: 1 to 8
    rope: Literal["pre", "post"] = "pre"  # code keys before (pre) or after (post) the rotary embedding
    centre: Literal["first", "none"] | None = None  # subtract the mean of the first tokens, or nothing; null: first for
    # keys before the rotary embedding, else none
    norm: Literal["preserved", "least_squares"] | None = None  # stored length: that of the exact vector, or that of
    # least error; null: preserved for keys, else least_squares
    norm_bits: Literal[8, 16] = 16  # [bits] of the length of a vector
    seed: int = 0  # of the random signs of the rotation

    def __post_init__(self) -> None:
        check_bits(self.bits)


@cache
def levels(bits: int) -> Tensor:
    """Return the 2^bits levels of least squared error for N(0, 1), ascending, float32 [2^bits]; of 0 bits: [0]."""
    with torch.inference_mode(False), torch.device("cpu"):
        count = 2**bits
        normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
        values = 3**0.5 * normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count)
        far = torch.tensor([50.0], dtype=torch.float64)
        for _ in range(LLOYD_ROUNDS if count > 1 else 0):
            edges = torch.cat((-far, (values[1:] + values[:-1]) / 2, far))
            density, below = normal.log_prob(edges).exp(), normal.cdf(edges)
            values = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
            values = (values - values.flip(0)) / 2
        if bits <= contract.MOST_LEVEL_BITS:  # multiples of a step, which costs 0.4 % of the error at 4 bits
            step = values.max() / contract.LARGEST_LEVEL if bits else 1.0
            values = (values / step).round() * step
        return values.float()


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return the indices, int64, of the nearest levels of an ascending table [count]."""
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2)


def rms(x: Tensor) -> Tensor:
    """Return the root mean square over the last axis, kept; never zero."""
    return x.square().mean(-1, keepdim=True).sqrt().clamp(min=MIN_RMS)


@dataclass(frozen=True)
class Norms:
    """Positive numbers as float16, or as bytes: 2^((byte - 128) / steps), 0 for none."""

    bits: int
    steps: int = NORM_STEPS_PER_OCTAVE

    def store(self, norms: Tensor) -> Tensor:
        if self.bits == 16:
            return norms.half()
        code = (norms.clamp(min=1e-30).log2() * self.steps).round() + 128
        return torch.where(norms > 1e-30, code.clamp(1, 255), 0).to(torch.uint8)

    def load(self, stored: Tensor) -> Tensor:
        if self.bits == 16:
            return stored.float()
        return torch.where(stored > 0, ((stored.float() - 128) / self.steps).exp2(), 0)


class Levels:
    """Vectors [..., width] of nearly Gaussian numbers <-> codes and a norm."""

    def __init__(self, bits: int, norm: str, norm_bits: int) -> None:
        self.table, self.norm, self.norms = levels(bits), norm, Norms(norm_bits)

    def encode(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """y float32 -> codes int64 like y, norms [..., 1] as they are stored."""
        table, size = self.table.to(y.device), rms(y)
        codes = nearest(y / size, table)
        for _ in range(2):
            values = table[codes]
            if self.norm == "preserved":
                norms = size / rms(values)
            else:
                norms = ((y * values).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True)).clamp(min=0)
            norms = torch.where(size > MIN_RMS, norms, 0)
            stored = self.norms.store(norms)
            if self.norm == "preserved" and self.norms.bits == 16:
                break
            codes = nearest(y / self.norms.load(stored).clamp(min=MIN_RMS), table)
        return codes, stored

    def values(self, codes: Tensor) -> Tensor:
        """Levels of codes of any integer type, float32."""
        return self.table.to(codes.device)[codes.int()]

    def whole(self) -> tuple[tuple[int, ...], float]:
        """Return the levels as small integers, for compiled code, and the step that these are multiples of."""
        step = float(self.table[-1]) / contract.LARGEST_LEVEL
        return tuple((self.table / step).round().int().tolist()), step


class Lloyd(Codec):
    """Codes [B, h, n, width] of rotated vectors and norms [B, h, n, 1]."""

    def __init__(self, spec: Spec, config: Config) -> None:
        generator = torch.Generator().manual_seed(config.seed)
        signs = torch.randint(0, 2, (spec.width,), generator=generator, device="cpu") * 2 - 1
        super().__init__(spec, {"signs": signs.to(torch.int8)})
        is_keys = spec.kind == "keys"
        self.rope = config.rope if is_keys else "post"
        self.centre = config.centre or ("first" if self.rope == "pre" else "none")
        self.granularity = MEAN_TOKENS if self.centre == "first" else 1
        self.levels = self.coder(config, config.bits)
        self.codes = PackedCodes(spec.width, config.bits)
        self.fields = {**self.codes.fields, "norms": Field("scales")}

    def coder(self, config: Config, bits: int) -> Levels:
        norm = config.norm or ("preserved" if self.spec.kind == "keys" else "least_squares")
        return Levels(bits, norm, config.norm_bits)

    def begin(self, x: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        return {"mean": first_mean(x).to(torch.float16)} if self.centre == "first" else {}

    def rotate_in(self, x: Tensor, state: Block) -> Tensor:
        """x [B, h, n, width] without the mean, rotated."""
        if "mean" in state:
            x = x - state["mean"]
        return hadamard.transform(x * self._signs(x))

    def rotate_back(self, y: Tensor) -> Tensor:
        return hadamard.transpose(y) * self._signs(y)

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        codes, norms = self.levels.encode(self.rotate_in(x, state))
        return {**self.codes.pack(codes), "norms": norms}

    def decode_levels(self, block: Block) -> tuple[Tensor, Tensor]:
        """Levels [B, h, n, width] and norms [B, h, n, 1], float32."""
        return self.levels.values(self.codes.unpack(block)), self.levels.norms.load(block["norms"])

    def decode(self, block: Block) -> Tensor:
        values, norms = self.decode_levels(block)
        x = self.rotate_back(values * norms)
        return x + block["mean"].float() if "mean" in block else x

    def query(self, q: Tensor, state: Block) -> Tensor:
        """Rotate the queries and append a column, the constant that the mean adds to all scores."""
        if self.rope == "pre":
            return q
        bias = q @ state["mean"].float().mT if "mean" in state else q.new_zeros(*q.shape[:3], 1)
        return torch.cat((hadamard.transform(q * self._signs(q)), bias), -1)

    def at_once(self, rows: Tensor) -> int:
        return ALL if self._reader(rows) is not None else self.block

    def scores(self, query: Tensor, block: Block) -> Tensor:
        if self.rope == "pre":
            return super().scores(query, block)
        values, norms = self.decode_levels(block)
        return (query[..., :-1] @ values.mT) * norms.mT + query[..., -1:]

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        kernel, whole = self._reader(query, block), out.shape[-1] // contract.PIECE * contract.PIECE
        whole = 0 if kernel is None else whole
        if kernel is not None and whole:
            (levels, step), rows = self.levels.whole(), _first(block, self.fields, whole)
            planes = [rows[name] for name in self.codes.fields]
            kernel.scores(query[..., :-1] * step, planes, rows["norms"], levels, out[..., :whole])
            out[..., :whole] += query[..., -1:]
        if whole < out.shape[-1]:
            out[..., whole:] = self.scores(query, _last(block, self.fields, whole))

    def mix(self, p: Tensor, block: Block) -> Tensor:
        kernel, whole = self._reader(p, block), p.shape[-1] // contract.BLOCK * contract.BLOCK
        whole = 0 if kernel is None else whole
        mixed = p.new_zeros(*p.shape[:3], self.spec.width)
        if kernel is not None and whole:
            (levels, step), rows = self.levels.whole(), _first(block, self.fields, whole)
            planes = [rows[name] for name in self.codes.fields]
            mixed += kernel.mix(p[..., :whole], planes, rows["norms"], levels, self.spec.width) * step
        if whole < p.shape[-1]:
            values, norms = self.decode_levels(_last(block, self.fields, whole))
            mixed += (p[..., whole:] * norms.mT) @ values
        return mixed

    def _reader(self, rows: Tensor, block: Block | None = None) -> Any:
        """Return the kernel that reads the codes (of a block) for these queries or probabilities, None if none does."""
        codes = None if block is None else block["norms"].numel() * self.spec.width
        is_plain = (
            self.rope == "post" and self.levels.norms.bits == 16 and self.codes.padded_channels == self.spec.width
        )
        kernel = dispatch.kv(rows.device, "levels") if is_plain and contract.is_worthwhile(rows, codes) else None
        return kernel if kernel is not None and kernel.supports(self.codes.bits, self.spec.width) else None

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        x = self.rotate_back(mixed)
        return x + mass * state["mean"].float() if "mean" in state else x

    def _signs(self, x: Tensor) -> Tensor:
        return self._static("signs", x)


def _first(block: Block, fields: Mapping[str, Field], count: int) -> dict[str, Tensor]:
    return {name: block[name][:, :, :count] for name in fields}


def _last(block: Block, fields: Mapping[str, Field], start: int) -> Block:
    """Return the block from token `start` on."""
    return {**block, **{name: block[name][:, :, start:] for name in fields}} if start else block


def first_mean(x: Tensor) -> Tensor:
    """Return the mean [B, h, 1, width] of the first MEAN_TOKENS tokens of x [B, h, n, width] that copy none before.

    Zero where fewer than MIN_DISTINCT_VECTORS are left.
    """
    x = x[:, :, :MEAN_TOKENS]
    is_new = torch.ones(x.shape[0], 1, x.shape[2], 1, dtype=torch.bool, device=x.device)
    is_new[:, 0, 1:, 0] = (x[:, :, 1:] != x[:, :, :-1]).any(-1).any(1)
    count = is_new.sum(2, keepdim=True)
    return (x * is_new).sum(2, keepdim=True) / count * (count >= MIN_DISTINCT_VECTORS)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Lloyd(spec, config)
