"""The lattice format, and the maths that learns a lattice and rounds to it, against slow float64 references."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import problems
from compress.papers.formats import lattice as lattice_format
from compress.papers.quant import lattices
from compress.papers.quant.lattices import Curve, Effort, Lattice

CURVE = Curve(torch.tensor(1.0), torch.tensor(4.0))


def stored(
    params: lattice_format.Params, shape: tuple[int, int], group_bits: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Random codes [rows, padded columns] and side tensors."""
    generator = torch.Generator().manual_seed(1)
    count, d = len(group_bits), params.dim
    codes = [
        torch.randint(2**bits, (shape[0], params.group_size), generator=generator).to(torch.uint8)
        for bits in group_bits
    ]
    side = {
        "group_bits": torch.tensor(group_bits, dtype=torch.uint8),
        "lattices": problems.random(count, d, d, seed=2).half(),
        "scale": torch.tensor([0.02]),
    }
    if params.compand:
        side["curves"] = torch.tensor([[0.5 + g, 3.0 + g] for g in range(count)]).half()
    if params.row_scales:
        side["row_scales"] = problems.random(shape[0], seed=3).abs().half()
    return torch.cat(codes, 1), side


def slow_decode(codes: Tensor, side: dict[str, Tensor], params: lattice_format.Params, columns: int) -> Tensor:
    out = torch.zeros(codes.shape, dtype=torch.float64)
    for i in range(codes.shape[0]):
        for start in range(0, codes.shape[1], params.dim):
            group = start // params.group_size
            z = codes[i, start : start + params.dim].double() - (2 ** int(side["group_bits"][group]) - 1) / 2
            y = side["lattices"][group].double() @ z
            if params.compand:
                mu, limit = side["curves"][group].double()
                y = y.sign() * ((1 + mu) ** y.abs() - 1) / mu * limit
            factor = side["scale"].double()
            if params.row_scales:
                factor = factor * side["row_scales"][i].double()
            out[i, start : start + params.dim] = y * factor
    return out[:, :columns]


# The format.


@pytest.mark.parametrize(
    ("bits", "dim", "size", "shape", "group_bits"),
    [
        (2, 8, 16, (20, 48), [1, 2, 3]),
        (3, 8, 32, (5, 60), [4, 2]),
        (4, 16, 16, (16, 40), [5, 3, 4]),
        (2, 32, 64, (3, 70), [2, 2]),
        (2, 8, 128, (1, 1), [2]),
    ],
)
@pytest.mark.parametrize("options", [(False, False), (True, True)])
def test_stored_bits_decode_exactly(
    bits: int, dim: int, size: int, shape: tuple[int, int], group_bits: list[int], options: tuple[bool, bool]
) -> None:
    params = lattice_format.Params(bits, dim, size, *options)
    codes, side = stored(params, shape, group_bits)
    tensors = lattice_format.pack(codes, side, params, shape)
    assert {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()} == lattice_format.specs(params, shape)
    unpacked = torch.cat(list(lattice_format.unpack(tensors, params, slice(None))), 1)
    assert torch.equal(unpacked[: shape[0]], codes)
    found = lattice_format.decode(tensors, params, shape, torch.float32)
    expected = slow_decode(codes, side, params, shape[1])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6 * expected.abs().amax().item())


