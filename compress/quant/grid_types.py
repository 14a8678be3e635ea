"""Name the data types of the grid format, round to their points, and fit the scales of their blocks.

A scale is searched among those that can be stored near the one by which the largest weight of its block meets the
largest point: that with the least squared error, each column weighed if its importance is known. What is tried:
- e4m3 (NVFP4): the numbers of the type from 2 steps below to 6 above. That includes "four over six" (arXiv 2512.02010),
  by which the largest weight of a block is at 6 or at 4, whichever errs less;
- e8m0 (MX): the power of two by which nothing is clipped, half and twice of it;
- others: shares of the range, above 1, too, where points are floating-point numbers; of both signs where the points
  on either side of 0 differ (iq4_nl).

A tensor scale is a power of two. Products with it are exact, and so is its inverse, which some engines store. It comes
from the largest weight, or from the largest of all weights that read one input, so that linears which engines fuse have
the same. It leaves room for blocks whose largest weight is at 4, and so for targets that are 1.5 times as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from compress.formats import grid

TYPES = {  # data type -> how the format stores it
    "nvfp4": grid.Params(grid.E2M1, 16, grid.E4M3, tensor_scale=True),
    "mxfp4": grid.Params(grid.E2M1, 32, grid.E8M0),
    "mxfp8": grid.Params(grid.E4M3, 32, grid.E8M0),
    "fp8": grid.Params(grid.E4M3, -1, "float32", block_rows=-1),
    "fp8-channel": grid.Params(grid.E4M3, -1, "float32"),
    "fp8-block": grid.Params(grid.E4M3, 128, "float32", block_rows=128),
    "nf4": grid.Params(grid.NF4, 64, grid.NESTED),
    "fp4": grid.Params(grid.FP4, 64, grid.NESTED),
    "dynamic8": grid.Params(grid.DYNAMIC8, 256, "float32"),
    "iq4_nl": grid.Params(grid.IQ4_NL, 32, "float16"),
}
# The scale of the block of the largest weight, at 6; at 4 it is 448, the largest number of e4m3.
LARGEST_SCALE = 448.0 / 1.5
LEAST_HALF, MOST_HALF = 2.0**-24, 65504.0  # positive numbers of float16
LARGEST_CODE, ONE_IN_E4M3 = 0x7E, 0x38  # codes in e4m3 of the largest number, and of 1
STEPS = range(-2, 7)  # numbers of e4m3 from the nearest scale that are tried
EXPONENTS = (0, -1, 1)  # powers of two, from the scale that clips nothing
SHARES = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.87, 0.84)  # shares of the range that are tried, for tables
FLOATING_SHARES = (1.0, 0.95, 1.06, 1.12, 1.19, 1.26, 1.34, 1.42, 1.5, 1.59, 1.68, 1.78, 1.89)  # the same for e4m3
SIGNED_SHARES = tuple(sign * (1.14 - 0.04 * i) for i in range(10) for sign in (1, -1))  # the same for iq4_nl
FITTED_WEIGHTS = 1 << 20  # weights whose scales are fitted at a time: bounds the temporaries to some MB


@dataclass(frozen=True)
class TypeConfig:
    """Settings of every method that writes the grid format."""

    type: str = "nvfp4"  # data type: nvfp4, mxfp4, mxfp8, fp8, fp8-channel, fp8-block, nf4, fp4, dynamic8 or iq4_nl
    scale_search: bool = True  # search the scales with the least errors; false: take the range of the weights

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"type {self.type!r} is not one of {', '.join(TYPES)}")


def params(config: TypeConfig, shape: tuple[int, int]) -> grid.Params:
    """Return the format's parameters for a weight [out, in]."""
    return TYPES[config.type]


