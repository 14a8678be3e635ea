"""Measure what bringing tokens ahead costs and finds: Double Sparsity with keys and values outside the fast memory.

    python benchmarks/kv_offload.py --model DIR --calib TEXT --text TEXT [--prompt 1024] [--tokens 64] [--windows 4]

A prompt goes through the model once, dense; the tokens behind it are fed one by one, and KL is to the exact cache of
transformers, which is fed the same ones. Tokens are stored as they are, in bfloat16. `foreseen` is the share of the
tokens of a query's own choice that the input of the layer in front had brought; `resident` the bytes that stay in fast
memory behind the last token, and `slow` those outside it, of the whole model. Random choice of a share k foresees k.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from measure import ROOT

sys.path.insert(0, str(ROOT))

STORE = {"method": "identity", "sink": 4, "residual_length": 32, "flush": 1}
PLAIN, OFFLOAD = "double_sparsity", "double_sparsity_offload"
KEEPS = (0.0625, 0.25)


def feed(model: Any, cache: Any, tokens: Any) -> Any:
    """Return log-probabilities [n, vocabulary] behind each of tokens [1, n], fed one by one."""
    import torch

    rows = [
        model(input_ids=tokens[:, n : n + 1], past_key_values=cache, use_cache=True).logits[0].float().log_softmax(-1)
        for n in range(tokens.shape[1])
    ]
    return torch.cat(rows)


def run(args: argparse.Namespace) -> None:
    """Print a row for each method and share."""
    import torch
    from kv_prompt import Prompt

    from compress.calib.data import token_windows
    from compress.calib.kv import calibrate
    from compress.evaluate.reader import Execution, load_model
    from compress.kv.cache import coded_layers, make_cache
    from compress.kv.settings import cache_settings
    from compress.kv.sparse.reader import Tally
    from compress.model import load as lm

    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model, Execution("bfloat16", "cpu")), lm.load_tokenizer(args.model)
    ranked = cache_settings({**STORE, "read": {"method": PLAIN}})
    calib, _ = token_windows(str(args.calib), tokenizer, 512, len(tokenizer), document_tokens=2048)
    length = args.prompt + args.tokens
    texts, _ = token_windows(
        str(args.text), tokenizer, length, len(tokenizer), document_tokens=2 * (args.first + args.windows) * length
    )
    rows: dict[str, list[Any]] = {}
    with torch.inference_mode():
        static, _ = calibrate(model, coded_layers(model.config, ranked), calib[:2], reading=ranked.read)
        for text in texts[args.first : args.first + args.windows]:
            prompt = Prompt(model, text[None, : args.prompt])
            following = text[None, args.prompt :]
            base = feed(model, prompt.exact, following)
            for keep in KEEPS:
                for method in (PLAIN, OFFLOAD):
                    settings = {**STORE, "read": {"method": method, "keep": keep}}
                    cache = prompt.fill(make_cache(model.config, settings, static, "fused"))
                    for layer in cache.layers:
                        layer.reader.tally = Tally()
                    found = feed(model, cache, following)
                    kl = (base.exp() * (base - found)).sum(-1)
                    readers = [layer.reader for layer in cache.layers]
                    wanted = sum(getattr(reader, "wanted", 0) for reader in readers)
                    foreseen = sum(getattr(reader, "foreseen", 0) for reader in readers)
                    nbytes = cache.nbytes().total
                    resident = sum(layer.resident_nbytes() for layer in cache.layers) if method == OFFLOAD else nbytes
                    row = (kl, foreseen / max(wanted, 1), resident, nbytes, [_share(reader) for reader in readers])
                    rows.setdefault(f"{method} {keep:g}", []).append(row)
            show(rows)


def show(rows: dict[str, list[Any]]) -> None:
    """Print what all windows so far say."""
    import torch

    for name, own in rows.items():
        kl = torch.cat([row[0] for row in own])
        error = float(kl.std() / len(kl) ** 0.5)
        share, resident, nbytes = (sum(row[i] for row in own) / len(own) for i in (1, 2, 3))
        kl_text = f"{float(kl.mean()):.4f} ± {error:.4f} | {len(kl)}"
        print(f"| {name} | {kl_text} | {share:.3f} | {resident / 1e6:.3f} MB | {nbytes / 1e6:.3f} MB |")
        by_layer = [sum(column) / len(column) for column in zip(*(row[4] for row in own), strict=True)]
        if share:
            print("  by layer " + " ".join(f"{x:.2f}" for x in by_layer), flush=True)


def _share(reader: Any) -> float:
    """Return the share of a layer's tokens that was foreseen."""
    return getattr(reader, "foreseen", 0) / max(getattr(reader, "wanted", 0), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="number of the first window")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
