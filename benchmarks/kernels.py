"""Check products with packed weights, and time them beside bfloat16.

    python benchmarks/kernels.py [--device cuda] [--threads 1] [--entries int4 vq2bit] [--shapes 4096x4096] [--batch 1]
    python benchmarks/kernels.py --interpret        # the Triton kernels without a GPU: right or not, no times
    python benchmarks/kernels.py show [--json FILE]

An entry is a recipe, or `name:key=value` with a setting changed, whose format and parameters a weight of each shape
gets, with random codes. First every kernel is compared with the decoded weight in float64, on new random inputs, with
uninitialized memory filled with NaN; one that is wrong ends the run. Then it is timed in turns with F.linear on
bfloat16 (compress/evaluate/speed.py): on a GPU in CUDA graphs, on one thread of a CPU in processor time, with weights
that are not in the cache. Rows go to benchmarks/results/kernels_<device>.json.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests/helpers/stored.py draws random weights

ENTRIES = [
    "int8",
    "int4",
    "int3",
    "int2",
    "w8a8-smooth",
    "gptvq2bit",
    "vptq2bit",
    "e8p2bit",
    "ternary",
    "ternary:packing=planar",
    "trellis2bit",
    "vq2bit",
    "trellis3bit",
    "trellis4bit",
]
SHAPES = ["4096x4096", "8192x8192", "14336x4096", "28672x8192", "6144x4096", "28672x4096"]  # the last two: qkv, gate_up
BATCHES = [1, 4, 8, 16, 64]
CHECKED_ROWS = 512  # of the weight that is compared with float64
HEADER = "| recipe | layer | batch | bpw | by | us | GB/s | of copy rate | x bfloat16 |"
TOLERANCE = 4e-3  # relative error of outputs in bfloat16, whose own rounding is 2e-3
INTERPRETED = (64, 512)  # shape
ROTATED = 1 << 28  # bytes of packed weights that calls go round on a GPU
MOST_COPIES = 256  # of a weight: small ones stay in a cache whatever is done


@dataclass(frozen=True)
class Row:
    """One product, timed."""

    entry: str
    shape: tuple[int, int]
    batch: int
    bpw: float
    kernel: bool  # else the weight is decoded
    seconds: float
    gb_per_s: float  # of stored bytes
    copy_share: float
    bfloat16_s: float
    ratio: float  # bfloat16 over ours


def stored_as(entry: str, shape: tuple[int, int]) -> tuple[str, Any]:
    """Format and parameters that a recipe gives a weight of this shape."""
    from compress import plugins, recipe

    name, overrides = entry.partition(":")[::2]
    scheme = recipe.load(name, [overrides] if overrides else []).quantize
    method = plugins.load("quant", scheme.method)
    return method.FORMAT, method.plan_params(scheme.config, shape)


def random_layer(entry: str, shape: tuple[int, int], device: str, seed: int = 0) -> Any:
    """A PackedLinear with random codes, without the operations that a recipe puts around it."""
    from compress import recipe
    from compress.runtime.linear import PackedLinear
    from helpers import stored

    format, params = stored_as(entry, shape)
    weight = stored.random_weight(format, params, shape, seed)
    activations = recipe.load(entry.partition(":")[0]).quantize.activations
    if activations is not None:
        weight = replace(weight, stored=replace(weight.stored, activations=activations))
    return PackedLinear.from_packed(weight).to(device)


def check(entry: str, shape: tuple[int, int], batch: int, device: str) -> float:
    """Relative error of a layer's outputs; SystemExit if it is too large."""
    import torch

    from compress.runtime import activation_quant

    layer = random_layer(entry, shape, device, seed=batch)
    x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(batch)).bfloat16().to(device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialized memory
    with torch.inference_mode():
        y = product(layer, x)
    torch.use_deterministic_algorithms(False)
    if layer.activations is not None:  # what the inputs become is part of the recipe
        x, scale = activation_quant.quantize(x, layer.activations)
        x = x.double() * scale.double()
    exact = x.double() @ layer.dequantize(torch.float64).T
    error = ((y.double() - exact).norm() / exact.norm()).item()
    if not error < TOLERANCE:
        raise SystemExit(f"{entry} {shape} batch {batch}: wrong, relative error {error:.2e}")
    return error


def product(layer: Any, x: Any) -> Any:
    """The layer's own forward; in the interpreter the Triton kernel, which a CPU would not take."""
    if not os.environ.get("TRITON_INTERPRET"):
        return layer(x)
    kernel = importlib.import_module(f"compress.kernels.triton.{layer.format}")
    return kernel.prepare(layer.tensors, layer.params, layer.shape)(x)


def path(entry: str, shape: tuple[int, int], batch: int, device: str) -> str:
    """What multiplies: "kernel", "decode", or, in the interpreter, "no kernel"."""
    import torch

    from compress.kernels import dispatch

    format, params = stored_as(entry, shape)
    x = torch.empty(batch, shape[1], dtype=torch.bfloat16, device=device)
    if not os.environ.get("TRITON_INTERPRET"):
        return "kernel" if dispatch.taken(format, params, shape, x) else "decode"
    kernel = dispatch.supported("cuda", format, params, shape)
    return "kernel" if kernel is not None and dispatch.suits(kernel, x) else "no kernel"


def time_rows(entry: str, shape: tuple[int, int], batches: list[int], device: str, copied: float) -> list[Row]:
    import torch
    import torch.nn.functional as F

    from compress.evaluate import speed

    first = random_layer(entry, shape, device)
    weight = first.packed()
    wanted = -(-(ROTATED if device == "cuda" else speed.ROTATED_NBYTES["cpu"]) // weight.nbytes)
    copies = max(2, min(MOST_COPIES, wanted))
    layers = [first, *(copy.deepcopy(first) for _ in range(1, copies))]
    plain = speed.bfloat16_weights(shape, device)
    rows = []
    for batch in batches:
        x = torch.randn(batch, shape[1], device=device).bfloat16()
        with torch.inference_mode():
            packed = [lambda layer=layer, x=x: layer(x) for layer in layers]
            others = [lambda other=other, x=x: F.linear(x, other) for other in plain]
            seconds, bfloat16_s = speed.in_turns([packed, others], device, clock())
        used = path(entry, shape, batch, device) == "kernel"
        rate = weight.nbytes / seconds
        row = Row(
            entry, shape, batch, weight.bpw, used, seconds, rate / 1e9, rate / copied, bfloat16_s, bfloat16_s / seconds
        )
        print(line(asdict(row)), flush=True)
        rows.append(row)
    return rows


def clock() -> Callable[[], float]:
    """Return what counts seconds: on one thread those of the processor, because the machine may have other work."""
    import torch

    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def line(row: dict[str, Any]) -> str:
    path = "kernel" if row["kernel"] else "decode"
    return (
        f"| {row['entry']} | {row['shape'][0]} x {row['shape'][1]} | {row['batch']} | {row['bpw']:.3f} | {path} | "
        f"{row['seconds'] * 1e6:.0f} | {row['gb_per_s']:.1f} | {row['copy_share']:.0%} | {row['ratio']:.2f} |"
    )


def shape_of(text: str) -> tuple[int, int]:
    out_features, _, in_features = text.partition("x")
    return int(out_features), int(in_features)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["run", "show"], default="run")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument(
        "--avx2-only", action="store_true", help="as on a processor without AVX-512 (tests/avx2_only.py)"
    )
    parser.add_argument("--interpret", action="store_true", help="only check the Triton kernels, on small shapes")
    parser.add_argument("--entries", nargs="+", default=ENTRIES, metavar="RECIPE")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[shape_of(s) for s in SHAPES], metavar="OUTxIN")
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/kernels_<device>.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.interpret:
        from helpers import interpreter  # noqa: F401  (tests/helpers/interpreter.py: before triton is imported)
    if args.avx2_only:
        import avx2_only  # noqa: F401  (before torch is imported)
    if args.mode == "show":
        result_file.show_for_device("kernels", args.json, HEADER, line)
        return
    import torch

    torch.set_num_threads(args.threads)
    torch.utils.deterministic.fill_uninitialized_memory = True
    shapes = [INTERPRETED] if args.interpret else args.shapes
    for entry in args.entries:
        for shape in {(min(shape[0], CHECKED_ROWS), shape[1]) for shape in shapes}:
            for batch in args.batch:
                by = path(entry, shape, batch, args.device)
                found = "" if by == "no kernel" else f", right, error {check(entry, shape, batch, args.device):.1e}"
                print(f"{entry} {shape[0]} x {shape[1]}, batch {batch}: {by}{found}", flush=True)
    if args.interpret:
        return
    from compress.evaluate import speed

    copied = speed.copy_rate(args.device, clock())
    rows = [
        row for shape in shapes for e in args.entries for row in time_rows(e, shape, args.batch, args.device, copied)
    ]
    facts = {
        "threads": args.threads,
        "avx2_only": args.avx2_only,
        "torch": torch.__version__,
        "copy_gb_per_s": copied / 1e9,
    }
    result_file.write_for_device("kernels", args.device, args.json, facts, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
