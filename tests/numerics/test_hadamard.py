"""Hadamard transforms of any size: exact tables, and fast products that equal the slow ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.numerics import hadamard
from compress.numerics.hadamard import Order, order, table, transform, transpose
from helpers.problems import random

# Dimensions of common models, and K * 2^power they are made of.
DIMENSIONS = {
    896: (28, 32),
    1152: (36, 32),
    1536: (12, 128),
    2304: (36, 64),
    2560: (20, 128),
    2880: (180, 16),
    3072: (12, 256),
    3584: (28, 128),
    3840: (60, 64),
    4096: (1, 4096),
    4864: (76, 64),
    5120: (20, 256),
    5376: (84, 64),
    5632: (44, 128),
    6144: (12, 512),
    6912: (108, 64),
    8960: (140, 64),
    9216: (36, 256),
    9728: (76, 128),
    9984: (312, 32),
    10240: (20, 512),
    10944: (684, 16),
    11008: (344, 32),
    12288: (12, 1024),
    13824: (108, 128),
    14336: (28, 512),
    15360: (60, 256),
    17408: (68, 256),
    18432: (36, 512),
    18944: (148, 128),
    21504: (84, 256),
    22016: (344, 64),
    25600: (100, 256),
    27648: (108, 256),
    28672: (28, 1024),
    29568: (924, 32),
    53248: (52, 1024),
}
TYPE_1 = (4, 8, 12, 20, 28, 44, 60, 68, 84, 108, 140, 180, 312, 344, 684)  # 28 is over GF(27), 344 over GF(343)
TYPE_2 = (12, 20, 36, 52, 76, 100, 148, 164, 244, 924, 1252)  # over GF(25), GF(49), GF(81), GF(121), GF(625) too
SIZES = (1, 2, 6, 12, 24, 33, 36, 50, 64, 96, 160, 344, 1024)


def slow(n: int) -> Tensor:
    """H [n, n] from the definition, float64."""
    found = order(n)
    matrix = table(found).double()
    for _ in range(found.power):
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return matrix / n**0.5


@pytest.mark.parametrize(("n", "parts"), DIMENSIONS.items())
def test_orders_of_common_dimensions(n: int, parts: tuple[int, int]) -> None:
    found = order(n)
    assert (found.K, 1 << found.power) == parts
    assert found.kind == "sylvester" if found.K == 1 else found.kind in ("paley1", "paley2")


@pytest.mark.parametrize(
    "kind_and_k",
    [*(("paley1", K) for K in TYPE_1), *(("paley2", K) for K in TYPE_2), *(("sylvester", K) for K in (1, 2, 64))],
)
def test_tables_are_hadamard_matrices_exactly(kind_and_k: tuple[str, int]) -> None:
    kind, K = kind_and_k
    matrix = table(Order(kind, K, 0))  # type: ignore[arg-type]
    assert matrix.shape == (K, K) and matrix.dtype == torch.int8 and bool((matrix.abs() == 1).all())
    wide = matrix.double()  # sums of at most 2048 ones are exact
    assert torch.equal(wide @ wide.T, K * torch.eye(K, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 5, 25, 33, 125, 1999])
def test_hartley_tables_are_orthogonal(size: int) -> None:
    matrix = table(Order("hartley", size, 0))
    error = (matrix @ matrix.T - size * torch.eye(size, dtype=torch.float64)).abs().max()
    assert error < 1e-9 * size and matrix.abs().max() <= 2**0.5 + 1e-12


def test_the_smallest_table_that_there_is() -> None:
    assert order(24) == Order("paley1", 12, 1)
    assert order(172) == Order("hartley", 43, 2)  # 172 is no order of Paley's: it has to be 344 or none
    assert order(344) == Order("paley1", 344, 0)
    assert order(50) == Order("hartley", 25, 1)
    assert order(33) == Order("hartley", 33, 0)
    assert order(2047) == Order("hartley", 2047, 0)


def test_sizes_without_a_transform() -> None:
    for n in (2049, 4 * 2053):
        with pytest.raises(ValueError, match=rf"size {n}: its odd part \d+ is over 2048; set incoherence: false"):
            order(n)


@pytest.mark.parametrize("n", SIZES)
def test_products_equal_those_of_the_matrix(n: int) -> None:
    matrix, x = slow(n), random(7, n)
    for function, exact in ((transform, x.double() @ matrix.T), (transpose, x.double() @ matrix)):
        assert torch.allclose(function(x).double(), exact, atol=1e-5, rtol=0)
        assert torch.allclose(function(x.double()), exact, atol=1e-12, rtol=0)
        assert torch.allclose(function(x[0]).double(), exact[0], atol=1e-5, rtol=0)
        assert torch.allclose(function(x.bfloat16().view(1, 7, n)).double()[0], exact, atol=0.04, rtol=0.01)


@pytest.mark.parametrize("n", [*SIZES, 11008, 14336, 29568])
def test_transpose_undoes_transform(n: int) -> None:
    x = random(3, n)
    y = transform(x)
    assert (transpose(y) - x).abs().max() < 1e-5 and (transform(transpose(x)) - x).abs().max() < 1e-5
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1), rtol=1e-5)


def test_one_large_entry_is_spread_evenly() -> None:
    x = torch.zeros(1, 14336)
    x[0, 77] = 100
    assert torch.allclose(transform(x).abs(), torch.full_like(x, 100 / 14336**0.5))


def test_large_inputs_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(5, 96, 10).transpose(1, 2)  # not contiguous
    whole = transform(x)
    monkeypatch.setattr(hadamard, "CHUNK", 300)
    assert torch.allclose(transform(x), whole, atol=1e-6) and whole.shape == (5, 10, 96)


def test_gradients_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through factors that were kept from inference mode, whole and in chunks."""
    with torch.inference_mode():
        transform(random(1, 40))
    for chunk in (1 << 20, 80):
        monkeypatch.setattr(hadamard, "CHUNK", chunk)
        x = random(6, 40).requires_grad_()
        weights = random(6, 40, seed=1)
        (transform(x) * weights).sum().backward()
        assert x.grad is not None and torch.allclose(x.grad, transpose(weights), atol=1e-5)


def test_no_rows() -> None:
    assert transform(torch.empty(0, 24)).shape == (0, 24)


@pytest.mark.parametrize("n", [64, 12, 36, 25])
def test_tables_are_real_where_meta_is_the_default_device(n: int) -> None:
    """As while a model is loaded: what is kept then serves later."""
    x, expected = random(2, n), transform(random(2, n))
    hadamard._factors.cache_clear()
    with torch.device("meta"):
        assert torch.equal(transform(x), expected)
    assert torch.equal(transform(x), expected)
