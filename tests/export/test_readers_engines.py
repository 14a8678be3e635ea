"""Exports read by llama.cpp, mlx-lm and onnxruntime: skipped where these are not installed, run by `make exports`.

llama.cpp rounds the inputs of linears to 8 bits in blocks of 32: logits are compared within that, greedy text exactly.
MLX is told to compute in float32.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compress import api
from compress.export import convert
from compress.model.load import load_model, load_tokenizer
from helpers.engines import FOUR_BITS, k_quants, packed, token_ids, tokenizer
from helpers.gguf_models import MODELS
from helpers.pico import of_type, save, save_pico
from helpers.runs import SMALL, Setup, job

BOOKS = Path(__file__).parents[1] / "models" / "books-8m"
PROMPTS = (
    *("It was a dark and stormy night;", "She looked at him, and said that", "The capital of France is"),
    *("Once upon a time there was a", "He had no money, and", "In the morning the captain"),
)
TIE = 0.05  # the most likely token leads by less: rounding decides
EIGHT_BITS = 0.03  # error of logits, relative to their size: inputs of such narrow models rounded to 8 bits
LARGER_BLOCKS = 0.05  # the same where 256 inputs share a scale
HALF = 0.002  # that of a cache in float16
SINGLE = 1e-4  # that of computing in float32
ASYMMETRIC = ("bits=4", "group_size=32", "symmetric=false")
IN_LLAMA = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "phi3", "mistral")
IN_MLX = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "phi3")
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def reader(name: str) -> ModuleType:
    return pytest.importorskip(name, reason=f"{name} is not installed; `make exports` does")


def ours(model: PreTrainedModel, ids: torch.Tensor) -> NDArray[np.float32]:
    """Return our logits [tokens, vocabulary]."""
    with torch.no_grad():
        return model(ids).logits[0].float().numpy()


def error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the norm of the difference, relative to the expected logits."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def in_llama_cpp(checkpoint: Path, ids: torch.Tensor, cache: int | None = None) -> float:
    """Return the error of llama.cpp; cache: the type in which it stores keys and values, by its number."""
    llama_cpp = reader("llama_cpp")
    file = checkpoint.parent / "model.gguf"
    convert.export(checkpoint, "gguf", file)
    types = {} if cache is None else {"type_k": cache, "type_v": cache}
    llm = llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, logits_all=True, verbose=False, **types)
    llm.eval(ids[0].tolist())
    return error(np.array(llm.scores[: ids.shape[1]]), ours(load_model(checkpoint, "float32"), ids))


def in_mlx(checkpoint: Path, ids: torch.Tensor) -> float:
    mx, utils = reader("mlx.core"), reader("mlx_lm.utils")
    out = checkpoint.parent / "mlx"
    convert.export(checkpoint, "mlx", out, torch.float32)
    model, _ = utils.load_model(out)
    model.set_dtype(mx.float32)
    logits = np.array(model(mx.array(ids.numpy()))[0].astype(mx.float32))
    return error(logits, ours(load_model(checkpoint, "float32"), ids))


@pytest.mark.parametrize("name", IN_LLAMA)
def test_llama_cpp_computes_models_in_float32_the_same(name: str, tmp_path: Path) -> None:
    """Names, settings, rows and norms, without the rounding of inputs."""
    checkpoint = save_pico(name, tmp_path / "plain")
    tokenizer().save_pretrained(checkpoint)
    found = in_llama_cpp(checkpoint, token_ids())
    assert found < HALF, found


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_other_architectures_the_same(name: str, tmp_path: Path) -> None:
    """With keys and values in float32; it looks up gelu in a table of float16."""
    kind, settings = MODELS[name]
    checkpoint = save(of_type(kind, settings), tmp_path / "plain")
    tokenizer().save_pretrained(checkpoint)
    found = in_llama_cpp(checkpoint, token_ids(48), cache=0)
    assert found < HALF, found


@pytest.mark.parametrize("name", IN_LLAMA)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    found = in_llama_cpp(packed(name, tmp_path), token_ids())
    assert found < EIGHT_BITS, found


@pytest.mark.parametrize("settings", [ASYMMETRIC, ("bits=5", "group_size=64"), ("bits=8", "group_size=-1")])
def test_other_types_in_llama_cpp(settings: tuple[str, ...], tmp_path: Path) -> None:
    found = in_llama_cpp(packed("llama", tmp_path, settings), token_ids())
    assert found < EIGHT_BITS, found


def test_k_quants_in_llama_cpp(tmp_path: Path) -> None:
    """Linears of all types, Q2_K to Q6_K; their inputs are rounded in blocks of 256."""
    found = in_llama_cpp(k_quants(tmp_path), token_ids())
    assert found < LARGER_BLOCKS, found


def test_stretched_positions_in_llama_cpp(tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path, changes={"rope_parameters": STRETCHED})
    assert in_llama_cpp(checkpoint, token_ids(60)) < EIGHT_BITS


@pytest.mark.parametrize("name", IN_MLX)
def test_mlx_computes_the_same(name: str, tmp_path: Path) -> None:
    found = in_mlx(packed(name, tmp_path), token_ids())
    assert found < SINGLE, found


@pytest.mark.parametrize("kind", ["phi", "stablelm", "gemma3_text", "olmo3", "glm4"])
def test_settings_that_transformers_has_elsewhere(kind: str, tmp_path: Path) -> None:
    """Rotary positions: a share of a head, and other ones for layers that see a window."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
    windows = {"layer_types": layers, "sliding_window": 32} if kind in ("gemma3_text", "olmo3") else {}
    found = in_mlx(save(of_type(kind, {**sizes, **windows}), tmp_path / "plain"), token_ids(60))
    assert found < HALF, found


