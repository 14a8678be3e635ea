"""Measure what is found in later turns of a conversation: eviction once behind the first, and choices made anew.

    python benchmarks/kv_turns.py MODEL TEXT [--context 1024] [--contexts 8] [--only NAME ...]

The first turn is text with a sentence at each of five depths ("The password of Oslo is amber feather."). Each later
turn asks for another one, and the model writes as many tokens as the answer has, greedily, one by one through the
cache. A cell counts where the exact cache answers it. Every cache reads the first turn itself, so that lines of prompts
count. Tokens of the past that a step reads, and what the first prompt read of its attention matrix, are means.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from measure import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT))

ENDS: dict[str, Any] = {"method": "identity", "sink": 4, "residual_length": 32}
ENTRIES: dict[str, dict[str, Any]] = {
    "exact": ENDS,
    **{f"snapkv, keep 1/{n}": {**ENDS, "evict": {"method": "snapkv", "keep": 1 / n}} for n in (4, 16)},
    **{
        f"loopserve, keep 1/{n}": {**ENDS, "read": {"method": "loopserve", "keep": 1 / n, "alpha": 1.0}}
        for n in (4, 16)
    },
    **{
        f"loopserve, keep 1/16, alpha {alpha}": {
            **ENDS,
            "read": {"method": "loopserve", "keep": 1 / 16, "alpha": alpha},
        }
        for alpha in (0.95, 0.8)
    },
}


@torch.no_grad()
def ask(model: Any, context: Any, cache: Any) -> tuple[list[bool], list[Tensor]]:
    """Return which answers are right, in the order of the turns, and the logits behind each question."""
    from compress.evaluate.reader import fill

    fill(model, context.prompt, cache)
    right, logits_of = [], []
    for index in context.order:
        tokens, count = context.questions[index]
        logits = model(input_ids=tokens[:, :-count], past_key_values=cache, use_cache=True).logits[:, -1]
        logits_of.append(logits[0].float().log_softmax(-1))
        written = []
        for _ in range(count):
            written.append(logits.argmax(-1, keepdim=True))
            logits = model(input_ids=written[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        right.append(torch.equal(torch.cat(written, 1), tokens[:, -count:]))
    return right, logits_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[*ENTRIES])
    args = parser.parse_args()

    from compress.evaluate import cache_needles
    from compress.evaluate.items import encode_with
    from compress.evaluate.reader import Candidate, Execution, load_model, readable
    from compress.kv.settings import cache_settings
    from compress.model import load as lm

    torch.set_num_threads(1)
    directory = Path(args.model).resolve()
    model, tokenizer = load_model(directory, Execution("float32", "cpu")), lm.load_tokenizer(directory)
    tokens = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"])
    rows = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)
    windows = rows[:: max(1, len(rows) // args.contexts)][: args.contexts]
    caches = [readable(model, Candidate(name, cache_settings(ENTRIES[name]), {}, path="fused")) for name in args.only]
    planted = cache_needles.contexts(windows, encode_with(tokenizer), len(windows), caches, model.config)
    found: dict[str, list[list[bool]]] = {name: [] for name in args.only}
    shares: dict[str, list[float]] = {name: [] for name in args.only}
    for context in planted:
        for candidate in caches:
            cache = candidate.cache(model.config)
            found[candidate.name].append(ask(model, context, cache)[0])
            readers = [getattr(layer, "reader", None) for layer in cache.layers]
            own = [r.prompt_share for r in readers if getattr(r, "prompt_share", None) is not None]
            shares[candidate.name] += own
        kept = torch.tensor(found["exact"])
        for name, cells in found.items():
            right = torch.tensor(cells) & kept
            by_turn = " ".join(f"{int(right[:, turn].sum())}" for turn in range(right.shape[1]))
            share = f"{sum(shares[name]) / len(shares[name]):.3f}" if shares[name] else ""
            print(f"| {name} | {int(right.sum())} of {int(kept.sum())} | by turn {by_turn} | {share} |", flush=True)
        print(f"{len(found['exact'])} contexts, exact by turn {kept.sum(0).tolist()}", flush=True)


if __name__ == "__main__":
    main()
