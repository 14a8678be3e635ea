"""Packed checkpoints in SGLang give what they give in transformers. Runs where SGLang is: `make sglang`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared import MIXED, PROMPTS, SMALL, TOKENS, check
from safetensors.torch import load_file, save_file

from helpers import runs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

CHANGES = {"qwen3_moe": {"moe_intermediate_size": 64}}  # SGLang pads others on a CPU to multiples of 32
CASES = {
    "int4": ("llama", "int4", *SMALL),
    "int4-tied": ("llama_tied", "int4", *SMALL),
    "vq2bit": ("llama", "vq2bit", *runs.SMALL),
    "mixed": ("llama", "int4", *MIXED),
    "qwen2": ("qwen2", "int4", *SMALL),
    "qwen3_moe": ("qwen3_moe", "int4", *SMALL),
    "kept tables": ("qwen3_moe", "int4", *SMALL, *runs.KEEP_TABLES),
}


def run(directory: Path, folder: Path, **asked: Any) -> tuple[int, str]:
    """Exit code and what SGLang prints; its answers lie in the file "out"."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **asked.pop("environment", {})}
    words = {
        "model": str(directory),
        "out": str(folder / "out"),
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "options": asked,
    }
    command = [sys.executable, str(Path(__file__).with_name("engine_sglang.py")), json.dumps(words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_same_as_transformers(case: str, packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES[case], **CHANGES.get(CASES[case][0], {}))
    code, said = run(directory, tmp_path)
    assert code == 0, said[-6000:]
    check(directory, json.loads((tmp_path / "out").read_text()))
    assert "packed weights" in said


def test_two_ranks_share_a_model(packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES["int4"])
    code, said = run(directory, tmp_path, tp_size=2, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    assert code == 0, said[-6000:]
    check(directory, json.loads((tmp_path / "out").read_text()))


def test_a_missing_tensor_is_named(packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(packed(*CASES["int4"]), directory)
    lost = "model.layers.1.self_attn.k_proj.scales"
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(lost, None) is not None:
            save_file(tensors, file, {"format": "pt"})
    code, said = run(directory, tmp_path)
    assert code != 0 and f"{lost} is not in the checkpoint" in said


def test_experts_that_sglang_builds_one_by_one_are_refused(packed: Callable[..., Path], tmp_path: Path) -> None:
    """SGLang has a class of its own for a quantized Mixtral, whose experts are linears under other names."""
    code, said = run(packed("mixtral", "int4", *SMALL), tmp_path)
    assert code != 0 and "no layer that SGLang builds for QuantMixtralForCausalLM has this name" in said


def test_without_the_plugin_nothing_is_served(packed: Callable[..., Path], tmp_path: Path) -> None:
    code, said = run(packed(*CASES["int4"]), tmp_path, environment={"SGLANG_PLUGINS": "none"})
    assert code != 0 and "Unknown quantization method: compress" in said
