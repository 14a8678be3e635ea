"""The Triton product of experts, interpreted, against decoded weights in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.types import PackedWeight, Stored
from helpers import interpreter  # noqa: F401

from compress.kernels.triton import grouped  # isort: skip


def experts(bits: int, group: int, symmetric: bool, shape: tuple[int, int], parts: int) -> list[list[PackedWeight]]:
    """Four experts of random codes, scales of both signs and zero points."""
    generator = torch.Generator().manual_seed(bits)
    params = int_format.params_for(bits, group, symmetric, shape[1])
    count = 1 if group == -1 else -(-shape[1] // group)

    def weight() -> PackedWeight:
        codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
        scales = (torch.randn(shape[0], count, generator=generator) / 50).half()
        zeros = torch.randint(0, 2**bits, scales.shape, generator=generator, dtype=torch.uint8)
        tensors = int_format.pack(codes, scales, None if symmetric else zeros, params)
        return PackedWeight(Stored("int", params), tensors, shape)

    return [[weight() for _ in range(parts)] for _ in range(4)]


def reference(made: list[list[PackedWeight]], x: Tensor, ids: Tensor) -> Tensor:
    matrices = [
        torch.cat([int_format.decode(w.tensors, w.params, w.shape, torch.float64) for w in each]) for each in made
    ]
    rows = x.double().repeat_interleave(len(ids) // len(x), 0)
    zero = torch.zeros(len(matrices[0]), dtype=torch.float64)
    return torch.stack([matrices[e] @ row if 0 <= e < 4 else zero for e, row in zip(ids.tolist(), rows, strict=True)])


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "shape", "parts", "tokens", "top"),
    [(4, 32, True, (24, 128), 2, 1, 2), (4, 32, False, (24, 300), 1, 5, 2), (3, 64, False, (40, 160), 2, 9, 1),
     (6, -1, False, (16, 96), 1, 3, 4), (8, 32, True, (24, 128), 1, 70, 2), (2, 32, True, (17, 608), 2, 4, 3)],
)  # fmt: skip
def test_as_decoded_weights_in_float64(
    bits: int, group: int, symmetric: bool, shape: tuple[int, int], parts: int, tokens: int, top: int
) -> None:
    made = experts(bits, group, symmetric, shape, parts)
    kernel = grouped.prepare(made, torch.float32)
    assert kernel is not None
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, shape[1], generator=generator).half().float()
    ids = torch.rand(tokens, 4, generator=generator).argsort(-1)[:, :top].flatten()
    ids[ids == 2] = 0  # without tokens
    ids[1::5] = torch.tensor(-1)  # of another process
    ids[-1] = 4 if tokens > 1 else 3
    y = kernel.product(x, ids, kernel.route(ids))
    wanted = reference(made, x, ids)
    assert y.dtype == x.dtype and ((y.double() - wanted).abs().max() / wanted.abs().max()).item() < 2e-6
    assert not y[(ids < 0) | (ids > 3)].any()
    ends = [ids[:top], ids[-top:]]
    alone = [kernel.product(row[None], own, kernel.route(own)) for row, own in zip(x[[0, -1]], ends, strict=True)]
    assert torch.allclose(torch.cat(alone), torch.cat((y[:top], y[-top:])), rtol=1e-5, atol=1e-5)


def test_routes_of_every_sort() -> None:
    """Every pair is in one block, that of its expert; blocks hold no other expert's, and there are never too few."""
    kernel = grouped.prepare(experts(4, 32, True, (16, 64), 1), torch.float16)
    assert kernel is not None
    for pairs in (1, 2, 7, 33, 64, 300):
        for seed in range(8):
            ids = torch.randint(-1, 6, (pairs,), generator=torch.Generator().manual_seed(seed))
            ids = ids if seed else torch.full_like(ids, 3)
            slots, owners = kernel.route(ids)
            seen = slots[slots < pairs]
            assert sorted(seen.tolist()) == ((ids >= 0) & (ids < 4)).nonzero()[:, 0].tolist()
            for row, owner in zip(slots, owners.tolist(), strict=True):
                members = row[row < pairs].long()
                assert (ids[members] == owner).all() if owner < 4 else not len(members)


def test_weights_that_differ_have_no_kernel() -> None:
    made = experts(4, 32, True, (16, 64), 1)
    assert grouped.prepare([*made[:3], *experts(3, 32, True, (16, 64), 1)[:1]], torch.float16) is None
    assert grouped.prepare([[PackedWeight(Stored("dense", None), {}, (2, 2))]], torch.float16) is None