@cache
def ascending(values: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of a table by ascending value, uint8, these values, and the last number that is nearer to each.

    Halfway between two points it is the one whose code is even that is taken: of floating-point numbers that with the
    even mantissa, as hardware rounds.
    """
    table = grid.value_table(values)
    order = torch.arange(len(table))[table.isfinite()]
    order = order[table[order].sort(stable=True).indices]
    points = table[order]
    keep = torch.cat((torch.ones(1, dtype=torch.bool), points.diff() > 0))  # of two zeros the first
    order, points = order[keep], points[keep]
    middle = (points[1:] + points[:-1]) / 2
    below = torch.nextafter(middle, torch.tensor(-torch.inf))
    return order.to(torch.uint8), points, torch.where(order[1:] % 2 == 0, below, middle)


def nearest(units: Tensor, values: str) -> Tensor:
    """Return the codes uint8 of the points nearest to `units` of any shape, float32; beyond the largest that one."""
    if values == grid.E4M3:
        top = grid.LARGEST[values]
        return units.clamp(-top, top).to(torch.float8_e4m3fn).view(torch.uint8)
    order, _, bounds = (tensor.to(units.device) for tensor in ascending(values))
    return order[torch.bucketize(units.contiguous(), bounds, out_int32=True)]


def points(units: Tensor, values: str) -> Tensor:
    """Return the values of the codes that `nearest` gives, float32."""
    if values in (grid.E2M1, grid.E4M3):
        return grid.nearest_floats(units, values)
    _, known, bounds = (tensor.to(units.device) for tensor in ascending(values))
    return known[torch.bucketize(units.contiguous(), bounds, out_int32=True)]


class BlockScales:
    """The scales of the blocks of a weight; `stored` has them as the format does.

    target [out, in] float32. largest: float32 [], of all weights that have the same tensor scale; None: the target's.
    Scales of blocks whose weights are larger are the largest that can be stored. importance [in] float32 or None: what
    squared errors of a column count.
    """

    def __init__(
        self,
        target: Tensor,
        params: grid.Params,
        is_searched: bool,
        largest: Tensor | None = None,
        importance: Tensor | None = None,
    ) -> None:
        self.params = params
        shape = target.shape[0], target.shape[1]
        self.size, self.count = params.block(shape), params.blocks(shape)
        self.stored: dict[str, Tensor] = {}
        tops = torch.cat([blocks.abs().amax((1, 3)) for blocks in self._parts(target)])
        whole = tops.amax() if largest is None else largest.to(tops.device)
        if params.tensor_scale:
            self.stored[grid.TENSOR_SCALE] = tensor_scale(whole, params.values).reshape(1)
        if params.is_whole:
            tops, is_searched = whole.reshape(1, 1), False  # it is shared, too
        wanted = tops / grid.LARGEST[params.values] / self.stored.get(grid.TENSOR_SCALE, 1.0)
        if params.scale_type == grid.NESTED:
            self._describe(wanted)
        if is_searched:
            wanted = self._best(target, wanted, importance)
            if params.scale_type == grid.NESTED:
                self._describe(wanted)
        self.stored["scales"] = self._store(wanted, slice(None))

    def factors(self) -> Tensor:
        """Return what points are multiplied with, of each block, float32 [R, C]; 1 where that is 0."""
        return factors(self.stored, self.params)

    def _parts(self, target: Tensor) -> Iterator[Tensor]:
        """Yield the rows of a target as blocks [R, rows, C, columns], filled up with zeros, some at a time."""
        (high, wide), (_, across) = self.size, self.count
        step = max(1, FITTED_WEIGHTS // max(1, target.shape[1] * high)) * high
        for rows in target.split(step):
            filled = torch.nn.functional.pad(rows, (0, across * wide - rows.shape[1], 0, -len(rows) % high))
            yield filled.view(-1, high, across, wide)

    def _best(self, target: Tensor, wanted: Tensor, importance: Tensor | None) -> Tensor:
        """Return the scales [R, C] with the least errors among those near `wanted`."""
        weights = next(self._parts(importance[None])) if importance is not None else None
        best, start = list[Tensor](), 0
        for blocks in self._parts(target):
            rows = slice(start, start + len(blocks))
            kept, least = wanted[rows], torch.full_like(wanted[rows], torch.inf)
            for candidate in _candidates(kept, self.params):
                factor = _nonzero(self._decode(self._store(candidate, rows), rows))
                units = blocks / factor[:, None, :, None]
                errors = points(units, self.params.values).sub_(units).square_()
                loss = (errors if weights is None else errors.mul_(weights)).sum((1, 3)) * factor.square()
                kept, least = torch.where(loss < least, candidate, kept), torch.minimum(loss, least)
            best.append(kept)
            start = rows.stop
        return torch.cat(best)

    def _describe(self, wanted: Tensor) -> None:
        """Take the sizes and the mean of nested scales from these scales [R, C]."""
        flat, mean = wanted.flatten(), wanted.mean()
        deviations = torch.nn.functional.pad(flat - mean, (0, -len(flat) % grid.SCALES_PER_SIZE))
        self.stored["scale_sizes"] = deviations.view(-1, grid.SCALES_PER_SIZE).abs().amax(1)
        self.stored["scale_mean"] = mean[None]

    def _nested_sizes(self, rows: slice) -> Tensor:
        sizes = self.stored["scale_sizes"].repeat_interleave(grid.SCALES_PER_SIZE)
        return sizes[: self.count[0] * self.count[1]].view(self.count)[rows]

    def _store(self, wanted: Tensor, rows: slice) -> Tensor:
        """Return the nearest scales that can be stored for some rows of blocks, as stored."""
        if self.params.scale_type == grid.NESTED:
            units = (wanted - self.stored["scale_mean"]) / _nonzero(self._nested_sizes(rows))
            return nearest(units, grid.DYNAMIC8)
        return storable(wanted, self.params.scale_type)

    def _decode(self, scales: Tensor, rows: slice) -> Tensor:
        """Return the factors [R, C] of some rows of blocks."""
        if self.params.scale_type == grid.NESTED:
            table = grid.value_table(grid.DYNAMIC8).to(scales.device)
            return table[scales.int()] * self._nested_sizes(rows) + self.stored["scale_mean"]
        return grid.factors({**self.stored, "scales": scales}, self.params)


def factors(stored: Mapping[str, Tensor], params: grid.Params) -> Tensor:
    """Return what points are multiplied with, of each block, float32 [R, C]; where that is 0, 1 or nearly 0."""
    return _nonzero(grid.factors(stored, params), LEAST_HALF if params.scale_type == "float16" else 1.0)


def tensor_scale(largest: Tensor, values: str) -> Tensor:
    """Return the tensor scale, float32 [], of weights whose largest magnitude is this: a power of two, 1 for zeros."""
    mantissa, exponent = torch.frexp(largest.float() / (grid.LARGEST[values] * LARGEST_SCALE))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-120, 120)
    return torch.where(largest == 0, 1.0, torch.ldexp(torch.ones_like(mantissa), exponent))


def storable(wanted: Tensor, scale_type: str) -> Tensor:
    """Return what is stored for scales of any shape, float32, at least 0: the nearest ones; of e8m0 none is smaller.

    0, of a block of zeros, becomes 1. It stays 0 in float16, whose scales may be negative: iq4_nl has no other 0.
    """
    if scale_type == grid.E8M0:
        mantissa, exponent = torch.frexp(wanted)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        stored = (exponent + grid.E8M0_BIAS).clamp(0, grid.E8M0_LARGEST)
        return torch.where(wanted == 0, grid.E8M0_BIAS, stored).to(torch.uint8)
    if scale_type == grid.E4M3:
        codes = nearest(wanted, grid.E4M3).clamp_(1)  # the least number, of blocks that are tiny beside others
        return torch.where(wanted == 0, ONE_IN_E4M3, codes).view(torch.float8_e4m3fn)
    if scale_type == "float16":
        halves = wanted.clamp(-MOST_HALF, MOST_HALF).half()
        return torch.where(halves.abs() <= LEAST_HALF, 0.0, halves)
    return _nonzero(wanted.to(grid.SCALE_DTYPES[scale_type]))


def near(wanted: Tensor, scale_type: str) -> Tensor:
    """Return the nearest scales that can be stored, as `storable`: of powers of two on both sides."""
    return storable(wanted * 0.75 if scale_type == grid.E8M0 else wanted, scale_type)


def _candidates(wanted: Tensor, params: grid.Params) -> Iterator[Tensor]:
    """Yield scales [R, C] that are tried in place of `wanted`, its own first."""
    if params.scale_type == grid.E4M3:
        codes = storable(wanted, params.scale_type).view(torch.uint8).int()
        for step in sorted(STEPS, key=abs):
            moved = (codes + step).clamp_(1, LARGEST_CODE).to(torch.uint8).view(torch.float8_e4m3fn).float()
            yield torch.where(wanted == 0, wanted, moved)
        return
    shares = tuple(2.0**x for x in EXPONENTS) if params.scale_type == grid.E8M0 else SHARES
    if params.values == grid.IQ4_NL:
        shares = (1.0, *SIGNED_SHARES)
    for share in FLOATING_SHARES if params.values == grid.E4M3 and params.scale_type != grid.E8M0 else shares:
        yield wanted * share


def _nonzero(scales: Tensor, other: float = 1.0) -> Tensor:
    return torch.where(scales.float() == 0, other, scales.float()).to(scales.dtype)
