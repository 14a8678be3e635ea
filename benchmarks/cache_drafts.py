"""Measure drafts that read less of the cache: how often the target accepts them, and what a step takes.

    python benchmarks/cache_drafts.py accept MODEL --text TEXT [--contexts 512 2048 4096] [--tokens 96] [--only NAME ..]
    python benchmarks/cache_drafts.py time MODEL --text TEXT [--contexts 512 2048 4096] [--kv METHOD]
    python benchmarks/cache_drafts.py show

accept: the target reads a text; at each of --tokens places behind a context each draft says its law of the next token,
from the target's cache, as the first token of a round. Acceptance is 1 - TV(target, draft) at temperature 1; "same"
counts equal likeliest tokens. Two pieces of text for each context. bytes: keys and values that a drafted token reads,
of those that the target reads (means of chunks included, which one token of a round reads).
time: steps of target and drafts in turns, on one thread, medians of the thread's own seconds; a round drafts 4 tokens,
the check has 5. Rows go to benchmarks/results/cache_drafts.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result_file
import torch
from measure import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT))

FILE = ROOT / "benchmarks" / "results" / "cache_drafts.json"
PARTS = ("window=64", "window=256", "window=512", "retrieved=128", "retrieved=256", "retrieved=512")
PLANES = {"method": "quantspec", "sink": 4, "residual_length": 128}
LENGTH, ROUNDS = 4, 12
Row = dict[str, Any]


def loaded(path: Path, dtype: str) -> tuple[Any, Any]:
    """Return a model that runs passes by programs, and its tokenizer."""
    from compress.kv import generation, hooks
    from compress.model.load import load_model, load_tokenizer
    from compress.runtime.step import speed_up

    model = load_model(path, dtype=getattr(torch, dtype)).eval()
    speed_up(model)
    hooks.attach(model)
    generation.switch(model)
    return model, load_tokenizer(path)


def session_of(model: Any, ids: Tensor, kv: str) -> Any:
    """Return a session whose cache holds all tokens but the last."""
    from transformers import DynamicCache

    from compress.kv.cache import make_cache
    from compress.speculate.passes import Passes
    from compress.speculate.session import Session

    recipe = PLANES if kv == "quantspec" else {"method": kv, "sink": 4, "residual_length": 128}
    cache = DynamicCache(config=model.config) if kv == "plain" else make_cache(model.config, recipe, path="fused")
    for piece in ids[:, :-1].split(1024, 1):
        model(input_ids=piece, past_key_values=cache, logits_to_keep=1)
    return Session(Passes(model, cache, {"past_key_values": cache}), ids, [], False, None)


def built(session: Any, part: str) -> Any:
    """Return the part of the cache that a text names."""
    from compress.speculate import specification

    return specification.parse(part)[0].build(session).reductions[0]


def share_of_bytes(session: Any, part: str) -> float:
    """Return the keys and values that a draft reads in a later round, of those that the target reads."""
    held = session.cache.get_seq_length()
    name, _, count = part.partition("=")
    if name == "cache":
        total = session.cache.nbytes()
        lower = sum(
            store.fields[field].nbytes
            for layer in session.cache.layers
            for store in layer.stores.values()
            for field in store.codec.fields
            if field.startswith("lower")
        )
        return 1 - lower / (total.total - total.state)
    means = 0.5 / 8 / LENGTH if name == "retrieved" else 0.0
    return min(1.0, int(count) / held + means)


@torch.no_grad()
def accept(args: argparse.Namespace, model: Any, tokenizer: Any, kv: str, context: int) -> list[Row]:
    """Return a row for each part at one context."""
    text = tokenizer(args.text.read_text(), return_tensors="pt").input_ids
    parts = args.only or (["cache=upper"] if kv == "quantspec" else list(PARTS))
    seen: dict[str, list[tuple[float, float, bool]]] = {part: [] for part in parts}
    shares = dict.fromkeys(parts, 0.0)
    for piece in range(2):
        start = piece * (text.shape[1] // 2)
        ids = text[:, start : start + context + args.tokens]
        session = session_of(model, ids[:, : context + 1], kv)
        session.passes.begin()
        made = {part: built(session, part) for part in parts}
        for place in range(context, context + args.tokens):
            token, laws = int(ids[0, place]), {}
            for part, reduction in made.items():
                with reduction.reduce(session):
                    laws[part] = session.forward([token])[0].double().log_softmax(-1)
                    session.crop(1)
            target = session.forward([token])[0].double().log_softmax(-1)
            session.passes.end_round(0)
            for part, law in laws.items():
                overlap = float(torch.minimum(target.exp(), law.exp()).sum())
                loss = float((target.exp() * (target - law)).sum())
                seen[part].append((overlap, loss, bool(target.argmax() == law.argmax())))
        shares = {part: share_of_bytes(session, part) for part in parts}
    rows = []
    for part, each in seen.items():
        overlaps, losses, same = zip(*each, strict=True)
        error = statistics.stdev(overlaps) / len(each) ** 0.5
        figures = {"alpha": statistics.mean(overlaps), "alpha_se": error, "kl": statistics.mean(losses)}
        identity = {"what": "accept", "model": str(args.model.name), "kv": kv, "context": context, "part": part}
        rows.append({**identity, **figures, "same": statistics.mean(same), "bytes": shares[part], "tokens": len(each)})
    return rows


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of the thread."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


@torch.no_grad()
def measure_time(args: argparse.Namespace, model: Any, tokenizer: Any, kv: str, context: int) -> list[Row]:
    """Return a row for each part: milliseconds of a plain step, a check, a drafted token, and of catching up."""
    torch.set_num_threads(1)
    text = tokenizer(args.text.read_text(), return_tensors="pt").input_ids
    parts = args.only or (["cache=upper"] if kv == "quantspec" else ["window=256", "retrieved=256", "retrieved=512"])
    session = session_of(model, text[:, : context + 1], kv)
    session.passes.begin()
    made = {part: built(session, part) for part in parts}
    rest = text[0, context:].tolist()
    spent: dict[str, list[float]] = {}
    for round_ in range(ROUNDS):
        tokens = rest[round_ * (LENGTH + 2) :]
        spent.setdefault("step", []).append(timed(lambda t=tokens: session.forward(t[:1])))
        session.passes.end_round(0)
        for part, reduction in made.items():
            begun = time.thread_time()
            with reduction.reduce(session):
                spent.setdefault(f"{part} enter", []).append(time.thread_time() - begun)
                for place, token in enumerate(tokens[1 : LENGTH + 1]):
                    name = f"{part} first" if not place else f"{part} later"
                    spent.setdefault(name, []).append(timed(lambda t=token: session.forward([t])))
                session.crop(LENGTH)
        spent.setdefault("check", []).append(timed(lambda t=tokens: session.forward(t[1 : LENGTH + 2])))
        session.passes.end_round(0)
    middle = {name: 1000 * statistics.median(each[2:]) for name, each in spent.items()}
    rows = []
    for part in parts:
        whole = middle[f"{part} enter"] + middle[f"{part} first"] + (LENGTH - 1) * middle[f"{part} later"]
        identity = {"what": "time", "model": str(args.model.name), "kv": kv, "context": context, "part": part}
        ratios = {"c": whole / LENGTH / middle["step"], "v": middle["check"] / middle["step"]}
        steps = {name: middle[f"{part} {name}"] for name in ("enter", "first", "later")}
        rows.append(
            {**identity, "dtype": args.dtype, "step": middle["step"], "check": middle["check"], **steps, **ratios}
        )
    return rows


def show() -> None:
    """Print the rows as tables."""
    rows = result_file.read(FILE)
    print("| model | cache | context | part | bytes | alpha | KL | same | tokens |\n" + "|---" * 9 + "|")
    for row in (row for row in rows if row["what"] == "accept"):
        figures = (
            f"{row['bytes']:.3f} | {row['alpha']:.3f} +- {row['alpha_se']:.3f} | {row['kl']:.4f} | {row['same']:.3f}"
        )
        print(f"| {row['model']} | {row['kv']} | {row['context']} | {row['part']} | {figures} | {row['tokens']} |")
    print(
        "| model | cache | context | part | step ms | check of 5 | enter | first | later | c | v |\n"
        + "|---" * 11
        + "|"
    )
    for row in (row for row in rows if row["what"] == "time"):
        times = " | ".join(f"{row[name]:.1f}" for name in ("step", "check", "enter", "first", "later"))
        head = f"| {row['model']} {row['dtype']} | {row['kv']} | {row['context']} | {row['part']}"
        print(f"{head} | {times} | {row['c']:.2f} | {row['v']:.2f} |")


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accept", "time", "show"))
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--kv", nargs="+", default=["plain", "quantspec"], help="plain, or codecs with their defaults")
    parser.add_argument("--dtype", help="float32 for `accept`, bfloat16 for `time`")
    parser.add_argument("--only", nargs="+")
    args = parser.parse_args()
    if args.what == "show":
        show()
        return
    work = accept if args.what == "accept" else measure_time
    args.dtype = args.dtype or ("float32" if args.what == "accept" else "bfloat16")
    model, tokenizer = loaded(args.model, args.dtype)
    for context, kv in itertools.product(args.contexts, args.kv):
        for row in work(args, model, tokenizer, kv, context):
            print(row, flush=True)
            keys = ("what", "model", "kv", "context", "part")
            result_file.add(FILE, {key: row[key] for key in keys}, True, row["part"], lambda row=row: row)


if __name__ == "__main__":
    main()
