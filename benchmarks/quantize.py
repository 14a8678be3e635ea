"""Compare compress with other tools side by side: time, memory, bits and quality, measured in one run.

    python benchmarks/quantize.py [--peer llm-compressor=/path/to/python ...] [--recipes int4 int3 int2] [--json FILE]
    python benchmarks/quantize.py memory [--layers 5 11 22] [--max-memory 1.5GiB]
    python benchmarks/quantize.py loading CHECKPOINT...

compare (the default): every tool quantizes the same model on the same token windows in a process of its own, the tools
taking turns; one evaluator scores all results in float32; bits are counted from the files. memory: a random model of
1.1B parameters under a memory limit, at several depths. loading: peak memory of `from_pretrained` over the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from measure import ROOT, SEED, Run, absolute, in_fresh_process, key_value, machine, median, run_child, run_quantize
from result_file import show
from rich.table import Table

Row = dict[str, Any]
PEERS = Path(__file__).resolve().with_name("peers.py")
OURS = "compress"
MODES = ("compare", "memory", "loading")
KEEP_TABLES = ("embeddings={keep: true}", "head={keep: true}")
GRID = {  # recipe -> bits, then (group size, symmetric) of the compared settings
    "int4": (4, ((128, True), (64, True))),
    "int3": (3, ((128, True), (64, True))),
    "int2": (2, ((64, False), (128, False))),
}


@dataclass(frozen=True)
class Setting:
    """What is asked of every tool. `bits` None: our recipe as it is shipped, which no peer has."""

    recipe: str
    method: str = ""
    bits: int | None = None
    group_size: int = 128
    symmetric: bool = True

    @property
    def name(self) -> str:
        if self.bits is None:
            return self.recipe
        return f"{self.method} int{self.bits} g{self.group_size} {'sym' if self.symmetric else 'asym'}"


def settings(recipes: Sequence[str], methods: Sequence[str]) -> list[Setting]:
    """The settings of the named recipes; a recipe outside GRID stands for itself."""
    found: list[Setting] = []
    for recipe in recipes:
        if recipe not in GRID:
            found.append(Setting(recipe))
            continue
        bits, groups = GRID[recipe]
        found += [Setting(recipe, method, bits, group, symmetric) for method in methods for group, symmetric in groups]
    return found


# Run in a fresh process: these import torch


def write_tokens(model: Path, calib: Path, count: int, seq_len: int, out: Path) -> None:
    """The windows that our pipeline calibrates on, for the peers."""
    from safetensors.torch import save_file

    from compress.calib import data
    from compress.model import load

    tokenizer, vocab_size = load.load_tokenizer(model), load.load_config(model).vocab_size
    windows = data.calibration(calib, tokenizer, count, seq_len, SEED, vocab_size).tokens
    save_file({"tokens": windows.contiguous()}, out)


def count_sizes(directory: Path, model: Path) -> Row:
    import peers

    return peers.sizes(directory, model)


def decode_peer(packed: Path, model: Path, out: Path) -> None:
    import peers

    peers.decode(packed, model, out)


def score(directory: Path, base: Path, text: Path, seq_len: int, max_tokens: int) -> Row:
    """Perplexity and KL to the unquantized model, in float32."""
    from compress.evaluate import evaluate

    return asdict(evaluate(directory, text, base, seq_len, max_tokens))


def build_random(out: Path, layers: int) -> None:
    import random_llama

    if not (out / "config.json").exists():
        random_llama.write(out, random_llama.Shape(num_hidden_layers=layers))


def load_checkpoint(directory: Path) -> Row:
    """Peak memory of from_pretrained, and of then reading every page of every tensor, beyond the libraries' own.

    The libraries are counted out by loading a tiny model first. Files may be mapped: they count when they are read.
    """
    import random_llama
    import torch
    from peer_tools.common import peak_rss

    import compress

    with tempfile.TemporaryDirectory() as temporary:
        random_llama.write(Path(temporary), random_llama.Shape(1, 64, 64, 2, 1, 260))
        model = compress.load(temporary)
        del model
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    before, start = peak_rss(), time.perf_counter()
    model = compress.load(directory)
    elapsed, loaded = time.perf_counter() - start, peak_rss()
    for tensor in model.state_dict().values():
        tensor.contiguous().view(torch.uint8).flatten()[:: mmap.PAGESIZE].sum()
    return {
        "libraries_bytes": before,
        "load_peak_bytes": loaded - before,
        "read_peak_bytes": peak_rss() - before,
        "seconds": elapsed,
    }


# compare


def run_ours(args: argparse.Namespace, setting: Setting, out: Path, *options: str) -> tuple[Run, Row]:
    """The cost and the report of our own command line; embeddings and head stay as they are, as with other tools."""
    overrides = [f"calibration.num_samples={args.num_samples}", f"calibration.seq_len={args.seq_len}", *KEEP_TABLES]
    if setting.bits is not None:
        overrides += [f"method={setting.method}", f"bits={setting.bits}", f"group_size={setting.group_size}"]
        overrides += [f"symmetric={str(setting.symmetric).lower()}"]
    extra = [*options, *(part for override in overrides for part in ("--set", override))]
    return run_quantize(args.model, setting.recipe, args.calib, out, args.env, extra)


def run_peer(args: argparse.Namespace, tool: str, setting: Setting, out: Path) -> tuple[Run, Row]:
    shutil.rmtree(out, ignore_errors=True)
    command: list[str | Path] = [args.peers[tool], PEERS, "--tool", tool, "--method", setting.method]
    command += ["--bits", str(setting.bits), "--group-size", str(setting.group_size)]
    command += [] if setting.symmetric else ["--asymmetric"]
    command += ["--model", args.model, "--tokens", args.tokens, "--out", out]
    output, run = run_child(command, args.env, out.with_suffix(".log"))
    said = json.loads(output.strip().splitlines()[-1])
    run = replace(run, quantize_wall_s=said["quantize_wall_s"], quantize_cpu_s=said["quantize_cpu_s"])
    return run, {"version": said["version"], "threads": said["threads"]}


def measure(args: argparse.Namespace, setting: Setting, work: Path) -> list[Row]:
    """One setting with every tool that has it: A B A B, the median of the repeats, the last result scored."""
    tools = [OURS, *(args.peers if setting.bits is not None else ())]
    outs = {tool: work / f"{tool}-{setting.name.replace(' ', '-')}" for tool in tools}
    runs: dict[str, list[Run]] = {tool: [] for tool in tools}
    facts: dict[str, Row] = {OURS: {}}
    for _ in range(args.repeat):
        for tool in tools:
            if tool == OURS:
                run, _ = run_ours(args, setting, outs[tool])
            else:
                run, facts[tool] = run_peer(args, tool, setting, outs[tool])
            runs[tool].append(run)
    rows = []
    for tool in tools:
        scored = outs[tool]
        if tool != OURS:
            scored = work / f"{outs[tool].name}-plain"
            in_fresh_process(decode_peer, outs[tool], args.model, scored)
        row = {"tool": tool, "setting": setting.name, **facts[tool], **asdict(median(runs[tool]))}
        row |= in_fresh_process(count_sizes, outs[tool], args.model)
        row |= in_fresh_process(score, scored, args.model, args.text, args.seq_len, args.max_tokens)
        rows.append({**row, "runs": [asdict(run) for run in runs[tool]]})
    return rows


def compare(args: argparse.Namespace, work: Path) -> list[Row]:
    args.tokens = work / "tokens.safetensors"
    in_fresh_process(write_tokens, args.model, args.calib, args.num_samples, args.seq_len, args.tokens)
    rows: list[Row] = []
    for setting in settings(args.recipes, args.methods):
        rows += measure(args, setting, work)
        print(f"{setting.name}: done", file=sys.stderr)
    show(compare_table(rows, args.repeat))
    return rows


def compare_table(rows: Sequence[Row], repeat: int) -> Table:
    """The last columns divide the fastest peer's figure by the row's: how many times less this row takes."""
    names = ["bpw", "KL +- se", "ppl", "quantize s", "process s", "RSS MB", "file MB"]
    peers = any(row["tool"] != OURS for row in rows)
    names += ["x quantize", "x process", "x RSS"] if peers else []
    title = f"Median of {repeat}; seconds are wall / CPU; quantize: without imports, loading and saving"
    table = Table(title=title + ("; x: fastest peer over this row" if peers else ""))
    for name in ("setting", "tool", *names):
        table.add_column(name, justify="left" if name in ("setting", "tool") else "right", no_wrap=True)
    previous = ""
    for row in rows:
        if previous and previous != row["setting"]:
            table.add_section()
        previous = row["setting"]
        cells = [row["setting"], row["tool"], f"{row['bpw']:.3f}", f"{row['kl_mean']:.5f} +- {row['kl_se'] or 0:.5f}"]
        cells += [f"{row['perplexity']:.3f}", seconds(row, "quantize_"), seconds(row)]
        cells += [f"{row['peak_rss_bytes'] / 1e6:.0f}", f"{row['checkpoint_bytes'] / 1e6:.2f}"]
        peer = fastest_peer(rows, row["setting"])
        if peer is not None and peer is not row:
            cells += [ratio(row, peer, "quantize_wall_s", "quantize_cpu_s"), ratio(row, peer, "wall_s", "cpu_s")]
            cells += [ratio(row, peer, "peak_rss_bytes")]
        table.add_row(*cells)
    return table


def fastest_peer(rows: Sequence[Row], setting: str) -> Row | None:
    found = [row for row in rows if row["setting"] == setting and row["tool"] != OURS]
    return min(found, key=lambda row: row["quantize_wall_s"], default=None)


def seconds(row: Row, prefix: str = "") -> str:
    values = (row[f"{prefix}wall_s"], row[f"{prefix}cpu_s"])
    return " / ".join("-" if value is None else f"{value:.1f}" for value in values)


def ratio(row: Row, peer: Row, *keys: str) -> str:
    return " / ".join(f"{peer[key] / row[key]:.2f}" if row[key] else "-" for key in keys)


# memory and loading


def memory(args: argparse.Namespace, work: Path) -> list[Row]:
    """Random models of several depths under a limit: neither the peak nor the seconds of a layer should grow."""
    table = Table(title=f"{args.recipe}, {args.num_samples} x {args.seq_len} tokens, --max-memory {args.max_memory}")
    for name in ("layers", "source GB", "peak RSS MB", "of the limit", "process s", "quantize s per layer"):
        table.add_column(name, justify="right")
    rows = []
    for layers in args.layers:
        args.model = work / f"random-{layers}"
        in_fresh_process(build_random, args.model, layers)
        run, report = run_ours(args, Setting(args.recipe), work / "quantized", "--max-memory", args.max_memory)
        row = {"layers": layers, "source_bytes": file_bytes(args.model), **asdict(run), **report["memory"]}
        row["quantize_s_per_layer"] = report["seconds"]["quantize"] / layers
        rows.append(row)
        share = run.peak_rss_bytes / row["limit"]
        cells = [str(layers), f"{row['source_bytes'] / 1e9:.2f}", f"{run.peak_rss_bytes / 1e6:.0f}"]
        cells += [f"{share:.2f}{' OVER' if share > 1 else ''}", seconds(row), f"{row['quantize_s_per_layer']:.2f}"]
        table.add_row(*cells)
    show(table)
    return rows


def loading(args: argparse.Namespace, work: Path) -> list[Row]:
    table = Table(title="from_pretrained in a fresh process: peak memory beyond the libraries; its ratio to the file")
    for name in ("checkpoint", "file MB", "loaded MB", "ratio", "all read MB", "ratio", "s"):
        table.add_column(name, justify="right")
    rows = []
    for directory in args.checkpoints:
        row = {"checkpoint": directory.name, "checkpoint_bytes": file_bytes(directory)}
        row |= in_fresh_process(load_checkpoint, directory)
        rows.append(row)
        size = row["checkpoint_bytes"]
        cells = [directory.resolve().name, f"{size / 1e6:.1f}"]
        for peak in (row["load_peak_bytes"], row["read_peak_bytes"]):
            cells += [f"{peak / 1e6:.1f}", f"{peak / size:.2f}"]
        table.add_row(*cells, f"{row['seconds']:.2f}")
    show(table)
    return rows


def file_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


# command line


def parse(argv: list[str]) -> argparse.Namespace:
    if not argv or argv[0] not in (*MODES, "-h", "--help"):
        argv = ["compare", *argv]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", type=absolute, help="write all figures here")
    shared.add_argument("--work", type=absolute, help="keep checkpoints and logs here (default: a temporary directory)")
    quantizing = argparse.ArgumentParser(add_help=False)
    quantizing.add_argument("--calib", type=absolute, default=ROOT / "tests/data/books_calib.txt")
    quantizing.add_argument("--seq-len", type=int, default=512)
    quantizing.add_argument(
        "--env", type=key_value, action="append", default=[], help="NAME=VALUE for every quantizing process"
    )
    sub = modes.add_parser("compare", parents=[shared, quantizing])
    sub.add_argument("--model", type=absolute, default=ROOT / "tests/models/books-8m")
    sub.add_argument("--text", type=absolute, default=ROOT / "tests/data/books_heldout.txt")
    sub.add_argument("--peer", type=key_value, action="append", default=[], dest="peers", help="TOOL=PYTHON")
    sub.add_argument("--recipes", nargs="+", default=list(GRID), help=f"{', '.join(GRID)}, or any other of ours alone")
    sub.add_argument("--methods", nargs="+", default=["gptq", "rtn"])
    sub.add_argument("--num-samples", type=int, default=128)
    sub.add_argument("--max-tokens", type=int, default=65536)
    sub.add_argument("--repeat", type=int, default=3)
    sub = modes.add_parser("memory", parents=[shared, quantizing])
    sub.add_argument("--layers", type=int, nargs="+", default=[5, 11, 22])
    sub.add_argument("--max-memory", default="1.5GiB")
    sub.add_argument("--recipe", default="int4")
    sub.add_argument("--num-samples", type=int, default=16)
    sub = modes.add_parser("loading", parents=[shared])
    sub.add_argument("checkpoints", type=absolute, nargs="+")
    args = parser.parse_args(argv)
    args.env = dict(getattr(args, "env", ()))
    args.peers = {tool: absolute(python) for tool, python in getattr(args, "peers", ())}
    return args


def options(args: argparse.Namespace) -> Row:
    """The settings of the run; of paths only the name, so that results do not tell where they were made."""
    chosen = {key: value for key, value in vars(args).items() if key not in ("json", "work", "tokens", "checkpoints")}
    chosen = {key: value.name if isinstance(value, Path) else value for key, value in chosen.items()}
    return chosen | {"peers": list(args.peers)}


def main() -> None:
    args = parse(sys.argv[1:])
    result: Row = {"machine": machine(), "options": options(args)}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        result["rows"] = {"compare": compare, "memory": memory, "loading": loading}[args.mode](args, work)
    result["load_average_after"] = os.getloadavg()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
