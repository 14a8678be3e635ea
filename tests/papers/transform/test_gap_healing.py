"""The refit of a projection before a gap is least squares."""

from __future__ import annotations

import pytest
import torch

from compress.papers.transform import gap_healing
from compress.papers.transform.gap_healing import Moments


@pytest.mark.parametrize("rank", [0, 2])
def test_the_refit_is_least_squares(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, x, z = (torch.randn(200, n, generator=generator, dtype=torch.float64) for n in (7, 5, 5))
    z = z + a @ torch.randn(7, 5, generator=generator, dtype=torch.float64)
    moments = Moments.of((5, 7), torch.device("cpu"))
    for part in range(0, 200, 50):
        moments.add(*(each[part : part + 50] for each in (a, x, z)))
    scale = z.norm(dim=1, keepdim=True)
    ridge = 0.01 * moments.inputs.diagonal().mean()
    above = torch.cat((a / scale, ridge.sqrt() * torch.eye(7, dtype=torch.float64)))
    behind = torch.cat(((z - x) / scale, torch.zeros(7, 5, dtype=torch.float64)))
    expected = torch.linalg.lstsq(above, behind).solution.T
    torch.testing.assert_close(gap_healing.solve(moments, 0.01), expected, rtol=1e-4, atol=1e-5)
    fitted = gap_healing.fit(moments, moments, rank)
    assert fitted.change is not None and fitted.after < fitted.before
    error = ((z - x - a @ fitted.change.T) / scale).square().sum() / 200
    assert fitted.after == pytest.approx(error.item(), rel=1e-4)
    assert torch.linalg.matrix_rank(fitted.change, rtol=1e-5) == (rank or 5)
    none = Moments(moments.inputs, -moments.cross, moments.squares, moments.states)
    assert gap_healing.fit(moments, none).change is None  # no better on what is held out
