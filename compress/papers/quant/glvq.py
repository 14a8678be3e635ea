"""GLVQ: learn for each group of columns the lattice that its weights are rounded to (the code is not published).

A group of 128 columns has a generation matrix G; 8 columns of a row become G z, z small integers, here odd multiples of
1/2, so that one and two bits are symmetric (compress/papers/formats/lattice.py). The column loop of
compress/quant/feedback.py learns G when it reaches the group, on targets that carry the errors so far. It rounds each
block by nearest plane in the block's metric C_BB: with C_BB^T G = Q R, coordinates follow from the last to the first,
clamped to the group's bits; the BEAM best beginnings are kept. Bits move from unimportant to important groups. After
the loop, lattices are refitted to the codes on the layer's whole Hessian and codes revisited, in turn.

Not in the core: at 2.076 bits a weight it has KL 0.0447, where `gptvq` has 0.0320 at 2.183 and `e8p` 0.0333 at 2.006
(docs/low_bit.md). On N(0, 1) a learned lattice with clamped integers has distortion .1181 at 2 bits, where uniform
levels have .1189 and E8P .0914. The published perplexities (4 bits better than the unquantized model) are not
reproduced.

Differences from the paper, and why (relative layer loss over four layers of a trained 8M model, 2 bits):
- Rounding is nearest plane with error feedback; the paper rounds off and leaves the rest to gradient steps. A beam of 2
  is -2.4 %, of 4 another -0.4 %.
- G is found in closed form (least squares with codes fixed), not by gradient steps. It starts turned so that nearest
  plane takes equal steps in all coordinates: -4 % against a plain Cholesky factor. Learning beyond this start brings 1
  %.
- There is no companding: docs/results/low_bit.md has its figures.
- A float16 scale for each row, 16 more bits, is -7 %: lattices know columns, not rows.
- Which groups get more and fewer bits follows from their share of the loss, all at once, not from a search with the
  layer's outputs. Inputs of equal size, the rule after a rotation, leave nothing to move.
- No rotation by default: rotated +1.3 %.

With an output metric lattices are learned as without it. Groups of rows are then rounded again behind each other
(compress/quant/two_sided.py), with sweeps of their own.

Not done: lattices that are refitted in the two-sided metric; training on layer outputs beyond the Hessian; fractional
mean bits.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.papers.formats import lattice as lattice_format
from compress.quant import descent, feedback
from compress.quant.feedback import Layer
from compress.quant.refit import round_two_sided
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "lattice"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
TWO_SIDED = True

DIM = 8  # columns of a lattice vector
BEAM = 2  # vectors partly rounded that the nearest-plane search keeps at each step
# Mean squared error of N(0, 1) with uniform levels, by bits: what a group gains and loses with a bit.
DISTORTION = {1: 0.3634, 2: 0.1188, 3: 0.0374, 4: 0.01154, 5: 0.00349}
# The step of uniform levels at odd multiples of 1/2 that suits N(0, 1) best, by bits.
GAUSSIAN_STEP = {1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.3352, 5: 0.1881}
MAX_CONDITION = 1e3  # ratio of the singular values of a lattice
RIDGE = 1e-6  # pull towards the former matrix, relative to the mean diagonal of the normal equations
MIN_SCALE = 1e-30  # instead of a scale of zero in divisions
MAX_TARGET = 1e3  # targets in units of the scale are cut here


@dataclass(frozen=True)
class Config:
    """Settings of GLVQ."""

    bits: int = 2  # [bits] of a lattice coordinate, that is of a weight, on average: 2, 3 or 4
    group_size: int = 128  # [columns] that share a lattice; fewer where the layer has fewer
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    iterations: int = 6  # [iterations] of learning a lattice, before its group is rounded
    sweeps: int = 2  # [sweeps] of coordinate descent and refitting after the column loop; 0: none

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {
        **{"dim": DIM, "mixed_bits": True, "compand": False, "row_scales": True, "beam": BEAM},
    }

    def __post_init__(self) -> None:
        lattice_format.Params(self.bits, DIM, self.group_size, compand=False, row_scales=True)
        check(self, "iterations", "sweeps")
        check_damp(self.damp)


def plan_params(config: Config, shape: tuple[int, int]) -> lattice_format.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    multiple = lattice_format.COLUMN_MULTIPLE
    size = min(config.group_size, -(-shape[1] // multiple) * multiple)
    return lattice_format.Params(config.bits, DIM, size, compand=False, row_scales=True)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound of the bytes needed beside the stored weight and the Hessian: thirty copies of the weight."""
    size = plan_params(config, shape).group_size
    n = -(-shape[1] // size) * size
    return feedback.workspace((shape[0], n), 30 * 4 * shape[0] * n + 8 * 4 * DIM**4)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]. `seed` is unused."""
    assert stats is not None
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    layer = feedback.prepare(weight, stats, config.damp, params.dim, params.group_size)
    rounder = LatticeRounder(layer, config, params)
    values = layer.weight - feedback.run(layer.weight, layer.factor, rounder).residual
    for sweep in range(config.sweeps + 1):
        values = rounder.refit(layer, values)
        if sweep < config.sweeps:
            values = descent.improve_blocks(layer, values, rounder, 1)
    if stats.output is not None:
        rounder.codes = round_two_sided(layer, rounder, config.sweeps, stats.output)
    codes = layer.natural(rounder.codes).permute(1, 0, 2).flatten(1)  # row, column
    tensors = lattice_format.pack(codes, rounder.side(layer), params, shape)
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, shape), tuple(layer.notes))


def group_bits(layer: Layer, config: Config, size: int) -> Tensor:
    """Return the bits of each group, [groups] uint8 in the loop's order; their mean is config.bits.

    Bits move from the least important group to the most important one, and so on, while the sum of losses falls. A
    group's loss is proportional to its variance in the metric of the loop.
    """
    importance = layer.weight.square().mean(1) * layer.factor.diagonal().square()
    groups = importance.view(-1, size).sum(1).tolist()
    bits = [config.bits] * len(groups)
    order = sorted(range(len(groups)), key=groups.__getitem__)
    gain = DISTORTION[config.bits] - DISTORTION[config.bits + 1]
    cost = DISTORTION[config.bits - 1] - DISTORTION[config.bits]
    for low, high in zip(order, order[::-1], strict=True):
        if gain * groups[high] <= cost * groups[low]:
            break
        bits[low] -= 1
        bits[high] += 1
    return torch.tensor(bits, dtype=torch.uint8, device=layer.weight.device)


class LatticeRounder(feedback.Rounder):
    """The lattices of all groups as a Rounder: learned when the loop reaches their columns."""

    width, unit_rows = DIM, 1

    def __init__(self, layer: Layer, config: Config, params: lattice_format.Params) -> None:
        columns, rows = layer.weight.shape
        self.config, self.group = config, params.group_size
        rms = layer.weight.square().mean().sqrt()
        self.scale = rms.view(1)
        self.row_scales = (layer.weight.square().mean(0).sqrt() / rms.clamp(min=MIN_SCALE)).half()  # [rows]
        self.factors = lattice_format.row_factors(self.scale, self.row_scales).flatten()  # [rows]
        self.bits = group_bits(layer, config, self.group)
        self.widths: list[int] = self.bits.tolist()
        self.codes = torch.zeros(columns // DIM, rows, DIM, dtype=torch.uint8, device=layer.weight.device)
        self.lattices: list[Tensor] = []  # [8, 8] float32, rounded to float16

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        if len(self.lattices) > start // self.group:  # the lattices of all rows serve some of them
            return
        assert len(self.lattices) == start // self.group, "the loop skipped a group"
        blocks = [slice(i, i + DIM) for i in range(0, self.group, DIM)]
        factor = torch.stack([metric[block, block] for block in blocks])
        scaled = self._to_units(targets).view(len(blocks), DIM, -1)
        weight = (self.factors / self.scale.clamp(min=MIN_SCALE)).expand(scaled.shape[2])
        self.lattices.append(learn(scaled, weight, factor, self.widths[start // self.group], self.config.iterations))

    def part(self, rows: slice) -> LatticeRounder:
        """Return a rounder of some rows in these lattices, with codes of its own."""
        part = copy(self)
        part.factors, part.codes = self.factors[rows], torch.zeros_like(self.codes[:, rows])
        return part

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        matrix, bits = self.lattices[start // self.group], self.widths[start // self.group]
        z = nearest(self._to_units(target)[None], metric[None], matrix, bits)[0]
        self.codes[start // DIM] = (z + (2**bits - 1) / 2).round_().T.to(torch.uint8)
        return matrix @ z * self.factors

    def refit(self, layer: Layer, values: Tensor) -> Tensor:
        """Refit the lattices to the codes, one group after the other; return the values [in, out] that result."""
        values = values.clone()
        pull = layer.times_hessian(layer.weight - values)
        weight = self.factors.expand(values.shape[1])
        for index, matrix in enumerate(self.lattices):
            columns = slice(index * self.group, (index + 1) * self.group)
            inside = layer.hessian[columns, columns].clone()
            inside.diagonal().add_(layer.damping)
            blocks = slice(index * self.group // DIM, (index + 1) * self.group // DIM)
            z = lattice_format.centre(self.codes[blocks], self.widths[index]).mT  # block, d, row
            scaled = (pull[columns] / weight.clamp(min=MIN_SCALE)).view(z.shape)
            better = refit_lattice(matrix, z, weight, inside, scaled)
            step = (better @ z).flatten(0, 1) * weight - values[columns]
            if ((2 * pull[columns] - inside @ step) * step).sum() <= 0:  # by rounding
                continue
            self.lattices[index] = better
            values[columns] += step
            pull.addmm_(layer.hessian[:, columns], step, alpha=-1)
            pull[columns].add_(step, alpha=-layer.damping)
        return values

    def side(self, layer: Layer) -> dict[str, Tensor]:
        """Return the tensors that are stored beside the codes, groups in the order of the layer."""
        order = torch.argsort(layer.order[:: self.group])
        matrices = torch.stack(self.lattices)[order].half()
        scales = {"scale": self.scale, "row_scales": self.row_scales}
        return {"group_bits": self.bits[order], "lattices": matrices, **scales}

    def _to_units(self, target: Tensor) -> Tensor:
        return (target / self.factors.clamp(min=MIN_SCALE)).clamp_(-MAX_TARGET, MAX_TARGET)


def nearest(target: Tensor, factor: Tensor, matrix: Tensor, bits: int, beam: int = BEAM) -> Tensor:
    """Return coordinates z [blocks, d, rows] near the targets [blocks, d, rows] in the metric of factor [blocks, d, d].

    Nearest plane: with C^T G = Q R, coordinates are decided from the last to the first, each clamped to the levels of
    `bits`; the `beam` best beginnings are kept.
    """
    top = (2**bits - 1) / 2
    q, r = torch.linalg.qr(factor.mT @ matrix)
    y = q.mT @ (factor.mT @ target)
    r = r[..., None]  # block, d, d, one for all rows
    blocks, d, rows = target.shape
    z = torch.zeros(blocks, 1, d, rows, device=target.device)
    cost = torch.zeros(blocks, 1, rows, device=target.device)
    for k in range(d - 1, -1, -1):
        exact = y[:, None, k] - (r[:, None, k, k + 1 :] * z[:, :, k + 1 :]).sum(2)  # block, beam, row
        pivot = r[:, None, k, k]
        exact = exact / pivot
        first = (exact - 0.5).round_().add_(0.5).clamp_(-top, top)
        if beam > 1:
            z, cost, first = _extend_beam(z, cost, exact, first, pivot, top, beam)
        z[:, :, k] = first
    best = cost.argmin(1)[:, None, None].expand(blocks, 1, d, rows)
    return z.gather(1, best)[:, 0]


def _extend_beam(
    z: Tensor, cost: Tensor, exact: Tensor, first: Tensor, pivot: Tensor, top: float, beam: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best beginnings when each goes on with its nearest or second level: z, costs, the level chosen."""
    side = torch.where(exact > first, 1.0, -1.0)
    second = first + torch.where((first + side).abs() > top, -side, side)
    costs = [cost + ((exact - level) * pivot).square() for level in (first, second)]
    cost, at = torch.cat(costs, 1).topk(min(beam, 2 * z.shape[1]), 1, largest=False)
    level = torch.cat([first, second], 1).gather(1, at)
    source = (at % z.shape[1])[:, :, None].expand(-1, -1, z.shape[2], -1)
    return z.gather(1, source), cost, level


