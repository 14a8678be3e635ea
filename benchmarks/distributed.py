"""Time runs shared by several processes of this machine beside the same run in one, and compare what they write.

    python benchmarks/distributed.py [ENTRY ...] [--processes 2] [--rounds 1] [--again]
    python benchmarks/distributed.py show

An ENTRY is a recipe, or a recipe with settings: int4, vq2bit:state_bits=12,sweeps=1. Each process has one thread. One
process and several take turns; the figures are medians over the rounds, whole commands from start to end. Packed
tensors must be the same to the bit. Rows go to --json as they finish, and those that are there with the same options
are not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import result_file
from measure import SEED, Run, add_table_options, median, run_child

from compress import recipe

Row = dict[str, Any]
ENTRIES = ["int4", "vq2bit"]
OPTIONS = ("processes", "num_samples", "seq_len", "rounds")


def run(args: argparse.Namespace, entry: str, processes: int, out: Path) -> tuple[Run, str]:
    """Return the cost of a run and the hash of the tensors that it wrote."""
    name, _, settings = entry.partition(":")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", "compress", "quantize", args.base]
    command += ["--recipe", name, "--calib", args.calib, "--seed", str(SEED), "--out", out, "--overwrite"]
    if recipe.load(name).allocate is not None:  # nothing that the other run has measured
        measurements = out.with_suffix(".measured")
        shutil.rmtree(measurements, ignore_errors=True)
        command += ["--measurements", measurements]
    given = [f"calibration.num_samples={args.num_samples}", f"calibration.seq_len={args.seq_len}"]
    for setting in [*given, *filter(None, settings.split(","))]:
        command += ["--set", setting]
    _, cost = run_child(command, {"OMP_NUM_THREADS": "1"} | args.env, out.with_suffix(".log"))
    digest = hashlib.sha256()
    for file in sorted(out.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return cost, digest.hexdigest()


def measured(args: argparse.Namespace, entry: str, work: Path) -> Row:
    """Return the figures of one process and of several; SystemExit if they do not write the same."""
    alone, shared = list[Run](), list[Run]()
    for _ in range(args.rounds):
        one, expected = run(args, entry, 1, work / "one")
        several, found = run(args, entry, args.processes, work / "several")
        if found != expected:
            raise SystemExit(f"{args.processes} processes write other tensors than one")
        alone.append(one)
        shared.append(several)
    one, several = median(alone), median(shared)
    report = json.loads((work / "one" / "report.json").read_text())
    return {
        "bpw": report["bpw"],
        "one_wall_s": one.wall_s,
        "wall_s": several.wall_s,
        "ratio": one.wall_s / several.wall_s,
        "one_cpu_s": one.cpu_s,
        "cpu_s": several.cpu_s,
        "peak_rss_bytes": several.peak_rss_bytes,  # of the largest process
        "one_peak_rss_bytes": one.peak_rss_bytes,
    }


CELLS = {
    "recipe": lambda row: row["entry"],
    "processes": lambda row: str(row["options"]["processes"]),
    "tokens": lambda row: str(row["options"]["num_samples"] * row["options"]["seq_len"]),
    "one s": lambda row: f"{row['one_wall_s']:.0f}",
    "several s": lambda row: f"{row['wall_s']:.0f}",
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "CPU s": lambda row: f"{row['one_cpu_s']:.0f} / {row['cpu_s']:.0f}",
    "MB": lambda row: f"{row['one_peak_rss_bytes'] / 1e6:.0f} / {row['peak_rss_bytes'] / 1e6:.0f}",
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="ENTRY")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    add_table_options(parser, "distributed", max_tokens=0)
    args = parser.parse_args(argv)
    args.env = dict(args.env)
    args.entries = [word for word in args.what if word != "show"] or ([] if "show" in args.what else ENTRIES)
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    identity = {"options": {key: getattr(args, key) for key in OPTIONS}}
    with tempfile.TemporaryDirectory() as work:
        for entry in args.entries:
            figures = partial(measured, args, entry, Path(work))
            result_file.add(args.json, {"entry": entry, **identity}, args.again, entry, figures)
    lines = [[cell(row) for cell in CELLS.values()] for row in result_file.read(args.json)]
    result_file.present("distributed.py", list(CELLS), lines, ["recipe"])


if __name__ == "__main__":
    main(sys.argv[1:])
