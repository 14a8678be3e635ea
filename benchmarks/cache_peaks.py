"""Measure what a cache takes of a process, beside the bytes that `compress plan --serve` counts for it.

    OMP_NUM_THREADS=1 python benchmarks/cache_peaks.py ./model kv4 --text text.txt --sequences 4 --tokens 1536

The text is read in chunks of 128 tokens for each sequence, so that activations stay small. `none` is the exact cache of
transformers. Held bytes are those of the cache's own tensors at the end; the peak is that of the process while it
reads, over what it had before the first token. Run each cache in a process of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import DynamicCache

from compress import process_memory, recipe
from compress.calib.data import token_windows
from compress.evaluate.cache_candidates import candidates_of
from compress.evaluate.reader import Execution, Reader, fill, load_model
from compress.model import load as lm
from compress.progress import silent

CHUNK_TOKENS = 128


def held(cache: object) -> int:
    """Return the bytes of all tensors that a cache holds, each storage once."""
    storages: dict[int, int] = {}
    seen, waiting = set[int](), [cache]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif hasattr(each, "__dict__") and not isinstance(each, (type, torch.nn.Module)):
            waiting += vars(each).values()
    return sum(storages.values())


@torch.no_grad()
def main() -> None:
    """Read the text through one cache and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("cache", help="name of a recipe, or none")
    parser.add_argument("--text", required=True)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1536)
    asked = parser.parse_args()
    config = lm.load_config(asked.model)
    many = asked.sequences * asked.tokens
    tokens, _ = token_windows(asked.text, lm.load_tokenizer(asked.model), asked.tokens, config.vocab_size, many, "auto")
    model = load_model(asked.model, Execution("bfloat16"))
    cache: object = DynamicCache(config=model.config)
    if asked.cache != "none":
        settings = recipe.load(asked.cache).kv_cache
        assert settings is not None
        (candidate,) = candidates_of(model, asked.model, {asked.cache: settings}, None, silent)
        cache = Reader(model, candidate).new_cache()
    fill(model, tokens[:, :CHUNK_TOKENS], DynamicCache(config=model.config))  # buffers of the first pass
    before = process_memory.resident()
    process_memory.reset_peak()
    for start in range(0, asked.tokens, CHUNK_TOKENS):
        fill(model, tokens[:, : start + CHUNK_TOKENS], cache, start)
    peak = process_memory.measured_peak()
    row = {"cache": asked.cache, "tokens": many, "held": held(cache), "peak": peak, "before": before}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
