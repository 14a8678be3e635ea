"""Measure the quality of mixed models at several budgets, beside uniform ones.

    python benchmarks/allocation.py [ENTRY ...] [--again]
    python benchmarks/allocation.py show

An ENTRY is a recipe, settings, and a target: mixed3bit@2.5bpw, mixed3bit:allocate.estimator=noise@3.125bpw, int3. All
entries of a recipe with the same options share one folder of measurements under --work, which stays; the seconds of an
entry are those of its own run, what it had to measure included. Every model is quantized by the whole pipeline, behind
its own quantized prefix, and scored on text that is not the calibration's. `uniform` is the KL that the uniform models
among the rows would have at these bytes: a straight line of log KL over bits between the nearest two.
Rows go to --json as they finish, and those that are there with the same options are not measured again.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT, absolute, add_table_options, in_fresh_process
from quantize import Setting, run_ours, score

Row = dict[str, Any]
UNIFORM = ["int2", "int3", "int4"]
TARGETS = ("2.5bpw", "3.0bpw", "3.125bpw", "3.5bpw")
OTHERS = (
    "allocate.estimator=gradient",
    "allocate.estimator=fisher",
    "allocate.estimator=noise",
    "allocate.estimator=hessian",
    "allocate.estimator=hessian;allocate.scale=noise",
    "allocate.method=uniform",
    "allocate.method=lq_lora",
    "allocate.method=adaquant",
    "allocate.method=layerwise",
    "allocate.method=layerwise;allocate.score=zd",
)
ENTRIES = [*UNIFORM, *(f"mixed3bit@{target}" for target in TARGETS)]
ENTRIES += [f"mixed3bit:{other}@3.125bpw" for other in OTHERS]


def measured(args: argparse.Namespace, entry: str, out: Path) -> Row:
    """Quantize and score one entry."""
    head, _, target = entry.partition("@")
    recipe, _, changes = head.partition(":")
    options = ["--overwrite"]
    for change in filter(None, changes.split(";")):
        options += ["--set", change]
    if target:
        options += ["--target", target, "--measurements", str(args.work / f"{recipe}.measured")]
    run, report = run_ours(args, Setting(recipe), out, *options)
    found = in_fresh_process(score, out, args.base, args.text, args.seq_len, args.max_tokens)
    facts = {key: value for key, value in report.get("allocation", {}).items() if key not in ("units", "trace")}
    return {"bpw": report["bpw"], "wall_s": run.wall_s, "cpu_s": run.cpu_s, "allocation": facts, **found}


def measure(args: argparse.Namespace, work: Path) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    args.model = args.base
    for entry in args.entries:
        keys = ("num_samples", "seq_len", "max_tokens")
        identity = {"entry": entry, "options": {key: getattr(args, key) for key in keys}}
        row = result_file.add(args.json, identity, args.again, entry, partial(measured, args, entry, work / "out"))
        if row is not None:
            kl, wall = row["kl_mean"], row["wall_s"]
            print(f"{entry}: {row['bpw']:.3f} bpw, KL {kl:.5f}, {wall:.0f} s", file=sys.stderr)


def between(rows: Sequence[Row], bpw: float) -> float | None:
    """KL of the uniform models at this size; None outside of them."""
    ascending = sorted((row["bpw"], row["kl_mean"]) for row in rows if row["entry"] in UNIFORM)
    for (low, loses), (high, keeps) in zip(ascending, ascending[1:], strict=False):
        if low <= bpw <= high:
            share = (bpw - low) / (high - low)
            return math.exp((1 - share) * math.log(loses) + share * math.log(keeps))
    return None


def present(rows: Sequence[Row]) -> None:
    """Print one line for each entry, with what uniform models have at its size."""
    names = ["entry", "bpw", "KL", "se", "uniform", "ratio", "ppl", "tokens", "CPU s"]
    lines = []
    for row in rows:
        uniform = between(rows, row["bpw"])
        beside = [f"{uniform:.4f}", f"{row['kl_mean'] / uniform:.2f}"] if uniform else ["", ""]
        cells = [row["entry"], f"{row['bpw']:.3f}", f"{row['kl_mean']:.5f}", f"{row['kl_se'] or 0:.5f}", *beside]
        lines.append([*cells, f"{row['perplexity']:.2f}", str(row["tokens"]), f"{row['cpu_s']:.0f}"])
    result_file.present("allocation.py", names, lines, ["entry"])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="ENTRY")
    parser.add_argument("--work", type=absolute, default=ROOT / "models_out/allocation")
    add_table_options(parser, "allocation")
    args = parser.parse_args(argv)
    args.env = dict(args.env)
    args.entries = [word for word in args.what if word != "show"] or ([] if "show" in args.what else ENTRIES)
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        measure(args, Path(temporary))
    present(result_file.read(args.json))


if __name__ == "__main__":
    main(sys.argv[1:])
