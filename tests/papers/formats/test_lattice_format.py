"""The lattice format against a slow decoder in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.papers.formats import lattice as lattice_format
from helpers import problems


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
