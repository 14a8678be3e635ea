"""Measure the CPU time of quantizing one linear, fit a model of it, and predict whole models, on this CPU and on GPUs.

    python benchmarks/scaling.py [ENTRY ...] [--shapes 2048x2048 ...] [--again]
    python benchmarks/scaling.py block ENTRY ... [--again]
    python benchmarks/scaling.py show

An ENTRY is a recipe, or a recipe with settings, as of low_bit.py. Without a word: the linears of models of 1.1B and 8B
parameters are rounded one by one, each in a process of its own with one thread, and so are the products of calibration.
A recipe that chooses among options is taken at each of them; what comparing them costs is not counted. block: one whole
block of the 1.1B shape, from reading to writing, to compare the prediction with. show: the tables, from what was
measured; nothing is measured for a GPU. Rows go to --json as they finish, and those that are there are not measured
again.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import result_file
from low_bit import attempt, scheme
from measure import ROOT, absolute, in_fresh_process, run_quantize

Row = dict[str, Any]
Shape = tuple[int, int]  # [out, in]
SEED = 0
TOKENS = 65536  # of calibration text, 128 windows of 512
OPTIONS = {  # recipe that chooses -> settings of its options
    "mixed3bit": [
        "bits=2,group_size=64,symmetric=false,static_groups=false,sweeps=3",
        *(f"bits={bits}" for bits in (3, 4, 5, 6)),
    ]
}
ENTRIES = ["int4", "vq2bit", *(f"mixed3bit:{settings}" for settings in OPTIONS["mixed3bit"])]
STREAMS = {"vq2bit": 2}  # recipe -> streams of activations: target correction runs the original model, too
PRODUCTS = {"forward": 4096, "hessian": 4096, "paired_hessian": 4096}  # what calibration does, on so many columns
PRODUCT_TOKENS = 1024


@dataclass(frozen=True)
class Layers:
    """Equal linears of a model."""

    shape: Shape
    count: int
    shared: int = 1  # linears that read the same input
    share: float = 1.0  # of the tokens that reach one of them


def llama(blocks: int, hidden: int, inner: int, kv: int) -> list[Layers]:
    """Return the linears of a Llama with grouped queries."""
    attention = [
        Layers((hidden, hidden), blocks, 3),
        Layers((kv, hidden), 2 * blocks, 3),
        Layers((hidden, hidden), blocks),
    ]
    return [*attention, Layers((inner, hidden), 2 * blocks, 2), Layers((hidden, inner), blocks)]


def deepseek() -> list[Layers]:
    """Return the linears of the 671B mixture: 61 blocks, of which 58 have 256 experts of which a token takes 8."""
    blocks, dense, experts, taken, hidden = 61, 3, 256, 8, 7168
    attention = [((1536, hidden), 2), ((576, hidden), 2), ((24576, 1536), 1), ((32768, 512), 1), ((hidden, 16384), 1)]
    mlps = [(dense, 18432, 1.0), (blocks - dense, 2048, 1.0), ((blocks - dense) * experts, 2048, taken / experts)]
    parts = [Layers(shape, blocks, shared) for shape, shared in attention]
    for count, inner, share in mlps:
        parts += [Layers((inner, hidden), 2 * count, 2, share), Layers((hidden, inner), count, 1, share)]
    return parts


MODELS = {
    "1.1B": llama(22, 2048, 5632, 256),
    "8B": llama(32, 4096, 14336, 1024),
    "70B": llama(80, 8192, 28672, 1024),
    "671B, mixture of experts": deepseek(),
}
MEASURED = ("1.1B", "8B")
SMALL: list[Shape] = [(1024, 1024), (1024, 4096)]  # for the fit
GPU = {"forward": 450e12, "hessian": 400e12, "products": 25e12, "factor": 20e12}  # FLOP/s of one H200, assumed
GPU_BYTES = 4.8e12  # of its memory a second
SEARCH_BYTES = 40  # of memory for each transition of the trellis, as torch searches: costs and sums are written, read
STORAGE_BYTES = 2e9  # a second, of one machine
COLUMN_SECONDS = 20e-6  # of starting the kernels of one column's step


# Run in a fresh process: these import torch or compress


def round_linear(entry: str, shape: Shape) -> Row:
    """Quantize a random linear one-sided, its turn into the rotated basis included, by one thread."""
    import torch

    from compress import formats, plugins
    from compress.quant import incoherence
    from compress.types import NO_TRANSFORMS, LayerPlan, LinearSpec, Stats, Stored

    torch.set_num_threads(1)
    chosen = incoherence.with_chosen_scales(scheme(entry), shape)
    method = plugins.load("quant", chosen.method)
    ops = incoherence.operations(chosen) if chosen.incoherence else NO_TRANSFORMS
    generator = torch.Generator().manual_seed(SEED)

    def once(out: int, columns: int) -> float:
        stored = Stored(method.FORMAT, method.plan_params(chosen.config, (out, columns)), ops)
        spec = LinearSpec("layer", (out, columns), torch.float32, 0, "layer")
        layer = LayerPlan(spec, chosen, stored, formats.nbytes(stored, (out, columns)))
        inputs = torch.randn(512, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
        hessian = inputs.T @ inputs
        hessian.diagonal().add_(0.1 * hessian.diagonal().mean())
        weight = torch.randn(out, columns, generator=generator)
        start, stats = time.process_time(), Stats(hessian, 4096)
        if ops:
            around = incoherence.surroundings(layer, SEED, weight)
            weight = incoherence.rotated_weight(weight, layer, around)
            stats = incoherence.rotated_stats(stats, layer, SEED)
        method.quantize(weight, stats if method.NEEDS else None, chosen.config, SEED)
        return time.process_time() - start

    once(256, 128)  # compiles what has to be compiled
    return {"cpu_s": once(*shape)}


def multiply(product: str, columns: int) -> Row:
    """Measure a product of calibration by one thread: seconds for each token, and FLOP counted without symmetry."""
    import torch

    from compress.calib.stats import HessianSum

    torch.set_num_threads(1)
    tokens = torch.randn(PRODUCT_TOKENS, columns)
    if product == "forward":
        weight = torch.randn(columns, columns)
        work = partial(torch.nn.functional.linear, tokens, weight)
    else:
        total = HessianSum(columns, torch.device("cpu"), paired=product == "paired_hessian")

        def work() -> None:
            if product == "paired_hessian":
                total.expect(tokens)
            total.add(tokens, PRODUCT_TOKENS)

    work()
    start = time.process_time()
    work()
    seconds = (time.process_time() - start) / PRODUCT_TOKENS
    return {"cpu_s_per_token": seconds, "flop_per_cpu_s": 2 * columns**2 / seconds}


# measuring


def whole_block(entry: str, work: Path) -> Row:
    """Quantize a model of one block of the 1.1B shape, with an eighth of the tokens, by one thread."""
    model, calib, out = work / "model", ROOT / "tests/data/books_calib.txt", work / "quantized"
    if not model.exists():
        command = [
            sys.executable,
            str(ROOT / "benchmarks/random_llama.py"),
            str(model),
            "--layers",
            "1",
            "--vocab",
            "512",
        ]
        if os.spawnv(os.P_WAIT, sys.executable, command):
            raise SystemExit("random_llama.py failed")
    recipe, _, settings = entry.partition(":")
    options = [part for setting in settings.split(",") if setting for part in ("--set", setting)]
    options += ["--set", f"calibration.num_samples={TOKENS // 8 // 512}", "--set", "calibration.seq_len=512"]
    run, _ = run_quantize(model, recipe, calib, out, {"OMP_NUM_THREADS": "1"}, options)
    return {"cpu_s": run.cpu_s, "quantize_cpu_s": run.quantize_cpu_s, "tokens": TOKENS // 8}


def shapes_of(model: str) -> list[Shape]:
    return sorted({part.shape for part in MODELS[model]}, key=math.prod)


def measure(args: argparse.Namespace) -> None:
    """Measure what is not in the file yet, small shapes first."""
    default = sorted({*SMALL, *(shape for model in MEASURED for shape in shapes_of(model))}, key=math.prod)
    shapes = [parsed_shape(text) for text in args.shapes] or default
    for product, columns in PRODUCTS.items():
        identity = {"table": "products", "product": product, "columns": columns}
        work = partial(in_fresh_process, multiply, product, columns)
        result_file.add(args.json, identity, args.again, product, work)
    for shape in shapes:
        for entry in args.entries or ENTRIES:
            identity = {"table": "linears", "entry": entry, "shape": list(shape)}
            name = f"{entry} {shape[0]} x {shape[1]}"
            work = partial(in_fresh_process, attempt, round_linear, entry, shape)
            row = result_file.add(args.json, identity, args.again, name, work)
            if row is not None:
                print(f"{name}: {row['cpu_s']:.1f} CPU s", file=sys.stderr)


def measure_blocks(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for entry in args.entries:
            work = partial(whole_block, entry, Path(temporary))
            result_file.add(args.json, {"table": "block", "entry": entry, "model": "1.1B"}, args.again, entry, work)


def parsed_shape(text: str) -> Shape:
    out, _, columns = text.partition("x")
    return int(out), int(columns)


# the model


def terms(shape: Shape) -> list[float]:
    """Return what the time of one linear is a sum of: weights, products between columns, factor, steps of columns."""
    out, columns = shape
    return [out * columns, out * columns**2, columns**3, columns]


def fitted(rows: list[Row], entry: str) -> list[float]:
    """Return the seconds of each term, none negative, that fit what was measured best in relative error."""
    import numpy as np

    taken = [row for row in rows if row["table"] == "linears" and row["entry"] == entry]
    if len(taken) < 4:
        raise SystemExit(
            f"{entry}: only {len(taken)} linears were measured; run `python benchmarks/scaling.py {entry}`"
        )
    left = np.array([[term / row["cpu_s"] for term in terms(tuple(row["shape"]))] for row in taken])
    size = left.max(0)
    chosen = list(range(left.shape[1]))
    while True:  # leave out what would be negative, the most negative first
        found = np.linalg.lstsq(left[:, chosen] / size[chosen], np.ones(len(taken)), rcond=None)[0]
        if (found >= 0).all():
            break
        chosen.pop(int(found.argmin()))
    seconds = np.zeros(left.shape[1])
    seconds[chosen] = found / size[chosen]
    return [float(value) for value in seconds]


def entries_of(recipe: str) -> list[str]:
    return [f"{recipe}:{settings}" for settings in OPTIONS[recipe]] if recipe in OPTIONS else [recipe]


def predicted(coefficients: list[list[float]], shape: Shape) -> float:
    return sum(a * b for one in coefficients for a, b in zip(one, terms(shape), strict=True))


def calibration(rows: list[Row], recipe: str, parts: list[Layers], tokens: int) -> float:
    """Return CPU seconds of the forward passes and Hessians; attention's own products are left out."""
    rates = {row["product"]: row["flop_per_cpu_s"] for row in rows if row["table"] == "products"}
    forward, hessian = flops(parts, tokens)
    streams = STREAMS.get(recipe, 1)
    kind = "paired_hessian" if streams > 1 else "hessian"
    return (streams + 1) * forward / rates["forward"] + hessian / rates[kind]


