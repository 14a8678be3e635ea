"""Time packed tables of embeddings and packed heads beside plain ones, and 3-bit layers beside their padded layout.

    python benchmarks/tables.py [--device cuda] [--threads 1] [--parts lookup head tail] [--repeats 11]
    python benchmarks/tables.py show [--json FILE]

- lookup: rows of a packed table beside nn.Embedding in bfloat16;
- head: the product with a packed table for bfloat16 activations beside nn.Linear, all bfloat16 or all float32;
- tail: a 3-bit layer whose rows end in tiles of 32 columns beside one that is padded to whole tiles.

All weights are in the format `int`, with random codes, and so many copies of each that none is found in a cache. The
two of a row take turns; a ratio is the median over these pairs, times are medians. On a CPU times are those of the
processor, which other work on the machine changes less; on a GPU calls run in CUDA graphs. Rows go to
benchmarks/results/tables_<device>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests/helpers/stored.py draws random weights

PARTS = ("lookup", "head", "tail")
LOOKUPS = [((49152, 576), 8, -1), ((49152, 576), 4, 64), ((128256, 4096), 8, -1), ((128256, 4096), 4, 64)]
LOOKED_UP = (1, 32, 512)
HEADS = [(shape, bits, group) for shape in ((49152, 576), (128256, 2048)) for bits in (8, 4) for group in (-1, 64)]
TAILS = [((1536, 576), 3, 64), ((4864, 896), 3, 64), ((6912, 1152), 3, 64), ((2560, 960), 3, 64)]
BATCHES = (1, 16)
LOOKUPS_OF_A_SAMPLE = 8
HEADER = "| part | table | bits | group | tokens | type | us | plain us | x plain |"
Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One pair of calls, timed."""

    part: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    tokens: int
    dtype: str  # of the plain one
    seconds: float
    plain_s: float
    ratio: float  # plain over ours


