"""Measure every kind of cache on the same prompts: loss and retrieval against bytes a token.

    python benchmarks/kv_frontier.py MODEL --calib TEXT --text TEXT --context 2048 --windows 8 [--only NAME ...]
    python benchmarks/kv_frontier.py show --context 2048 [--of NAME]

A prompt of the text has a sentence to find again at each of five depths and a passage of 32 tokens at one depth. The
model reads it once, exactly. Every cache is filled with the keys and values that this gave, and then the same tokens
go through each: 64 tokens of text (KL to the exact cache), the passage again (nll of 24 tokens above the exact cache's,
after a cue of 8) and the five questions. All of them read the past as it is stored. Prompt, text, passage and questions
together are --context tokens. Numbers are float32; bytes are of one sequence after all of it, in 16 bits. `show` tells
calibrated tensors apart (static): many sequences share them.

Rows go to benchmarks/results/kv_frontier.json, a row for a window and a cache. Those that are there are not measured
again. What calibration gave is kept in --static DIR, if that is named.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import result_file
import torch
from measure import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT))

SCORED, CHUNK = 64, 32  # tokens of text behind the prompt, and how many at a time
PASSAGE, CUE = 32, 8
SPREAD = (0.1, 0.45, 0.8)  # where the passage stands, one after the other
COLUMNS = (
    "",
    "cache",
    "bytes a token",
    "static",
    "KL",
    "s.e.",
    "tokens",
    "same top-1",
    "passage",
    "needles",
    "their nll",
)
CALIBRATION = (8, 1024)  # samples and their length, at most what the model takes
EXACT_ENDS: dict[str, Any] = {"sink": 4, "residual_length": 128}
EXACT = {"method": "identity", **EXACT_ENDS}
KIVI = {"method": "kivi", "bits": 4, **EXACT_ENDS}
PCA = {"method": "pca", **EXACT_ENDS}
SNAP = {"method": "snapkv", "keep": 0.5}
EXPECTED = {"method": "expected_attention", "keep": 0.5}
RECIPES = (
    *("kv8", "kv4", "kv3", "kv2", "kv1.5", "kv1", "pca4", "kivi2", "zipkv", "gear4", "kvquant3", "rotatekv2", "squat2"),
    "kv4-half",
)
ENTRIES: dict[str, dict[str, Any]] = {
    "kivi3": {"method": "kivi", "bits": 3, **EXACT_ENDS},
    "pca 1 bit": {**PCA, "bits": 1.0},
    "commvq 2 bits": {"method": "commvq", "bits": 2.0, "tied": False, **EXACT_ENDS},
    "cskv 1/2, 4 bits": {"method": "cskv", "keep": 0.5, "bits": 4, "flush": 128, **EXACT_ENDS},
    "cskv 3/4, 4 bits": {"method": "cskv", "keep": 0.75, "bits": 4, "flush": 128, **EXACT_ENDS},
    "matryoshka 1/2": {"method": "matryoshka", "keep": 0.5, "flush": 128, **EXACT_ENDS},
    "matryoshka 3/4, 4 bits": {"method": "matryoshka", "keep": 0.75, "bits": 4, "flush": 128, **EXACT_ENDS},
    "half, knorm": {**EXACT, "evict": {"method": "knorm", "keep": 0.5}},
    "half, snapkv": {**EXACT, "evict": SNAP},
    "half, expected": {**EXACT, "evict": EXPECTED},
    "half, expected, critical": {**EXACT, "evict": {**EXPECTED, "critical": True}},
    "half, expected, ada, critical": {**EXACT, "evict": {**EXPECTED, "heads": "ada", "critical": True}},
    "half, d2o": {**EXACT, "evict": {"method": "d2o", "keep": 0.5}},
    "half, expected, ada, critical, kivi4": {**KIVI, "evict": {**EXPECTED, "heads": "ada", "critical": True}},
    "kv4, reads 1/16, double sparsity": {**KIVI, "read": {"method": "double_sparsity", "keep": 0.0625}},
    "kv4, reads 1/16, tidal": {**KIVI, "read": {"method": "tidal", "keep": 0.0625}},
    "kv4, reads 1/16, actqkv": {**KIVI, "read": {"method": "actqkv", "keep": 0.0625}},
    "kv4, reads values above 0.001": {**KIVI, "read": {"method": "selective_values", "eps": 0.001}},
}


def settings_of(name: str) -> Any:
    """Return the settings of a recipe's cache or of an entry."""
    from compress import recipe
    from compress.kv.settings import cache_settings

    return cache_settings(ENTRIES[name]) if name in ENTRIES else recipe.load(name).kv_cache


