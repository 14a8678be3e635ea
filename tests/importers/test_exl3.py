"""EXL3's tiles are decoded as its GPU kernels do it, written out here bit by bit; there is no reader for a CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.importers import open_checkpoint
from helpers import foreign
from helpers.pico import save_pico
from helpers.runs import stored_tensors

SIZES = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 128}
Q = "model.layers.0.self_attn.q_proj"


def value(state: int, codebook: str) -> np.float16:
    """What 16 bits stand for."""
    word = state * {"": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook] + (0 if codebook else 64248484)
    word &= 0xFFFFFFFF
    if codebook == "mul1":
        slope, shift = (float(np.array(bits, np.uint16).view(np.float16)) for bits in (0x1EEE, 0xC931))
        return np.float16(np.float64((1024 + sum(word.to_bytes(4, "little"))) * slope + shift))
    low, high = np.array((word & 0x8FFF8FFF) ^ 0x3B603B60, np.uint32).reshape(1).view(np.float16)
    return np.float16(low + high)


@cache
def values(codebook: str) -> np.typing.NDArray[np.float64]:
    return np.array([value(state, codebook) for state in range(65536)], np.float64)


def decoded(trellis: Tensor, inputs: Tensor, outputs: Tensor, bits: float, codebook: str) -> Tensor:
    """The weight float16 [out, in]: tiles bit by bit, then both transforms by the signs of their entries."""
    down, across, words = trellis.shape
    ring = np.unpackbits(trellis.numpy().view("<u4").astype(">u4").view(np.uint8)).reshape(down, across, 16 * words)
    table = values(codebook)
    inner, end = np.empty((16 * down, 16 * across)), 0
    for t in range(256):
        end += int(bits) + (t % 2 if bits % 1 else 0)
        places = np.arange(end - 16, end) % ring.shape[-1]
        states = ring[..., places].astype(np.int64) @ (1 << np.arange(15, -1, -1))
        lane, number = divmod(t, 8)
        row, column = 2 * (lane % 4) + (0, 1, 8, 9)[number % 4], lane // 4 + 8 * (number // 4)
        inner[row::16, column::16] = table[states]
    assert end == ring.shape[-1]
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
    rows, columns = (np.kron(np.eye(16 * count // 128), signs) for count in (down, across))
    whole = (inputs.double().numpy()[:, None] * (rows @ inner)) @ columns * outputs.double().numpy()
    return torch.from_numpy(whole.T.copy()).to(torch.float16)


def exl3(bits: float, codebook: str, is_old: bool = False) -> foreign.Pack:
    def pack(name: str, weight: Tensor) -> foreign.Packed:
        draw = torch.Generator().manual_seed(len(name) + int(2 * bits))
        out, inner = weight.shape
        shape = (inner // 16, out // 16, int(16 * bits))
        trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=draw)
        marker = {f".{codebook}": torch.tensor(1, dtype=torch.int32)} if codebook else {}
        if is_old:
            counts = (inner // 16, out // 16)
            fields = [torch.randint(-(1 << 15), 1 << 15, (n,), dtype=torch.int16, generator=draw) for n in counts]
            scales = [torch.tensor([1 - 2 * (int(f) >> b & 1) for f in field for b in range(16)]) for field in fields]
            sides = dict(zip((".su", ".sv"), fields, strict=True))
        else:
            scales = [(0.1 * torch.randn(n, generator=draw)).half() for n in (inner, out)]
            sides = dict(zip((".suh", ".svh"), scales, strict=True))
        return {".trellis": trellis, **sides, **marker}, decoded(trellis, *scales, bits, codebook)

    return pack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("exl3") / "model", changes={**SIZES, "num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("bits", "codebook", "is_old"), [(1, "mcg", False), (2.5, "mul1", False), (3, "", False), (8, "mul1", True)]
)
def test_weights(bits: float, codebook: str, is_old: bool, model: Path, tmp_path: Path) -> None:
    settings = {"quant_method": "exl3", "bits": bits, "version": "0.0.28", "codebook": codebook or "3inst"}
    both = foreign.written(model, tmp_path, settings, exl3(bits, codebook, is_old), torch.float16)
    foreign.check_tensors(both)
    assert open_checkpoint(both.quantized).base == f"exl3 of {bits} bits"


def test_refusals(model: Path, tmp_path: Path) -> None:
    both = foreign.written(model, tmp_path, {"quant_method": "exl3", "bits": 2}, exl3(2, "mcg"), torch.float16)
    stored = stored_tensors(both.quantized)
    foreign.restore(both.quantized, {f"{Q}.mul1": torch.tensor(1, dtype=torch.int32)})
    foreign.refused(both.quantized, "mcg with mul1")
    foreign.restore(both.quantized, {f"{Q}.mul1": None, f"{Q}.suh": None})
    foreign.refused(both.quantized, "su is missing")
    half = torch.zeros(*stored[f"{Q}.trellis"].shape[:2], 24, dtype=torch.int16)
    foreign.restore(both.quantized, {f"{Q}.suh": stored[f"{Q}.suh"], f"{Q}.trellis": half})
    foreign.refused(both.quantized, "no weight that can be read")
