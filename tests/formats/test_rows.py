"""Single rows of the `int` format decode as the whole matrix does, and rows that were packed apart can be joined."""

from __future__ import annotations

import pytest
import torch

from compress import formats
from compress.formats import int as int_format
from compress.types import PackedWeight, Stored
from helpers.pico import round_to_nearest


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "group_size"), [((40, 96), 32), ((37, 50), -1), ((33, 70), 24)])
def test_rows_are_those_of_the_matrix(bits: int, symmetric: bool, shape: tuple[int, int], group_size: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    packed = round_to_nearest(weight, bits, group_size, symmetric)
    rows = torch.tensor([shape[0] - 1, 0, 9, 9, 16])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(formats.decode_rows(packed, rows, dtype), formats.decode(packed, dtype)[rows])
    assert formats.decode_rows(packed, rows[:0], torch.float32).shape == (0, shape[1])


@pytest.mark.parametrize("bits", [3, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_joined_rows_are_the_bytes_of_the_whole(bits: int, symmetric: bool) -> None:
    weight = torch.randn(72, 96, generator=torch.Generator().manual_seed(1))
    whole = round_to_nearest(weight, bits, 32, symmetric)
    parts = [round_to_nearest(part, bits, 32, symmetric) for part in weight.split(32)]
    joined = formats.join_rows(parts)
    assert joined.keys() == whole.tensors.keys()
    assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in joined.items())
    formats.check(PackedWeight(whole.stored, joined, whole.shape), "joined")


def test_only_bare_weights_of_a_format_with_rows_can_be_looked_up() -> None:
    params = int_format.Params(8, -1, True, 64)
    assert formats.has_rows(Stored("int", params))
    assert formats.has_rows(Stored("dense", None))
    assert not formats.has_rows(Stored("e8p", None))
