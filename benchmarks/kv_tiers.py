"""Measure ZipVL: the share of important tokens that each layer chooses, beside one fixed share of as many bytes.

    python benchmarks/kv_tiers.py MODEL TEXT [--windows 4 --context 2048 --scored 512] [--only NAME ...] [--json FILE]

A window is a prompt of --context tokens, in one pass, and the --scored ones that follow, which the model is given in
one step behind it. KL is to the exact cache. Bytes are a token's, of those of the prompt, as stored in bfloat16. `work`
is the pairs of a query and a key that the prompt's attention reads, probes included, as a share of those of a whole
prompt. "fixed" has in all layers the mean share that "adaptive" had on the same window. Everything is float32, one
thread.
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
from kv_prefill import following
from kv_prompt import nbytes_in_16_bits
from torch import Tensor

from compress.evaluate.reader import Execution, load_model
from compress.kv.cache import make_cache
from compress.model.load import load_tokenizer
from compress.papers.evict import zipvl

EXACT: dict[str, Any] = {"method": "identity", "sink": 4, "residual_length": 128}
CODED: dict[str, Any] = {"method": "lloyd", "norm_bits": 8, "sink": 4, "residual_length": 128}


def tiered(prefill: str, tau: float | None = 0.975, low: int = 2) -> dict[str, Any]:
    """Return a cache in tiers of 4 and `low` bits; tau None: of a share that is set later."""
    evict = {"method": "zipvl", "tau": tau, "low": low, "prefill": prefill}
    return {**CODED, "bits": 4, "evict": evict}


ENTRIES: dict[str, dict[str, Any]] = {  # a fixed share follows the entry whose share it has
    "4 bits": {**CODED, "bits": 4},
    "2 bits": {**CODED, "bits": 2},
    "whole prompt, adaptive 0.975": tiered("all"),
    "whole prompt, fixed": tiered("all", None),
    "whole prompt, adaptive 0.9": tiered("all", 0.9),
    "whole prompt, fixed 0.9": tiered("all", None),
    "important alone, adaptive 0.975": tiered("important"),
    "important alone, fixed": tiered("important", None),
    "important alone, adaptive 0.995": tiered("important", 0.995),
    "important keys, adaptive 0.975": tiered("keys"),
    "important keys, fixed": tiered("keys", None),
    "important keys, dropped": tiered("keys", low=0),
}


def shares_of(cache: Any) -> list[float]:
    """Return the share of important tokens of each layer, of the first sequence; none where no layer has judged."""
    return [layer.shares[0] for layer in cache.layers if getattr(layer, "shares", None)]


@torch.no_grad()
def measured(model: Any, prompt: Tensor, after: Tensor, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the figures of each entry for a prompt [1, n] and what follows it [1, m]."""
    cache, found, before = make_cache(model.config, EXACT), {}, [1.0]
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    base = following(model, cache, after, False)
    for name in names:
        settings = ENTRIES[name]
        if settings.get("evict", {}).get("tau", 1) is None:
            settings = {**settings, "evict": {**settings["evict"], "keep": statistics.mean(before)}}
        cache, started = make_cache(model.config, settings), time.process_time()
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        took, shares = time.process_time() - started, shares_of(cache)
        size = nbytes_in_16_bits(cache) / prompt.shape[1]
        other = following(model, cache, after, False)
        found[name] = {
            "kl": float((base.exp() * (base - other)).sum(-1).mean()),
            "bytes": size,
            "seconds": took,
            "shares": shares,
        }
        if shares:
            before, config, n = shares, zipvl.Config(prefill=settings["evict"]["prefill"]), prompt.shape[1]
            found[name]["work"] = statistics.mean(zipvl.attention_work(config, n, round(s * n)) for s in shares)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over windows, with the standard error of KL, and the mean share of each layer."""
    kl = [row["kl"] for row in rows]
    shares = [statistics.mean(layer) for layer in zip(*(row["shares"] for row in rows), strict=True)]
    return {
        "kl": statistics.mean(kl),
        "se": statistics.stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan,
        "bytes": statistics.mean(row["bytes"] for row in rows),
        "seconds": statistics.mean(row["seconds"] for row in rows),
        "work": statistics.mean(row.get("work", 1.0) for row in rows),
        "share": statistics.mean(shares) if shares else 1.0,
        "shares": [round(share, 3) for share in shares],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=list(ENTRIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = load_model(args.model.resolve(), Execution("float32", "cpu"))
    length = args.context + args.scored
    text = args.text.read_text(encoding="utf-8")[: 16 * args.windows * length]
    tokens = torch.tensor(load_tokenizer(args.model.resolve())(text)["input_ids"])
    rows = tokens[: len(tokens) // length * length].view(-1, length)[: args.windows]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts = row[None, : args.context], row[None, args.context :]
        for name, each in measured(model, *parts, args.only).items():
            found.setdefault(name, []).append(each)
        means = {name: summary(own) for name, own in found.items()}
        print(json.dumps(means), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(means, indent=1) + "\n")
    for name, each in means.items():
        print(
            f"| {name} | {each['share']:.3f} | {each['bytes']:.0f} | {each['work']:.2f} "
            f"| {each['kl']:.4f} ± {each['se']:.4f} |"
        )


if __name__ == "__main__":
    main()