def flops(parts: list[Layers], tokens: int) -> tuple[float, float]:
    """Return those of one forward pass and of the Hessians, one for each shared input."""
    forward = sum(2.0 * math.prod(part.shape) * part.count * part.share for part in parts)
    hessian = sum(2.0 * part.shape[1] ** 2 * part.count / part.shared * part.share for part in parts)
    return forward * tokens, hessian * tokens


def measured(rows: list[Row], recipe: str, shape: Shape) -> float | None:
    """Return the CPU seconds of all entries of a recipe on a linear; None where one was not measured."""
    found = {row["entry"]: row["cpu_s"] for row in rows if row["table"] == "linears" and tuple(row["shape"]) == shape}
    entries = entries_of(recipe)
    return sum(found[entry] for entry in entries) if all(entry in found for entry in entries) else None


def gpu_seconds(recipe: str, parts: list[Layers], tokens: int, devices: int) -> float:
    """Return seconds by counts of operations, nothing measured; reading the weights goes on at the same time."""
    forward, hessian = flops(parts, tokens)
    streams, options = STREAMS.get(recipe, 1), len(entries_of(recipe))
    seconds = (streams + 1) * forward / GPU["forward"] + streams * hessian / GPU["hessian"]
    for part in parts:
        out, columns = part.shape
        seconds += options * part.count * 2 * out * columns**2 / GPU["products"]
        seconds += part.count * columns**3 / 3 / GPU["factor"] + options * part.count * columns * COLUMN_SECONDS
        if recipe == "vq2bit":
            seconds += part.count * math.prod(part.shape) * 1.5 * 2**14 * SEARCH_BYTES / GPU_BYTES
    stored = 2.0 * sum(math.prod(part.shape) * part.count for part in parts)
    return max(seconds / devices, stored / STORAGE_BYTES)


