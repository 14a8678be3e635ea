"""Codes of a table of values are trained through rounding: NVFP4, MXFP4, FP8, NF4 and others (after arXiv 2407.11062).

Behind each code is a real number that counts points of the table by ascending value. Rounded it is the code; its
gradient is that of the value (Bengio et al. 2013, arXiv 1308.3432), and ends where the table does. It starts within the
cell of the stored code, in the middle or as near as MARGIN allows to the weight that was quantized. So points that are
far apart take as many steps of training as those that are close.

Differences from EfficientQAT, which trains integers: scales stay as they are, since few of them could be stored and
linears that engines fuse have to keep equal ones. What transforms and low-rank parts store is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compress.formats import grid
from compress.quant import grid_types
from compress.tune.codes.latent import MARGIN
from compress.tune.trained import Rates, Trained, TrainedWeight, add_surroundings, strip_surroundings
from compress.types import PackedWeight

BYTES = 24 + 3 * 4  # [bytes] for each weight, beside what `fixed` takes: a trained number, its target, a step's own
RATE = 0.2  # [points of the table] that a code travels unless the settings say otherwise


def serves(packed: PackedWeight) -> bool:
    """Return whether a weight can be trained so."""
    return packed.format == "grid"


class _TablePoints(torch.autograd.Function):
    """Give the points [n] of a table at numbers of any shape; the gradient passes as if these were the values."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, points: Tensor) -> Tensor:
        places = latent.round()
        ctx.save_for_backward((places >= 0) & (places < len(points)))
        return points[places.clamp_(0, len(points) - 1).int()]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None


class Codes(TrainedWeight):
    """One packed weight of the format `grid`."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed)
        params, shape = packed.params, packed.shape
        own = grid.specs(params, shape)
        self.beside = {name: each for name, each in self.trained.items() if name not in own}
        self.order, self.points, _ = (part.to(target.device) for part in grid_types.ascending(params.values))
        self.codes = grid.unpack_codes(packed.tensors["codes"], params, shape[1])
        values = grid.value_table(params.values).to(target.device).nan_to_num()
        self.centre = torch.searchsorted(self.points, values)[self.codes.int()].float()  # two zeros are one point
        high, wide = params.block(shape)
        factors = grid_types.factors({name: packed.tensors[name] for name in own}, params)
        self.factors = factors.repeat_interleave(high, 0)[: shape[0]].repeat_interleave(wide, 1)[:, : shape[1]]
        matrix = strip_surroundings(target, packed) if rates.start == "weights" else None
        start = self.centre if matrix is None else self._near(matrix)
        self.trained = {**self.beside, "latent": Trained(start, unit=rates.travel)}

    def _near(self, matrix: Tensor) -> Tensor:
        """Return the numbers in the cells of the codes that are nearest to a matrix [out, in]."""
        steps, places = self.points.diff(), self.centre.long()
        below, above = steps[(places - 1).clamp(min=0)], steps[places.clamp(max=len(steps) - 1)]
        distance = matrix / self.factors - self.points[places]
        inside = distance / torch.where(distance < 0, below, above)
        return self.centre + inside.clamp(MARGIN - 0.5, 0.5 - MARGIN)

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        values: Tensor = _TablePoints.apply(self.trained["latent"].value(), self.points)
        own = {name: each.value() for name, each in self.beside.items()}
        return add_surroundings(values * self.factors, self.packed, {**self.packed.tensors, **own})

    @torch.no_grad()
    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        places, params = self._places(), self.packed.params
        codes = torch.where(places == self.centre, self.codes, self.order[places.int()])
        return self._pack_with({"codes": grid.pack(codes, {}, params)["codes"]})

    def changed_share(self) -> float:
        """Return the share of codes that moved."""
        return float((self._places() != self.centre).float().mean())

    def _places(self) -> Tensor:
        return self.trained["latent"].value().detach().round().clamp(0, len(self.points) - 1)
