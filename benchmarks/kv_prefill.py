"""Measure what dropping tokens within the prompt's forward pass (LazyLLM) costs and saves, beside eviction after it.

    python benchmarks/kv_prefill.py MODEL TEXT [--windows 8] [--context 1024] [--only NAME ...] [--json FILE]

A window is a prompt of --context tokens and the 64 that follow, which are fed to the model behind it, in one step, or
token by token where dropped tokens may come back. KL is to the exact cache. Bytes are a token's, of those of the
prompt, as stored in bfloat16, hidden states that are kept beside the cache included. Time is CPU time of the prompt's
pass, by that of the pass that keeps all tokens right before it. Everything is float32, one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kv_prompt import nbytes_in_16_bits
from torch import Tensor

from compress.evaluate.reader import Execution, load_model
from compress.kv.cache import make_cache
from compress.kv.layer import KVCache
from compress.model.load import load_tokenizer

SCORED = 64
EXACT: dict[str, Any] = {"method": "identity", "sink": 4, "residual_length": 128}
KIVI: dict[str, Any] = {"method": "kivi", "bits": 4, "group_size": 32, "sink": 4, "residual_length": 128}


def lazy(keep: float, base: dict[str, Any] = EXACT, **settings: Any) -> dict[str, Any]:
    """Return a cache that drops tokens of the prompt."""
    return {**base, "evict": {"method": "lazyllm", "keep": keep, **settings}}


def evicts(method: str, keep: float, **settings: Any) -> dict[str, Any]:
    """Return a cache that evicts tokens after the prompt."""
    return {**EXACT, "evict": {"method": method, "keep": keep, **settings}}


EVERY = list(range(7))
ENTRIES: dict[str, dict[str, Any]] = {
    "lazyllm 0.9": lazy(0.9),
    "lazyllm 0.75": lazy(0.75),
    "lazyllm 0.5": lazy(0.5),
    "lazyllm 0.5, after 0": lazy(0.5, after=[0]),
    "lazyllm 0.5, after each": lazy(0.5, after=EVERY),
    "lazyllm 0.5, revive": lazy(0.5, revive=True),
    "lazyllm 0.9, last token": lazy(0.9, window=1),
    "lazyllm 0.75, last token": lazy(0.75, window=1),
    "lazyllm 0.5, last token": lazy(0.5, window=1),
    "lazyllm 0.5, last token, after 0": lazy(0.5, window=1, after=[0]),
    "lazyllm 0.5, last token, kivi 4 bits": lazy(0.5, KIVI, window=1),
    "lazyllm 0.5, last token, revive": lazy(0.5, window=1, revive=True),
    "snapkv 0.75": evicts("snapkv", 0.75, heads="shared"),
    "snapkv 0.5": evicts("snapkv", 0.5, heads="shared"),
    "expected 0.5": evicts("expected_attention", 0.5, heads="shared"),
    "knorm 0.5": evicts("knorm", 0.5, heads="shared"),
    "kivi 4 bits": KIVI,
}


def prefilled(model: Any, settings: dict[str, Any], prompt: Tensor) -> tuple[KVCache, float]:
    """Return the cache of a prompt [1, n], and the CPU seconds that it took."""
    cache = make_cache(model.config, settings)
    started = time.process_time()
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, time.process_time() - started


def following(model: Any, cache: KVCache, tokens: Tensor, one_by_one: bool) -> Tensor:
    """Return the log-probabilities of tokens [1, n] behind a prompt, float32 [n, vocab]."""
    parts = tokens.split(1, 1) if one_by_one else (tokens,)
    found = [model(part, past_key_values=cache, use_cache=True).logits[0, -part.shape[1] :] for part in parts]
    return torch.cat(found).float().log_softmax(-1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = load_model(Path(args.model).resolve(), Execution("float32", "cpu"))
    length = args.context + SCORED
    text = Path(args.text).read_text(encoding="utf-8")[: 16 * args.windows * length]
    tokens = torch.tensor(load_tokenizer(Path(args.model).resolve())(text)["input_ids"])
    rows = tokens[: len(tokens) // length * length].view(-1, length)[: args.windows]
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for number, row in enumerate(rows):
        prompt, after = row[None, : args.context], row[None, args.context :]
        cache, _ = prefilled(model, EXACT, prompt)
        base = following(model, cache, after, False)
        for name in args.only or ENTRIES:
            settings = ENTRIES[name]
            dense = prefilled(model, EXACT, prompt)[1]
            cache, took = prefilled(model, settings, prompt)
            size = nbytes_in_16_bits(cache) / args.context
            started = time.process_time()
            other = following(model, cache, after, settings.get("evict", {}).get("revive", False))
            decoding = time.process_time() - started
            kl = float((base.exp() * (base - other)).sum(-1).mean())
            found.setdefault(name, []).append((kl, size, took / dense, decoding))
        summary = {name: _summary(own) for name, own in found.items()}
        print(f"{number + 1} windows", json.dumps(summary), file=sys.stderr, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(summary, indent=1) + "\n")
    for name, each in summary.items():
        print(
            f"| {name} | {each['bytes_per_token']:.0f} | {each['kl']:.4f} ± {each['kl_standard_error']:.4f} "
            f"| {each['time']:.2f} |"
        )


def _summary(rows: list[tuple[float, float, float, float]]) -> dict[str, float]:
    kl, size, ratio, decoding = zip(*rows, strict=True)
    return {
        "kl": statistics.mean(kl),
        "kl_standard_error": statistics.stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan,
        "tokens": SCORED * len(kl),
        "bytes_per_token": statistics.mean(size),
        "time": statistics.median(ratio),
        "decoding_seconds": statistics.mean(decoding),
    }


if __name__ == "__main__":
    main()
