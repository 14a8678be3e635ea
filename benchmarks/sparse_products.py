"""Time products with sparse weights beside dense ones on a CPU: ratios to bfloat16, in one process, in turns.

    python benchmarks/sparse_products.py [--shapes 4096x4096 14336x4096] [--rows 1 4] [--turns 9] [--avx2]

One thread, processor time; weights are random, their masks too. `--avx2` plays a processor without AVX-512.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

from measure import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests/helpers/stored.py draws random weights
HEADER = "| weight | bits | rows | median | minimum |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "14336x4096"], metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4], help="of activations")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--avx2", action="store_true")
    chosen = parser.parse_args()
    if chosen.avx2:
        import avx2_only  # noqa: F401
    for text in chosen.shapes:
        outputs, inputs = map(int, text.split("x"))
        print(f"{text}\n\n{HEADER}\n{'|---' * 5}|")
        print("\n".join(time_products((outputs, inputs), chosen.rows, chosen.turns)), "\n")


def time_products(shape: tuple[int, int], counts: list[int], turns: int) -> Iterator[str]:
    """Yield a line for each weight and number of rows: times over that of the dense bfloat16 weight."""
    import torch

    from compress import formats
    from compress.formats import dense, sparse
    from compress.formats import int as int_format
    from compress.kernels import dispatch
    from helpers import stored

    def codes(bits: int, columns: int) -> int_format.Params:
        return int_format.params_for(bits, 128, True, columns)

    torch.set_num_threads(1)
    half = shape[1] // 2
    weights = {
        "bf16": ("dense", dense.Params()),
        "2:4 bf16": ("sparse", sparse.params_for(2, 4, dense.Params())),
        "64:128 bf16": ("sparse", sparse.params_for(64, 128, dense.Params())),
        **{f"int{bits}": ("int", codes(bits, shape[1])) for bits in (4, 3, 2)},
        **{f"2:4 int{bits}": ("sparse", sparse.params_for(2, 4, codes(bits, half))) for bits in (4, 8)},
        "64:128 int4": ("sparse", sparse.params_for(64, 128, codes(4, half))),
    }
    packed = {name: stored.random_weight(*weight, shape) for name, weight in weights.items()}
    x = torch.randn(max(counts), shape[1]).bfloat16()
    kernels = {name: dispatch.prepare(x, w.tensors, w.format, w.params, shape) for name, w in packed.items()}
    for count in counts:
        seconds: dict[str, list[float]] = {name: [] for name in kernels}
        for _ in range(turns):
            for name, kernel in kernels.items():
                assert kernel is not None
                began = time.thread_time()
                kernel(x[:count])
                seconds[name].append(time.thread_time() - began)
        for name, taken in seconds.items():
            bits = 8 * formats.nbytes(packed[name].stored, shape) / (shape[0] * shape[1])
            middle, least = (f(taken) / f(seconds["bf16"]) for f in (statistics.median, min))
            yield f"| {name} | {bits:.2f} | {count} | {middle:.2f} | {least:.2f} |"


if __name__ == "__main__":
    main()
