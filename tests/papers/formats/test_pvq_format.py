"""The numbering of PVQ against big integers, and its bit stream."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.papers.formats import pvq as pvq_format
from compress.papers.quant import pvq
from compress.types import PackedWeight, Stored
from helpers import problems

# vector_dim -> pulses of about 2, 3 and 4 bits
PULSES = {8: (4, 10, 24), 16: (9, 21, 46), 32: (19, 43, 92), 64: (39, 89, 186), 128: (80, 179, 371)}


@cache
def count(dim: int, pulses: int) -> int:
    """|S(dim, pulses)| by the recursion of the literature."""
    if dim == 0 or pulses == 0:
        return int(pulses == 0)
    return count(dim - 1, pulses) + count(dim, pulses - 1) + count(dim - 1, pulses - 1)


def filled_count(dim: int, pulses: int) -> int:
    """`count`, computed from small to large so that the recursion stays shallow."""
    for k in range(pulses):
        for d in range(dim):
            count(d, k)
    return count(dim, pulses)


def all_points(dim: int, pulses: int) -> Tensor:
    """S(dim, pulses), [count, dim] int64."""
    span = range(-pulses, pulses + 1)
    return torch.tensor([y for y in itertools.product(span, repeat=dim) if sum(map(abs, y)) == pulses])


def some_points(rows: int, dim: int, pulses: int, seed: int = 0) -> Tensor:
    """Points of vectors from flat to peaked, and the two extreme ones; [rows, dim] int64."""
    sharpness = torch.linspace(0, 4, rows).unsqueeze(1)
    x = problems.random(rows, dim, seed=seed)
    points = pvq.search(x.sign() * x.abs() ** (1 + sharpness), pulses).long()
    points[:2] = 0
    points[0, 0], points[1, -1] = pulses, -pulses
    return points


def big(limbs: Tensor) -> list[int]:
    """Ranks [L, rows] as Python integers."""
    return [sum(limb << (pvq_format.LIMB * i) for i, limb in enumerate(row)) for row in limbs.T.tolist()]


def slow_rank(y: list[int]) -> int:
    """The numbering of the format's docstring, in big integers, one node at a time."""
    if len(y) == 1:
        return int(y[0] < 0)
    half, k = len(y) // 2, sum(map(abs, y))
    first, second = y[:half], y[half:]
    j = sum(map(abs, first))
    node, other = pvq_format._node(len(y), k), pvq_format._node(half, k - j)
    size = other.mantissa << other.exponent
    return (node.offsets[j] << node.shift) + slow_rank(first) * size + slow_rank(second)


# The numbering.


def test_counts() -> None:
    assert (count(4, 3), count(5, 4)) == (88, 450)
    for dim, pulses in ((2, 9), (4, 3), (8, 4), (8, 24), (16, 21)):  # small ones are counted exactly
        assert pvq_format._node(dim, pulses).total == filled_count(dim, pulses)


@pytest.mark.parametrize(("dim", "pulses"), [(d, k) for d, ks in PULSES.items() for k in ks])
def test_the_field_is_no_wider_than_the_count_asks(dim: int, pulses: int) -> None:
    exact = filled_count(dim, pulses)
    total = pvq_format._node(dim, pulses).total
    assert exact <= total
    assert math.log2(total) - math.log2(exact) < 1e-6
    assert pvq_format.rank_bits(dim, pulses) == math.ceil(math.log2(exact))


@pytest.mark.parametrize(("dim", "pulses"), [(2, 1), (2, 7), (4, 3), (4, 6), (8, 2)])
def test_bijection(dim: int, pulses: int) -> None:
    points = all_points(dim, pulses)
    ranks = pvq_format.rank(points, pulses)
    assert sorted(big(ranks)) == list(range(count(dim, pulses)))
    assert torch.equal(pvq_format.unrank(ranks, dim, pulses), points)


def test_bijection_of_8_and_4() -> None:
    ranks = torch.arange(count(8, 4)).unsqueeze(0)
    points = pvq_format.unrank(ranks, 8, 4)
    assert len(points) == 2816
    assert len(points.unique(dim=0)) == 2816
    assert bool((points.abs().sum(1) == 4).all())
    assert torch.equal(pvq_format.rank(points, 4), ranks)


@pytest.mark.parametrize(("dim", "pulses"), [(d, k) for d, ks in PULSES.items() for k in ks] + [(128, 400), (8, 1023)])
def test_ranks_are_those_of_big_integers(dim: int, pulses: int) -> None:
    points = some_points(40, dim, pulses)
    ranks = pvq_format.rank(points, pulses)
    assert big(ranks) == [slow_rank(y) for y in points.tolist()]
    assert max(big(ranks)) < 2 ** pvq_format.rank_bits(dim, pulses)
    assert bool(((ranks >= 0) & (ranks <= pvq_format.MASK)).all())
    assert torch.equal(pvq_format.unrank(ranks, dim, pulses), points)


