"""vLLM's own loaders read our exports, without our plugin. Runs where vLLM is: `make vllm`.

vLLM's kernels for CPUs know 4 bits and int8 with int8 inputs, no experts: the others are to be refused, not misread.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from compared import HEADS, PROMPTS, TOKENS, errors_of

from compress import api
from compress.export import convert
from helpers import pico
from helpers.runs import KEEP_TABLES, Setup, job

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

FOUR = ("quantize.bits=4", "group_size=32", *KEEP_TABLES)
EIGHT = ("quantize.bits=8", "group_size=32", *KEEP_TABLES)
ASYMMETRIC = ("symmetric=false",)
INT8_INPUTS = ("quantize.bits=8", "group_size=-1", "activations={bits: 8, scale: token}", *KEEP_TABLES)
HEAD = ("quantize.bits=4", "group_size=32", "embeddings={keep: true}", "head={method: rtn, bits: 4, group_size: 32}")
TOLERANCE = 0.15  # nats: vLLM computes in bfloat16, and rounds inputs to int8 by itself
READ = [
    ("compressed-tensors", "llama", FOUR),
    ("compressed-tensors", "llama", (*FOUR, *ASYMMETRIC)),
    ("compressed-tensors", "llama", INT8_INPUTS),
    ("compressed-tensors", "llama", HEAD),
    ("gptq", "llama", FOUR),
    ("awq", "llama", FOUR),
    ("awq", "llama", (*FOUR, *ASYMMETRIC)),
    ("dense", "llama", EIGHT),
]
REFUSED = [
    ("compressed-tensors", "llama", EIGHT, "Failed to find a kernel that can implement the WNA16 linear layer"),
    ("compressed-tensors", "mixtral", FOUR, "No WNA16 MoE backend supports the deployment configuration"),
    ("gptq", "llama", EIGHT, "Marlin does not support weight_bits = uint8b128"),
    ("gptq", "llama", (*FOUR, *ASYMMETRIC), "Unsupported quantization config: bits=4, sym=False"),
    ("gptq", "mixtral", FOUR, "No WNA16 MoE backend supports the deployment configuration"),
    ("awq", "mixtral", FOUR, "is not supported for the current GPU"),
]
Served = Callable[[Path, Path], tuple[int, str]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """served(checkpoint, folder) -> exit code and log of vLLM without our plugin; its answers lie in folder/out."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, str(Path(__file__).with_name("engine.py"))]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None

        def ask(directory: Path, folder: Path) -> tuple[int, str]:
            asked = {"model": str(directory), "out": str(folder / "out.json"), "log": str(folder / "log")}
            asked |= {"prompts": PROMPTS, "tokens": TOKENS, "options": {"dtype": "bfloat16"}}  # type: ignore[dict-item]
            asked |= {"environment": {"VLLM_PLUGINS": ""}}  # type: ignore[dict-item]
            parent.stdin.write(json.dumps(asked) + "\n")
            parent.stdin.flush()
            return int(parent.stdout.readline()), (folder / "log").read_text()

        yield ask
        parent.stdin.close()


def exported(folder: Path, target: str, model: str, settings: tuple[str, ...]) -> Path:
    source = pico.save_pico(model, folder / "model", dtype=torch.bfloat16, changes=HEADS)
    api.quantize(job(source, Setup("int8", settings), folder / "packed"))
    convert.export(folder / "packed", target, folder / "exported")
    return folder / "exported"


@pytest.mark.parametrize(("target", "model", "settings"), READ)
def test_vllm_reads_the_export(
    target: str, model: str, settings: tuple[str, ...], served: Served, tmp_path: Path
) -> None:
    directory = exported(tmp_path, target, model, settings)
    code, log = served(directory, tmp_path)
    assert code == 0, log[-4000:]
    answers = json.loads((tmp_path / "out.json").read_text())
    error = max(errors_of(tmp_path / "packed", answers, is_greedy=False))
    print(f"{target} {settings}: {error:.4f} nats")
    assert error < TOLERANCE


@pytest.mark.parametrize(("target", "model", "settings", "reason"), REFUSED)
def test_vllm_refuses_what_it_has_no_kernels_for(
    target: str, model: str, settings: tuple[str, ...], reason: str, served: Served, tmp_path: Path
) -> None:
    code, log = served(exported(tmp_path, target, model, settings), tmp_path)
    assert code != 0 and reason in log, log[-4000:]
