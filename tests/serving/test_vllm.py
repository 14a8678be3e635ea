"""Packed checkpoints in vLLM give what they give in transformers. Runs where vLLM is: `make vllm`."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pico
import runs
from compress import api

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # vLLM's attention knows these
SMALL = (*runs.SMALL, "group_size=32")
PROMPTS = [[5, 9, 200, 31], list(range(60, 90)), [7]]
TOKENS = 12
FLIPPED = 0.02  # nats that an input makes which is rounded to the next code
MIXED = (  # of the linears of one fused layer: two formats, one not packed, one with a low-rank part
    *SMALL,
    "rules=[{match: '*.k_proj', bits: 2}, {match: '*.v_proj', keep: true}, {match: '*.up_proj', bits: 3}]",
)
Answers = list[dict[str, Any]]


@functools.cache
def parent() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, str(Path(__file__).with_name("engine.py"))]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def ask(**asked: Any) -> int:
    process = parent()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def served(directory: Path, folder: Path, lora: Path | None = None, **options: Any) -> Answers:
    """What vLLM generates, and what it logs as "log" beside it."""
    out, log = folder / "out.json", folder / "log"
    environment = options.pop("environment", {})
    adapter = None if lora is None else str(lora)
    asked = {"prompts": PROMPTS, "tokens": TOKENS, "options": options, "environment": environment, "lora": adapter}
    code = ask(model=str(directory), out=str(out), log=str(log), **asked)
    assert code == 0, log.read_text()[-6000:]
    return json.loads(out.read_text())


def refused(directory: Path, folder: Path, environment: dict[str, str] | None = None) -> str:
    """What vLLM says when it does not serve."""
    log = folder / "log"
    asked = {"prompts": PROMPTS, "tokens": 1, "options": {}, "environment": environment or {}}
    assert ask(model=str(directory), out=str(folder / "out.json"), log=str(log), **asked) == 1
    return log.read_text()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """packed(model, recipe, *overrides) -> a checkpoint, written once."""

    @functools.cache
    def directory(name: str, recipe: str, *overrides: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        model = pico.save_pico(name, folder / "model", changes={**HEADS, **changes})
        out = folder / "packed"
        api.quantize(runs.job(model, runs.Setup(recipe, overrides), out))
        return out

    return directory


@torch.no_grad()
def errors_of(directory: Path, answers: Answers, change: Callable[[Any], None] = lambda model: None) -> list[float]:
    """Errors of log probabilities, in float32; greedy tokens must be those of transformers."""
    from compress.model.load import load_model

    model = load_model(directory, dtype=torch.float32).eval()
    change(model)
    errors = []
    for ids, answer in zip(PROMPTS, answers, strict=True):
        whole = torch.tensor([ids + answer["ids"]])
        known = model(whole).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        assert known.argmax(-1).tolist() == answer["ids"]
        for row, told in zip(known, answer["logprobs"], strict=True):
            errors += [abs(float(row[int(token)]) - value) for token, value in told.items()]
    return errors


def check(directory: Path, answers: Answers, change: Callable[[Any], None] = lambda model: None) -> None:
    """Greedy tokens equal to those of transformers, log probabilities within 1e-5, all in float32."""
    assert max(errors_of(directory, answers, change)) < 1e-5


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
}


@pytest.mark.parametrize("case", CASES)
def test_same_as_transformers(case: str, packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES[case])
    check(directory, served(directory, tmp_path))
    assert "packed weights" in (tmp_path / "log").read_text()


def test_rounded_inputs_may_flip(packed: Callable[..., Path], tmp_path: Path) -> None:
    """Sums that differ in their last bit may round to another code: few do, and make no more than FLIPPED."""
    directory = packed("llama", "w4a8", *runs.SMALL)
    errors = errors_of(directory, served(directory, tmp_path))
    assert statistics.median(errors) < 1e-5 and max(errors) < FLIPPED


def test_compiled_by_vllm(packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES["int4"])
    check(directory, served(directory, tmp_path, enforce_eager=False))


def test_a_cache_recipe_is_said_not_to_be_applied(packed: Callable[..., Path], tmp_path: Path) -> None:
    """The weights are served; the reference generates without the cache of the recipe, too."""
    directory = packed("llama", "w4kv4", *runs.SMALL, "quantize.group_size=32")
    check(directory, served(directory, tmp_path))
    said = (tmp_path / "log").read_text()
    assert "kv_cache section is not applied" in said and "--kv-cache-dtype fp8" in said


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


def test_a_server_answers_eight_at_once(packed: Callable[..., Path], tmp_path: Path) -> None:
    directory, log = packed(*CASES["int4"]), tmp_path / "log"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ["--model", str(directory), "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    words += ["--port", str(port), "--served-model-name", "m"]
    number = ask(serve=words, log=str(log), environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})

    def complete(ids: list[int]) -> str:
        asked = {"model": "m", "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        address = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(address, json.dumps(asked).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)["choices"][0]["text"]

    try:
        wait_for(port, log)
        prompts = [[start, start + 1, start + 2] for start in range(40, 48)]
        alone = [complete(ids) for ids in prompts]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(complete, prompts)) == alone
    finally:
        os.killpg(number, signal.SIGTERM)


def wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-6000:])