def candidate(model: Any, name: str, tokens: Tensor, kept: Path | None) -> Any:
    """Return a cache to measure, calibrated on tokens [samples, length] where it needs that, or as `kept` has it."""
    from safetensors.torch import load_file, save_file

    from compress.calib.kv import calibrate
    from compress.evaluate.reader import Candidate, readable
    from compress.kv.cache import coded_layers

    settings, static = settings_of(name), dict[str, Tensor]()
    if settings.needs() or (settings.read is not None and settings.read.method == "double_sparsity"):
        file = None if kept is None else kept / (name.replace("/", "_").replace(" ", "_") + ".safetensors")
        if file is not None and file.exists():
            static = load_file(file)
        else:
            static, facts = calibrate(model, coded_layers(model.config, settings), tokens, reading=settings.read)
            print(f"{name}: calibrated in {facts['seconds']} s", file=sys.stderr, flush=True)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                save_file({key: x.contiguous().clone() for key, x in static.items()}, file)
    return readable(model, Candidate(name, settings, static))


def planted(model: Any, tokenizer: Any, text: str, args: argparse.Namespace) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield a context of cache_needles, what follows it [1, SCORED], and its passage [1, PASSAGE]."""
    from compress.evaluate import cache_needles
    from compress.evaluate.reader import Candidate

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])

    tokens = torch.tensor(tokenizer(text)["input_ids"])
    rows = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)
    stride = len(rows) // (2 * args.windows)
    if not stride:
        raise SystemExit(f"{len(rows)} windows of {args.context} tokens are too few for {args.windows}; give more text")
    longest = [Candidate("", settings_of("kv4"), {})]  # sink, tail and group of all entries
    for index in range(args.windows):
        row, passage = rows[2 * index * stride], rows[(2 * index + 1) * stride][None, :PASSAGE]
        window, following = row[: -SCORED - PASSAGE].clone(), row[None, -SCORED:]
        at = int(SPREAD[index % len(SPREAD)] * len(window))
        window[at : at + PASSAGE] = passage
        contexts = cache_needles.contexts(window[None], encode, 1, longest, model.config)
        if not contexts:
            raise SystemExit(f"a context of {args.context} tokens has no room for needles; give a longer --context")
        yield contexts[0], following, passage


def read_through(model: Any, cache: Any, context: Any, following: Tensor, passage: Tensor) -> tuple[Tensor, Any, Any]:
    """Return log-probabilities behind the prompt [SCORED, vocabulary], nll of the passage, and needles [2, depths]."""
    from compress.evaluate import cache_needles

    def log_probs(tokens: Tensor) -> Tensor:
        parts = [
            model(input_ids=part, past_key_values=cache, use_cache=True).logits[0].float().log_softmax(-1)
            for part in tokens.split(CHUNK, 1)
        ]
        return torch.cat(parts)

    found = log_probs(following)
    target = passage[0, CUE:]
    nll = -log_probs(passage)[CUE - 1 : -1].gather(-1, target[:, None]).double().mean()
    return found, float(nll), cache_needles.ask(model, context, cache)


@torch.no_grad()
def measured(model: Any, prompt: Any, cache: Any, rest: tuple[Any, Tensor, Tensor], base: Any, static: int) -> Any:
    """Return the row of a cache for one window; base: what `read_through` gives for the exact cache."""
    from kv_prompt import nbytes_in_16_bits

    started = time.process_time()
    prompt.fill(cache)
    stored = time.process_time()
    log_q, nll, needles = read_through(model, cache, *rest)
    log_p, exact_nll, exact_needles = base
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).double()
    kept = exact_needles[1] > 0
    return {
        "nbytes": nbytes_in_16_bits(cache),
        "static": static,
        "kl": float(kl.mean()),
        "same_top1": float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()),
        "passage_nll": nll - exact_nll,
        "needles_found_exactly": int(kept.sum()),
        "needles_right": int(needles[1][kept].sum()),
        "needles_nll": float((needles[0] - exact_needles[0])[kept].sum()),
        "store_s": round(stored - started, 3),
        "read_s": round(time.process_time() - stored, 3),
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure all entries on all windows that the result file does not have yet."""
    from kv_prompt import Prompt

    from compress.calib.data import token_windows
    from compress.evaluate.reader import Execution, load_model
    from compress.model import load as lm
    from compress.model.architectures import max_positions

    torch.set_num_threads(args.threads)
    directory = Path(args.model).resolve()
    model, tokenizer = load_model(directory, Execution("float32", "cpu")), lm.load_tokenizer(directory)
    count, length = CALIBRATION
    length = min(length, max_positions(model.config) or length)
    samples, _ = token_windows(args.calib, tokenizer, length, model.config.vocab_size, document_tokens=count * length)
    shared = {"model": directory.name, "context": args.context}
    names = args.only or [*RECIPES, *ENTRIES]
    caches: dict[str, Any] = {}
    text = Path(args.text).read_text(encoding="utf-8")
    for window, (context, following, passage) in enumerate(planted(model, tokenizer, text, args)):
        asked = {name: {**shared, "window": window, "cache": name} for name in names}
        there = result_file.read(args.json)
        missing = {name: key for name, key in asked.items() if not any(key.items() <= row.items() for row in there)}
        if not missing:
            continue
        prompt = Prompt(model, context.prompt)
        base = read_through(model, prompt.exact, context, following, passage)

        def work(name: str, prompt: Any = prompt, rest: Any = (context, following, passage), base: Any = base) -> Any:
            try:
                if name not in caches:
                    made = candidate(model, name, samples[:count], args.static)
                    static = 0 if made.settings.evict else prompt.static(made.cache(model.config))
                    caches[name] = made, static
                made, static = caches[name]
                return measured(model, prompt, made.cache(model.config), rest, base, static)
            except (RuntimeError, ValueError) as error:
                raise SystemExit(str(error)) from None

        for name, key in missing.items():
            row = result_file.add(args.json, key, False, name, partial(work, name))
            print(json.dumps(row), file=sys.stderr, flush=True)