def learn(target: Tensor, weight: Tensor, factor: Tensor, bits: int, iterations: int) -> Tensor:
    """Learn the best matrix [d, d] for targets [blocks, d, rows], rows weighted by `weight` [rows].

    Alternates coordinates and the matrix that is best for them, and keeps the best pair seen.
    """
    factor = factor / factor.square().mean().sqrt()
    hessian = torch.block_diag(*(factor @ factor.mT))
    tried: list[tuple[float, Tensor]] = []
    matrix = initial_lattice(target, factor, GAUSSIAN_STEP[bits])
    for step in range(iterations + 1):
        z = nearest(target, factor, matrix, bits)
        error = target - matrix @ z
        loss = (factor.mT @ error).mul_(weight).square_().sum().item()
        tried.append((loss, matrix))
        if step < iterations:
            pull = (hessian @ error.flatten(0, 1)).view(error.shape)
            matrix = refit_lattice(matrix, z, weight, hessian, pull)
    return min(tried, key=lambda pair: pair[0])[1]


def initial_lattice(target: Tensor, factor: Tensor, step: float) -> Tensor:
    """Return a matrix that whitens the targets, turned so that nearest plane takes equal steps everywhere."""
    metric = (factor @ factor.mT).mean(0).double()
    cov = torch.einsum("bir,bjr->ij", target.double(), target.double()) / (target.shape[0] * target.shape[2])
    eye = torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
    lower = torch.linalg.cholesky(cov + eye * (1e-4 * cov.diagonal().mean()).clamp(min=1e-6))
    inner = torch.linalg.cholesky(metric + eye * 1e-6 * metric.diagonal().mean())
    return round_lattice(lower @ equal_steps(inner.mT @ lower) * step)


