"""KVQuant (arXiv 2401.18079): keys before RoPE by channel, values by token, levels where the loss is sensitive.

A key channel's range is fixed by calibration, from its least sample to its largest: x = offset + scale level. A value
token's range is its own: its `outliers` largest and smallest channels are set aside, whatever split leaves the
narrowest rest. The 2^bits levels are shared by all channels of a layer's keys, or values: 1-D k-means that minimizes
sum F (x - Q(x))^2 over the calibration tokens with F the squared gradient of the loss (a diagonal of the Fisher
information). With `q_norm` the levels are spread again for reading so that the codes keep mean and variance. What the
levels miss most, `outliers` of each token's channels over all heads, is stored beside the codes as float16 differences
that are added. Tokens are coded one by one.

Bits per element, C channels of a token over all heads, k = round(outliers C), 1 or more: bits + k (16 + i) / C with
i = 8 bits of index for C <= 256, else 16; values + 32 / C. The rotary rows that keys before RoPE need when they are
read are counted with the state of the cache.

Differences from the published code. Each token has k slots, so that its rows have one size; they are given to the
largest errors, not to what leaves the range: a slot is never empty, and levels are learned a second time for all that
the slots leave. The published slots (floor(outliers / 2 C) + 1 at each end) are more than `outliers` promises for few
channels, and its cap marks the smallest normalized entries too. A key channel's range is not cut at quantiles: tokens
with more outliers than slots lost more than the narrower range gave. F is multiplied by the square of the range,
without which the sum over normalized entries is not that of the formula. k-means starts from quantiles and from an even
grid and keeps the better end: no seed. Codes are chosen for the rounded float16 ranges and levels; a channel that never
varies has a least scale instead of NaN. Q-Norm is off at 2 bits too: it changed no error by more than 3 percent.

It does not follow ranges that move away from those of the calibration text; there is no kernel: reading decodes, and
the rotary embedding is applied to all cached keys at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import CalibrationError
from compress.kv.codec import Block, Codec, Field, Spec, check_bits, head_rows, token_rows
from compress.kv.codecs.packed import PackedCodes
from compress.numerics import checks

NEEDS = frozenset({"keys_pre", "values", "gradients"})
WORK = 90  # bytes that calibrating takes for each number of its largest sample
MIN_SCALE = 1e-5  # scale of a channel or token that does not vary
K_MEANS_ROUNDS = 100
K_MEANS_PASSES = 2  # each without the outliers of the one before


@dataclass(frozen=True)
class Config:
    bits: int = 3  # [bits] of one code: 1 to 8
    outliers: float = 0.01  # [fraction] of the channels of a token that are stored beside the codes, below 0.5; 0: none
    q_norm: bool = False  # decode with levels that keep mean and variance (Q-Norm); published for 2 bits

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if not 0 <= self.outliers < 0.5:
            raise ValueError(f"outliers {self.outliers} is a share below 0.5")

    def slots(self, channels: int) -> int:
        """Return how many outliers a token of so many channels stores."""
        return max(1, round(self.outliers * channels)) if self.outliers else 0


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """levels and outputs [2^bits] float16: what codes are chosen for, and read as; of keys offsets, scales [h, width].

    samples: keys_pre or values, and their gradients, [tokens, h, width].
    """
    x = samples["keys_pre" if spec.kind == "keys" else "values"]
    rows, slopes = x.flatten(1), samples["gradients"].flatten(1)
    if len(rows) < 2**config.bits:
        raise CalibrationError(f"{spec.where}: {len(rows)} calibration tokens are too few for {2**config.bits} levels")
    if spec.kind == "keys":
        offsets, scales = _affine(rows.amin(0), rows.amax(0))
        ranges = {"offsets": offsets.view(x.shape[1:]), "scales": scales.view(x.shape[1:])}
    else:
        offsets, scales = _affine(*narrowest(rows, config.slots(rows.shape[1])))
        ranges = {}
    normal = (rows - offsets.float()) / scales.float()
    weight = (slopes * scales.float()).square()
    inside, slots = torch.ones_like(rows, dtype=torch.bool), config.slots(rows.shape[1])
    for _ in range(K_MEANS_PASSES):  # the last ones leave out what takes the slots with the levels before
        levels = k_means(normal[inside], weight[inside], 2**config.bits).half()
        missed = (normal - levels.float()[nearest(normal, levels)]) * scales.float()
        inside = torch.ones_like(inside).scatter_(1, missed.abs().topk(slots).indices, False)
    outputs = fit_moments(levels, normal[inside]) if config.q_norm else levels
    return {**ranges, "levels": levels, "outputs": outputs}


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives: levels, and ranges of the channels of keys."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("levels", "outputs"), (2**config.bits,))
    if spec.kind == "keys":
        shapes |= dict.fromkeys(("offsets", "scales"), (spec.heads, spec.width))
    return {name: (shape, torch.float16) for name, shape in shapes.items()}


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that levels can be searched, and channels have a range; ValueError."""
    checks.ascending("levels", static["levels"])
    if "scales" in static:
        checks.positive("scales", static["scales"])


