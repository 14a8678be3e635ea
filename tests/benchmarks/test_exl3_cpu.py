"""benchmarks/exl3_cpu.py against its definitions in float64 on small weights."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import exl3_cpu  # noqa: E402
from exl3_cpu import TILE  # noqa: E402


def moments(count: int, seed: int) -> Tensor:
    """A correlated second moment, float64."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(count, count, generator=generator, dtype=torch.float64)
    return mixing @ mixing.T / count + 0.1 * torch.eye(count, dtype=torch.float64)


def weight(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def to_integers(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Rounding to integers in the place of the search."""
    values = tiles.round()
    return values, values.long()


def test_the_best_closed_path_of_a_small_trellis_is_found() -> None:
    setting, steps = exl3_cpu.Setting(1), 10
    codes = exl3_cpu.Codes(setting, window=4)
    streams = torch.tensor(list(itertools.product((0, 1), repeat=steps)))
    places = (torch.arange(steps)[:, None] + torch.arange(-3, 1)) % steps
    paths = (streams[:, places] * torch.tensor([8, 4, 2, 1])).sum(-1)  # all closed paths, [1024, steps]
    values = torch.randn(64, steps, generator=torch.Generator().manual_seed(0))
    best = (codes.table[:, 0][paths][None] - values[:, None]).square().sum(-1).amin(1)
    states = codes.search.encode(values)
    reached = (codes.table[:, 0][states] - values).square().sum(-1)
    kept = {tuple(path) for path in paths.tolist()}
    assert all(tuple(path) in kept for path in states.tolist())
    assert (reached >= best - 1e-4).all()
    assert reached.sum() < 1.03 * best.sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_streams_take_the_bits_that_are_counted_and_decode_to_the_same_values(bits: int) -> None:
    setting = exl3_cpu.Setting(bits, hadamard=32)
    codes = exl3_cpu.Codes(setting)
    tiles = torch.randn(6, 256, generator=torch.Generator().manual_seed(bits))
    values, states = codes.encode(tiles)
    words = exl3_cpu.pack_states(states, bits)
    assert words.dtype == torch.int16
    assert words.shape == (6, 16 * bits)
    assert torch.equal(exl3_cpu.unpack_states(words, bits), states)
    assert torch.equal(codes.values(states), values)
    assert (values - tiles).square().mean() < 1.25 * {2: 0.0744, 3: 0.0192, 4: 0.00503}[bits]


def test_a_linear_takes_its_streams_and_two_vectors() -> None:
    setting = exl3_cpu.Setting(2, hadamard=64)
    w = weight(96, 64, 0).float()  # padded to 128 inputs
    packed = exl3_cpu.quantize_readers([w], moments(96, 1).float(), setting)[0]
    assert packed.nbytes == 128 * 64 * 2 // 8 + 2 * (128 + 64) + 4
    assert exl3_cpu.decode(packed, setting, (96, 64)).shape == (96, 64)


def test_the_order_of_a_stream_visits_every_place_once() -> None:
    assert sorted(exl3_cpu.core_order().tolist()) == list(range(256))


def test_transforms_are_orthonormal_and_their_own_inverse() -> None:
    x = weight(64, 96, 0)
    for dim, size in ((0, 64), (0, 16), (1, 32)):
        turned = exl3_cpu.transform(x, dim, size)
        assert torch.allclose(exl3_cpu.transform(turned, dim, size), x)
        assert torch.allclose(turned.square().sum(dim), x.square().sum(dim))


def test_the_block_factor_gives_the_hessian() -> None:
    hessian = moments(5 * TILE, 0)
    lower = exl3_cpu.block_ldl(hessian) + torch.eye(len(hessian), dtype=torch.float64)
    inverse = torch.linalg.inv(lower)
    diagonal = inverse @ hessian @ inverse.T
    blocks = torch.block_diag(*[diagonal[i : i + TILE, i : i + TILE] for i in range(0, len(hessian), TILE)])
    assert torch.allclose(diagonal, blocks, atol=1e-8)
    assert torch.allclose(lower @ blocks @ lower.T, hessian)


def test_feedback_equals_its_definition_and_its_parts_sum_to_the_loss() -> None:
    hessian, w = moments(4 * TILE, 0), 3 * weight(4 * TILE, 2 * TILE, 1)
    factor = exl3_cpu.block_ldl(hessian)
    values, states = exl3_cpu.ldlq(w, factor, to_integers)
    error, lost = w - values, 0.0
    lower = factor + torch.eye(len(factor), dtype=torch.float64)
    inverse = torch.linalg.inv(lower)
    blocks = inverse @ hessian @ inverse.T
    for i in range(4):
        rows = slice(i * TILE, (i + 1) * TILE)
        target = w[rows] + sum(
            factor[j * TILE : (j + 1) * TILE, rows].T @ error[j * TILE : (j + 1) * TILE] for j in range(i + 1, 4)
        )
        assert torch.allclose(values[rows], target.round())
        left = target - values[rows]
        lost += torch.trace(left.T @ blocks[rows, rows] @ left).item()
    assert lost == pytest.approx(torch.trace(error.T @ hessian @ error).item())
    assert torch.equal(states.double(), exl3_cpu.to_tiles(values))


def test_feedback_along_both_axes_equals_its_definition() -> None:
    hessian, outputs, w = moments(3 * TILE, 0), moments(4 * TILE, 2), 3 * weight(3 * TILE, 4 * TILE, 1)
    factor, output_factor = exl3_cpu.block_ldl(hessian), exl3_cpu.block_ldl(outputs)
    values, _ = exl3_cpu.ldlq_two_sided(w, factor, output_factor, to_integers)
    error = w - values
    down, across = (each + torch.eye(len(each), dtype=torch.float64) for each in (factor, output_factor))
    lost, cores = 0.0, []
    for lower, metric in ((down, hessian), (across, outputs)):
        inverse = torch.linalg.inv(lower)
        cores.append(inverse @ metric @ inverse.T)
    for a, c in itertools.product(range(3), range(4)):
        rows, columns = slice(a * TILE, (a + 1) * TILE), slice(c * TILE, (c + 1) * TILE)
        later = error.clone()
        later[: rows.start], later[:, : columns.start] = 0, 0
        later[rows, columns] = 0
        target = w[rows, columns] + (down.T @ later @ across)[rows, columns]
        assert torch.allclose(values[rows, columns], target.round())
        left = target - values[rows, columns]
        lost += torch.trace(left.T @ cores[0][rows, rows] @ left @ cores[1][columns, columns]).item()
    assert lost == pytest.approx(torch.trace(error.T @ hessian @ error @ outputs).item())


def test_without_an_output_hessian_both_kinds_of_feedback_are_one() -> None:
    hessian, w = moments(3 * TILE, 0), 3 * weight(3 * TILE, 2 * TILE, 1)
    factor, nothing = exl3_cpu.block_ldl(hessian), torch.zeros(2 * TILE, 2 * TILE, dtype=torch.float64)
    one, states = exl3_cpu.ldlq(w, factor, to_integers)
    both, same = exl3_cpu.ldlq_two_sided(w, factor, nothing, to_integers)
    assert torch.equal(one, both)
    assert torch.equal(states, same)


def test_scaling_is_undone() -> None:
    setting = exl3_cpu.Setting(2, hadamard=32)
    w, generator = weight(64, 96, 0).float(), torch.Generator().manual_seed(0)
    signs = exl3_cpu.draw_signs(64, generator)
    scaled = exl3_cpu.scale(w, signs, exl3_cpu.Codes(setting), setting, generator)
    assert torch.allclose(exl3_cpu.unscale(scaled, 32), w, atol=1e-5)
    assert 0.85 < scaled.weight.square().mean().sqrt() < 1.15


def test_the_refit_lowers_the_loss_until_it_is_flat_in_the_vector_solved_last() -> None:
    hessian, w = moments(48, 0).float(), weight(48, 32, 1).float()
    values = 1.2 * w + 0.3 * weight(48, 32, 2).float()

    def loss(rows: Tensor, columns: Tensor) -> Tensor:
        error = w - rows[:, None] * values * columns
        return torch.trace(error.T @ hessian @ error)

    rows, columns = exl3_cpu.refit(w, values, hessian)
    assert loss(rows, columns) < 0.95 * loss(torch.ones(48), torch.ones(32))
    free = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(free, columns), free)
    assert slope.abs().max() < 1e-3 * loss(torch.zeros(48), columns)


def test_the_hessian_directs_the_error_and_an_output_hessian_too() -> None:
    setting, w = exl3_cpu.Setting(2, hadamard=32), weight(64, 64, 0).float()
    hessian, outputs = moments(64, 1).float(), moments(64, 2).float()

    def error(moment: Tensor, output: Tensor | None) -> Tensor:
        packed = exl3_cpu.quantize_readers([w], moment, setting, 0, None if output is None else [output])[0]
        return w - exl3_cpu.decode(packed, setting, (64, 64))

    plain, one, both = error(torch.eye(64), None), error(hessian, None), error(hessian, outputs)
    assert torch.trace(one.T @ hessian @ one) < 0.8 * torch.trace(plain.T @ hessian @ plain)
    assert torch.trace(both.T @ hessian @ both @ outputs) < 0.9 * torch.trace(one.T @ hessian @ one @ outputs)
