"""Measure what reading a part of a key-value cache costs in quality, and what share of it is read.

    python benchmarks/kv_reading.py --model DIR --calib TEXT --text TEXT [--prompt 2048] [--tokens 512] [--windows 2]
                                    [--only NAME ...]
    python benchmarks/kv_reading.py show [--json FILE]

A prompt goes through the model once, which is dense; the tokens behind it are scored in chunks of 32, each query of
which reads the past as its method chooses. KL is to the exact cache of transformers, which goes through the same
chunks. All rows but `exact` store 4 bits (kivi). Shares of tokens and of bytes are those of the first two chunks, mean
over layers: bytes of keys and values that one-token steps read, with what the method reads of its own, over those that
dense reading reads. Rows go to benchmarks/results/kv_reading_cpu.json after each row.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT

sys.path.insert(0, str(ROOT))

CHUNK = 32  # tokens that are scored in one pass
SAMPLES = (2, 512)  # of calibration: windows and their length
COUNTED = 2  # chunks whose reading is counted
CODEC = {"method": "kivi", "bits": 4}
DOUBLE, TIDAL, ACTQKV, VALUES, QUEST = "double_sparsity", "tidal", "actqkv", "selective_values", "quest"
METHODS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    **{f"{DOUBLE} 1/{n}": {"method": DOUBLE, "keep": 1 / n} for n in (16, 8, 4, 32)},
    **{f"{TIDAL} 1/{n}": {"method": TIDAL, "keep": 1 / n} for n in (16, 8, 4, 32)},
    **{f"{ACTQKV} 1/{n}": {"method": ACTQKV, "keep": 1 / n} for n in (16, 8, 4, 32)},
    **{f"{VALUES} {eps:g}": {"method": VALUES, "eps": eps} for eps in (1e-4, 1e-3, 3e-3, 1e-2)},
    **{f"{QUEST} 1/{n}": {"method": QUEST, "keep": 1 / n} for n in (16, 4)},
    **{
        f"{ACTQKV} 1/{n}, form: published, window: {window}": {
            "method": ACTQKV,
            "keep": 1 / n,
            "form": "published",
            "window": window,
        }
        for n, window in ((16, 16), (16, 1), (4, 16), (4, 1))
    },
    f"{TIDAL} 1/16, heads: all": {"method": TIDAL, "keep": 1 / 16, "heads": "all"},
    f"{ACTQKV} 1/16, budget: equal": {"method": ACTQKV, "keep": 1 / 16, "budget": "equal"},
    f"{ACTQKV} 1/16, budget: equal, window: 1": {"method": ACTQKV, "keep": 1 / 16, "budget": "equal", "window": 1},
    f"{DOUBLE} 1/16, channels: 8": {"method": DOUBLE, "keep": 1 / 16, "channels": 8},
    f"{DOUBLE} 1/16, labels: codes": {"method": DOUBLE, "keep": 1 / 16, "labels": "codes"},
    f"{DOUBLE} 1/16, mean: scores": {"method": DOUBLE, "keep": 1 / 16, "mean": "scores"},
}
HEADER = "| reading | KL | tokens scored | same top 1 | keys read | values read | bytes read | seconds |"


@dataclass(frozen=True)
class Row:
    """One way of reading."""

    name: str
    kl: float  # nats a token, to the exact cache
    same_top1: float
    tokens: int  # scored
    keys: float  # share of stored tokens whose keys are read
    values: float  # the same of values
    bytes: float  # share of the bytes that dense reading reads
    seconds: float  # of scoring


def windows(directory: Path, text: Path, count: int, length: int) -> Any:
    from compress.calib.data import token_windows
    from compress.model import load as lm

    tokenizer = lm.load_tokenizer(directory)
    found, _ = token_windows(str(text), tokenizer, length, len(tokenizer), document_tokens=4 * count * length)
    if len(found) < count:
        raise SystemExit(f"{text} has {len(found)} windows of {length} tokens, {count} are needed")
    return found[:count]


def chunks(model: Any, cache: Any, tokens: Any, prompt: int) -> Iterator[Any]:
    """Yield log-probabilities [n, vocabulary] of each chunk behind the prompt."""
    for start in range(prompt, tokens.shape[1], CHUNK):
        part = tokens[:, start : start + CHUNK]
        yield model(input_ids=part, past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)


def count(cache: Any) -> None:
    """Begin to count what is read, or stop."""
    from compress.kv.sparse.reader import Tally

    for layer in cache.layers:
        if layer.chooses:
            layer.reader.tally = Tally()


def shares(cache: Any) -> list[tuple[float, float, float]]:
    """Return the shares of keys, values and bytes that each layer has read, and stop counting."""
    found = []
    for layer in cache.layers:
        if layer.chooses:
            tally, layer.reader.tally = layer.reader.tally, None
            found.append(
                (tally.keys / tally.stored, tally.values / tally.stored, (tally.nbytes + tally.extra) / tally.dense)
            )
    return found or [(1.0, 1.0, 1.0)]


def measure(model: Any, settings: Any, static: Any, caches: list[Any], exact: list[list[Any]], texts: Any) -> list[Any]:
    """Return KL and agreement of each token, and shares; `caches` hold the prompts, read densely."""
    from compress.kv.cache import make_cache

    kl, same, read = [], [], []
    for cache, plain, tokens in zip(caches, exact, texts, strict=True):
        own, prompt = make_cache(model.config, settings, static, "fused"), cache.get_seq_length()
        for layer, filled in zip(own.layers, copy.deepcopy(cache).layers, strict=True):
            layer.stores, layer.seen, layer.is_initialized = filled.stores, filled.seen, True
            if own.reading is not None:
                layer.reader = layer.make_reader()
        count(own)
        for index, (found, base) in enumerate(zip(chunks(model, own, tokens[None], prompt), plain, strict=True)):
            if index == COUNTED - 1:
                read += shares(own)
            kl.append((base.exp() * (base - found)).sum(-1))
            same.append((base.argmax(-1) == found.argmax(-1)).float())
    return [kl, same, read]


def run(args: argparse.Namespace) -> None:
    import torch
    from transformers import DynamicCache

    from compress.calib.kv import calibrate
    from compress.evaluate.reader import Execution, load_model
    from compress.kv.cache import coded_layers, make_cache
    from compress.kv.settings import cache_settings
    from compress.kv.static import head_shape

    torch.set_num_threads(args.threads)
    model = load_model(args.model, Execution("float32", "cpu"))
    texts = windows(args.model, args.text, args.windows, args.prompt + args.tokens)
    _, _, width = head_shape(model.config)
    ranked = cache_settings({**CODEC, "read": {"method": DOUBLE, "channels": width}})
    tokens = windows(args.model, args.calib, *SAMPLES)
    with torch.inference_mode():
        static, facts = calibrate(model, coded_layers(model.config, ranked), tokens, reading=ranked.read)
        print(f"calibrated in {facts['seconds']} s", flush=True)
        caches, exact = [], []
        for text in texts:
            plain, coded = DynamicCache(config=model.config), make_cache(model.config, CODEC, path="fused")
            model(input_ids=text[None, : args.prompt], past_key_values=plain, use_cache=True, logits_to_keep=1)
            for layer, own in zip(plain.layers, coded.layers, strict=True):
                own.update(layer.keys, layer.values)
                own.commit()
            caches.append(coded)
            exact.append(list(chunks(model, plain, text[None], args.prompt)))
        print("prompts are read", flush=True)
        rows = []
        for name in args.only or METHODS:
            read = METHODS[name]
            settings = cache_settings({**CODEC, **({} if read is None else {"read": read})})
            channels = getattr(settings.read.config, "channels", 0) if settings.read else 0
            own = {key: x[:, :channels].contiguous() for key, x in static.items()}
            start = time.monotonic()
            kl, same, shared = measure(model, settings, own, caches, exact, texts)
            seconds = time.monotonic() - start
            mean = [sum(column) / len(shared) for column in zip(*shared, strict=True)]
            whole = torch.cat(kl)
            rows.append(
                Row(name, float(whole.mean()), float(torch.cat(same).mean()), whole.numel(), *mean, round(seconds, 1))
            )
            print(line(asdict(rows[-1])), flush=True)
            facts = {
                "threads": args.threads,
                "torch": torch.__version__,
                "load_average": os.getloadavg(),
                "prompt": args.prompt,
                "windows": args.windows,
                "model": args.model.name,
            }
            result_file.write_for_device("kv_reading", "cpu", args.json, facts, [asdict(row) for row in rows])


def line(row: dict[str, Any]) -> str:
    return (
        f"| {row['name']} | {row['kl']:.5f} | {row['tokens']} | {row['same_top1']:.3f} | {row['keys']:.3f} | "
        f"{row['values']:.3f} | {row['bytes']:.3f} | {row['seconds']:.0f} |"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["run", "show"], default="run")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calib", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens that are read before those that are scored")
    parser.add_argument("--tokens", type=int, default=512, help="scored in each window")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=METHODS, help="default: all")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/kv_reading_cpu.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.mode == "show":
        result_file.show_for_device("kv_reading", args.json, HEADER, line)
    elif not (args.model and args.calib and args.text):
        raise SystemExit("name --model, --calib and --text")
    else:
        run(args)


if __name__ == "__main__":
    main()
