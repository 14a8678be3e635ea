"""Compare the predicted with the measured peak memory of every kind of recipe, without a limit and under the tightest.

    python benchmarks/memory.py [ENTRY ...] --source MODEL [--shapes real wide] [--limits none tight] [--again]
    python benchmarks/memory.py --show

An ENTRY is a recipe, or a recipe with settings: int4, trellis3bit:sweeps=1. Each runs in a process of its own, which
notes the peak that the kernel counted, and in which phase of the run it was reached (sampled). Shapes: `real` is the
first blocks of a real model (--source, whose tokenizer serves all), with its widths and its vocabulary; `wide` is a
random Llama as wide as one of a billion parameters. Limits: `none`, and `tight`, the least that a refused run asks for.
Rows go to --json as they finish, and those that are there with the same options are not measured again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT, absolute, add_table_options, in_fresh_process

Row = dict[str, Any]
MIB = 1 << 20
ENTRIES = [
    *("int4", "int3", "int8", "trellis3bit:state_bits=12,sweeps=1", "vq2bit:state_bits=12", "e8p2bit", "pvq3bit"),
    *("gptvq2bit:iterations=2", "vptq2bit:iterations=2", "glvq2bit:iterations=1", "lq-lora2.75", "lord20", "clover50"),
    *("int2-lrec:tune.steps=2", "vq2bit-lrec:state_bits=12", "int3-eora", "awq4bit", "w8a8-smooth"),
    *("quarot4bit:transform.0.seeds=1", "rsq3bit", "mixed3bit:allocate.samples=2", "kv2", "kvquant3", "w4kv2"),
]
SHARES = {"real": 1, "wide": 4}  # of the samples that a shape is calibrated on: one of so many
TIGHT = 8 * MIB  # more than a refused run asked for: no two processes are equally large


# Run in a fresh process: these import torch or compress


def truncate(source: Path, out: Path, layers: int) -> None:
    """Write a checkpoint of the first blocks of another, with its tokenizer."""
    from compress.storage.checkpoint import open_checkpoint, write_shard

    stored = open_checkpoint(source)
    copy_tokenizer(source, out)
    kept = {
        name: tensor
        for name, tensor in stored.tensors.items()
        if not (found := re.search(r"\.layers\.(\d+)\.", name)) or int(found[1]) < layers
    }
    write_shard(out / "model.safetensors", kept)
    (out / "config.json").write_text(json.dumps({**stored.config, "num_hidden_layers": layers}))


def widen(source: Path, out: Path, layers: int) -> None:
    """Write a random Llama as wide as one of a billion parameters, with the tokenizer of another model."""
    import random_llama

    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    random_llama.write(out, random_llama.Shape(layers, vocab_size=vocabulary))
    for file in out.glob("*token*"):
        file.unlink()
    copy_tokenizer(source, out)


def copy_tokenizer(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*token*"):
        shutil.copyfile(file, out / file.name)


class Phases:
    """What a run says that it is doing, and the most memory seen while it does."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.now = "starting"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def __call__(self, text: str, done: float, total: float) -> None:
        self.now = re.sub(r"\d+", "*", re.sub(r"^block \d+/\d+: ", "", text)).replace("model.layers.*.", "")

    def _sample(self) -> None:
        from compress import process_memory

        while not self.ended.wait(0.004):
            self.peaks[self.now] = max(self.peaks.get(self.now, 0), process_memory.resident())


def run(model: Path, calib: Path, entry: str, counts: tuple[int, int], limit: int | None, out: Path) -> Row:
    """Return what a run predicts, measures, and where its peak is; the refusal of one that does not begin."""
    from compress import api, process_memory, recipe
    from compress.errors import BudgetError, CompressError
    from compress.run.job import Job

    name, _, settings = entry.partition(":")
    chosen = recipe.load(name)
    overrides = [part for part in settings.split(",") if part]
    if chosen.calibration.num_samples != 1:
        overrides += [f"calibration.num_samples={counts[0]}", f"calibration.seq_len={counts[1]}"]
    loaded, again = recipe.load(name, overrides), {"overwrite": True, "restart": True}
    job = Job(str(model), loaded, out, calib=str(calib), max_memory=limit, pack=chosen.packs, **again)
    phases, started = Phases(), time.monotonic()
    try:
        report = api.quantize(job, phases)
    except BudgetError as error:
        return {"refused": str(error), "peak": process_memory.peak(), "phase": phases.now}
    except CompressError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    finally:
        phases.ended.set()
    phases.thread.join()
    return {
        "predicted": report["memory"]["predicted_peak"],
        "measured": process_memory.peak(),
        "phase": max(phases.peaks, key=lambda key: phases.peaks[key]),
        "phases": phases.peaks,
        "arrangement": report["arrangement"],
        "seconds": time.monotonic() - started,
    }


