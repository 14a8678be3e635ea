"""Compiled code that chooses codes of mixed bits and packs them, against plain code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.cpu import kv_encode
from compress.kv.codec import Codec, Spec
from compress.kv.codecs import pca

HEADS = 2

pytestmark = pytest.mark.skipif(not kv_encode.supports(64), reason="no compiled functions with AVX-512 here")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codec(width: int, bits: Tensor) -> Codec:
    back = torch.linalg.qr(normal(HEADS, width, width, seed=3).double())[0] * torch.logspace(0.5, -1, width)
    static = {"mean": normal(HEADS, width, seed=4).half(), "back": back.half(), "bits": bits.to(torch.uint8)}
    static["variances"] = torch.logspace(1, -2, width).expand(HEADS, -1).contiguous()
    return pca.build(pca.Config(bits=7.0), Spec("values", 0, 1, HEADS, width, 2), static)


def plain(made: Codec, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(made, "_kernel", lambda name, like: None)
        return made.encode(x, {})


def mixed_bits(width: int, seed: int = 2) -> Tensor:
    """Bits of all sorts, in no order, the second head with fewer."""
    bits = torch.randint(0, 8, (HEADS, width), generator=torch.Generator().manual_seed(seed))
    bits[1] //= 2
    return bits


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("batch", [1, 3])
def test_codes_are_those_of_plain_code(width: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = codec(width, mixed_bits(width))
    assert isinstance(made, pca.Principal)
    x = normal(batch, HEADS, 77, width, seed=5) * torch.logspace(-2, 2, 77)[:, None]
    x[:, 0, 3] = made.static["mean"][0]  # nothing but the mean
    expected, found = plain(made, x, monkeypatch), made.encode(x, {})
    assert found["codes"].shape == expected["codes"].shape and found["norms"].dtype == torch.uint8
    assert int((found["norms"] != expected["norms"]).sum()) <= 1  # sums are added up in another order: ties
    is_same = (found["norms"] == expected["norms"]).all(1)[:, None]
    assert torch.equal(found["codes"] * is_same, expected["codes"] * is_same)
    assert len(found["codes"].unique()) > 200


@pytest.mark.parametrize("bits", range(1, 8))
def test_every_number_of_bits_at_its_edges(bits: int) -> None:
    """Numbers just below, on and just above each edge between levels, whose norm is 1."""
    table = pca.table(bits)
    edges = (table[1:] + table[:-1]) / 2
    x = torch.cat((edges, edges.nextafter(torch.tensor(9.0)), edges.nextafter(torch.tensor(-9.0)), 3 * table))
    made = codec(64, torch.full((HEADS, 64), bits))
    assert isinstance(made, pca.Principal)
    y = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(1, 1, -1, 64).expand(-1, HEADS, -1, -1).contiguous()
    lanes = kv_encode.Lanes(
        made.pieces.starts,
        made.pieces.bounds,
        torch.full((len(made.pieces.pieces),), 16, dtype=torch.int32),
        torch.ones(HEADS, 64),
        torch.full((HEADS,), 64.0),
    )
    rows = kv_encode.pack(y, torch.ones(1, HEADS, y.shape[2], 1), lanes, _tables(), made.pieces.nbytes)
    codes = made.pieces.unpack(rows).transpose(1, 2)
    assert torch.equal(codes.long(), torch.bucketize(y, edges))


def _tables() -> Any:
    return tuple(tuple(pca.table(b).tolist()) for b in range(8))


def test_norms_fit_best() -> None:
    """Against the formula in float64."""
    made = codec(64, mixed_bits(64, seed=6))
    assert isinstance(made, pca.Principal)
    x = normal(1, HEADS, 50, 64, seed=7)
    stored = made.encode(x, {})["norms"].double()
    back, weights = made.static["back"].double().mT, made.static["weights"].double()
    y = torch.linalg.solve(back, (x[0] - made.static["mean"]).double().mT).mT
    active = (weights > 0).double()
    size = ((y.square() * active).sum(-1, keepdim=True) / active.sum(-1, keepdim=True)).sqrt()
    level = made._levels(made._nearest((y / size).float()[None], torch.ones(1, HEADS, 50, 1)))[0].double()
    norms = (y * level * weights).sum(-1) / (level.square() * weights).sum(-1)
    assert float((norms.log2() * 16 + 128 - stored[0, ..., 0]).abs().max()) < 0.5 + 1e-3
