"""Measure all low-bit recipes in one table: bits, quality, time and memory, on a small model or synthetic layers.

    python benchmarks/low_bit.py [models] [ENTRY ...] [--only 'pvq*'] [--again]
    python benchmarks/low_bit.py layers [ENTRY ...] [--size 256] [--again]
    python benchmarks/low_bit.py show

An ENTRY is a recipe, or a recipe with settings: pvq3bit, pvq3bit:bpw=2.5, int2:method=rtn, int3:incoherence=true.
models: each entry quantizes the model in a process of its own, which is scored and then loaded and run in others.
layers: each entry rounds one Gaussian layer with correlated inputs of log-normal sizes, as it does in a model; the
seconds are those of one layer, and, by the number of weights, those of 7B and 70B models (linears alone).
Rows go to --json as they finish, and those that are there with the same options are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT, absolute, in_fresh_process, key_value
from quantize import Setting, count_sizes, run_ours, score

Row = dict[str, Any]
Cell = Callable[[Row], str]
MODES = ("models", "layers", "show")
RECIPES = ["vq2bit", "vq3bit", "gptvq2bit", "vptq2bit", "glvq2bit", "e8p2bit", "pvq3bit"]
RECIPES += ["trellis2bit", "trellis3bit", "trellis4bit", "int2", "int3", "int4"]
RATES = ["gptvq2bit:vector_dim=2,bits=6", "gptvq2bit:vector_dim=2,bits=8", "e8p2bit:bits=3", "e8p2bit:bits=4"]
RATES += ["glvq2bit:bits=3", "glvq2bit:bits=4", "pvq3bit:bpw=2.0", "pvq3bit:bpw=4.0"]
RATES += [f"int{bits}:method=rtn" for bits in (2, 3, 4)]
BASES = ["int2", "int3", "int4", "gptvq2bit", "glvq2bit"]  # also rotated, beside their own basis
BASES = [f"{name}:incoherence=true" for name in BASES] + ["int2:method=rtn,incoherence=true"]
BASES += [f"{name}:incoherence=false" for name in ("e8p2bit", "pvq3bit", "trellis2bit")]
SHAPES = ((4096, 4096), (4096, 11008))  # [out, in] of a 7B model
MODEL_WEIGHTS = {"7B": 6.5e9, "70B": 6.9e10}  # in the linears of the decoder blocks
NEW_TOKENS = 64
PROMPT_TOKENS = 16
SEED = 0


def parsed(entry: str) -> tuple[str, list[str]]:
    """Recipe and overrides."""
    recipe, _, settings = entry.partition(":")
    return recipe, settings.split(",") if settings else []


# Run in a fresh process: these import torch or compress


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); what a recipe cannot do is a SystemExit of one line, which the measuring process can read."""
    from compress.errors import CompressError

    try:
        return function(*args)
    except (CompressError, ValueError, AssertionError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def available() -> tuple[list[str], list[str]]:
    """Recipes and methods."""
    from compress import plugins, recipe

    return recipe.names(), plugins.names("quant")


def scheme(entry: str) -> Any:
    """The scheme of an entry's linears; its rules for some of them do not count."""
    from compress import recipe

    name, overrides = parsed(entry)
    return recipe.load(name, overrides).quantize


def methods(entries: Sequence[str]) -> list[str]:
    return [scheme(entry).method for entry in entries]


def run_model(directory: Path) -> Row:
    """Seconds to load (imports not counted), to the first token (weights are decoded then), and tokens a second."""
    import torch

    from compress.model.load import load_model

    start = time.perf_counter()
    model = load_model(directory, "float32")
    loaded = time.perf_counter()
    tokens = torch.arange(1, PROMPT_TOKENS + 1).unsqueeze(0)

    def generate(count: int) -> float:
        begin = time.perf_counter()
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return time.perf_counter() - begin

    first = generate(1)
    return {"load_s": loaded - start, "first_token_s": first, "tokens_per_s": NEW_TOKENS / generate(NEW_TOKENS)}


def write_hessian(columns: int, out: Path) -> None:
    """D M^T M D, M = I + G / sqrt(n), D log-normal, G Gaussian: what inputs z M D, z Gaussian, have on average."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    mixing = torch.randn(columns, columns, generator=generator).div_(math.sqrt(columns))
    mixing.diagonal().add_(1)
    mixing *= torch.randn(columns, generator=generator).exp_()
    save_file({"hessian": mixing.T @ mixing}, out)


def round_layer(entry: str, shape: tuple[int, int], hessian_file: Path) -> Row:
    """Quantize one random weight [out, in] as the pipeline does, its turn into the rotated basis included.

    Rounding is one-sided: no gradients belong to such a weight.
    """
    import torch
    from peer_tools.common import peak_rss
    from safetensors.torch import load_file

    from compress import formats, plugins
    from compress.quant import incoherence
    from compress.types import NO_TRANSFORMS, LayerPlan, LinearSpec, Stats, Stored

    chosen = incoherence.with_chosen_scales(scheme(entry), shape)
    method = plugins.load("quant", chosen.method)
    spec = LinearSpec("layer", shape, torch.float32, 0, "layer")
    ops = incoherence.operations(chosen) if chosen.incoherence else NO_TRANSFORMS
    params = method.plan_params(chosen.config, shape)
    stored = Stored(method.FORMAT, params, ops)
    layer = LayerPlan(spec, chosen, stored, formats.nbytes(stored, shape))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(SEED + 1))
    hessian = load_file(hessian_file)["hessian"].clone()  # the file is mapped
    stats = Stats(hessian, shape[1])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    before, start, cpu = peak_rss(), time.perf_counter(), time.process_time()
    around = incoherence.surroundings(layer, SEED, weight) if ops else {}
    given = incoherence.rotated_weight(weight, layer, around) if ops else weight
    seen = incoherence.rotated_stats(stats, layer, SEED) if ops and method.NEEDS else stats
    result = method.quantize(given, seen if method.NEEDS else None, chosen.config, SEED)
    wall, cpu, peak = time.perf_counter() - start, time.process_time() - cpu, peak_rss()
    packed = incoherence.wrap(result.weight, layer, around) if ops else result.weight
    assert packed.nbytes == layer.nbytes, f"{packed.nbytes} bytes stored, {layer.nbytes} planned"
    del given, seen, result
    start = time.perf_counter()
    residual = formats.decode(packed, torch.float32).sub_(weight)
    decode = time.perf_counter() - start

    def energy(rows: Any) -> float:
        return sum((part @ hessian).mul_(part).sum(dtype=torch.float64).item() for part in rows.split(256))

    row = {"method": chosen.method, "incoherence": chosen.incoherence, "bpw": packed.bpw}
    row |= {"output_error": energy(residual) / energy(weight), "weight_error": _ratio(residual, weight)}
    return row | {
        "wall_s": wall,
        "cpu_s": cpu,
        "decode_s": decode,
        "peak_rss_bytes": peak,
        "added_bytes": peak - before,
    }


def _ratio(residual: Any, weight: Any) -> float:
    return (residual.double().square().sum() / weight.double().square().sum()).item()


# measuring


def model_row(entry: str, args: argparse.Namespace, work: Path) -> Row:
    out = work / "quantized"
    recipe, overrides = parsed(entry)
    options = [part for override in overrides for part in ("--set", override)]
    run, report = run_ours(args, Setting(recipe), out, *options)
    row = {"method": report["layers"][0]["method"], **asdict(run)}
    row |= in_fresh_process(count_sizes, out, args.model)
    row |= in_fresh_process(attempt, score, out, args.model, args.text, args.seq_len, args.max_tokens)
    return row | in_fresh_process(attempt, run_model, out)


def layer_row(entry: str, shape: tuple[int, int], work: Path) -> Row:
    hessian = work / f"hessian-{shape[1]}.safetensors"
    if not hessian.exists():
        in_fresh_process(write_hessian, shape[1], hessian)
    row = in_fresh_process(attempt, round_layer, entry, shape, hessian)
    for name, weights in MODEL_WEIGHTS.items():
        row[f"seconds_{name}"] = row["wall_s"] / math.prod(shape) * weights
    return row


def wanted(args: argparse.Namespace) -> list[str]:
    """The entries to measure; what is not there is said and left out."""
    recipes, known = in_fresh_process(available)
    default = [*RECIPES, *RATES, *(BASES if args.mode == "layers" else [])]
    entries = [e for e in args.entries or default if not args.only or any(fnmatchcase(e, only) for only in args.only)]
    for entry in entries:
        if parsed(entry)[0] not in recipes and not Path(parsed(entry)[0]).is_file():
            print(f"{entry}: skipped, there is no such recipe", file=sys.stderr)
    entries = [e for e in entries if parsed(e)[0] in recipes or Path(parsed(e)[0]).is_file()]
    used = in_fresh_process(attempt, methods, entries)
    if not args.entries and not args.only and (missing := sorted(set(known) - set(used))):
        print(f"no entry for the methods {', '.join(missing)}", file=sys.stderr)
    return entries


def measure(args: argparse.Namespace, work: Path) -> None:
    """Measure every entry that is not in the file yet, and write the file after each."""
    shapes = [(args.size, args.size), (args.size, args.size * 43 // 16)] if args.size else SHAPES
    if args.mode == "layers":
        entries = wanted(args)
        jobs: list[tuple[str, Row]] = [(entry, {"shape": list(shape)}) for shape in shapes for entry in entries]
    else:
        keys = ("num_samples", "seq_len", "max_tokens", "env")
        names = {key: getattr(args, key).name for key in ("model", "calib", "text")}
        jobs = [(entry, {**names, **{key: getattr(args, key) for key in keys}}) for entry in wanted(args)]
    for entry, options in jobs:
        identity = {"table": args.mode, "entry": entry, "options": options}
        name = f"{entry} {options.get('shape', '')}"
        row = result_file.add(args.json, identity, args.again, name, partial(one, entry, options, args, work))
        if row is not None:
            print(f"{name}: {row['bpw']:.3f} bits, {row['wall_s']:.1f} s", file=sys.stderr)


def one(entry: str, options: Row, args: argparse.Namespace, work: Path) -> Row:
    if args.mode == "layers":
        return layer_row(entry, tuple(options["shape"]), work)
    return model_row(entry, args, work)


# tables


COLUMNS: dict[str, dict[str, Cell]] = {
    "models": {
        "recipe": lambda row: row["entry"],
        "bpw": lambda row: f"{row['bpw']:.3f}",
        "KL +- se": lambda row: f"{row['kl_mean']:.4f} +- {row['kl_se'] or 0:.4f}",
        "ppl": lambda row: f"{row['perplexity']:.2f}",
        "tokens": lambda row: str(row["tokens"]),
        "file MB": lambda row: f"{row['checkpoint_bytes'] / 1e6:.2f}",
        "wall / CPU s": lambda row: f"{row['wall_s']:.0f} / {row['cpu_s']:.0f}",
        "RSS MB": lambda row: f"{row['peak_rss_bytes'] / 1e6:.0f}",
        "load s": lambda row: f"{row['load_s']:.2f}",
        "first token s": lambda row: f"{row['first_token_s']:.2f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    },
    "layers": {
        "recipe": lambda row: row["entry"],
        "layer": lambda row: " x ".join(map(str, row["options"]["shape"])),
        "rotated": lambda row: "yes" if row["incoherence"] else "no",
        "bpw": lambda row: f"{row['bpw']:.3f}",
        "output error": lambda row: f"{row['output_error']:.5f}",
        "wall / CPU s": lambda row: f"{row['wall_s']:.1f} / {row['cpu_s']:.1f}",
        "decode s": lambda row: f"{row['decode_s']:.1f}",
        "RSS MB": lambda row: f"{row['peak_rss_bytes'] / 1e6:.0f}",
        "added MB": lambda row: f"{row['added_bytes'] / 1e6:.0f}",
        **{
            f"{name} at this rate": lambda row, name=name: result_file.duration(row[f"seconds_{name}"])
            for name in MODEL_WEIGHTS
        },
    },
}


def present(rows: Sequence[Row], mode: str) -> None:
    """Print the table of a mode by bits, the shapes of layers and options of models apart."""
    chosen = sorted(
        (row for row in rows if row["table"] == mode),
        key=lambda row: (json.dumps(row["options"]), round(row["bpw"]), row["bpw"]),
    )
    if chosen:
        lines = [[cell(row) for cell in COLUMNS[mode].values()] for row in chosen]
        result_file.present(f"low_bit.py {mode}", list(COLUMNS[mode]), lines, ("recipe", "layer"))


# command line


def parse(argv: list[str]) -> argparse.Namespace:
    if not argv or argv[0] not in (*MODES, "-h", "--help"):
        argv = ["models", *argv]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", type=absolute, default=ROOT / "benchmarks/results/low_bit.json")
    measuring = argparse.ArgumentParser(add_help=False, parents=[shared])
    measuring.add_argument(
        "entries", nargs="*", metavar="ENTRY", help="default: every recipe, and others at 2 to 4 bits"
    )
    measuring.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="only entries that match one")
    measuring.add_argument("--again", action="store_true", help="measure what is in the file, too")
    measuring.add_argument(
        "--work", type=absolute, help="keep checkpoints and logs here (default: a temporary directory)"
    )
    sub = modes.add_parser("models", parents=[measuring])
    sub.add_argument("--model", type=absolute, default=ROOT / "tests/models/books-8m")
    sub.add_argument("--calib", type=absolute, default=ROOT / "tests/data/books_calib.txt")
    sub.add_argument("--text", type=absolute, default=ROOT / "tests/data/books_heldout.txt")
    sub.add_argument("--num-samples", type=int, default=128)
    sub.add_argument("--seq-len", type=int, default=512)
    sub.add_argument("--max-tokens", type=int, default=65536)
    sub.add_argument("--env", type=key_value, action="append", default=[], help="NAME=VALUE for quantizing processes")
    sub = modes.add_parser("layers", parents=[measuring])
    sub.add_argument("--size", type=int, help="layers of this many rows, for a quick look (default: 4096)")
    modes.add_parser("show", parents=[shared])
    args = parser.parse_args(argv)
    args.env, args.size = dict(getattr(args, "env", ())), getattr(args, "size", None)
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if args.mode != "show":
        with tempfile.TemporaryDirectory() as temporary:
            work = args.work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            measure(args, work)
    for mode in ("models", "layers"):
        if args.mode in (mode, "show"):
            present(result_file.read(args.json), mode)


if __name__ == "__main__":
    main()
