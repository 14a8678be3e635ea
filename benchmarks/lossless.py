"""Measure what lossless storage costs: decoding beside a copy, products beside bfloat16, loading beside the plain file.

    python benchmarks/lossless.py                                    # decoding and products of random weights
    python benchmarks/lossless.py --load PLAIN LOSSLESS [LOSSLESS ...]  # loading of checkpoints

One thread, processor time, candidates in turns; medians and minima of nine turns. Figures are ratios: what a copy of
the bfloat16 weight, F.linear with it, or loading the plain checkpoint takes is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).parents[1])]

from compress.formats import exponents  # noqa: E402
from compress.kernels.cpu import exponents as kernels  # noqa: E402
from compress.kernels.loops import huffman, rans  # noqa: E402
from compress.numerics import rans as plain_rans  # noqa: E402

TURNS = 9
SHAPES = ((4096, 4096), (14336, 4096), (1536, 576))
BATCHES = (1, 2, 4, 8)
COPIES = 16  # of a small weight, so that it is not always in the nearest cache
SMALL = 1 << 21  # weights


def seconds(ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The processor time of each of these calls, in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, run in ways.items():
            start = time.thread_time()
            run()
            times[name].append(time.thread_time() - start)
    return times


def show(what: str, times: dict[str, list[float]], one: str, nbytes: int = 0) -> None:
    """Print medians and minima as multiples of those of `one`; with `nbytes` also what they come to in a second."""
    parts = []
    for name, each in times.items():
        rate = f", {nbytes / median(each) / 1e9:.2f} GB/s" if nbytes else ""
        parts.append(f"{name} {median(each) / median(times[one]):.2f} ({min(each) / min(times[one]):.2f}{rate})")
    print(f"{what}: " + "; ".join(parts), flush=True)


def measure_weight(shape: tuple[int, int]) -> None:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    stored = {coding: exponents.pack(weight, coding, huffman.encode) for coding in ("huffman", "ranked")}
    bits = {c: 8 * sum(t.nbytes for t in tensors.values()) / weight.numel() for c, (_, tensors) in stored.items()}
    prepared = {coding: kernels.prepare(tensors, params, shape) for coding, (params, tensors) in stored.items()}
    symbols = ((weight.view(torch.int16) >> 7) & 0xFF).to(torch.uint8)
    context = torch.zeros(1, dtype=torch.int64)
    freqs = plain_rans.frequencies(torch.bincount(symbols.flatten().int(), minlength=256)[None])
    streams = rans.encode(symbols, context, freqs)
    bits["rans"] = 8 + 16 * sum(map(len, streams)) / weight.numel()
    print(f"{shape[0]} x {shape[1]}, bits: " + ", ".join(f"{name} {each:.3f}" for name, each in bits.items()))
    copy = torch.empty_like(weight)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(weight)}
    for coding, kernel in prepared.items():
        assert kernel is not None, "nothing can be compiled here"
        assert torch.equal(kernel.decode(torch.bfloat16), weight)
        ways[coding] = lambda kernel=kernel: kernel.decode(torch.bfloat16)  # type: ignore[misc]
    ways["rans"] = lambda: rans.decode(streams, context, freqs, shape[1])
    show("  decode", seconds(ways), "copy", weight.nbytes)
    copies = [weight.clone() for _ in range(COPIES if weight.numel() < SMALL else 1)]
    ranked = [kernels.prepare(*reversed(stored["ranked"]), shape) for _ in copies]
    for batch in BATCHES:
        x = torch.randn(batch, shape[1]).bfloat16()
        times = seconds(
            {
                "F.linear": lambda x=x: [F.linear(x, each) for each in copies],  # type: ignore[misc]
                "ranked": lambda x=x: [each(x) for each in ranked if each is not None],  # type: ignore[misc]
            }
        )
        show(f"  product, {batch} rows", times, "F.linear")


def measure_loading(directories: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    import compress  # noqa: F401  # registers the format

    ways = {each: lambda each=each: AutoModelForCausalLM.from_pretrained(each) for each in directories}
    for load in ways.values():
        load()
    touched = {
        name: lambda load=load: [p.sum() for p in load().parameters()]  # files are read when they are used
        for name, load in ways.items()
    }
    show("load", seconds(ways), directories[0])
    show("load and read", seconds(touched), directories[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", nargs="+", metavar="DIRECTORY")
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.load:
        measure_loading(args.load)
        return
    for text in args.shapes:
        rows, columns = map(int, text.split("x"))
        measure_weight((rows, columns))


if __name__ == "__main__":
    main()
