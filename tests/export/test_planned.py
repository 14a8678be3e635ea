"""A recipe that names its export is refused before anything is quantized, for all that is known by then."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from compress import api
from compress.errors import ExportError
from helpers.pico import of_type, save
from helpers.runs import KEEP_TABLES, Setup, job

GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}  # weights stored as [in, out]
GPT_OSS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LLAMA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192}
MIXTRAL: dict[str, Any] = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
FOUR_BITS = (*KEEP_TABLES, "quantize.bits=4", "group_size=32")
KEPT = "rules=[{match: '*layers.1.*experts.1.*', keep: true}]"
ALL_KEPT = "rules=[{match: '*experts*', keep: true}]"
NEEDED = {"gguf": "gguf", "onnx": "onnxscript"}  # packages without which these targets write nothing
MIXED = "rules=[{match: '*experts.1.down_proj', bits: 8}]"

REFUSED = [
    ("gptq", "gpt2", GPT2, (), r"holds it as \[inputs, outputs\]"),
    ("mlx", "gpt2", GPT2, (), r"stored as \[in, out\]"),
    ("compressed-tensors", "gpt_oss", GPT_OSS, (), "hold all experts of a block in one tensor"),
    ("mlx", "mixtral", MIXTRAL, (MIXED,), "differ in bits or groups"),
    ("mlx", "mixtral", MIXTRAL, (KEPT,), "quantize this expert, too"),
    ("gptq", "mixtral", MIXTRAL, (KEPT,), "1.block_sparse_moe.experts.1.* quantize this expert, too"),
    ("onnx", "mixtral", MIXTRAL, (KEPT,), "quantize this expert, too"),
    ("onnx", "mixtral", MIXTRAL, (ALL_KEPT,), "writes no plain experts"),
    ("torchao", "mixtral", MIXTRAL, (), "keep experts"),
    ("gguf", "opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, (), "models of type opt are not written"),
    ("gguf", "llama", LLAMA, (), "has no merges"),
]


@pytest.mark.parametrize(("target", "model", "sizes", "settings", "reason"), REFUSED)
def test_what_the_export_would_refuse_is_not_quantized(
    target: str, model: str, sizes: dict[str, Any], settings: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    if target in NEEDED:
        pytest.importorskip(NEEDED[target])
    source = save(of_type(model, sizes), tmp_path / "model")
    setup = Setup("int8", (*FOUR_BITS, f"export={target}", *settings))
    with pytest.raises(ExportError, match=reason):
        api.quantize(job(source, setup, tmp_path / "packed"))
    assert not (tmp_path / "packed").exists()


def test_a_plan_that_fits_goes_through(tmp_path: Path) -> None:
    source = save(of_type("mixtral", MIXTRAL), tmp_path / "model")
    others = ("onnx",) if importlib.util.find_spec(NEEDED["onnx"]) else ()
    for target in ("gptq", "awq", "compressed-tensors", "mlx", "dense", *others):
        prepared = api.plan(job(source, Setup("int8", (*FOUR_BITS, f"export={target}")), tmp_path / "packed"))
        assert isinstance(prepared, tuple)
