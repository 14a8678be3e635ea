"""Measure how much attention tokens catch that one layer chose for the layers behind it, as TidalDecode does.

    python benchmarks/kv_handed_on.py --model DIR --text TEXT [--prompt 2048] [--keep 0.0625] [--windows 2]

For 32 queries of each window, at even distances in its second half, and each layer behind a layer that chooses: the
share of the attention of its query heads (softmax over the past) that falls on as many tokens as `keep` says, chosen

    own    by the query head itself in its own layer, the most there is
    code   by the query head of the same number in the layer that chooses, as the authors' code does
    heads  by the mean softmax of the query heads that share keys in that layer, as compress/papers/sparse/tidal.py does
    all    by the mean over all of its heads (`heads: all`)

Means over layers, heads and queries, with the standard error over windows and queries.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from measure import ROOT

sys.path.insert(0, str(ROOT))

QUERIES = 32


def attention_of(model: Any, tokens: Any) -> Any:
    """Return softmax attention [layers, queries, H, n] of the queries that are looked at; tokens int64 [1, n]."""
    import torch
    from kv_prompt import Prompt

    prompt, n = Prompt(model, tokens), tokens.shape[1]
    places = torch.linspace(n // 2, n - 1, QUERIES).long()
    layers = []
    for (_, query), (keys, _) in zip(prompt.calls, prompt.held, strict=True):
        groups = query.shape[1] // keys.shape[1]
        q, k = query[0, :, places].float(), keys[0].repeat_interleave(groups, 0).float()
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores.masked_fill_(torch.arange(n) > places[:, None], -torch.inf)
        layers.append(scores.softmax(-1).transpose(0, 1))
    return torch.stack(layers)


def caught(p: Any, scores: Any, keep: float) -> Any:
    """Return the share of attention p [queries, H, n] on the best tokens of scores of the same shape, [queries]."""
    count = int(keep * p.shape[-1])
    return p.gather(-1, scores.topk(count, -1).indices).sum(-1).mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--keep", type=float, default=0.0625)
    parser.add_argument("--windows", type=int, default=2)
    args = parser.parse_args()
    import torch

    from compress.calib.data import token_windows
    from compress.evaluate.reader import Execution, load_model
    from compress.model import load as lm
    from compress.papers.sparse.tidal import Config, choosing

    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model, Execution("bfloat16", "cpu")), lm.load_tokenizer(args.model)
    limit = 2 * args.windows * args.prompt
    texts, _ = token_windows(str(args.text), tokenizer, args.prompt, len(tokenizer), document_tokens=limit)
    choosers = choosing(Config(), model.config.num_hidden_layers)
    by_window: dict[tuple[str, int], list[Any]] = {}
    by_distance: dict[tuple[str, int], list[Any]] = {}
    with torch.inference_mode():
        for window, text in enumerate(texts[: args.windows]):
            p = attention_of(model, text[None])
            kv_heads = model.config.num_key_value_heads
            for index in range(choosers[0] + 1, len(p)):
                source = max(x for x in choosers if x <= index)
                if source == index:
                    continue
                shared = p[source].unflatten(1, (kv_heads, -1)).mean(2, keepdim=True)
                heads = shared.expand(-1, -1, p.shape[2] // kv_heads, -1).flatten(1, 2)
                of_all = p[source].mean(1, keepdim=True).expand_as(p[source])
                for name, scores in (("own", p[index]), ("code", p[source]), ("heads", heads), ("all", of_all)):
                    share = caught(p[index], scores, args.keep)
                    by_window.setdefault((name, window), []).append(share)
                    by_distance.setdefault((name, index - source), []).append(share)
    for name in ("own", "code", "heads", "all"):
        per_query = torch.cat([torch.stack(x).mean(0) for (own, _), x in by_window.items() if own == name])
        error = float(per_query.std() / len(per_query) ** 0.5)
        near = [float(torch.stack(x).mean()) for (own, _), x in sorted(by_distance.items()) if own == name]
        print(f"| {name} | {float(per_query.mean()):.3f} ± {error:.3f} | {' '.join(f'{x:.2f}' for x in near)} |")


if __name__ == "__main__":
    main()