def means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one cache over its windows."""
    kl = torch.tensor([row["kl"] for row in rows], dtype=torch.float64)
    found, summed = sum(row["needles_found_exactly"] for row in rows), {}
    for key in ("nbytes", "passage_nll", "same_top1", "kl", "static"):
        summed[key] = sum(row[key] for row in rows) / len(rows)
    return {
        **summed,
        "cache": rows[0]["cache"],
        "kl_se": float(kl.std()) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan,
        "tokens": len(rows) * SCORED,
        "right": sum(row["needles_right"] for row in rows),
        "asked": found,
        "needles_nll": sum(row["needles_nll"] for row in rows) / max(1, found),
    }


def undominated(found: list[dict[str, Any]], nbytes: str) -> set[str]:
    """Return the names of caches than which no other has both fewer bytes and a smaller KL."""
    names, best = set(), math.inf
    for row in sorted(found, key=lambda row: (row[nbytes], row["kl"])):
        if row["kl"] < best:
            names.add(row["cache"])
            best = row["kl"]
    return names


def show(args: argparse.Namespace) -> None:
    """Print the means over windows, the smallest caches first.

    Caches that no other beats in bytes and KL are marked: 1 for one sequence, n for many that share what is static.
    """
    rows = [row for row in result_file.read(args.json) if row["context"] == args.context]
    models = dict.fromkeys(row["model"] for row in rows)
    for model in [args.of] if args.of else models:
        of_model = [row for row in rows if row["model"] == model]
        names = dict.fromkeys(row["cache"] for row in of_model)
        found = [means([row for row in of_model if row["cache"] == name]) for name in names]
        for row in found:
            row["one"] = row["nbytes"] + row["static"]
        one, many = undominated(found, "one"), undominated(found, "nbytes")
        cells = []
        for row in sorted(found, key=lambda row: row["nbytes"]):
            mark = ", ".join(sign for sign, of in (("1", one), ("n", many)) if row["cache"] in of)
            static = f"{row['static'] / args.context:,.0f}" if row["static"] else ""
            needles = f"{row['right']} of {row['asked']}", f"{row['needles_nll']:+.3f}"
            loss = f"{row['kl']:.5f}", f"{row['kl_se']:.5f}", f"{row['tokens']}", f"{row['same_top1']:.1%}"
            per_token = f"{row['nbytes'] / args.context:,.0f}", static
            cells.append((mark, row["cache"], *per_token, *loss, f"{row['passage_nll']:+.3f}", *needles))
        result_file.present(f"{model}, {args.context:,} tokens", COLUMNS, cells, ("", "cache"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or 'show'")
    parser.add_argument("--calib", help="text that caches are calibrated on")
    parser.add_argument("--text", help="text of the prompts")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--only", nargs="+", help="recipes and entries; default: all")
    parser.add_argument("--static", type=Path, help="directory for what calibration gave")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--of", metavar="NAME", help="the model to show; default: all")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/kv_frontier.json")
    args = parser.parse_args()
    if args.model == "show":
        show(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