def test_decoding_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = lattice_format.Params(3, 8, 32, True, True), (37, 90)
    codes, side = stored(params, shape, [4, 2, 3])
    tensors = lattice_format.pack(codes, side, params, shape)
    whole = lattice_format.decode(tensors, params, shape, torch.float32)
    monkeypatch.setattr(lattice_format, "DECODE_CHUNK", 64)
    torch.testing.assert_close(lattice_format.decode(tensors, params, shape, torch.float32), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((5, 8, 16), "bits 5 is not one of"),
        ((2, 12, 16), "dim 12 is not one of"),
        ((2, 8, 24), "group_size 24 is not a positive multiple of 16"),
        ((2, 32, 48), "group_size 48 is not a positive multiple of 32"),
        ((2, 8, 0), "group_size 0 is not a positive multiple of 16"),
    ],
)
def test_bad_params(values: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lattice_format.Params(*values, compand=False, row_scales=False)


# Curves.


def test_a_curve_and_its_inverse_and_slope() -> None:
    values = torch.linspace(-6, 6, 101, dtype=torch.float64)
    curve = Curve(*(c.double() for c in CURVE))
    y = curve.compress(values)
    torch.testing.assert_close(lattice_format.expand(y, *curve), values)
    assert lattice_format.expand(torch.tensor(1.0), *CURVE).item() == pytest.approx(4.0)
    step = 1e-6
    numeric = (lattice_format.expand(y + step, *curve) - lattice_format.expand(y - step, *curve)) / (2 * step)
    torch.testing.assert_close(curve.slope(y), numeric, rtol=1e-6, atol=1e-6)


# Rounding.


def problem(d: int, rows: int, blocks: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Targets [blocks, d, rows], factors [blocks, d, d], a matrix [d, d]."""
    factor = (torch.eye(d) + 0.3 * problems.random(blocks, d, d, seed=4)).triu()
    matrix = torch.eye(d) + 0.2 * problems.random(d, d, seed=5)
    return problems.random(blocks, d, rows, seed=6), factor, matrix


def slow_nearest_plane(target: Tensor, factor: Tensor, matrix: Tensor, bits: int) -> Tensor:
    """One row [d]: coordinates from the last to the first, the rest of the target solved without a factorization."""
    basis, wanted = (factor.T @ matrix).double(), (factor.T @ target).double()
    top, d = (2**bits - 1) / 2, len(target)
    z = torch.zeros(d, dtype=torch.float64)
    for k in range(d - 1, -1, -1):
        left = wanted - basis[:, k + 1 :] @ z[k + 1 :]
        best = torch.linalg.lstsq(basis[:, : k + 1], left[:, None]).solution[k, 0]
        z[k] = ((best - 0.5).round() + 0.5).clamp(-top, top)
    return z


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_nearest_plane(bits: int) -> None:
    target, factor, matrix = problem(8, 40, 2)
    z = lattices.nearest(target, factor, Lattice(matrix, None), bits, beam=1)
    expected = torch.stack(
        [
            torch.stack([slow_nearest_plane(target[b, :, r], factor[b], matrix, bits) for r in range(40)], 1)
            for b in range(2)
        ]
    )
    assert torch.equal(z.double(), expected)


def test_a_wide_beam_is_exhaustive() -> None:
    target, factor, matrix = problem(4, 60)
    lattice = Lattice(matrix, None)
    every = torch.tensor(list(product((-0.5, 0.5), repeat=4)))  # all points of 1 bit
    errors = ((target[0].T[:, None] - every @ matrix.T) @ factor[0]).square().sum(-1)  # row, point
    z = lattices.nearest(target, factor, lattice, 1, beam=16)[0].T
    found = ((target[0].T - z @ matrix.T) @ factor[0]).square().sum(-1)
    torch.testing.assert_close(found, errors.amin(1))
    narrow = lattices.nearest(target, factor, lattice, 1, beam=1)[0].T
    assert ((target[0].T - narrow @ matrix.T) @ factor[0]).square().sum() > found.sum()


def test_a_nearly_straight_curve_changes_nothing() -> None:
    """mu -> 0 with matching limit is the identity: the row by row search must then agree with the shared one."""
    target, factor, matrix = problem(8, 30, 2)
    straight = Lattice(matrix / 8, Curve(torch.tensor(1e-4), torch.tensor(8.0)))
    z = lattices.nearest(target, factor, straight, 3, beam=2)
    assert torch.equal(z, lattices.nearest(target, factor, Lattice(matrix, None), 3, beam=2))
    torch.testing.assert_close(straight.values(z), Lattice(matrix, None).values(z), rtol=1e-3, atol=1e-3)


# Learning.


@pytest.mark.parametrize("curve", [None, CURVE])
def test_refitting_is_least_squares(curve: Curve | None) -> None:
    """Against the normal equations by automatic differentiation of the (linearized) loss in float64."""
    target, factor, matrix = problem(4, 25, 3)
    lattice = Lattice((matrix / (1 if curve is None else 8)).half().float(), curve)
    z = lattices.nearest(target, factor, lattice, 2, beam=1)
    weight = problems.random(25, seed=7).abs() + 0.1
    mixing = problems.random(12, 12, seed=8)
    hessian = mixing @ mixing.T / 12
    error = target - lattice.values(z)
    pull = (hessian @ error.flatten(0, 1)).view(error.shape)
    found = lattices.refitted(lattice, z, weight, hessian, pull)
    slope = torch.ones_like(z) if (known := lattice.slope(z)) is None else known

    def loss(flat: Tensor) -> Tensor:
        left = error.double() - slope.double() * (flat.view(4, 4) @ z.double())
        left = (left * weight.double()).flatten(0, 1)
        return (left * (hessian.double() @ left)).sum()

    start = torch.zeros(16, dtype=torch.float64)
    second = torch.autograd.functional.hessian(loss, start)
    first = torch.autograd.functional.jacobian(loss, start)
    expected = lattice.matrix.double() - torch.linalg.solve(second, first).view(4, 4)
    torch.testing.assert_close(found.matrix.double(), expected, rtol=2e-3, atol=2e-3)


def test_equal_steps() -> None:
    matrix = problems.random(8, 8, seed=9).double() * torch.logspace(0, 3, 8, dtype=torch.float64)
    basis = lattices.equal_steps(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64))
    steps = torch.linalg.qr(matrix @ basis).R.diagonal().abs()
    torch.testing.assert_close(steps, steps.log().mean().exp().expand(8), rtol=1e-8, atol=0)


def test_learning_lowers_the_loss_and_keeps_the_best() -> None:
    target, factor, _ = problem(8, 200, 4)
    target = problems.random(8, 8, seed=11) @ target  # correlated
    weight = torch.ones(200)

    def loss(lattice: Lattice) -> float:
        error = target - lattice.values(lattices.nearest(target, factor, lattice, 2, 1))
        return (factor.mT @ error).square().sum().item()

    losses = [loss(lattices.learn(target, weight, factor, 2, Effort(count, 1, False))) for count in (0, 1, 4, 8)]
    assert all(after <= before for before, after in zip(losses, losses[1:], strict=False))
    assert losses[-1] < 0.95 * losses[0]


def test_a_learned_lattice_is_never_near_singular() -> None:
    target, factor, _ = problem(8, 100)
    target[:, 3:] = 0  # targets of three dimensions
    lattice = lattices.learn(target, torch.ones(100), factor, 2, Effort(4, 2, False))
    assert torch.linalg.cond(lattice.matrix).item() < 1.1 * lattices.CONDITION
    assert torch.isfinite(lattice.values(lattices.nearest(target, factor, lattice, 2, 2))).all()