# tables


def recipes_measured(rows: list[Row]) -> Iterator[str]:
    names = {row["entry"] for row in rows if row["table"] == "linears"}
    return (recipe for recipe in ("int4", "vq2bit", "mixed3bit") if names.issuperset(entries_of(recipe)))


def show(rows: list[Row]) -> None:
    """Print the linears, measured and predicted, then whole models, then blocks."""
    linears, models, blocks = [], [], []
    for recipe in recipes_measured(rows):
        fit = [fitted(rows, entry) for entry in entries_of(recipe)]
        for shape in sorted({tuple(row["shape"]) for row in rows if row["table"] == "linears"}, key=math.prod):
            if (seconds := measured(rows, recipe, shape)) is not None:
                guess = predicted(fit, shape)
                linears.append([recipe, f"{shape[0]} x {shape[1]}", f"{seconds:.1f}", f"{guess:.1f}"])
        for name, parts in MODELS.items():
            models.append([name, recipe, *model_cells(rows, recipe, parts, fit)])
        for row in rows:
            if row["table"] == "block" and row["entry"] == recipe:
                parts = [Layers(p.shape, p.count // 22, p.shared) for p in MODELS["1.1B"]]
                guess = sum(predicted(fit, p.shape) * p.count for p in parts)
                guess += calibration(rows, recipe, parts, row["tokens"])
                blocks.append([recipe, f"{row['quantize_cpu_s'] or row['cpu_s']:.0f}", f"{guess:.0f}"])
    result_file.present("One linear, CPU seconds", ["recipe", "linear", "measured", "model"], linears, ["recipe"])
    names = ["model", "recipe", "linears, from measured ones", "linears, by the fit", "calibration", "all, one core"]
    names += ["one H200, by counts", "eight H200, by counts"]
    result_file.present("Whole models", names, models, ["model", "recipe"])
    result_file.present("One block of 1.1B, CPU seconds", ["recipe", "measured", "model"], blocks, ["recipe"])


def model_cells(rows: list[Row], recipe: str, parts: list[Layers], fit: list[list[float]]) -> list[str]:
    known = [measured(rows, recipe, part.shape) for part in parts]
    from_measured = sum(s * p.count for s, p in zip(known, parts, strict=True) if s is not None)
    guess = sum(predicted(fit, part.shape) * part.count for part in parts)
    around = calibration(rows, recipe, parts, TOKENS)
    whole = None not in known
    cells = [
        result_file.duration(from_measured) if whole else "",
        result_file.duration(guess),
        result_file.duration(around),
    ]
    cells.append(result_file.duration((from_measured if whole else guess) + around))
    return [*cells, *(result_file.duration(gpu_seconds(recipe, parts, TOKENS, devices)) for devices in (1, 8))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "entries", nargs="*", metavar="ENTRY", help="`show`, `block` and entries, or entries to measure"
    )
    parser.add_argument("--shapes", nargs="+", default=[], metavar="OUTxIN")
    parser.add_argument("--again", action="store_true", help="measure what is in the file, too")
    parser.add_argument("--json", type=absolute, default=ROOT / "benchmarks/results/scaling.json")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    mode = args.entries[0] if args.entries and args.entries[0] in ("show", "block") else ""
    args.entries = args.entries[1:] if mode else args.entries
    if mode == "block":
        measure_blocks(args)
    elif not mode:
        measure(args)
    show(result_file.read(args.json))


if __name__ == "__main__":
    main()
