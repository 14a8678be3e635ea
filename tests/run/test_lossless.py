"""The recipe `lossless`: the bits of every weight and logit, its bytes in the report, and what it keeps as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import save_pico
from helpers.runs import Setup, job

TOKENS = torch.arange(48).reshape(2, 24) * 5
RANKED = tuple(f"{section}.coding=ranked" for section in ("quantize", "embeddings", "head"))


def logits(directory: Path, tokens: Tensor = TOKENS) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        out: Tensor = model(tokens).logits
    return out


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("overrides", [(), RANKED], ids=["huffman", "ranked"])
def test_every_bit_stays(name: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    source = save_pico(name, tmp_path / "m", dtype=torch.bfloat16)
    report = api.quantize(job(source, Setup("lossless", overrides), tmp_path / "out"))
    written = open_checkpoint(tmp_path / "out")
    assert report["nbytes"]["total"] == written.nbytes < (0.8 if overrides else 0.76) * report["source_nbytes"]
    assert all(row["weight_error"] == 0 for row in report["layers"])
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    packed = [module for module in model.modules() if isinstance(module, PackedLinear | PackedEmbedding)]
    assert bool(packed) == bool(overrides)
    if not overrides:
        original = AutoModelForCausalLM.from_pretrained(source).state_dict()
        assert {key: value.tolist() for key, value in original.items()} == {
            key: value.tolist() for key, value in model.state_dict().items()
        }
        model.save_pretrained(tmp_path / "again")
        assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
        assert torch.equal(logits(tmp_path / "again"), logits(source))


def test_embeddings_and_head_beside_other_methods(tmp_path: Path) -> None:
    """As if they were kept: the linears of blocks alone are rounded."""
    source = save_pico("llama", tmp_path / "m", dtype=torch.bfloat16)
    for coding in ("huffman", "ranked"):
        table = f"{{method: lossless, coding: {coding}}}"
        setup = Setup("int8", (f"embeddings={table}", f"head={table}"))
        api.quantize(job(source, setup, tmp_path / coding))
    api.quantize(job(source, Setup("int8", ("embeddings={keep: true}", "head={keep: true}")), tmp_path / "kept"))
    wanted = logits(tmp_path / "kept")
    assert torch.equal(logits(tmp_path / "huffman"), wanted) and torch.equal(logits(tmp_path / "ranked"), wanted)
    kept, coded = (open_checkpoint(tmp_path / name).nbytes for name in ("kept", "huffman"))
    assert coded < kept - 2 * 264 * 64 * 4 // 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_kept_and_it_is_said(dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_pico("llama", tmp_path / "m", dtype=dtype)
    report = api.quantize(job(source, Setup("lossless"), tmp_path / "out"))
    name = str(dtype).removeprefix("torch.")
    assert {row["format"] for row in report["layers"]} == {"dense"}
    assert all(f"it is {name}" in notes[0] for notes in report["fallbacks"].values())
    assert report["nbytes"]["total"] == open_checkpoint(tmp_path / "out").nbytes
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source))