# measuring


def checkpoint(shape: str, args: argparse.Namespace, work: Path) -> Path:
    out = work / f"{shape}-{args.layers}"
    if not (out / "config.json").exists():
        in_fresh_process(truncate if shape == "real" else widen, args.source, out, args.layers)
    return out


def measure(entry: str, shape: str, limits: str, args: argparse.Namespace, work: Path) -> Row:
    given = partial(
        in_fresh_process,
        run,
        checkpoint(shape, args, work),
        args.calib,
        entry,
        (args.num_samples // SHARES[shape], args.seq_len),
    )
    limit = None
    out = work / "quantized"
    if limits == "tight":
        limit, row = MIB, {"refused": "at least 1 MiB"}
        for _ in range(3):  # an allocation asks for what it measures with and, when that is there, compares with
            if "refused" in (row := given(limit, out)):
                limit = int(re.search(r"at least (\d+) MiB", row["refused"])[1]) * MIB + TIGHT  # type: ignore[index]
    else:
        row = given(limit, out)
    if "refused" in row:
        raise SystemExit(f"ended in {row['phase']} with {row['peak'] // MIB} MiB: {row['refused']}")
    return {"limit": limit, **row}


CELLS = {
    "recipe": lambda row: row["entry"],
    "shape": lambda row: row["options"]["shape"],
    "limit MiB": lambda row: "none" if row["limit"] is None else f"{row['limit'] / MIB:.0f}",
    "predicted MiB": lambda row: f"{row['predicted'] / MIB:.0f}",
    "measured MiB": lambda row: f"{row['measured'] / MIB:.0f}",
    "predicted / measured": lambda row: f"{row['predicted'] / row['measured']:.3f}{verdict(row)}",
    "peak in": lambda row: row["phase"],
    "s": lambda row: f"{row['seconds']:.0f}",
}


def verdict(row: Row) -> str:
    if row["limit"] is not None and row["measured"] > row["limit"]:
        return " OVER THE LIMIT"
    ratio = row["predicted"] / row["measured"]
    return " BELOW" if ratio < 1 else " high" if ratio > 1.15 else ""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", metavar="ENTRY", default=ENTRIES)
    parser.add_argument("--source", type=absolute, default=ROOT / "tests/models/books-8m")
    parser.add_argument("--shapes", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--limits", nargs="+", choices=["none", "tight"], default=["none", "tight"])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--num-samples", type=int, default=64, help="of the shape real; wide has a quarter")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--phases", action="store_true", help="print the peak of each phase")
    parser.add_argument("--show", action="store_true", help="print what is in the file and stop")
    parser.add_argument("--work", type=absolute, help="keep checkpoints here (default: a temporary directory)")
    add_table_options(parser, "memory_peaks", None)
    return parser.parse_args(argv)


def main() -> None:
    args = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        for entry in () if args.show else args.entries:
            for shape in args.shapes:
                for limits in args.limits:
                    options = {"shape": shape, "limits": limits, "source": args.source.name}
                    options |= {key: getattr(args, key) for key in ("layers", "num_samples", "seq_len")}
                    name = f"{entry}, {shape}, limit {limits}"
                    work = partial(measure, entry, shape, limits, args, args.work or Path(temporary))
                    row = result_file.add(args.json, {"entry": entry, "options": options}, args.again, name, work)
                    if row is not None:
                        print(" | ".join([name, *(cell(row) for cell in list(CELLS.values())[3:])]), flush=True)
                    if row is not None and args.phases:
                        for phase, peak in row["phases"].items():
                            print(f"    {peak / MIB:6.0f} {phase}", flush=True)
    rows = result_file.read(args.json)
    result_file.present("memory.py", list(CELLS), [[c(row) for c in CELLS.values()] for row in rows], ["recipe"])


if __name__ == "__main__":
    main()