def test_first_and_last_rank() -> None:
    for dim, pulses in ((16, 21), (64, 89), (128, 179)):
        total = pvq_format._node(dim, pulses).total
        limbs = -(-pvq_format.rank_bits(dim, pulses) // pvq_format.LIMB)
        shifts = range(0, pvq_format.LIMB * limbs, pvq_format.LIMB)
        first = pvq_format.unrank(torch.zeros(limbs, 1, dtype=torch.int64), dim, pulses)[0]
        assert first.tolist() == [0] * (dim - 1) + [pulses]
        beyond = (1 << pvq_format.rank_bits(dim, pulses)) - 1
        assert beyond >= total  # no point has this rank: a damaged file must not stop the decoder
        damaged = torch.tensor([[beyond >> s & pvq_format.MASK] for s in shifts])
        assert pvq_format.unrank(damaged, dim, pulses).shape == (1, dim)


def test_points_of_other_pulses_are_refused() -> None:
    with pytest.raises(AssertionError, match="number of pulses"):
        pvq_format.rank(torch.tensor([[1, 1, 0, 0]]), 3)


def test_tables_do_not_depend_on_the_default_device() -> None:
    pvq_format._node.cache_clear()
    pvq_format._level.cache_clear()
    with torch.device("meta"):
        assert pvq_format.rank_bits(8, 5) == math.ceil(math.log2(filled_count(8, 5)))
    assert pvq_format.rank(torch.tensor([[5, 0, 0, 0, 0, 0, 0, 0]]), 5).device.type == "cpu"


# The stored form.


@pytest.mark.parametrize("dim", PULSES)
@pytest.mark.parametrize("gain_bits", [1, 4, 8])
def test_stored_bits(dim: int, gain_bits: int) -> None:
    """The stream, read bit by bit, holds gain and rank of each vector; reading it gives back what was packed."""
    params = pvq_format.Params(dim, PULSES[dim][1], gain_bits)
    rows, vectors = 3, 5
    points = some_points(rows * vectors, dim, params.pulses).view(rows, vectors, dim)
    gains = torch.randint(2**gain_bits, (rows, vectors), generator=torch.Generator().manual_seed(0))
    tensors = pvq_format.pack(points, gains, torch.ones(rows), torch.zeros(2**gain_bits), params)
    width = pvq_format.rank_bits(dim, params.pulses)
    for row in range(rows):
        stream = int.from_bytes(bytes(tensors["codes"][row].tolist()), "little")
        for v in range(vectors):
            field = stream >> v * (gain_bits + width)
            assert field & (2**gain_bits - 1) == gains[row, v]
            assert (field >> gain_bits) & ((1 << width) - 1) == slow_rank(points[row, v].tolist())
    found_points, found_gains = pvq_format._points(tensors["codes"], params, vectors)
    assert torch.equal(found_points, points)
    assert torch.equal(found_gains, gains)


def test_decoded_values() -> None:
    """Against the formula in float64, at whatever number of rows is decoded at a time."""
    params = pvq_format.Params(16, 21, 3)
    points = some_points(24, 16, 21).view(4, 6, 16)
    gains = torch.arange(24).view(4, 6) % 8
    scales = torch.tensor([0.0, 0.5, 2.0, -1.0])
    levels = torch.arange(8) / 8
    tensors = pvq_format.pack(points, gains, scales, levels, params)
    unit = points.double() / points.double().norm(dim=-1, keepdim=True)
    expected = (unit * (levels[gains] * scales[:, None]).double().unsqueeze(-1)).flatten(1)[:, :90]
    packed = PackedWeight(Stored("pvq", params), tensors, (4, 90))
    assert torch.allclose(problems.decoded(packed), expected, rtol=1e-6, atol=0)
    assert formats.decode(packed, torch.bfloat16).dtype == torch.bfloat16
    for rows in (1, 3):
        some = {"codes": tensors["codes"][:rows], "scales": scales[:rows], "levels": tensors["levels"]}
        part = pvq_format.decode(some, params, (rows, 90), torch.float32)
        assert torch.equal(part, formats.decode(packed, torch.float32)[:rows])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((12, 4, 4), "vector_dim 12 is not one of"),
        ((8, 0, 4), "pulses 0 is not in 1..1023"),
        ((8, 1024, 4), "pulses 1024 is not in"),
        ((8, 4, 0), "gain_bits 0 is not in 1..8"),
        ((8, 4, 4, "float32"), "scale_dtype 'float32' is not"),
    ],
)
def test_bad_params(values: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pvq_format.Params(*values)
