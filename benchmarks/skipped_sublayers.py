"""Compare choices of sublayers that a draft passes over, at equal shares: acceptance, divergence, bytes.

    python benchmarks/skipped_sublayers.py MODEL --text prose.txt --share 0.1 --share 0.2 --out prose.json

Each choice is made on the first windows of the text and measured on the others. CLaSp chooses anew for each window,
with the middle token's hidden states, and is measured on the rest of that window; `exit` runs the first blocks alone.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from compress.evaluate import drafts, scores
from compress.evaluate.reader import Reader
from compress.model import load
from compress.papers.speculate import clasp, draft_verify, swift
from compress.papers.speculate.set_search import SetSearch
from compress.runtime import bypass
from compress.runtime.bypass import Sublayer
from compress.speculate.skipping import even_set, inner_sublayers

SEQ_LEN = 256


def acceptance(reader: Reader, windows: Tensor, targets: list[Tensor], sublayers: frozenset[Sublayer]) -> float:
    """Return the mean overlap with the whole model's laws."""
    total = 0.0
    for window, target in zip(windows.split(1), targets, strict=True):
        with bypass.bypassed(reader.model, sublayers):
            draft = reader.predictions(window).float().softmax(-1)
        total += float(torch.minimum(target, draft).sum(-1).mean())
    return total / len(targets)


@torch.no_grad()
def clasp_figures(model: Any, windows: Tensor, blocks: int) -> dict[str, float]:
    """Return KL and acceptance behind the middle of each window, with the set that is chosen there."""
    rows, middle = list[tuple[float, float, float]](), SEQ_LEN // 2
    for window in windows.split(1):
        cache = DynamicCache(config=model.config)
        hidden = model(window[:, :middle], past_key_values=cache, output_hidden_states=True).hidden_states
        chosen = clasp.choose(model, cache, torch.stack([each[0, -1] for each in hidden[:-1]]), blocks)
        target = model(window, use_cache=False).logits[0, middle:].float().log_softmax(-1)
        with bypass.bypassed(model, chosen):
            rows.append(drafts.compare(target, model(window, use_cache=False).logits[0, middle:]))
    kl, alpha, same = torch.tensor(rows).mean(0).tolist()
    return {"kl": kl, "acceptance": alpha, "same_top1": same}


def main() -> None:
    """Print and keep a row for each choice and share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--share", type=float, action="append", required=True)
    parser.add_argument("--choice-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    wanted = asked.choice_tokens + asked.max_tokens
    windows = scores.text_windows([asked.model], asked.text, SEQ_LEN, wanted).tokens
    reader = Reader(load.load_model(asked.model, asked.dtype, "cpu"))
    model: Any = reader.model
    first, others = windows[: asked.choice_tokens // SEQ_LEN], windows[asked.choice_tokens // SEQ_LEN :]
    targets = [reader.predictions(window).float().softmax(-1) for window in first.split(1)]
    known = inner_sublayers(model)
    counts = sorted({2 * round(share * len(known) / 2) for share in asked.share})
    modules = bypass.modules_of(model)
    sizes = {each: sum(drafts.stored_nbytes(module) for module in modules[each]) for each in known}
    calls = 0

    def score(sublayers: frozenset[Sublayer]) -> float:
        nonlocal calls
        calls += 1
        return acceptance(reader, first, targets, sublayers)

    sets = {
        ("greedy", count): each for count, each in zip(counts, drafts.greedy(known, counts, score, sizes), strict=True)
    }
    greedy_calls = calls
    blocks = 1 + max(block for block, _ in bypass.sublayers_of(model))
    for count in counts:
        sets["even", count] = even_set(known, count)
        sets["exit", count] = bypass.early_exit(model, blocks - count // 2)
        search, settings = SetSearch(known, count), swift.Config(enough=1.0, trials=asked.trials)
        while not swift.is_done(search, settings):
            swift.step(search, settings, even_set(known, count), score)
        sets["swift", count] = search.best
        sets["draft_verify", count] = draft_verify.optimise(known, count, score, 0, asked.trials)
    measured = drafts.measure(reader, others, [(None, each) for each in sets.values()])
    rows = [{"by": by, **vars(row)} for (by, _), row in zip(sets, measured, strict=True)]
    rows += [{"by": "clasp", "count": count, **clasp_figures(model, others, count // 2)} for count in counts]
    slope = sum((1 - row["acceptance"]) * math.sqrt(row["kl"]) for row in rows) / sum(row["kl"] for row in rows)
    for row in sorted(rows, key=lambda row: (row["count"], -row["acceptance"])):
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    print({"fit": round(slope, 4), "greedy_calls": greedy_calls, "sublayers": len(known), "tokens": others.numel()})
    if asked.out:
        asked.out.write_text(json.dumps({"rows": rows, "slope": slope}, indent=1))


if __name__ == "__main__":
    main()
