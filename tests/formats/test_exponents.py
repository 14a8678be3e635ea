"""The lossless format: every bit pattern, rows, cuts, damaged tensors, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import CheckpointError
from compress.formats import exponents
from compress.types import PackedWeight, Stored

EVERY = torch.arange(1 << 16).sub(1 << 15).to(torch.int16).view(torch.bfloat16)
CODINGS = ["huffman", "ranked"]


def usual(rows: int, columns: int) -> Tensor:
    """A weight like those of trained models, zeros, a subnormal number and a large one among them."""
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02).bfloat16()
    weight[0, 0], weight[-1, 0], weight[rows // 2, -1] = 0.0, 1e-39, -1e30
    return weight


def packed(weight: Tensor, coding: str) -> PackedWeight:
    params, tensors = exponents.pack(weight, coding)
    return PackedWeight(Stored("exponents", params), tensors, (weight.shape[0], weight.shape[1]))


def is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("shape", [(256, 256), (64, 1024), (4096, 16)])
def test_every_bit_pattern_comes_back(coding: str, shape: tuple[int, int]) -> None:
    weight = EVERY.view(shape)
    stored = packed(weight, coding)
    formats.check(stored, "weight")
    assert is_same(formats.decode(stored, torch.bfloat16), weight)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("shape", [(40, 96), (37, 51), (3, 2000), (70, 1)])
def test_rows_and_cuts_are_those_of_the_weight(coding: str, shape: tuple[int, int]) -> None:
    weight = usual(*shape)
    stored = packed(weight, coding)
    rows = torch.tensor([shape[0] - 1, 0, 0, shape[0] // 2])
    assert is_same(formats.decode_rows(stored, rows, torch.bfloat16), weight[rows])
    assert formats.decode_rows(stored, rows[:0], torch.float32).shape == (0, shape[1])
    part = formats.cut(stored, range(shape[0] // 3, shape[0]), range(shape[1] // 2, shape[1]))
    assert is_same(formats.decode(part, torch.bfloat16), weight[shape[0] // 3 :, shape[1] // 2 :])


def test_bytes_of_normal_weights() -> None:
    """The entropy of their exponents is 2.55 bits: 10.55 in all, and 16 bits for the bytes of each row."""
    weight = (torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    counts = torch.bincount(((weight.view(torch.int16) >> 7) & 0xFF).flatten().int()).double()
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * share.log2()).sum())
    assert 8 + entropy < packed(weight, "huffman").bpw < 8 + 1.03 * entropy + 20 / 2048 + 8 * 256 / weight.numel()
    assert 12 <= packed(weight, "ranked").bpw < 12.03


@pytest.mark.parametrize(
    ("coding", "name", "change"),
    [
        ("huffman", "sizes", lambda t: t + 1),
        ("huffman", "sizes", lambda t: -t),
        ("huffman", "sizes", lambda t: torch.cat((t[:1] + t[1:2] - 1, torch.ones_like(t[:1]), t[2:]))),
        ("huffman", "lengths", torch.zeros_like),
        ("ranked", "escapes", lambda t: t.flip(0)),
        ("ranked", "escapes", lambda t: t + (1 << 20)),
        ("ranked", "escapes", lambda t: torch.cat((t[:1], t[:-1]))),  # one twice
    ],
)
def test_damaged_tensors_are_refused(coding: str, name: str, change: object) -> None:
    stored = packed(usual(40, 96), coding)
    stored.tensors[name] = change(stored.tensors[name])  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=f"^weight.{name}"):
        formats.check(stored, "weight")


def test_a_stream_that_ends_elsewhere_is_damaged() -> None:
    stored = packed(usual(40, 96), "huffman")
    stored.tensors["stream"].bitwise_xor_(0x5A)
    for decode in (formats.decode, lambda weight, dtype: formats.decode_rows(weight, torch.arange(3), dtype)):
        with pytest.raises(CheckpointError, match="damaged.*; download or write the checkpoint again$"):
            decode(stored, torch.bfloat16)
