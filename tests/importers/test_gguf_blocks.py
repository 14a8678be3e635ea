"""Decoders of GGUF blocks against the reader that defines them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress.importers import gguf_blocks

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("number", gguf_blocks.BLOCKS, ids=lambda number: gguf_blocks.BLOCKS[number].name)
def test_decoders_are_equal_to_the_reference_in_every_bit(number: int) -> None:
    block = gguf_blocks.BLOCKS[number]
    kind = gguf.GGMLQuantizationType(number)
    assert (block.name, block.elements, block.nbytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    raw = np.random.default_rng(number).integers(0, 256, (257, block.nbytes), dtype=np.uint8)  # infinite scales, too
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind).reshape(-1)
    decoded = gguf_blocks.decode(torch.from_numpy(raw).reshape(-1), number).numpy()
    assert np.isfinite(decoded).mean() > 0.5
    assert decoded.dtype == np.float32
    assert (decoded.view(np.uint32) == expected.view(np.uint32))[~np.isnan(expected)].all()
    assert (np.isnan(decoded) == np.isnan(expected)).all()


def test_types_have_names() -> None:
    assert [gguf_blocks.type_name(number) for number in (1, 14, 40, 99)] == ["float16", "Q6_K", "NVFP4", "number 99"]