def equal_steps(matrix: Tensor) -> Tensor:
    """Return the orthogonal V for which the triangular factor of matrix @ V, [d, d], has an equal diagonal.

    The geometric mean decomposition: starting from the singular values, rotations in a plane set one diagonal entry
    after the other to the geometric mean of all.
    """
    d = len(matrix)
    _, sizes, vt = torch.linalg.svd(matrix)
    basis, sizes = vt.mT.clone(), sizes.tolist()
    mean = torch.tensor(sizes, dtype=torch.float64).log().mean().exp().item()
    for k in range(d - 1):
        order = sorted(range(k, d), key=lambda i: sizes[i])
        high, low = order[-1], order[0]
        if not sizes[low] < mean < sizes[high]:
            continue
        rest = [i for i in range(k, d) if i not in (high, low)]
        places = [*range(k), high, low, *rest]
        basis, sizes = basis[:, places], [sizes[i] for i in places]
        a, b = sizes[k], sizes[k + 1]
        cos = min(max((mean**2 - b**2) / (a**2 - b**2), 0.0), 1.0) ** 0.5
        sin = (1 - cos**2) ** 0.5
        turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=basis.dtype, device=basis.device)
        basis[:, k : k + 2] = basis[:, k : k + 2] @ turn
        sizes[k], sizes[k + 1] = mean, a * b / mean
    return basis


