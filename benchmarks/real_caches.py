"""Compare caches on a real model: the divergence of 64 tokens read through each cache behind the same prompts.

    python benchmarks/real_caches.py MODEL --calib TEXT --text TEXT --windows 1024,2048,4032 pca4 kv2 kv4

Each prompt is computed once; every cache is then given its exact keys and values, and reads them as codes for the 64
tokens that follow, 32 at a time. That is what `compress kv-bench` scores at the end of a window, for a small part of
its time: a model of 135M parameters takes minutes for a prompt of thousands of tokens on one core. Recipes are
calibrated on WINDOWS windows of LENGTH tokens, in a pass each. Numbers are float32; bytes are per token, exact tokens
counted in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from compress import recipe
from compress.calib.data import token_windows
from compress.calib.kv import calibrate
from compress.kv import hooks
from compress.kv.cache import coded_layers, make_cache
from compress.kv.settings import CacheSettings
from compress.model import load as lm

WINDOWS, LENGTH = 8, 1024  # of calibration text
SCORED, CHUNK = 64, 32  # tokens read through a cache, and how many at a time


def calibrated(model: Any, recipes: dict[str, CacheSettings], tokens: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return the static tensors of each recipe; tokens [windows, length]."""
    static: dict[str, dict[str, Tensor]] = {name: {} for name in recipes}
    for name, settings in recipes.items():
        if settings.needs():
            codings = coded_layers(model.config, settings)
            static[name], _ = calibrate(model, codings, tokens, batch=1, reading=settings.read)
    return static


@torch.no_grad()
def rows(model: Any, recipes: dict[str, CacheSettings], static: dict[str, dict[str, Tensor]], ids: Tensor) -> Iterator:
    """Yield (recipe, divergence of each scored token [SCORED], bytes a token, seconds of storing) for ids [n]."""
    prompt = len(ids) - SCORED
    exact = DynamicCache(config=model.config)
    model.model(ids[None, :prompt], past_key_values=exact, use_cache=True)
    stored = [(layer.keys.clone(), layer.values.clone()) for layer in exact.layers]
    expected = _through(model, ids, prompt, exact)
    positions = torch.arange(prompt)[None]
    for name, settings in recipes.items():
        cache = make_cache(model.config, settings, static[name], "decode")
        started = time.process_time()
        for layer, (keys, values) in zip(cache.layers, stored, strict=True):
            layer.turns = model.model.rotary_emb(keys, positions)
            layer.update(keys, values)
        seconds = time.process_time() - started
        found = _through(model, ids, prompt, cache)
        held = cache.nbytes()
        divergence = (expected.exp() * (expected - found)).sum(-1)
        yield name, divergence, (held.total - (held.sink + held.tail) / 2) / len(ids), seconds


def _through(model: Any, ids: Tensor, prompt: int, cache: Any) -> Tensor:
    """Return the log-probabilities float64 [SCORED, vocabulary] behind each of the last tokens."""
    parts = [
        model(ids[None, start : start + CHUNK], past_key_values=cache, use_cache=True).logits[0]
        for start in range(prompt, len(ids), CHUNK)
    ]
    return torch.cat(parts).double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", default="1024,1024,2048,2048,4032,4032", help="tokens of each prompt")
    asked = parser.parse_args()
    model, tokenizer = lm.load_model(asked.model, "float32", "cpu"), lm.load_tokenizer(asked.model)
    hooks.attach(model)
    recipes = {name: recipe.load(name).kv_cache for name in asked.recipes}
    vocabulary = model.config.vocab_size
    tokens, _ = token_windows(asked.calib, tokenizer, LENGTH, vocabulary, document_tokens=WINDOWS * LENGTH)
    static = calibrated(model, recipes, tokens[:WINDOWS])
    ids = tokenizer(Path(asked.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    lengths = [int(length) + SCORED for length in asked.windows.split(",")]
    for window, length in enumerate(lengths):
        start = window * (len(ids) - max(lengths)) // len(lengths)
        for name, divergence, nbytes, seconds in rows(model, recipes, static, ids[start : start + length]):
            found = {"recipe": name, "prompt": length - SCORED, "kl": float(divergence.mean()), "tokens": SCORED}
            print(json.dumps({**found, "bytes": round(nbytes, 1), "store_s": round(seconds, 3)}), flush=True)


if __name__ == "__main__":
    main()
