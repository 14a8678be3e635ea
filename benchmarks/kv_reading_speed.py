"""Time one step of attention that reads chosen tokens beside one that reads everything, in one process.

    python benchmarks/kv_reading_speed.py [--tokens 16384] [--threads 1] [--keep 0.0625] [--methods kivi lloyd]
                                          [--channels 16] [--labels store codes]
    python benchmarks/kv_reading_speed.py show [--json FILE]

The caches are those of benchmarks/kv_attention.py: one sequence, 32 query heads, 8 KV heads of 128 channels, 4 bits.
Each way is one call of fused attention for a new token that is not stored; they take turns. With one thread its own
seconds count, so that other processes do not. Label channels are those with the largest keys, as calibration on such
keys would find them. Rows go to benchmarks/results/kv_reading_speed_cpu.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import result_file
from kv_attention import HEADS, KV_HEADS, WIDTH, layer, step
from measure import ROOT

sys.path.insert(0, str(ROOT))

BITS = 4
METHODS = ("kivi", "lloyd")
WAYS = {"store": {}, "codes": {"labels": "codes"}, "store, mean: scores": {"mean": "scores"}}
HEADER = "| codec | labels | tokens | keep | dense us | chosen us | ratio | choosing us | tokens read | bytes read |"


@dataclass(frozen=True)
class Row:
    """One codec and one way to choose."""

    codec: str
    labels: str
    tokens: int
    keep: float
    dense_s: float
    chosen_s: float
    choosing_s: float  # of it
    ratio: float  # dense over chosen
    keys: float  # share of tokens that are read
    bytes: float  # share of bytes that are read, labels included


def reader(keys: Any, settings: dict[str, Any]) -> Any:
    """Return a reader for the layer, with the label channels of its keys."""
    from compress import plugins
    from compress.kv.codec import Spec

    plugin = plugins.load("read", "double_sparsity")
    config = plugin.Config(dense_layers=0, **settings)
    spec = Spec("read", 0, 1, KV_HEADS, WIDTH, HEADS // KV_HEADS, keys.dtype)
    rows = keys[0].transpose(0, 1)[:2048].float()
    samples = {"keys": rows, "queries": rows.repeat_interleave(HEADS // KV_HEADS, 1)}
    return plugin.build(config, spec, plugin.calibrate(config, spec, samples))


def choosing(found: Any, q: Any) -> Any:
    """Choose, and do nothing else."""
    from compress.kv.sparse.reader import QueryPiece, group_queries

    return found.reader.choose(QueryPiece(found, group_queries(q, KV_HEADS, WIDTH**-0.5), found.candidates(), None, 0))


def reading_layer(dense: Any, own: Any) -> Any:
    """Return a layer with the stores of another one, whose attention reads what a reader chooses."""
    from compress.kv.sparse.layer import ReadingLayer

    layer = ReadingLayer(0, dense.cache)
    layer.stores, layer.seen, layer.is_initialized, layer.reader = dense.stores, dense.seen, True, own
    return layer


def time_row(codec: str, labels: list[str], args: argparse.Namespace) -> list[Row]:
    import torch

    from compress.evaluate import speed
    from compress.kv.sparse.reader import Tally

    generator = torch.Generator().manual_seed(1)
    q, *new = (torch.randn(1, h, 1, WIDTH, generator=generator).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS))
    found, (keys, _) = layer(codec, BITS, args.tokens, "cpu", 0)
    readers = [reader(keys, {"keep": args.keep, "channels": args.channels, **WAYS[way]}) for way in labels]
    ways: list[list[Any]] = [[lambda: step(found, q, new)]]
    layers = [reading_layer(found, own) for own in readers]
    ways += [[lambda own=own: step(own, q, new)] for own in layers]
    ways += [[lambda own=own: choosing(own, q)] for own in layers]
    with torch.inference_mode():
        shares = []
        for own in layers:
            own.reader.tally = Tally()
            step(own, q, new)
            tally, own.reader.tally = own.reader.tally, None
            shares.append((tally.keys / tally.stored, (tally.nbytes + tally.extra) / tally.dense))
        dense, *times = speed.in_turns(ways, "cpu", time.thread_time if args.threads == 1 else time.perf_counter)
    return [
        Row(codec, way, args.tokens, args.keep, dense, chosen, alone, dense / chosen, *share)
        for way, chosen, alone, share in zip(labels, times[: len(readers)], times[len(readers) :], shares, strict=True)
    ]


def line(row: dict[str, Any]) -> str:
    times = [f"{row[name] * 1e6:.0f}" for name in ("dense_s", "chosen_s")]
    return (
        f"| {row['codec']} | {row['labels']} | {row['tokens']} | {row['keep']:g} | {times[0]} | {times[1]} | "
        f"{row['ratio']:.2f} | {row['choosing_s'] * 1e6:.0f} | {row['keys']:.3f} | {row['bytes']:.3f} |"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["run", "show"], default="run")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384])
    parser.add_argument("--keep", type=float, default=1 / 16)
    parser.add_argument("--channels", type=int, default=16, help="label channels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--labels", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/kv_reading_speed_cpu.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.mode == "show":
        result_file.show_for_device("kv_reading_speed", args.json, HEADER, line)
        return
    import torch

    torch.set_num_threads(args.threads)
    rows, lengths = [], args.tokens
    for tokens in lengths:
        for codec in args.methods:
            args.tokens = tokens
            labels = [way for way in args.labels if way != "codes" or codec == "kivi"]
            rows += time_row(codec, labels, args)
            for row in rows[-len(labels) :]:
                print(line(asdict(row)), flush=True)
    facts = {"threads": args.threads, "torch": torch.__version__, "load_average": os.getloadavg()}
    result_file.write_for_device("kv_reading_speed", "cpu", args.json, facts, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
