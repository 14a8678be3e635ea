"""Time products with 4 + 4 bits, whole and at the 4-bit level, beside weights of 8 and of 4 bits: one thread of a CPU.

    python benchmarks/nested_levels.py                # 4096 x 4096, bfloat16, 1 and 4 rows
    python benchmarks/nested_levels.py --rows 8

Weights are drawn at random. Several copies take turns, so that none stays in a cache; the kinds are timed in turn, and
the median of the ratios of neighbours is printed beside the median of times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from compress.formats import int as int_format
from compress.formats import levels, nested
from compress.kernels import dispatch
from compress.types import PackedWeight
from helpers.stored import random_weight

SIZE, COPIES, ROUNDS, GROUP = 4096, 6, 60, 128


def integers(bits: int, seed: int) -> PackedWeight:
    """Random integers with a scale for 128 columns."""
    return random_weight("int", int_format.params_for(bits, GROUP, True, SIZE), (SIZE, SIZE), seed)


def main() -> None:
    """Print microseconds of processor time of each kind, and times those of int4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4], help="rows of activations")
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    sums = [nested.join([integers(4, seed), integers(4, seed + COPIES)], (4, 8)) for seed in range(COPIES)]
    weights = {
        "int4": [integers(4, seed) for seed in range(COPIES)],
        "4 + 4 at 4": [levels.view(weight, 4) for weight in sums],
        "4 + 4": sums,
        "int8": [integers(8, seed) for seed in range(COPIES)],
    }
    for count in rows:
        x = torch.randn(count, SIZE).bfloat16()
        kernels = {
            name: [dispatch.prepare(x, w.tensors, w.format, w.params, w.shape) for w in each]
            for name, each in weights.items()
        }
        times: dict[str, list[float]] = {name: [] for name in kernels}
        for number in range(ROUNDS):
            for name, each in kernels.items():
                kernel = each[number % COPIES]
                assert kernel is not None
                begun = time.process_time()
                kernel(x)
                times[name].append(1e6 * (time.process_time() - begun))
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own[COPIES:], times["int4"][COPIES:], strict=True))
            print(f"{count} rows  {name:<11} {statistics.median(own[COPIES:]):8.0f} us  {ratio:5.2f} x int4")


if __name__ == "__main__":
    main()
