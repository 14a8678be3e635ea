"""Apply orthonormal Hadamard transforms of any size.

For n = K * 2^k the matrix is H = (T_K (x) H_2 (x) ... (x) H_2) / sqrt(n) with a table T of order K:
- K = 1 for powers of two (Sylvester);
- else the smallest K = 4 o, 8 o, ... (o the odd part of n) for which a Paley construction exists: type I for a prime
  power K - 1 = 3 mod 4, type II for a prime power K / 2 - 1 = 1 mod 4. Such tables have entries +-1;
- else K = o with the discrete Hartley table, cos + sin of 2 pi i j / o: orthogonal too, but its entries reach sqrt(2).

Tables are built in code, exact (integers, but for Hartley), and kept. H is not symmetric in general: `transform`
applies H to vectors, `transpose` its transpose, which is its inverse. Sums are taken in float32, of float64 in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

LARGEST_TABLE = 2048  # K above which no table is made: its product would cost more than the rest of the model
BLOCK_BITS = 6  # 2^6: largest Sylvester factor of one product; larger ones do more work, smaller ones more passes
CHUNK = 1 << 20  # numbers transformed at a time, to bound the float32 temporaries


@dataclass(frozen=True)
class Order:
    """The construction for a size n = K * 2^power."""

    kind: Literal["sylvester", "paley1", "paley2", "hartley"]
    K: int  # order of the table
    power: int


@lru_cache(maxsize=1024)
def order(n: int) -> Order:
    """Return the construction for size n >= 1; ValueError if there is none."""
    odd, power = n, 0
    while odd % 2 == 0:
        odd, power = odd // 2, power + 1
    if odd == 1:
        return Order("sylvester", 1, power)
    for j in range(2, power + 1):
        K = odd << j
        if K > LARGEST_TABLE:
            break
        if _prime_power(K - 1) is not None:  # K - 1 is 3 mod 4
            return Order("paley1", K, power - j)
        if (K // 2 - 1) % 4 == 1 and _prime_power(K // 2 - 1) is not None:
            return Order("paley2", K, power - j)
    if odd <= LARGEST_TABLE:
        return Order("hartley", odd, power)
    raise ValueError(
        f"no Hadamard transform of size {n}: its odd part {odd} is over {LARGEST_TABLE}; set incoherence: false there"
    )


def transform(x: Tensor) -> Tensor:
    """Return x H^T, each vector H x, for x [..., n] of any floating type; same type."""
    return _transform_chunks(x, _factors)


def transpose(x: Tensor) -> Tensor:
    """Return x H, each vector H^T x, for x [..., n]: undoes `transform`."""
    return _transform_chunks(x, partial(_factors, transposed=True))


def table(order: Order) -> Tensor:
    """Return T [K, K] with T T^T = K I: int8, for Hartley float64."""
    return _TABLES[order.kind](order.K)


def _transform_chunks(x: Tensor, factors_of: Callable[[int, torch.dtype, torch.device], tuple[Tensor, ...]]) -> Tensor:
    n = x.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    factors = factors_of(n, wide, x.device)
    rows = x.reshape(-1, n)
    step = max(1, CHUNK // n)
    if rows.shape[0] <= step:
        return _apply(rows.to(wide), factors).to(x.dtype).view(x.shape)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    for start in range(0, rows.shape[0], step):
        out[start : start + step] = _apply(rows[start : start + step].to(wide), factors)
    return out.view(x.shape)


def _apply(x: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """Multiply each row of x [rows, n] by the Kronecker product of the factors [f, f], whose sizes multiply to n."""
    rows, n = x.shape
    left = 1
    for factor in factors[:-1]:
        size = factor.shape[0]
        x = torch.matmul(factor, x.reshape(rows * left, size, n // (left * size)))
        left *= size
    last = factors[-1]
    return (x.reshape(-1, last.shape[0]) @ last.T).reshape(rows, n)


@lru_cache(maxsize=64)
def _factors(n: int, dtype: torch.dtype, device: torch.device, transposed: bool = False) -> tuple[Tensor, ...]:
    """Return the matrices whose Kronecker product is H (or its transpose); the last one carries 1 / sqrt(n)."""
    size = order(n)
    blocks = -(-size.power // BLOCK_BITS)
    bits = [size.power // blocks + (i < size.power % blocks) for i in range(blocks)]
    # Kept: tensors of inference mode could not be trained through, and meta may be the default device.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        matrices = [table(size)] if size.K > 1 or not bits else []
        matrices += [_sylvester(1 << k) for k in bits]
        factors = [matrix.to(torch.float64) for matrix in matrices]
        factors[-1] = factors[-1] / n**0.5
        return tuple((f.T if transposed else f).contiguous().to(device, dtype) for f in factors)


def _sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.int8)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def _paley1(K: int) -> Tensor:
    """Return I + S, S = [[0, 1], [-1, Q]] antisymmetric."""
    matrix = torch.ones(K, K, dtype=torch.int8)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = _residues(K - 1)
    matrix.diagonal()[1:] = 1
    return matrix


def _paley2(K: int) -> Tensor:
    """Return C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]], C = [[0, 1], [1, Q]] symmetric."""
    size = K // 2
    core = torch.ones(size, size, dtype=torch.int8)
    core[1:, 1:] = _residues(size - 1)
    core[0, 0] = 0
    off = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    on = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(core, off) + torch.kron(torch.eye(size, dtype=torch.int8), on)


def _hartley(size: int) -> Tensor:
    index = torch.arange(size)
    angle = (index[:, None] * index % size).double() * (2 * torch.pi / size)
    return angle.cos() + angle.sin()


_TABLES: dict[str, Callable[[int], Tensor]] = {
    "sylvester": _sylvester,
    "paley1": _paley1,
    "paley2": _paley2,
    "hartley": _hartley,
}


def _residues(q: int) -> Tensor:
    """Return Q [q, q] int8, Q_ab = chi(a - b): 1 if the difference is a square of GF(q), -1 if not, 0 if it is zero."""
    power = _prime_power(q)
    assert power is not None
    p, k = power
    weights = p ** torch.arange(k)
    digits = torch.arange(q)[:, None] // weights % p  # [q, k], the elements as polynomials over GF(p)
    difference = torch.zeros(q, q, dtype=torch.int64)
    for digit, weight in zip(digits.unbind(1), weights, strict=True):
        difference += (digit[:, None] - digit) % p * weight
    return _character(p, k)[difference]


def _character(p: int, k: int) -> Tensor:
    """Return chi of all elements of GF(p^k), [p^k] int8; element sum_i d_i x^i has index sum_i d_i p^i.

    Reduces by x^k = sum_i c_i x^i for the first c of which x generates all nonzero elements; the even powers of x are
    then the squares.
    """
    one = (1, *[0] * (k - 1))
    for c in itertools.product(range(p), repeat=k):
        powers = [one]
        while len(powers) < p**k:
            *low, high = powers[-1]
            following = tuple((a + high * b) % p for a, b in zip((0, *low), c, strict=True))
            if following == one or not any(following):
                break
            powers.append(following)
        if len(powers) == p**k - 1 and following == one:
            chi = torch.zeros(p**k, dtype=torch.int8)
            index = torch.tensor(powers) @ p ** torch.arange(k)
            chi[index[0::2]], chi[index[1::2]] = 1, -1
            return chi
    raise AssertionError(f"GF({p}^{k}) has no primitive polynomial")


def _prime_power(q: int) -> tuple[int, int] | None:
    """Return (p, k) with q = p^k >= 2 and p prime, if q is one."""
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    k, rest = 0, q
    while rest % p == 0:
        rest, k = rest // p, k + 1
    return (p, k) if rest == 1 else None
