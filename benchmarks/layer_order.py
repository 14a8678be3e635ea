"""Lower whole blocks of a model in the orders of LIM and ZD, reversed and at random (arXiv 2406.17415).

    python benchmarks/layer_order.py MODEL --pair high8 low4 --pair high4 low2 --calib calib.txt --text held_out.txt

A pair names two checkpoints that `compress quantize` wrote of MODEL, at more and at fewer bits. Blocks are taken from
the second, those first that matter least, the rest and everything outside of blocks from the first, and each mixture
is scored against MODEL. So a block was quantized behind blocks of its own kind, not behind those of the mixture. A line
of JSON for each mixture, and the scores of the blocks in front.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calib.data import token_windows
from compress.evaluate import scores
from compress.evaluate.reader import Reader
from compress.model import load
from compress.model.skeleton import Skeleton
from compress.papers.allocate import block_scores
from compress.storage.checkpoint import open_checkpoint

SCORED = ("nll", "base_nll", "kl", "same_top1")


def block_orders(model: Path, calib: str, samples: int, seq_len: int, draws: int) -> dict[str, list[int]]:
    """Return orders of the blocks by name, those first that are to be lowered first; print the scores."""
    tokenizer, config = load.load_tokenizer(model), load.load_config(model)
    windows, _ = token_windows(calib, tokenizer, seq_len, config.vocab_size, samples * seq_len)
    skeleton = Skeleton(open_checkpoint(model))
    lim, zd = block_scores.lim(skeleton, windows[:samples]), []
    for index in range(len(skeleton.blocks)):
        block = skeleton.load_block(index, torch.device("cpu"))
        zd.append(block_scores.zd(p.detach() for p in block.parameters() if p.dim() == 2))
        skeleton.free()
    print(json.dumps({"lim": [round(x, 5) for x in lim], "zd": [round(x, 5) for x in zd]}), flush=True)
    count = len(lim)
    orders = {
        "lim": sorted(range(count), key=lambda i: lim[i]),  # the smallest matters least
        "zd": sorted(range(count), key=lambda i: -zd[i]),  # the largest matters least
    }
    orders |= {f"{name} reversed": orders[name][::-1] for name in ("lim", "zd")}
    generator = torch.Generator().manual_seed(0)
    return orders | {f"random {i}": torch.randperm(count, generator=generator).tolist() for i in range(draws)}


def measure_pair(base: Any, pair: tuple[Any, Any], lowered: dict[str, list[int]], windows: Tensor) -> dict[str, Tensor]:
    """Return of each mixture its figures [4, windows, positions]; lowered: blocks taken from the second of a pair."""
    high, low = (list(model.model.layers) for model in pair)
    columns: dict[str, list[Tensor]] = {name: [] for name in lowered}
    model, reader, original = pair[0], Reader(pair[0]), Reader(base)
    for window in windows.split(2):
        expected = original.predictions(window)
        for name, blocks in lowered.items():
            for index in range(len(high)):
                model.model.layers[index] = low[index] if index in blocks else high[index]
            targets = window[:, 1:].flatten()
            figures = scores.score([reader.predictions(window), expected], targets)
            columns[name].append(figures.view(len(SCORED), len(window), -1))
    return {name: torch.cat(parts, 1) for name, parts in columns.items()}


def row(figures: Tensor) -> dict[str, float]:
    """Return the means of a mixture's figures, and the standard error of its KL over windows."""
    means = dict(zip(SCORED, figures.mean((1, 2)).tolist(), strict=True))
    of_windows = figures[2].mean(1)
    return {
        "kl": means["kl"],
        "se": float(of_windows.std()) / math.sqrt(len(of_windows)),
        "perplexity_ratio": math.exp(means["nll"] - means["base_nll"]),
        "same_top1": means["same_top1"],
        "tokens": figures[0].numel(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each mixture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pair", type=Path, nargs=2, action="append", required=True, metavar=("HIGH", "LOW"))
    parser.add_argument("--calib", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=4096)
    args = parser.parse_args(arguments)
    orders = block_orders(args.model, args.calib, args.samples, args.seq_len, args.draws)
    windows = scores.text_windows([args.model], args.text, args.seq_len, args.max_tokens).tokens
    base = load.load_model(args.model, "float32")
    for pair in args.pair:
        count = len(orders["lim"])
        lowered = {"none": list[int](), "all": list(range(count))}
        for share in args.shares:
            lowered |= {f"{name}, {share:.0%}": order[: round(share * count)] for name, order in orders.items()}
        opened = (load.load_model(pair[0], "float32"), load.load_model(pair[1], "float32"))
        for name, figures in measure_pair(base, opened, lowered, windows).items():
            head = {"pair": [path.name for path in pair], "lowered": name, "blocks": lowered[name]}
            print(json.dumps({**head, **row(figures)}), flush=True)


if __name__ == "__main__":
    main()
