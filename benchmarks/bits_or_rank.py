"""Compare bits, a low-rank correction, and both, at equal bytes, each placed by the allocator.

    python benchmarks/bits_or_rank.py [--targets 2.4bpw 2.5bpw 2.75bpw 3.0bpw]

One table of measured damages (GPTQ of 2, 3 and 4 bits in groups of 64, each with and without rank 8 in 4 bits; a unit
at a time, at each option), one knapsack for each budget and each set of options, and the KL of the levels to the
original on a held-out text. The measurements are kept in --work, where an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from measure import ROOT, in_fresh_process, machine

RECIPE = """
calibration: {num_samples: 32, seq_len: 512}
quantize: {method: gptq, bits: 2, group_size: 64, symmetric: false, static_groups: false, sweeps: 3}
allocate:
  options:
    - {bits: 2}
    - {bits: 2, lowrank: {rank: 8, bits: 4}}
    - {bits: 3}
    - {bits: 3, lowrank: {rank: 8, bits: 4}}
    - {bits: 4}
    - {bits: 4, lowrank: {rank: 8, bits: 4}}
"""
SETS = {"bits": (0, 2, 4), "rank beside 2 bits": (0, 1), "both": (0, 1, 2, 3, 4, 5)}  # numbers of options


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    from compress import recipe
    from compress.allocate import metrics, session
    from compress.allocate.problem import Problem
    from compress.allocate.solver import damages_of, solve
    from compress.recipe.schema import Target
    from compress.run.job import Job

    args.work.mkdir(parents=True, exist_ok=True)
    path = args.work / "bits-or-rank.yaml"
    path.write_text(RECIPE)
    job = Job(
        str(args.base), recipe.load(str(path)), args.work / "out", str(args.calib), measurements=args.work / "levels"
    )
    rows: list[dict[str, Any]] = []
    taken = []
    with session.open_measurements(job, lambda text, done, total: None) as opened:
        found = metrics.table(opened, frozenset({"kl_one_at_a_time"}))
        for target in args.targets:
            whole = found.problem(Target(target))
            for name, numbers in SETS.items():
                offered = {found.options[number] for number in numbers}
                places = [[i for i, e in enumerate(unit.entries) if e.option in offered] for unit in whole.units]
                units = tuple(
                    dataclasses.replace(unit, entries=tuple(unit.entries[i] for i in at))
                    for unit, at in zip(whole.units, places, strict=True)
                )
                asked = Problem(units, whole.budget)
                choice = solve(asked, damages_of(asked, "kl_one_at_a_time")).choice
                taken.append(tuple(at[i] for at, i in zip(places, choice, strict=True)))
                rows.append({"target": target, "options": name, "bpw": found.bpw(taken[-1])})
        bench = metrics.evaluator(opened, found, str(args.text), args.max_tokens)
        kls = bench.divergence(taken, range(bench.samples))
    return [{**row, "kl": kl, "tokens": bench.samples * bench.seq_len} for row, kl in zip(rows, kls, strict=True)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=["2.4bpw", "2.5bpw", "2.75bpw", "3.0bpw"])
    parser.add_argument("--base", type=Path, default=ROOT / "tests/models/books-8m")
    parser.add_argument("--calib", type=Path, default=ROOT / "tests/data/books_calib.txt")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/books_heldout.txt")
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--work", type=Path, default=ROOT / "models_out/bits-or-rank")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/bits_or_rank.json")
    args = parser.parse_args(argv)
    rows = in_fresh_process(measured, args)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"rows": rows, "machine": machine()}, indent=2) + "\n")
    for row in rows:
        print(f"| {row['target']} | {row['options']} | {row['bpw']:.3f} | {row['kl']:.5f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
