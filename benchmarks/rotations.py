"""Time the operations around a rotated weight: scales stored in place of signs beside signs alone.

    python benchmarks/rotations.py [--sizes 576 4096] [--rows 1 16 256] [--rounds 41]

A row is the Hadamard transform of one side with one diagonal, bfloat16, one thread. The diagonals take turns in each
round, and what is shown is the median of the ratios of a round: 1 is as fast as signs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from measure import ROOT

sys.path[:0] = [str(ROOT)]

NAMES = ("signs", "channel_scale16", "channel_scale8")
HEADER = "| size | rows | side | signs, us | channel_scale16 | channel_scale8 |\n|---|---|---|---|---|---|"
SECONDS = 2e-3  # of a measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[576, 1536, 4096, 14336])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    print(HEADER)
    for size in options.sizes:
        for rows in options.rows:
            for side in ("in", "out"):
                times = measure(calls(size, rows, side), options.rounds)
                ratios = [
                    statistics.median(a / b for a, b in zip(times[n], times["signs"], strict=True)) for n in NAMES
                ]
                shown = f"{1e6 * statistics.median(times['signs']):.1f} | {ratios[1]:.3f} | {ratios[2]:.3f}"
                print(f"| {size} | {rows} | {side} | {shown} |", flush=True)


def calls(size: int, rows: int, side: str) -> dict[str, Callable[[], object]]:
    """Return what is timed, by the diagonal's name."""
    import torch

    from compress.formats.transforms import pack_diagonal
    from compress.kernels import dispatch
    from compress.types import WeightTransforms

    torch.set_num_threads(1)
    x, scales = torch.randn(rows, size).bfloat16(), torch.randn(size)

    def call(name: str) -> Callable[[], object]:
        stored = {f"{side}_{name}": pack_diagonal(name, scales)}
        if side == "in":
            return lambda: dispatch.before(x, WeightTransforms((name, "hadamard")), stored)
        return lambda: dispatch.after(x, WeightTransforms((), ("hadamard", name)), stored)

    return {name: call(name) for name in NAMES}


def measure(by_name: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a call in each round."""
    for call in by_name.values():
        call()  # compiled
    count = max(1, int(SECONDS / seconds(by_name["signs"], 5)))
    times: dict[str, list[float]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, call in by_name.items():
            times[name].append(seconds(call, count))
    return times


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the processor time of a call."""
    begun = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begun) / count


if __name__ == "__main__":
    main()
