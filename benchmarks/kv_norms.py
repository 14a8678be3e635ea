"""Measure who needs the bits of a cache, keys or values: norms by layer, and splits of the same bytes side by side.

    python benchmarks/kv_norms.py norms MODEL --calib TEXT
    python benchmarks/kv_norms.py splits MODEL --calib TEXT --text TEXT [--context 1024] [--tokens 2048] [--needles 8]

`norms` prints the Frobenius norms of the weights that make keys and values, of keys and values by token, and the bits
that KV-AdaQuant gives. `splits` scores --tokens of text in windows of --context tokens through every cache (KL to the
exact cache, with its standard error over windows), and asks for five sentences in each of --needles prompts, which the
model reads once, exactly, and every cache is filled with. Everything is float32.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT))

CALIBRATION = (8, 512)  # samples and their length
EXACT_ENDS: dict[str, Any] = {"sink": 4, "residual_length": 32}
CODECS: dict[str, dict[str, Any]] = {
    "kivi": {"method": "kivi"},
    "kivi, both by token": {"method": "kivi", "axis": "token"},
    "pca": {"method": "pca"},
}
SPLITS = ((4, 2), (2, 4), (3, 3), (4, 4))  # bits of keys, of values
NORMS = {"method": "kv_adaquant", "bits": 3.0, "widths": (2, 3, 4, 6, 8)}
BY_TOKEN = {**NORMS, "axis": "token"}
RULES: dict[str, dict[str, Any]] = {
    "both by token, spectral of weights": {**BY_TOKEN, "norm": "spectral"},
    "both by token, Frobenius of weights": {**BY_TOKEN, "norm": "frobenius"},
    "both by token, Frobenius of cache": {**BY_TOKEN, "norm": "frobenius", "of": "cache"},
    "spectral of weights": {**NORMS, "norm": "spectral"},
}


def entries() -> dict[str, dict[str, Any]]:
    """Return the settings of all caches by name."""
    split = {
        f"{name}, K{k}V{v}": {**codec, **EXACT_ENDS, "keys": {"bits": k}, "values": {"bits": v}}
        for (name, codec), (k, v) in product(CODECS.items(), SPLITS)
    }
    return split | {name: {**rule, **EXACT_ENDS} for name, rule in RULES.items()}


def calibrated(model: Any, settings: dict[str, Any], samples: Tensor) -> dict[str, Tensor]:
    """Return the calibrated tensors of a cache; none where it needs none."""
    from compress.calib.kv import calibrate
    from compress.kv.cache import coded_layers
    from compress.kv.settings import cache_settings

    return calibrate(model, coded_layers(model.config, cache_settings(settings)), samples)[0]


def candidates(model: Any, names: list[str], samples: Tensor) -> list[Any]:
    """Return the caches to measure."""
    from compress.evaluate.reader import Candidate, readable
    from compress.kv.settings import cache_settings

    made = []
    for name in names:
        settings = entries()[name]
        static = calibrated(model, settings, samples)
        made.append(readable(model, Candidate(name, cache_settings(settings), static)))
    return made


def show_norms(model: Any, samples: Tensor) -> None:
    """Print the norms of all layers and the bits that the rules give."""
    static = {name: calibrated(model, {**rule, **EXACT_ENDS}, samples) for name, rule in RULES.items()}
    first = next(iter(static.values()))
    count = len({name.split(".")[1] for name in first})
    places = [(layer, kind) for layer in range(count) for kind in ("keys", "values")]
    norms = {place: first[f"layers.{place[0]}.{place[1]}.norms"].tolist() for place in places}
    print("| layer | W_K | W_V | K | V | " + " | ".join(f"bits, {name}" for name in static) + " |")
    for layer in range(count):
        keys, values = norms[layer, "keys"], norms[layer, "values"]
        bits = [
            " ".join(f"{int(own[f'layers.{layer}.{kind}.bits'])}" for kind in ("keys", "values"))
            for own in static.values()
        ]
        cells = [f"{keys[0]:.2f}", f"{values[0]:.2f}", f"{keys[2]:.2f}", f"{values[2]:.2f}", *bits]
        print(f"| {layer} | " + " | ".join(cells) + " |")
    for at, name in enumerate(("weights, Frobenius", "weights, spectral", "cache, Frobenius", "cache, spectral")):
        above = sum(norms[layer, "keys"][at] > norms[layer, "values"][at] for layer in range(count))
        ratio = math.exp(
            sum(math.log(norms[layer, "keys"][at] / norms[layer, "values"][at]) for layer in range(count)) / count
        )
        print(f"{name}: keys above values in {above} of {count} layers, {ratio:.2f} times (geometric mean)")


def needles(model: Any, tokenizer: Any, windows: Tensor, caches: list[Any]) -> list[Any]:
    """Return the scores of needles of each cache."""
    from kv_prompt import Prompt

    from compress.evaluate import cache_needles
    from compress.evaluate.items import encode_with

    planted = cache_needles.contexts(windows, encode_with(tokenizer), len(windows), caches, model.config)
    cells = torch.zeros(1 + len(caches), 2, len(planted), len(cache_needles.DEPTHS), dtype=torch.float64)
    for column, context in enumerate(planted):
        prompt = Prompt(model, context.prompt)
        cells[0, :, column] = cache_needles.ask(model, context, prompt.exact)
        for row, candidate in enumerate(caches, 1):
            cells[row, :, column] = cache_needles.ask(model, context, prompt.fill(candidate.cache(model.config)))
    return [cache_needles.score(cells[0], own) for own in cells[1:]]


@torch.no_grad()
def show_splits(args: argparse.Namespace, model: Any, tokenizer: Any, samples: Tensor) -> None:
    """Print a row for each cache."""
    from compress.evaluate.cache_scores import compare, exact_tokens

    tokens = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"])
    rows = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)
    caches = candidates(model, args.only or [*entries()], samples)
    count = args.tokens // args.context
    scored = rows[:: max(1, len(rows) // count)][:count]
    started = time.process_time()
    figures = compare(model, scored, caches, 1, lambda _: print(f"{time.process_time() - started:.0f} s", flush=True))
    first = min(args.context // 2, max(exact_tokens(each.codings(model.config)) for each in caches))
    asked = needles(model, tokenizer, rows[1 :: max(1, len(rows) // args.needles)][: args.needles], caches)
    print("| cache | KL | s.e. | tokens | same top-1 | needles | their nll |")
    for candidate, each, found in zip(caches, figures, asked, strict=True):
        kl = each[2, :, first:].mean(1)
        error = float(kl.std()) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan
        right = "" if found.right is None else f"{found.right * found.kept:.0f} of {found.kept}"
        more = "" if found.nll is None else f"{found.nll:+.3f}"
        same = float(each[3, :, first:].mean())
        scores = f"{float(kl.mean()):.5f} | {error:.5f} | {each[2, :, first:].numel()} | {same:.1%}"
        print(f"| {candidate.name} | {scores} | {right} | {more} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("norms", "splits"))
    parser.add_argument("model")
    parser.add_argument("--calib", required=True, help="text that caches are calibrated on")
    parser.add_argument("--text", help="text to score")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--needles", type=int, default=8)
    parser.add_argument("--only", nargs="+", help="names of caches; default: all")
    args = parser.parse_args()

    from compress.calib.data import token_windows
    from compress.evaluate.reader import Execution, load_model
    from compress.model import load as lm

    torch.set_num_threads(1)
    directory = Path(args.model).resolve()
    model, tokenizer = load_model(directory, Execution("float32", "cpu")), lm.load_tokenizer(directory)
    count, length = CALIBRATION
    samples, _ = token_windows(args.calib, tokenizer, length, model.config.vocab_size, document_tokens=count * length)
    if args.what == "norms":
        show_norms(model, samples[:count])
    else:
        show_splits(args, model, tokenizer, samples[:count])


if __name__ == "__main__":
    main()
