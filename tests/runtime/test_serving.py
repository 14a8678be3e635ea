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
    """Both caches, with left padding: from the kernels; a sequence does not depend on the others."""
    model, calls = load(checkpoint), []
    for module, name in ((dispatch, "decoded_product"), (formats, "decode_stored")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("a weight was decoded"))
    run = Product.__call__
    monkeypatch.setattr(Product, "__call__", lambda *args: calls.append(args) or run(*args))
    dynamic = written(model)
    assert len(calls) >= 2 * 14  # of the prompt, and of the first token: the others are decoded by a program
    assert dynamic.shape == (2, PROMPT.shape[1] + 6)
    static, known = written(model, cache_implementation="static"), PROMPT.shape[1] + 1
    assert static.shape == dynamic.shape and torch.equal(static[:, :known], dynamic[:, :known])  # then rounding differs
    with torch.no_grad():
        among = model(PROMPT, attention_mask=MASK).logits[1, -1].float()
        alone = model(PROMPT[1:, 2:]).logits[0, -1].float()
    assert (among - alone).norm() < 0.03 * alone.norm()  # padding moves the parts that attention sums


def test_logits_are_those_of_the_decoded_weights(checkpoint: Path) -> None:
    """To the rounding of bfloat16 activations."""
    kernels, decoded = load(checkpoint), load(checkpoint)
    decoded.dequantize()
    with torch.inference_mode():
        ours, plain = (m(PROMPT, attention_mask=MASK).logits[:, -1].float() for m in (kernels, decoded))
    assert (ours - plain).norm() < 0.02 * plain.norm()


def test_a_model_compiles_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is traced, rotations, attention of few tokens and plain linears are torch's own; all else is the same.

    A prompt of more tokens than are few gives the same bits.
    """
    monkeypatch.setattr(emitter, "widens", lambda dtype: False)  # else plain linears take any number of tokens
    model = compress.load(checkpoint, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(dispatch, "_hadamard", lambda x, stored: None)
    with torch.no_grad():
        for prompt in (PROMPT, PROMPT.repeat(1, 4)):
            traced, eager = (each(prompt, use_cache=False).logits for each in (compiled, model))
            assert (eager.float() - traced.float()).norm() <= 0.02 * traced.float().norm()
    assert torch.equal(eager, traced)
