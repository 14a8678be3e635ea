"""GGUF files of architectures whose tensors are cut, reordered or computed anew; test_readers_engines.py runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress import api
from compress.errors import ExportError
from compress.export import convert
from compress.export.targets.gguf import architecture
from compress.importers import gguf_header
from compress.importers.gguf import values
from helpers.engines import FOUR_BITS, tokenizer
from helpers.gguf_models import DELTA, GEMMA, HEADS, MODELS, YARN
from helpers.pico import of_type, save
from helpers.runs import Setup, job

gguf = pytest.importorskip("gguf")

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
EDITED = ("gpt_oss", "granitemoeshared", "qwen3_next", "qwen3_5_moe_text")


@pytest.mark.parametrize("name", EDITED)
def test_packed_tensors_are_those_of_the_decoded_model(name: str, tmp_path: Path) -> None:
    """Rows, columns and experts of packed weights lie where those of plain numbers do, in every bit."""
    kind, settings = MODELS[name]
    model = save(of_type(kind, settings), tmp_path / "model")
    tokenizer().save_pretrained(model)
    api.quantize(job(model, Setup("int8", FOUR_BITS), tmp_path / "packed"))
    convert.export(tmp_path / "packed", "dense", tmp_path / "dense")
    files = {kind: tmp_path / f"{kind}.gguf" for kind in ("packed", "dense")}
    for kind, file in files.items():
        convert.export(tmp_path / kind, "gguf", file)
    packed, dense = (gguf_header.read_all(file).tensors for file in files.values())
    assert packed.keys() == dense.keys()
    for key, entry in packed.items():
        assert torch.equal(values(entry), values(dense[key])), key
    kinds = {gguf.GGMLQuantizationType(entry.type).name for entry in packed.values()}
    assert kinds == {"Q4_0", "Q8_0", "F32"}


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_has_keys(name: str) -> None:
    kind, settings = MODELS[name]
    model = architecture.describe(CONFIG_MAPPING[kind](**{**SMALL, **settings}))
    prefix = f"{model.architecture}."
    assert all(key.startswith(prefix) for key in model.metadata)
    assert {"block_count", "context_length"} <= {key.removeprefix(prefix) for key in model.metadata}


def test_computed_settings() -> None:
    """Of layers that differ."""
    made = {
        name: architecture.describe(CONFIG_MAPPING[kind](**{**SMALL, **more})) for name, (kind, more) in MODELS.items()
    }
    keys = made["gemma4_text"].metadata
    assert keys["gemma4.feed_forward_length"] == [160] * 3 + [320] * 3
    assert keys["gemma4.attention.sliding_window_pattern"] == [True, True, False] * 2
    assert (keys["gemma4.attention.key_length"], keys["gemma4.attention.key_length_swa"]) == (32, 16)
    assert made["gemma4_text"].divisors == (1.0,) * 4 + (1e30,) * 12
    assert made["gemma4_moe"].metadata["gemma4.attention.head_count_kv"] == [2, 2, 1]
    assert made["lfm2"].metadata["lfm2.attention.head_count_kv"] == [0, 2, 0]
    assert made["lfm2"].metadata["lfm2.feed_forward_length"] == 128
    assert made["qwen3_next"].metadata["qwen3next.ssm.inner_size"] == 4 * 32
    assert made["deepseek_v3"].metadata["deepseek2.attention.key_length"] == 48
    assert made["deepseek_v3"].metadata["deepseek2.rope.scaling.yarn_log_multiplier"] == 0.1


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (
            "smollm3",
            {**HEADS, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]},
            "no_rope_layers is not 1, 1, 1, 0",
        ),
        ("qwen3_5_text", {**HEADS, **DELTA, "linear_value_head_dim": 64}, "linear_value_head_dim is 64"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        (
            "gemma4_text",
            {
                **GEMMA,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 1,
                "layer_types": [*["sliding_attention", "full_attention"] * 2],
            },
            "the last two",
        ),
        ("qwen3", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "beta_fast"),
        ("qwen3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, "mscale"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ExportError, match=reason):
        architecture.describe(CONFIG_MAPPING[kind](**changes))


def test_groups_that_do_not_follow_heads_are_refused_before_anything_is_quantized(tmp_path: Path) -> None:
    """Columns move by heads of 32: groups of 64 would be torn."""
    kind, settings = MODELS["qwen3_5_text"]
    model = save(of_type(kind, settings), tmp_path / "model")
    tokenizer().save_pretrained(model)
    with pytest.raises(ExportError, match="out_proj has its columns in another order there"):
        api.plan(job(model, Setup("int8", ("bits=4", "group_size=64", "export=gguf")), tmp_path / "packed"))


def test_yarn_with_bounds_that_are_not_rounded_gets_a_note() -> None:
    config = CONFIG_MAPPING["gpt_oss"](rope_parameters={**YARN, "truncate": False})
    assert "truncate is false" in architecture.describe(config).notes[0]
