"""Columns of integers: lossless, in chunks, predicted; and the grid that keys and values are rounded to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.kv.saved import columns, parts, plain

ROWS = 600  # three chunks, the last one shorter


def integers(kind: torch.dtype, share: float = 0.0) -> Tensor:
    """A matrix [ROWS, 9]: each row is `share` of the one before plus noise; one column has values beyond a symbol."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(ROWS, 9, generator=generator) * 20
    for row in range(1, ROWS):
        rows[row] += share * rows[row - 1]
    rows[:, 4] *= 40
    rows += 50
    return rows.round().to(torch.int16) if kind == torch.int16 else rows.round().long().remainder(256).to(kind)


def coded(matrix: Tensor) -> tuple[columns.CodedMatrix, Tensor]:
    found, counts = columns.fit_columns(matrix)
    freqs, table = columns.tables(counts)
    return columns.encode(matrix, columns.Columns(found.offset, found.predict, table.to(torch.int16)), freqs), freqs


@pytest.mark.parametrize("kind", [torch.int16, torch.uint8])
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_nothing_is_lost_and_chunks_are_the_whole(kind: torch.dtype, share: float) -> None:
    matrix = integers(kind, share)
    stored, freqs = coded(matrix)
    assert torch.equal(columns.decode(stored, freqs, ROWS, kind, (0, 3)), matrix)
    for chunk, rows in enumerate(matrix.split(columns.CHUNK)):
        assert torch.equal(columns.decode(stored, freqs, ROWS, kind, (chunk, chunk + 1)), rows)


def test_symbols_are_those_of_the_definition() -> None:
    matrix = integers(torch.int16, 0.8)
    found, counts = columns.fit_columns(matrix)
    expected = torch.zeros_like(counts)
    for row, values in enumerate(matrix.tolist()):
        for column, value in enumerate(values):
            offset, predict = int(found.offset[column]), int(found.predict[column])
            code = value - offset
            if row % columns.CHUNK:
                code -= ((int(matrix[row - 1, column]) - offset) * predict + 8) // 16
            expected[column, code + 128 if abs(code) < 128 else 0] += 1
    assert torch.equal(counts, expected)


def test_prediction_is_a_share_that_pays() -> None:
    assert columns.fit_columns(integers(torch.int16))[0].predict.max() <= 2
    matrix = integers(torch.int16, 0.8)
    assert 11 <= columns.fit_columns(matrix)[0].predict.float().mean() <= 14
    shuffled = matrix[torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))]
    assert len(coded(matrix)[0].stream) < 0.93 * len(coded(shuffled)[0].stream)


def test_tables_are_near_one_for_each_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "TABLE_SYMBOLS", 1)
    spread = torch.logspace(0, 2, 200)
    matrix = (torch.randn(ROWS, 200, generator=torch.Generator().manual_seed(1)) * spread).round().to(torch.int16)
    _, counts = columns.fit_columns(matrix)
    freqs, table = columns.tables(counts)
    cost = -(counts * (freqs[table] / 4096).clamp(min=1e-9).log2()).sum(1)
    shares = counts / counts.sum(1, keepdim=True)
    entropy = -(counts * shares.clamp(min=1e-30).log2()).sum(1)
    assert len(freqs) == columns.MOST_TABLES
    assert entropy.sum() < cost.sum() < 1.04 * entropy.sum()  # which a table of 600 numbers of their own flatters


def test_a_damaged_chunk_is_found() -> None:
    stored, freqs = coded(integers(torch.int16))
    stored.stream[100] ^= 1
    with pytest.raises(ValueError, match="chunk 0 does not have the checksum"):
        columns.decode(stored, freqs, ROWS, torch.int16, (0, 3))


def states(tokens: int = 300) -> Tensor:
    """Keys [2, 3, tokens, 8] that lie near two directions of each head."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(3, 8, 8, generator=generator) * torch.tensor([4.0, 2.0, *[0.2] * 6])[:, None]
    return torch.randn(2, 3, tokens, 8, generator=generator) @ mixed + 1


def test_the_error_of_the_grid() -> None:
    x = states()
    part = parts.round_part(x, 0.01, torch.float32, "keys")
    error = part.tensor(part.matrix(x)) - x
    assert error.abs().max() <= part.step / 2 * 1.001
    variance = x.double().movedim(2, 0).flatten(1).var(0, unbiased=False).mean()
    assert error.square().mean().item() == pytest.approx(0.01 * variance.item(), rel=0.1)


def test_an_outlier_widens_the_grid_and_is_not_cut() -> None:
    x = states()
    x[0, 0, 5, 0] = 1e5
    part = parts.round_part(x, 1e-6, torch.float32, "keys")
    assert (part.tensor(part.matrix(x)) - x).abs().max() <= part.step / 2 * 1.001


def test_constants_come_back() -> None:
    x = torch.full((1, 2, 5, 4), 3.25)
    part = parts.round_part(x, 0.01, torch.float32, "keys")
    assert torch.allclose(part.tensor(part.matrix(x)), x, rtol=1e-3)


def test_what_is_not_finite_is_refused() -> None:
    x = states()
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(NumericalError, match="layer 3, keys of the cache are not finite"):
        parts.round_part(x, 0.01, torch.float32, "layer 3, keys")


def test_a_basis_is_used_where_it_pays_and_turns_back() -> None:
    x = states(1500)
    step = parts.round_part(x, 0.01, torch.float32, "keys").step
    vectors = plain.fit_basis(x, step)
    assert vectors is not None
    turned = plain.to_basis(x, vectors)
    assert torch.allclose(plain.from_basis(turned, vectors), x, atol=1e-4)
    assert plain.estimate_bits(turned, step) < 0.8 * plain.estimate_bits(x, step)
    unturned = torch.randn(1, 3, 1500, 8, generator=torch.Generator().manual_seed(0))
    assert plain.fit_basis(unturned, 0.3) is None
    assert plain.fit_basis(x[:, :, :8], step) is None  # too few tokens to pay for it


def test_the_estimate_of_bits_is_near_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "TABLE_SYMBOLS", 1)
    x = states(1500)
    part = parts.round_part(x, 0.01, torch.float32, "keys")
    stored, _ = coded(part.matrix(x))
    assert plain.estimate_bits(x, part.step) == pytest.approx(16 * len(stored.stream), rel=0.1)
