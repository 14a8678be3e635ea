"""Rotation of models with linear attention, factors between norms and readers, and norms without weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from compress import api
from compress.errors import UnsupportedModelError
from compress.model import graph as structure
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint
from helpers import wrappers
from helpers.pico import build, of_type, save, save_pico
from helpers.runs import KEEP_TABLES, RTN, Setup, cli, job

IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
ROTATE = "transform=[{method: rotate}]"
AUTO = "transform=[{method: rotate, residual: auto}]"
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
DELTA: dict[str, Any] = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**HEADS, **DELTA, **EXPERTS},
    "qwen3_5_text": {**HEADS, **DELTA},
    "qwen3_5_moe_text": {**HEADS, **DELTA, **EXPERTS},
    "falcon_h1": {**HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "olmo": HEADS,  # norms without weights
    "bitnet": HEADS,  # norms in front of what writes to the stream
    "granitemoe": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def transformed(source: Path, out: Path, override: str = ROTATE) -> dict[str, Any]:
    """The report of `compress transform`."""
    return api.quantize(dataclasses.replace(job(source, RTN.set(override), out), pack=False))


def distance(a: Path, b: Path) -> float:
    """Of the logits of two checkpoints, relative, in float32."""
    x, y = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (a, b))
    with torch.no_grad():
        first, second = x(IDS).logits.double(), y(IDS).logits.double()
    return ((first - second).norm() / first.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_function(name: str, tmp_path: Path) -> None:
    """Where a norm of heads, a factor, a gate or no weight at all stands between norms, readers and writers."""
    source = save(of_type(name, MODELS[name]), tmp_path / "model")
    transformed(source, tmp_path / "out")
    assert distance(source, tmp_path / "out") < 1e-5


def small_norms(model: PreTrainedModel) -> PreTrainedModel:
    """The model with blocks that change the residual stream by a thousandth of it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.mul_(1e-3)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_block_that_changes_little_is_compared_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its change is less than the rounding of the states to 16 bits."""
    source = save(small_norms(build("llama")).to(dtype), tmp_path / "model")
    transformed(source, tmp_path / "out")
    assert distance(source, tmp_path / "out") < 0.02


def test_experts_of_16_bits_are_routed_alike(tmp_path: Path) -> None:
    """Rounded routers would send some probe tokens to other experts, which is no fault of the rotation."""
    changes = {"num_local_experts": 8, "num_experts_per_tok": 4}
    source = save_pico("mixtral", tmp_path / "model", dtype=torch.bfloat16, changes=changes)
    report = transformed(source, tmp_path / "out")
    assert report["self_check"] == "passed" and not report["notes"]


@pytest.mark.parametrize("name", ["olmo2", "glm4"])
def test_a_stream_behind_norms_stays_if_that_is_allowed(name: str, tmp_path: Path) -> None:
    source = save(of_type(name, HEADS), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="normalizes what goes to the residual stream, .*residual: auto"):
        transformed(source, tmp_path / "no")
    report = transformed(source, tmp_path / "out", AUTO)
    (note,) = report["notes"]["transform"]
    assert note.startswith("the residual stream is not rotated, because model.layers.0.post_")
    assert distance(source, tmp_path / "out") < 1e-5


def test_a_stream_that_images_are_written_into_stays(tmp_path: Path) -> None:
    """What the projector gives would have to be rotated, too; text alone would not show that it was not."""
    source, out = save(wrappers.build("llava"), tmp_path / "model"), tmp_path / "out"
    with pytest.raises(UnsupportedModelError, match="what model.vision_tower writes into the residual stream"):
        transformed(source, tmp_path / "no")
    transformed(source, out, AUTO)
    original, rotated = (AutoModelForImageTextToText.from_pretrained(path).eval() for path in (source, out))
    inputs = wrappers.with_image("llava", original)
    with torch.no_grad():
        before, after = (model(**inputs).logits for model in (original, rotated))
    assert (after - before).norm() < 1e-4 * before.norm()


def test_auto_rotates_the_stream_where_it_can(tmp_path: Path) -> None:
    source = save_pico("llama", tmp_path / "model")
    assert not transformed(source, tmp_path / "out", AUTO)["notes"]
    transformed(source, tmp_path / "same")
    tables = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name).get_input_embeddings().weight for name in ("out", "same")
    ]
    assert torch.equal(*tables)


def test_what_untying_costs_is_said(tmp_path: Path) -> None:
    source = save_pico("llama_tied", tmp_path / "model")
    said = f"+ {264 * 64 * 4 / (1 << 20):.1f} MiB before either is packed"
    words = Setup("quarot4bit", ("quantize.method=rtn", "quantize.group_size=32", *KEEP_TABLES)).options()
    planned = cli("plan", str(source), *words)
    assert said in planned.out
    run = cli("quantize", str(source), *words, "--out", str(tmp_path / "out"))
    assert said in run.err and said in run.out


def test_what_changes_the_stream_is_named(tmp_path: Path) -> None:
    """MiniMax takes what its norms give for the stream; its linear attention has a norm that is none of these."""
    changes = {**HEADS, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}
    source = save(of_type("minimax", changes), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="^model.layers.0.(input|post_attention)_layernorm normalizes what"):
        transformed(source, tmp_path / "no")


def test_readers_behind_a_factor_and_writers_behind_a_norm_are_traced(tmp_path: Path) -> None:
    source = save(of_type("falcon_h1", MODELS["falcon_h1"]), tmp_path / "model")
    block = structure.trace(Skeleton(open_checkpoint(source))).blocks[0]
    assert set(block.norms["input_layernorm"]) == {
        "mamba.in_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
    }  # fmt: skip
    assert set(block.writers) == {"mamba.out_proj", "self_attn.o_proj", "feed_forward.down_proj"}
    source = save(of_type("qwen3_next", MODELS["qwen3_next"]), tmp_path / "delta")
    assert "linear_attn.out_proj" in structure.trace(Skeleton(open_checkpoint(source))).blocks[0].writers
