"""Packed checkpoints in vLLM give what they give in transformers. Runs where vLLM is: `make vllm`."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import MIXED, SMALL, check, errors_of
from in_vllm import in_rounds, needed, refused, served
from safetensors.torch import load_file, save_file

from compress import api
from helpers import drafting, runs

pytestmark = needed

ROUNDED = 0.02  # nats that bfloat16 makes of half of a small model's logits: 0.007 in transformers, 0.008 here
FLIPPED = 0.02  # nats that an input makes which is rounded to the next code
PRUNED = "transform=[{method: prune_experts, remove: 1, samples: 4}]"
CASES = {
    "int4": ("llama", "int4", *SMALL),
    "int4-tied": ("llama_tied", "int4", *SMALL),
    "vq2bit": ("llama", "vq2bit", *runs.SMALL),
    "mixed": ("llama", "int4", *MIXED),
    "qwen2": ("qwen2", "int4", *SMALL),
    "phi3": ("phi3", "int4", *SMALL),
    "qwen3_moe": ("qwen3_moe", "int4", *SMALL),
    "mixtral": ("mixtral", "int4", *SMALL),
    "w4a8": ("llama", "w4a8", *runs.SMALL, *runs.KEEP_TABLES),
    "quarot4bit": ("llama_tied", "quarot4bit", *SMALL),
    "kept tables": ("mixtral", "int4", *SMALL, *runs.KEEP_TABLES),
    "fewer experts": ("mixtral", "int4", *SMALL, *runs.KEEP_TABLES, PRUNED),
}


@pytest.mark.parametrize("case", CASES)
def test_same_as_transformers(case: str, packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES[case])
    check(directory, served(directory, tmp_path))
    assert "packed weights" in (tmp_path / "log").read_text()


def test_a_plain_checkpoint_of_fewer_experts(packed: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "fewer.yaml"
    path.write_text("transform: [{method: prune_experts, remove: 1, samples: 4}]\n")
    directory = packed("mixtral", str(path), *runs.SMALL)
    check(directory, served(directory, tmp_path))
    assert json.loads((directory / "config.json").read_text())["num_local_experts"] == 3


def test_rounded_inputs_may_flip(packed: Callable[..., Path], tmp_path: Path) -> None:
    """Sums that differ in their last bit may round to another code: few do, and make no more than FLIPPED."""
    directory = packed("llama", "w4a8", *runs.SMALL)
    errors = errors_of(directory, served(directory, tmp_path))
    assert statistics.median(errors) < 1e-5 and max(errors) < FLIPPED


@pytest.mark.parametrize("case", ["int4", "mixtral", "qwen3_moe"])
def test_compiled_by_vllm(case: str, packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES[case])
    check(directory, served(directory, tmp_path, enforce_eager=False))


@pytest.mark.parametrize("eager", [True, False])
def test_experts_that_run_together(eager: bool, packed: Callable[..., Path], tmp_path: Path) -> None:
    """Large enough for kernels, which float32 has none of: logits are those of float32 up to bfloat16's rounding."""
    directory = packed(*CASES["mixtral"], intermediate_size=320)
    answers = served(directory, tmp_path, enforce_eager=eager, dtype="bfloat16")
    errors = errors_of(directory, answers, is_greedy=False)
    assert statistics.median(errors) < ROUNDED and max(errors) < 0.6  # 0.29 where a router changes


def test_two_ranks_share_a_model(packed: Callable[..., Path], tmp_path: Path) -> None:
    for case in ("int4", "vq2bit"):
        directory = packed(*CASES[case])
        options = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
        check(directory, served(directory, tmp_path, **options))
        assert ("hadamard mixes all channels" in (tmp_path / "log").read_text()) == (case == "vq2bit")


def test_lora_beside_packed_linears(packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES["int4"])
    generator = torch.Generator().manual_seed(1)
    factors = {}
    for block in range(2):
        for name, rows, columns in (("self_attn.q_proj", 64, 64), ("mlp.down_proj", 64, 192)):
            key = f"base_model.model.model.layers.{block}.{name}"
            factors[f"{key}.lora_A.weight"] = 0.1 * torch.randn(8, columns, generator=generator)
            factors[f"{key}.lora_B.weight"] = 0.1 * torch.randn(rows, 8, generator=generator)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))

    def adapted(model: Any) -> None:
        for key in {key.rsplit(".", 2)[0] for key in factors}:
            a, b = factors[f"{key}.lora_A.weight"], factors[f"{key}.lora_B.weight"]
            module = model.get_submodule(key.removeprefix("base_model.model."))
            module.register_forward_hook(lambda _, given, out, a=a, b=b: out + given[0] @ a.T @ b.T * 2)

    answers = served(directory, tmp_path, adapter, enable_lora=True, max_lora_rank=8)
    check(directory, answers, adapted)
    with pytest.raises(AssertionError):
        check(directory, answers)  # the adapter matters


def test_a_draft_head_of_the_checkpoint(tmp_path: Path) -> None:
    """Packed, as the rest is; it guesses what the model writes, which is what it writes without drafts."""
    directory = tmp_path / "packed"
    setup = runs.Setup("int4", SMALL)
    api.quantize(runs.job(drafting.save_drafting(tmp_path / "model"), setup, directory))
    prompts = drafting.texts(4, 7, 12).tolist()
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    asked = [{"prompts": prompts, "tokens": 32}]
    got = in_rounds(directory, tmp_path, asked, speculative_config=drafts, disable_log_stats=False)
    check(directory, got["rounds"][0])
    counted = got["drafts"]
    assert 1 + counted["accepted_tokens"] / counted["drafts"] > 2.2  # 2.77 were seen, of 3 at most


def test_a_missing_tensor_is_named(packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(packed(*CASES["int4"]), directory)
    lost = "model.layers.1.self_attn.k_proj.scales"
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(lost, None) is not None:
            save_file(tensors, file, {"format": "pt"})
    assert f"{lost} is not in the checkpoint" in refused(directory, tmp_path)


def test_without_the_plugin_nothing_is_served(packed: Callable[..., Path], tmp_path: Path) -> None:
    said = refused(packed(*CASES["int4"]), tmp_path, {"VLLM_PLUGINS": ""})
    assert "Unknown quantization method: compress" in said