@pytest.mark.parametrize("settings", [ASYMMETRIC, ("bits=3", "group_size=64"), ("bits=8", "group_size=-1")])
def test_other_bits_in_mlx(settings: tuple[str, ...], tmp_path: Path) -> None:
    found = in_mlx(packed("llama", tmp_path, settings), token_ids())
    assert found < SINGLE, found


@pytest.mark.parametrize("rules", ["", "rules=[{match: '*down_proj', type: mxfp8}]"])
def test_mx_types_in_mlx(rules: str, tmp_path: Path) -> None:
    """One type for all, and a mixture by modules; MLX multiplies them in float32."""
    model = save_pico("llama", tmp_path / "model")
    tokenizer().save_pretrained(model)
    settings = (*SMALL, "activations=null", "incoherence=false", *([rules] if rules else []))
    api.quantize(job(model, Setup("mxfp4", settings), tmp_path / "packed"))
    found = in_mlx(tmp_path / "packed", token_ids())
    assert found < SINGLE, found


def test_stretched_positions_in_mlx(tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path, changes={"rope_parameters": STRETCHED})
    assert in_mlx(checkpoint, token_ids(60)) < SINGLE


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of 8M parameters in 4 bits."""
    folder = tmp_path_factory.mktemp("books")
    api.quantize(job(BOOKS, Setup("int8", FOUR_BITS), folder / "packed"))
    return folder / "packed"


def greedy(checkpoint: Path, prompt: str, count: int = 24) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt, and what our model writes after it up to the first tie."""
    model, ids = load_model(checkpoint, "float32"), load_tokenizer(checkpoint)(prompt, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    with torch.no_grad():
        best = model(written).logits[0, start - 1 : -1].topk(2).values
    ties = [*((best[:, 0] - best[:, 1]) < TIE).tolist(), True]
    return ids[0].tolist(), written[0, start:].tolist()[: ties.index(True)]


@pytest.mark.parametrize("setup", [None, Setup("q4_k", SMALL)], ids=["Q4_0", "Q4_K"])
def test_llama_cpp_writes_the_same_text(setup: Setup | None, books: Path, tmp_path: Path) -> None:
    """Its own tokenizer, too, gives the same tokens."""
    llama_cpp = reader("llama_cpp")
    if setup is not None:
        api.quantize(job(BOOKS, setup, tmp_path / "packed"))
        books = tmp_path / "packed"
    file = tmp_path / "model.gguf"
    convert.export(books, "gguf", file)
    llm = llama_cpp.Llama(str(file), n_ctx=128, n_threads=1, verbose=False)
    compared = 0
    for prompt in PROMPTS:
        ids, expected = greedy(books, prompt)
        assert llm.tokenize(prompt.encode(), add_bos=False) == ids
        tokens = llm.generate(ids, temp=0.0)
        assert [next(tokens) for _ in expected] == expected
        compared += len(expected)
    assert compared > 40, compared


def test_mlx_writes_the_same_text(books: Path) -> None:
    mlx_lm = reader("mlx_lm")
    out = books.parent / "mlx"
    convert.export(books, "mlx", out)
    model, words = mlx_lm.load(str(out))
    compared = 0
    for prompt in PROMPTS:
        ids, expected = greedy(books, prompt)
        written = mlx_lm.stream_generate(model, words, ids, max_tokens=max(1, len(expected)))
        assert [each.token for each in written][: len(expected)] == expected
        compared += len(expected)
    assert compared > 40, compared
