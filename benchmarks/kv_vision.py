"""Measure what is lost where vision tokens leave the cache of the model that small_vlm.py trains.

    python benchmarks/kv_vision.py models_out/small-vlm [--pictures 256 --seed 7] [--json FILE]

Three figures, each the share of right answer tokens, teacher forced: `cell`, one question whose one answer the prompt's
own pass gives; `row`, one question whose answer of six tokens is written behind the prompt (the last five read the
cache); `later`, a second question about another cell, asked behind the prompt of the first. Pictures have random cells,
or pairs of equal neighbours, so that half of the vision tokens say what the one before them said. Bytes are those of a
picture's prompt in 16 bits by those of the exact cache. One thread, float32.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import small_vlm as vlm
import torch
from kv_prompt import nbytes_in_16_bits
from torch import Tensor

from compress.evaluate.reader import Execution, load_model
from compress.kv.cache import make_cache
from compress.papers.evict import mustdrop

EXACT: dict[str, Any] = {"method": "identity", "sink": 0, "residual_length": 0}
SHARES = (0.5, 0.25, 0.125)
WITHOUT = "without the third stage, "


def evicts(method: str, **settings: Any) -> dict[str, Any]:
    """Return an exact cache with an `evict` section."""
    return {**EXACT, "evict": {"method": method, "recent": 2, **settings}}


def entries() -> dict[str, dict[str, Any]]:
    """Return the caches that are measured, by name."""
    found = {"whole": EXACT}
    for keep in SHARES:
        for choose in ("every", "last", "attention"):
            found[f"{choose} {keep}"] = evicts("vision", choose=choose, keep=keep)
        found[f"every, merged {keep}"] = evicts("vision", choose="every", keep=keep, merge=True)
        for after in (0, 1, 2):
            found[f"fastv after {after} {keep}"] = evicts("fastv", keep=keep, after=after)
        found[f"mustdrop {keep}"] = evicts("mustdrop", keep=keep, merge_after=0, after=2)
        found[f"mustdrop, two filters {keep}"] = evicts("mustdrop", keep=keep, merge_after=0, after=[1, 2])
        found[f"mustdrop, merging alone {keep}"] = evicts("mustdrop", keep=keep, merge_after=0, after=-1)
    for tau in (0.975, 0.9):
        probes = {"recent_probes": 2, "random_probes": 8, "low": 0}
        for prefill in ("important", "keys", "all"):
            found[f"zipvl {prefill} {tau}"] = evicts("zipvl", tau=tau, prefill=prefill, **probes)
    staged = {name: each for name, each in found.items() if name.startswith("mustdrop") and "alone" not in name}
    return {**found, **{WITHOUT + name: each for name, each in staged.items()}}


def paired(cells: Tensor) -> Tensor:
    """Return cells int64 [count, SIDE, SIDE] where every second one of a row is that before it."""
    return cells[:, :, ::2].repeat_interleave(2, 2)


@torch.no_grad()
def right(model: Any, settings: dict[str, Any], ids: Tensor, pixels: Tensor, answer: Tensor) -> tuple[Tensor, float]:
    """Return which answer tokens are right, bool [count, m], behind a prompt `ids` [count, n], and the prompt's bytes.

    The prompt goes in in one pass; the answer in one step behind it.
    """
    cache = make_cache(model.config, settings)
    first = model(input_ids=ids, pixel_values=pixels, past_key_values=cache, use_cache=True).logits[:, -1:]
    size = nbytes_in_16_bits(cache) / len(ids)
    logits = [first]
    for token in answer[:, :-1].unbind(1):
        logits.append(model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1).argmax(-1) == answer, size


def figures(model: Any, settings: dict[str, Any], cells: Tensor, pixels: Tensor, seed: int) -> dict[str, float]:
    """Return the shares of right tokens and the bytes of a prompt."""
    generator, image = torch.Generator().manual_seed(seed), vlm.vision_tokens(len(cells))
    question, answer = vlm.cell_questions(cells, generator)
    cell, _ = right(model, settings, torch.cat((image, question), 1), pixels, answer)
    second, later_answer = vlm.cell_questions(cells, generator)
    behind = torch.cat((answer, second, later_answer), 1)
    later, _ = right(model, settings, torch.cat((image, question), 1), pixels, behind)
    question, answer = vlm.row_questions(cells, generator)
    row, size = right(model, settings, torch.cat((image, question), 1), pixels, answer)
    shares = {"cell": cell, "row": row[:, 1:], "later": later[:, -1:]}
    return {**{name: float(x.float().mean()) for name, x in shares.items()}, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = load_model(args.model.resolve(), Execution("float32", "cpu"))
    generator = torch.Generator().manual_seed(args.seed)
    cells, _ = vlm.pictures(args.pictures, generator)
    kinds = {name: (x, vlm.pixels_of(x, generator)) for name, x in (("random", cells), ("paired", paired(cells)))}
    found = {}
    for name, settings in entries().items():
        is_two_stages = name.startswith(WITHOUT)
        with patch.object(mustdrop, "forgets", lambda *_: False) if is_two_stages else nullcontext():
            found[name] = {kind: figures(model, settings, *shown, args.seed) for kind, shown in kinds.items()}
        by_kind = " | ".join(
            " ".join(f"{each[key]:.3f}" for key in ("cell", "row", "later")) for each in found[name].values()
        )
        size = found[name]["random"]["bytes"] / found["whole"]["random"]["bytes"]
        print(f"| {name} | {size:.3f} | {by_kind} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
