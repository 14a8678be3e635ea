"""bitsandbytes' weights are decoded as it does itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.importers import open_checkpoint
from helpers import foreign
from helpers.runs import stored_tensors

Q = "model.layers.1.self_attn.q_proj"


def settings(kind: str, double: bool) -> dict[str, Any]:
    return {
        **{"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
        **{"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double, "bnb_4bit_quant_storage": "uint8"},
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)])
def test_four_bits(kind: str, double: bool, dtype: torch.dtype, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    bnb = foreign.tool("bitsandbytes")

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        packed, state = bnb.functional.quantize_4bit(
            weight.to(dtype), blocksize=64, quant_type=kind, compress_statistics=double
        )
        stored = {f".weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {".weight": packed, **stored}, bnb.functional.dequantize_4bit(packed, state)

    both = foreign.written(pico_dir("llama"), tmp_path, settings(kind, double), pack, dtype)
    if is_by_the_table(bnb, kind):
        foreign.check_tensors(both)
        return
    source, wanted = open_checkpoint(both.quantized), stored_tensors(both.plain)
    assert source.tensors.keys() == wanted.keys()
    for name, tensor in source.tensors.items():
        torch.testing.assert_close(tensor.read(), wanted[name], rtol=max(2e-6, torch.finfo(dtype).eps), atol=0)


def is_by_the_table(bnb: Any, kind: str) -> bool:
    """Return whether the tool decodes by the table that it stores, to the bit.

    On processors without AVX-512 its code has constants of its own for fp4, of fewer digits.
    """
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] << 4 | codes[1::2]).repeat(4).unsqueeze(1)  # a block of 64
    _, state = bnb.functional.quantize_4bit(torch.ones(64), blocksize=64, quant_type=kind)
    return bool(bnb.functional.dequantize_4bit(packed, state)[:16].equal(state.code * state.absmax))


def eight(name: str, weight: Tensor) -> foreign.Packed:
    scales = weight.half().abs().amax(1).float()
    codes = (weight.half() * (127 / scales[:, None])).round().to(torch.int8)
    decoded = codes * scales.view(-1, 1) * 7.874015718698502e-3
    stored = {".weight": codes, ".SCB": scales, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, decoded.half()


EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}


def test_eight_bits(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, EIGHT, eight, torch.float16)
    foreign.check(both, tmp_path / "out", "bitsandbytes of 8 bits")


def test_eight_bits_by_its_own_reader(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    bnb = foreign.tool("bitsandbytes")

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        stored, _ = eight(name, weight)
        return stored, bnb.functional.int8_vectorwise_dequant(stored[".weight"], stored[".SCB"]).half()

    foreign.check_tensors(foreign.written(pico_dir("llama"), tmp_path, EIGHT, pack, torch.float16))


def nf4(name: str, weight: Tensor, block: int = 48) -> foreign.Packed:
    """By hand: no tool needed. Scales in float32; the last block is smaller where rows do not fill it."""
    table = torch.linspace(-1, 1, 16)
    flat = weight.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    largest = blocks.abs().amax(1)
    each = largest.repeat_interleave(block)[: len(flat)]
    codes = (flat / each)[:, None].sub(table).abs().argmin(1).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored = {
        ".weight": (codes[::2] << 4 | codes[1::2]).unsqueeze(1),
        ".weight.absmax": largest,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (table[codes.int()] * each).view(weight.shape).bfloat16()


def test_blocks_across_rows(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings("nf4", False), nf4)
    foreign.check(both, tmp_path / "out", "bitsandbytes nf4")


def described(**changes: Any) -> Tensor:
    state = {"quant_type": "nf4", "blocksize": 48, "dtype": "bfloat16", "shape": [64, 64], **changes}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"
DAMAGE: list[tuple[str, dict[str, Tensor | None]]] = [
    ("quant_map is missing", {f"{Q}.weight.quant_map": None}),
    ("absmax has the shape .85., its weight asks for .86.", {f"{Q}.weight.absmax": torch.ones(85)}),
    ("does not describe a weight", {STATE: torch.zeros(8, dtype=torch.uint8)}),
    ("does not describe a weight", {STATE: torch.tensor([123, 125], dtype=torch.uint8)}),
    ("describes no weight that can be read", {STATE: described(shape=[-1, 64])}),
    ("describes no weight that can be read", {STATE: described(dtype="float64")}),
    ("describes no weight that can be read", {STATE: described(blocksize=1 << 40)}),
    ("has 2048 bytes, too few for the shape .640, 64.", {STATE: described(shape=[640, 64])}),
    ("scales in bytes, and .* does not say how", {f"{Q}.weight.absmax": torch.ones(86, dtype=torch.uint8)}),
    ("too many for a description", {STATE: torch.zeros(1 << 17, dtype=torch.uint8)}),
]


@pytest.mark.parametrize(("pattern", "changes"), DAMAGE)
def test_damage_is_named(
    pattern: str, changes: dict[str, Tensor | None], pico_dir: foreign.Pico, tmp_path: Path
) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings("nf4", False), nf4)
    foreign.restore(both.quantized, changes)
    foreign.refused(both.quantized, pattern)


def test_tiles_of_a_gpu_are_refused(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, EIGHT, eight, torch.float16)
    foreign.restore(both.quantized, {f"{Q}.weight_format": torch.tensor(2, dtype=torch.uint8)})
    foreign.refused(both.quantized, "stored in tiles of one kind of GPU")