def k_means(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return sorted levels [count] float64 with (locally) least sum weight (x - nearest level)^2; x, weight [n]."""
    x, order = x.double().sort()
    weight = weight.double()[order]
    total = float(weight.sum())
    weight = weight / total if total > 0 else torch.full_like(weight, 1 / len(x))  # e.g. a layer that is not read
    mass, first, second = (
        torch.cat((x.new_zeros(1), (weight * power).cumsum(0))) for power in (torch.ones_like(x), x, x * x)
    )
    at = (torch.arange(count, dtype=x.dtype, device=x.device) + 0.5) / count
    starts = (x[torch.searchsorted(mass[1:], at).clamp(max=len(x) - 1)], x[0] + (x[-1] - x[0]) * at)
    best, least = starts[0], float("inf")
    for levels in starts:
        for _ in range(K_MEANS_ROUNDS):
            cuts = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
            cuts = torch.cat((cuts.new_zeros(1), cuts, cuts.new_full((1,), len(x))))
            masses, sums = mass[cuts].diff(), first[cuts].diff()
            moved = torch.where(masses > 0, sums / masses.clamp(min=1e-300), levels)
            loss = float((second[cuts].diff() - 2 * levels * sums + levels.square() * masses).sum())
            if torch.equal(moved, levels):
                break
            levels = moved.sort().values
        if loss < least:
            best, least = levels, loss
    return best.sort().values


def fit_moments(levels: Tensor, x: Tensor) -> Tensor:
    """Q-Norm: levels [n] for reading, so that mean and variance of coded x are those of x."""
    coded = levels.float()[nearest(x, levels)]
    ratio = x.std() / coded.std().clamp(min=MIN_SCALE)
    return (levels.float() * ratio + x.mean() - coded.mean() * ratio).half()


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Return codes int64 of the nearest of sorted levels."""
    levels = levels.float()
    return torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2)


def narrowest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return least and largest entry [n, 1] of rows [n, C] without the `count` outermost, split for the least range."""
    sides = min(count + 1, rows.shape[-1])
    low = rows.topk(sides, largest=False).values  # rising: after j are cut at the low end
    high = rows.topk(sides).values.flip(-1)  # rising: with count - j cut at the high end
    best = (high - low).argmin(-1, keepdim=True)
    return low.gather(-1, best), high.gather(-1, best)


def _affine(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return offset and scale, float16, that map [-1, 1] to [low, high]."""
    return ((high + low) / 2).half(), ((high - low) / 2).clamp(min=MIN_SCALE).half()


class NonUniform(Codec):
    """Codes of levels, and the largest errors of each token, of keys or values."""

    def __init__(self, config: Config, spec: Spec, static: Mapping[str, Tensor]) -> None:
        super().__init__(spec, static)
        self.codes = PackedCodes(spec.width, config.bits)
        self.slots = config.slots(spec.heads * spec.width)
        self.index = torch.uint8 if spec.heads * spec.width <= 256 else torch.int16
        self.fields = dict(self.codes.fields)
        if self.slots:
            self.fields |= {"outliers": Field("extras"), "places": Field("extras")}
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

    def table(self, name: str, x: Tensor) -> Tensor:
        """Return a static tensor in float32, on the device of x."""
        if x.device not in self._tables:
            self._tables[x.device] = {key: tensor.float().to(x.device) for key, tensor in self.static.items()}
        return self._tables[x.device][name]

    def ranges(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        """offset and scale, float32, for tensors [B, h, n, width]."""
        raise NotImplementedError

    def fit(self, x: Tensor) -> dict[str, Tensor]:
        """Rows of the fields that `ranges` reads."""
        return {}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        rows = self.fit(x)
        offset, scale = self.ranges(rows, x)
        codes = nearest((x - offset) / scale, self.table("levels", x))
        rows |= self.codes.pack(codes)
        if self.slots:
            missed = x - (self.table("outputs", x)[codes] * scale + offset)
            flat = token_rows(missed)
            places = flat.abs().topk(self.slots).indices
            rows["outliers"] = flat.gather(-1, places).half()[:, None]
            rows["places"] = places.to(self.index)[:, None]
        return rows

    def decode(self, block: Block) -> Tensor:
        codes = self.codes.unpack(block)
        offset, scale = self.ranges(block, codes)
        x = self.table("outputs", codes)[codes.int()].mul_(scale).add_(offset)
        if not self.slots:
            return x
        flat = token_rows(x)
        flat.scatter_add_(-1, block["places"][:, 0].long(), block["outliers"][:, 0].float())
        return head_rows(flat, self.spec.heads)


class NonUniformKeys(NonUniform):
    """Before RoPE, ranges of channels from calibration."""

    rope = "pre"

    def ranges(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.table("offsets", x)[:, None], self.table("scales", x)[:, None]


class NonUniformValues(NonUniform):
    """Ranges of tokens, over all heads: offsets and scales [B, 1, n, 1]."""

    def __init__(self, config: Config, spec: Spec, static: Mapping[str, Tensor]) -> None:
        super().__init__(config, spec, static)
        self.fields = {**self.fields, "offsets": Field("scales"), "scales": Field("scales")}

    def fit(self, x: Tensor) -> dict[str, Tensor]:
        low, high = narrowest(token_rows(x).flatten(0, 1), self.slots)
        offsets, scales = _affine(low, high)
        shape = (x.shape[0], 1, x.shape[2], 1)
        return {"offsets": offsets.view(shape), "scales": scales.view(shape)}

    def ranges(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        return block["offsets"].float(), block["scales"].float()


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return (NonUniformKeys if spec.kind == "keys" else NonUniformValues)(config, spec, static)
