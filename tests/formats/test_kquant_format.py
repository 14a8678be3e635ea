"""Weights on the grids of K-quants decode as the blocks of llama.cpp do, to the bit, whatever is stored."""

from __future__ import annotations

import pytest
import torch

from compress import formats
from compress.formats import kquant
from compress.importers import gguf_blocks
from helpers.stored import random_weight


@pytest.mark.parametrize("type", kquant.LAYOUTS)
def test_blocks_decode_to_the_same_weights(type: str) -> None:
    """Read by our decoder of GGUF files, and by the package gguf."""
    gguf = pytest.importorskip("gguf")
    weight = random_weight("kquant", kquant.Params(type), (19, 512))  # type: ignore[arg-type]
    decoded = formats.decode(weight, torch.float32)
    number = gguf_blocks.k_type(type)
    blocks = gguf_blocks.pack_k(*kquant.unpack(weight.tensors, weight.params, weight.shape), number)
    read = torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(number)))
    assert torch.equal(read, decoded)
    assert torch.equal(gguf_blocks.decode(blocks.flatten(), number).view(19, 512), decoded)
    assert blocks.numel() * 16 / 19 == weight.nbytes / 2, "16 rows are as many bytes as there"


@pytest.mark.parametrize("type", kquant.LAYOUTS)
def test_what_is_packed_is_unpacked(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight("kquant", kquant.Params(type), (32, 300))  # type: ignore[arg-type]
    codes, scales = kquant.unpack(weight.tensors, weight.params, weight.shape)
    assert codes.shape == (32, 512) and scales.codes.shape == (32, 512 // weight.params.layout.group_size)
    again = kquant.pack(codes, scales, weight.params)
    assert all(torch.equal(tensor, weight.tensors[name]) for name, tensor in again.items())
    whole = formats.decode(weight, torch.float32)
    monkeypatch.setattr(kquant, "CHUNK", 5 * 512)
    assert torch.equal(formats.decode(weight, torch.float32), whole)


def test_columns_are_cut_at_super_blocks() -> None:
    weight = random_weight("kquant", kquant.Params("q4_k"), (32, 1024))
    half = formats.cut(weight, range(32), range(512, 1024))
    assert torch.equal(formats.decode(half, torch.float32), formats.decode(weight, torch.float32)[:, 512:])
    with pytest.raises(ValueError, match="column 128 lies within a super-block of 256"):
        formats.cut(weight, range(32), range(128, 256))
