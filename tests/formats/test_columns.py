"""Weights column by column: what was `int` or `dense` decodes to the same weight, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress import formats
from compress.formats import columns
from compress.quant import rtn
from helpers import problems


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("settings", [{"group_size": 32}, {"group_size": -1, "symmetric": False}, {"group_size": 24}])
def test_integers_are_repacked_without_loss(bits: int, settings: dict[str, Any]) -> None:
    shape = (37, 100)
    packed = rtn.quantize(problems.random(*shape), None, rtn.Config(bits=bits, **settings)).weight
    params, tensors = columns.from_int(packed.tensors, packed.params, shape)
    assert params.bits == {2: 2, 3: 4, 4: 4}.get(bits, 8)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(columns.decode(tensors, params, shape, dtype), formats.decode(packed, dtype))


def test_a_tile_holds_vectors_of_sixteen_outputs() -> None:
    """The layout on disk, so never to change: byte b of a tile has output b in its low half, output 16 + b above it."""
    params = columns.Params(4, 1, False)
    codes = torch.arange(32, dtype=torch.uint8)[:, None] % 16
    tensors = columns.pack_codes(codes, torch.ones(32, 1), codes.clone(), params)
    expected = torch.arange(16, dtype=torch.uint8) * 17
    assert torch.equal(tensors["codes"][0], expected) and torch.equal(tensors["zeros"][0], expected)
