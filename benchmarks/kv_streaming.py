"""Measure a streamed cache: time to the first token and loss on traces of bandwidth, chosen and at fixed levels.

    python benchmarks/kv_streaming.py MODEL TEXT [--context 2048] [--prompts 4] [--scored 512] [--deadline 6]

The model reads each prompt once; its cache is written at all levels. A network of every trace is simulated
(compress/papers/streaming/controller.py) with --computed and --decoded tokens a second, which are measured on the
first prompt if they are not given. What a simulation chose is loaded, and the tokens behind the prompt are scored
through it, teacher forced: KL to the cache that was never saved. Everything is float32; `raw` is the cache in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT))

MIB = 1 << 20
TRACES: dict[str, tuple[float, ...]] = {  # MiB a second, for each second
    "4 MiB/s": (4,),
    "2 MiB/s": (2,),
    "1 MiB/s": (1,),
    "4, then 0.75": (4, 0.75),
    "0.75, then 4": (0.75, 0.75, 4),
    "changing": (3, 1, 2, 0.5, 4, 1, 3, 0.5),
}


@torch.no_grad()
def score(model: Any, cache: Any, following: Tensor) -> Tensor:
    """Return the log-probabilities behind each token that follows, [n, vocabulary]."""
    parts = [model(input_ids=x, past_key_values=cache, use_cache=True).logits[0] for x in following.split(128, 1)]
    return torch.cat(parts).float().log_softmax(-1)


class Rows:
    """What was measured, by the name of a row."""

    def __init__(self) -> None:
        self.cells: dict[str, list[tuple[float, float, float, str]]] = {}

    def add(self, name: str, kl: float, seconds: float, nbytes: float, choices: tuple[str, ...]) -> None:
        short = "".join(choice[0].upper() if choice == "coarse" else choice[0] for choice in choices)
        self.cells.setdefault(name, []).append((kl, seconds, nbytes, short))

    def show(self, scored: int, deadline: float) -> None:
        """Print the means over prompts."""
        print("| | KL | s.e. | tokens | MiB | seconds | in time | choices |")
        for name, cells in self.cells.items():
            kl, seconds, nbytes = (torch.tensor([cell[at] for cell in cells], dtype=torch.float64) for at in range(3))
            error = float(kl.std()) / math.sqrt(len(cells)) if len(cells) > 1 else math.nan
            in_time = f"{int((seconds <= deadline).sum())} of {len(cells)}"
            figures = f"{float(kl.mean()):.5f} | {error:.5f} | {scored * len(cells)} | {float(nbytes.mean()) / MIB:.2f}"
            print(f"| {name} | {figures} | {float(seconds.mean()):.2f} | {in_time} | {cells[0][3]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--deadline", type=float, default=6.0)
    parser.add_argument("--computed", type=float, help="tokens a second")
    parser.add_argument("--decoded", type=float, help="tokens a second")
    args = parser.parse_args()

    from transformers import DynamicCache

    from compress.evaluate.reader import Execution, load_model
    from compress.model import load as lm
    from compress.papers.streaming.controller import TEXT, MachineSpeeds, Trace, always, choose, simulate
    from compress.papers.streaming.levels import LevelledCache, fetch_from, write_levels
    from compress.papers.streaming.stream import load_choices

    torch.set_num_threads(1)
    directory = Path(args.model).resolve()
    model, tokenizer = load_model(directory, Execution("float32", "cpu")), lm.load_tokenizer(directory)
    tokens = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"])
    length = args.context + args.scored
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    rows, speeds = Rows(), None
    for window in windows[:: max(1, len(windows) // args.prompts)][: args.prompts]:
        ids, following = window[None, : args.context], window[None, args.context :]
        cache, started = DynamicCache(config=model.config), time.process_time()
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        computed = args.context / (time.process_time() - started)
        with TemporaryDirectory() as folder:
            write_levels(cache, Path(folder) / "prompt", model, ids)
            raw = sum(2 * 2 * layer.keys.numel() for layer in cache.layers)
            base, known = score(model, cache, following), dict[tuple[str, ...], float]()
            source = LevelledCache(fetch_from(Path(folder) / "prompt"), model)
            sizes, started = source.sizes, time.process_time()
            load_choices(source, [*sizes.pieces][1:2] * source.pieces)
            decoded = args.context / (time.process_time() - started)
            if speeds is None:
                speeds = MachineSpeeds(args.computed or computed, args.decoded or decoded, 0.05)
                print(f"computed {speeds.computed:.0f}, decoded {speeds.decoded:.0f} tokens/s; {raw / MIB:.1f} MiB raw")
            policies = {level: always(level) for level in sizes.pieces} | {TEXT: always(TEXT), "chosen": choose}
            for trace_name, rates in TRACES.items():
                trace = Trace([MIB * rate for rate in rates])
                for name, policy in policies.items():
                    made = simulate(sizes, speeds, trace, args.deadline, policy)
                    if made.choices not in known:
                        loaded = score(model, load_choices(source, made.choices), following)
                        known[made.choices] = float((base.exp() * (base - loaded)).sum(-1).double().mean())
                    rows.add(f"{trace_name}: {name}", known[made.choices], made.first_token, made.nbytes, made.choices)
                rows.add(f"{trace_name}: raw", 0.0, trace.arrival(0.0, raw) + 0.05, raw, ())
        rows.show(args.scored, args.deadline)


if __name__ == "__main__":
    main()