def table(params: Any, shape: tuple[int, int], device: str) -> list[dict[str, Any]]:
    """Stored tensors of a random table, as many copies as exceed the caches together."""
    from compress.evaluate import speed
    from helpers import stored

    tensors = {name: t.to(device) for name, t in stored.random_weight("int", params, shape).tensors.items()}
    count = max(2, -(-speed.ROTATED_NBYTES[device] // sum(t.nbytes for t in tensors.values())))
    return [tensors, *({name: t.clone() for name, t in tensors.items()} for _ in range(count - 1))]


def layer(params: Any, tensors: dict[str, Any], shape: tuple[int, int]) -> Any:
    from compress.runtime.linear import PackedLinear
    from compress.types import PackedWeight, Stored

    return PackedLinear.from_packed(PackedWeight(Stored("int", params), tensors, shape))


def plain(shape: tuple[int, int], dtype: Any, device: str) -> list[Any]:
    from compress.evaluate import speed

    return [weight.to(dtype) for weight in speed.bfloat16_weights(shape, device)]


def paired(ours: list[Call], others: list[Call], device: str, repeats: int) -> tuple[float, float, float]:
    """Return the median seconds of a call of both kinds, and the median of their ratios."""
    from compress.evaluate import speed

    if device == "cuda":
        seconds, other_s = speed.in_turns([ours, others], device)
        return seconds, other_s, other_s / seconds
    found = []
    for _ in range(repeats + 1):
        both = []
        for calls in (ours, others):
            start = time.process_time()
            for call in calls:
                call()
            both.append((time.process_time() - start) / len(calls))
        found.append(both)
    found = found[1:]  # the first compiles and fills caches
    seconds, other_s = (statistics.median(times) for times in zip(*found, strict=True))
    return seconds, other_s, statistics.median(other / own for own, other in found)


def time_lookups(shape: tuple[int, int], bits: int, group: int, device: str, repeats: int) -> list[Row]:
    """Rows that are asked for at random lie anywhere in the table: one copy is enough."""
    import torch
    import torch.nn.functional as F

    from compress.formats import int as int_format
    from compress.kernels import dispatch

    params = int_format.params_for(bits, group, True, shape[1])
    tensors, plain_table = table(params, shape, device)[0], plain(shape, torch.bfloat16, device)[0]
    rows = []
    for tokens in LOOKED_UP:
        ids = [torch.randint(shape[0], (tokens,), device=device) for _ in range(LOOKUPS_OF_A_SAMPLE)]
        packed = [lambda i=i: dispatch.rows(i, tensors, "int", params, shape, torch.bfloat16) for i in ids]
        others = [lambda i=i: F.embedding(i, plain_table) for i in ids]
        figures = paired(packed, others, device, repeats)
        rows.append(Row("lookup", shape, bits, group, tokens, "bfloat16", *figures))
    return rows


def time_heads(shape: tuple[int, int], bits: int, group: int, device: str, repeats: int) -> list[Row]:
    import torch
    import torch.nn.functional as F

    from compress.formats import int as int_format

    params = int_format.params_for(bits, group, True, shape[1])
    heads = [layer(params, tensors, shape) for tensors in table(params, shape, device)]
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        weights = plain(shape, dtype, device)
        for tokens in BATCHES:
            x = torch.randn(tokens, shape[1], device=device).bfloat16()
            same = x.to(dtype)
            packed = [lambda head=head, x=x: head(x) for head in heads]
            others = [lambda weight=weight, x=same: F.linear(x, weight) for weight in weights]
            figures = paired(packed, others, device, repeats)
            rows.append(Row("head", shape, bits, group, tokens, str(dtype).removeprefix("torch."), *figures))
    return rows


def time_tails(shape: tuple[int, int], bits: int, group: int, device: str, repeats: int) -> list[Row]:
    """A layer in the layout that it gets beside the one with the fewest padded columns."""
    import torch

    from compress.formats import int as int_format

    narrow = int_format.params_for(bits, group, True, shape[1])
    whole = [int_format.Params(bits, group, True, words) for words in int_format.TILE_WORDS]
    padded = min(whole, key=lambda params: (int_format.padded_shape(params, shape)[1], -params.tile_words))
    kinds = [[layer(params, t, shape) for t in table(params, shape, device)] for params in (narrow, padded)]
    rows = []
    for tokens in BATCHES:
        x = torch.randn(tokens, shape[1], device=device).bfloat16()
        calls: list[list[Call]] = [[lambda module=module, x=x: module(x) for module in modules] for modules in kinds]
        rows.append(Row("tail", shape, bits, group, tokens, "bfloat16", *paired(*calls, device, repeats)))
    return rows


def line(row: dict[str, Any]) -> str:
    return (
        f"| {row['part']} | {row['shape'][0]} x {row['shape'][1]} | {row['bits']} | {row['group_size']} | "
        f"{row['tokens']} | {row['dtype']} | {row['seconds'] * 1e6:.0f} | {row['plain_s'] * 1e6:.0f} | "
        f"{row['ratio']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["run", "show"], default="run")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=11, help="pairs of a row, on a CPU")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/tables_<device>.json")
    args = parser.parse_args()
    if args.mode == "show":
        result_file.show_for_device("tables", args.json, HEADER, line)
        return
    import torch

    torch.set_num_threads(args.threads)
    measured: dict[str, tuple[Any, list[Any]]] = {
        "lookup": (time_lookups, LOOKUPS),
        "head": (time_heads, HEADS),
        "tail": (time_tails, TAILS),
    }
    facts = {"threads": args.threads, "torch": torch.__version__}
    rows = []
    for part in args.parts:
        measure_part, cases = measured[part]
        for case in cases:
            with torch.inference_mode():
                some = [asdict(row) for row in measure_part(*case, args.device, args.repeats)]
            print("\n".join(map(line, some)), flush=True)
            rows += some
            result_file.write_for_device("tables", args.device, args.json, facts, rows)


if __name__ == "__main__":
    main()