def refit_lattice(matrix: Tensor, z: Tensor, weight: Tensor, hessian: Tensor, pull: Tensor) -> Tensor:
    """Return the matrix that is best for coordinates z [blocks, d, rows], in closed form.

    The loss is tr(E^T hessian E), E [blocks * d, rows] the errors of the group times `weight` [rows];
    pull = hessian @ E, without the weights, [blocks, d, rows].
    """
    blocks, d, _ = z.shape
    weighted = z * weight
    gram = (weighted.flatten(0, 1) @ weighted.flatten(0, 1).T).view(blocks, d, blocks, d)
    normal = torch.einsum("iajb,icjd->acbd", hessian.view(blocks, d, blocks, d).double(), gram.double())
    right = (pull * weight).double() @ weighted.double().mT  # block, d, d
    normal = normal.reshape(d * d, d * d)
    normal.diagonal().add_(RIDGE * normal.diagonal().mean().clamp(min=MIN_SCALE))
    step = torch.linalg.solve(normal, right.sum(0).flatten()).view(d, d)
    return round_lattice(matrix.double() + step)


def round_lattice(matrix: Tensor) -> Tensor:
    """Clip the singular values to a range of MAX_CONDITION and round to float16 precision."""
    left, sizes, right = torch.linalg.svd(matrix)
    matrix = left @ (sizes.clamp(min=sizes.amax().item() / MAX_CONDITION)[:, None] * right)
    return matrix.clamp(-6e4, 6e4).half().float()
