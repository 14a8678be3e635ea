"""Decoders of GGUF blocks against the reader that defines them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress.importers import gguf_blocks

gguf = pytest.importorskip("gguf")


def one_bit(raw: np.typing.NDArray[np.uint8]) -> np.typing.NDArray[np.float32]:
    """A float16 scale, or its negative where the bit of a number is not set, lowest first; gguf 0.19 has no reader."""
    signs = 2 * np.unpackbits(raw[:, 2:], axis=1, bitorder="little").astype(np.float32) - 1
    return signs * raw[:, :2].copy().view(np.float16).astype(np.float32)


@pytest.mark.parametrize("number", gguf_blocks.BLOCKS, ids=lambda number: gguf_blocks.BLOCKS[number].name)
def test_decoders_are_equal_to_the_reference_in_every_bit(number: int) -> None:
    block = gguf_blocks.BLOCKS[number]
    kind = gguf.GGMLQuantizationType(number)
    assert (block.name, block.elements, block.nbytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    raw = np.random.default_rng(number).integers(0, 256, (257, block.nbytes), dtype=np.uint8)  # infinite scales, too
    with np.errstate(all="ignore"):
        expected = (one_bit(raw) if block.name == "Q1_0" else gguf.dequantize(raw, kind)).reshape(-1)
    decoded = gguf_blocks.decode(torch.from_numpy(raw).reshape(-1), number).numpy()
    assert np.isfinite(decoded).mean() > 0.5
    assert decoded.dtype == np.float32
    assert (decoded.view(np.uint32) == expected.view(np.uint32))[~np.isnan(expected)].all()
    assert (np.isnan(decoded) == np.isnan(expected)).all()


def test_types_have_names() -> None:
    assert [gguf_blocks.type_name(number) for number in (1, 14, 40, 99)] == ["float16", "Q6_K", "NVFP4", "number 99"]


@pytest.mark.parametrize("number", gguf_blocks.SIGNED, ids=lambda number: gguf_blocks.BLOCKS[number].name)
def test_packed_blocks_decode_to_scale_times_code_in_the_reference_reader(number: int) -> None:
    """All codes, negative scales, the smallest and the largest one."""
    reach = 1 << (gguf_blocks.SIGNED[number] - 1)
    generator = torch.Generator().manual_seed(number)
    codes = torch.randint(-reach, reach, (48, 96), generator=generator, dtype=torch.int8)
    codes[0, :2] = torch.tensor([-reach, reach - 1])
    scales = torch.randn(48, 3, generator=generator).half()
    scales[1] = torch.tensor([2.0**-24, -65504.0 / reach, 0.0])
    packed = gguf_blocks.pack(codes, scales, number)
    expected = codes.float() * scales.float().repeat_interleave(32, 1)
    assert packed.shape == (48, 3 * gguf_blocks.BLOCKS[number].nbytes) and packed.dtype == torch.uint8
    assert np.array_equal(gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType(number)), expected.numpy())
    assert torch.equal(gguf_blocks.decode(packed.reshape(-1), number).view(48, 96), expected)
