"""Packed checkpoints served by transformers' own generate, the kernels active: any cache, any batch, padded prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import compress
from compress import api, formats
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import emitter
from compress.kernels.cpu.small_matmul import Product
from helpers.pico import save_pico
from helpers.runs import GPTQ, Setup, job

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]

SETUPS = {
    "int": GPTQ,
    "trellis": Setup("vq2bit", ("state_bits=8", "calibration.num_samples=8", "calibration.seq_len=32")),
}
PROMPT = torch.randint(1, 256, (2, emitter.MOST // 2), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(PROMPT)
MASK[1, :2] = 0  # the second prompt is shorter: padded on the left


@pytest.fixture(scope="module", params=SETUPS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    api.quantize(job(save_pico("llama", directory / "source"), SETUPS[request.param], directory / "out"))
    return directory / "out"


def load(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()


def written(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(
        PROMPT, attention_mask=MASK, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **options
    )


def test_generate_with_kernels(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches, with left padding: the same tokens, from the kernels."""
    model, calls = load(checkpoint), []
    for module, name in ((dispatch, "decoded_product"), (formats, "decode_stored")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("a weight was decoded"))
    run = Product.__call__
    monkeypatch.setattr(Product, "__call__", lambda *args: calls.append(args) or run(*args))
    dynamic = written(model)
    assert len(calls) >= 6 * 14
    assert dynamic.shape == (2, PROMPT.shape[1] + 6)
    assert torch.equal(written(model, cache_implementation="static"), dynamic)
    alone = model.generate(PROMPT[1:, 2:], max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(alone[0, -6:], dynamic[1, -6:])


def test_logits_are_those_of_the_decoded_weights(checkpoint: Path) -> None:
    """To the rounding of bfloat16 activations."""
    kernels, decoded = load(checkpoint), load(checkpoint)
    decoded.dequantize()
    with torch.inference_mode():
        ours, plain = (m(PROMPT, attention_mask=MASK).logits[:, -1].float() for m in (kernels, decoded))
    assert (ours - plain).norm() < 0.02 * plain.norm()


def test_a_model_compiles_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is traced, rotations are torch's own; all else gives the same bits."""
    model = compress.load(checkpoint, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(PROMPT, use_cache=False).logits
        monkeypatch.setattr(dispatch, "_hadamard", lambda x, stored: None)
        assert torch.equal(model(PROMPT, use_cache=False).logits, found)
