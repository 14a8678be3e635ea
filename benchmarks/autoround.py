"""Compare AutoRound with methods of ours at equal bits on the same calibration windows: bits, divergence, CPU seconds.

    python -m venv peer && peer/bin/pip install torch==2.13.0 auto-round
    python benchmarks/autoround.py --peer peer/bin/python [--work DIR] [ENTRY ...]
    python benchmarks/autoround.py show

An ENTRY is `SETTING:METHOD`, the settings those of SETTINGS and the methods those of METHODS. All keep embeddings and
head as they are, read the same windows of tokens, and store one scale (and zero point) for as many weights; bits are
counted from the files. Rows go to --json as they finish, and those that are there with the same options are not
measured again. What AutoRound has written in --work is not made again. One evaluator scores all in float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import quantize
import result_file
from measure import absolute, add_table_options, in_fresh_process, run_child, run_quantize, spread_blocks

Row = dict[str, Any]
PEER = "auto-round"


class Setting(NamedTuple):
    """Integers of so many bits, one scale for so many of them, with a zero point where not symmetric."""

    recipe: str
    tuned: str  # the recipe of the same bits that is tuned
    bits: int
    group_size: int
    is_symmetric: bool


SETTINGS = {"2bit": Setting("int2", "int2-tuned", 2, 64, False), "4bit": Setting("int4", "int4-round", 4, 128, True)}
PLAIN = {"incoherence": False}  # at run time AutoRound has no transforms
TUNED = "tuned"  # the tuned recipe of a setting, as it stands
METHODS: dict[str, tuple[Row, tuple[str, ...]]] = {  # name -> changes to the recipe's `quantize`, and overrides
    "rtn": ({"method": "rtn", **PLAIN}, ()),
    "gptq": ({"method": "gptq", **PLAIN}, ()),
    "gptq+blockwise": ({"method": "gptq", **PLAIN}, ("tune={method: blockwise}",)),
    "gptq+rotation": ({"method": "gptq", "incoherence": True}, ()),
    "gptq+rotation+blockwise": ({"method": "gptq", "incoherence": True}, ("tune={method: blockwise}",)),
    TUNED: ({}, ()),
    "learned_codes": ({}, ("tune={method: blockwise, codes: straight_through, steps: 200}",)),
    "gptq+norm_tweaking": ({"method": "gptq", **PLAIN}, ("tune={method: norm_tweaking}",)),
}
ENTRIES = [f"{setting}:{method}" for setting in SETTINGS for method in (PEER, "rtn", "gptq", "gptq+rotation")]


def run_peer(args: argparse.Namespace, setting: Setting, work: Path) -> tuple[Row, Path]:
    """Quantize with AutoRound, unless it is done; return what it took, and the checkpoint decoded to float32."""
    out = work / f"{PEER}-{setting.recipe}-{args.iterations}-{args.blocks or 'all'}"
    said, plain = out / "said.json", out.with_name(f"{out.name}-plain")
    if not said.exists():
        tokens = work / "tokens.safetensors"
        in_fresh_process(quantize.write_tokens, args.base, args.calib, args.num_samples, args.seq_len, tokens)
        command: list[str | Path] = [args.peer, quantize.PEERS, "--tool", PEER, "--bits", str(setting.bits)]
        command += ["--group-size", str(setting.group_size), *([] if setting.is_symmetric else ["--asymmetric"])]
        command += ["--iterations", str(args.iterations), "--batch-size", str(args.batch_size)]
        command += ["--plain-blocks", *map(str, spread_blocks(args.base, args.blocks)[1])]
        command += ["--model", args.base, "--tokens", tokens, "--out", out]
        output, run = run_child(command, args.env, out.with_suffix(".log"))
        row = json.loads(output.strip().splitlines()[-1])
        facts = replace(run, quantize_wall_s=row["quantize_wall_s"], quantize_cpu_s=row["quantize_cpu_s"])
        said.write_text(json.dumps({"version": row["version"], **asdict(facts)}))
    in_fresh_process(quantize.decode_peer, out, args.base, plain)
    sizes = in_fresh_process(quantize.count_sizes, out, args.base)
    return {"iterations": args.iterations, **json.loads(said.read_text()), **sizes}, plain


def run_ours(args: argparse.Namespace, setting: Setting, method: str, work: Path) -> tuple[Row, Path]:
    """Quantize with a method of ours; return what it took, and the checkpoint."""
    changes, overrides = METHODS[method]
    recipe = setting.tuned if method == TUNED else setting.recipe
    given = {**changes, "bits": setting.bits, "group_size": setting.group_size, "symmetric": setting.is_symmetric}
    values = [f"quantize.{key}={json.dumps(value)}" for key, value in given.items()]
    if changes.get("method") == "rtn":
        values = [f"quantize={json.dumps(given)}"]
    values += [f"calibration.num_samples={args.num_samples}", f"calibration.seq_len={args.seq_len}"]
    _, left_out = spread_blocks(args.base, args.blocks)
    values += [f"ignore={json.dumps([f'*.layers.{block}.*' for block in left_out])}"]
    options = [word for value in (*values, *quantize.KEEP_TABLES, *overrides) for word in ("--set", value)]
    out = work / "ours"
    run, _ = run_quantize(args.base, recipe, args.calib, out, args.env, options)
    return {**asdict(run), **in_fresh_process(quantize.count_sizes, out, args.base)}, out


def measure(args: argparse.Namespace, entry: str, work: Path) -> Row:
    """Quantize and score one entry."""
    name, _, method = entry.partition(":")
    setting = SETTINGS[name]
    row, out = run_peer(args, setting, work) if method == PEER else run_ours(args, setting, method, work)
    window = args.score_seq_len or args.seq_len
    return row | in_fresh_process(quantize.score, out, args.base, args.text, window, args.max_tokens)


def table(rows: list[Row]) -> None:
    """Print the rows by their settings, the best first."""
    cells = []
    for row in sorted(rows, key=lambda row: (row["model"], row["entry"].partition(":")[0], row["kl_mean"])):
        setting, _, method = row["entry"].partition(":")
        cell = [row["model"], setting, method, f"{row['bpw']:.3f}", f"{row['kl_mean']:.4f}", f"{row['kl_se']:.4f}"]
        cells.append([*cell, f"{row['perplexity']:.2f}", f"{row['same_top1']:.1%}", f"{row['cpu_s']:.0f}"])
    names = ["model", "setting", "method", "bits", "KL", "s.e.", "perplexity", "same top-1", "CPU s"]
    result_file.present("AutoRound and ours at equal bits", names, cells, left=["model", "setting", "method"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", metavar="ENTRY", help="or `show`")
    parser.add_argument("--peer", type=absolute, help="the python of the environment that has AutoRound")
    parser.add_argument("--iterations", type=int, default=200, help="of AutoRound, for each block")
    parser.add_argument("--batch-size", type=int, default=8, help="of AutoRound, windows in an iteration")
    parser.add_argument("--blocks", type=int, help="quantize so many blocks, spread from the first to the last")
    parser.add_argument("--score-seq-len", type=int, help="tokens of a window that is scored, if not --seq-len")
    parser.add_argument("--work", type=absolute)
    add_table_options(parser, "autoround")
    parser.set_defaults(num_samples=64, env=[("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")])
    args = parser.parse_args()
    args.env = dict(args.env)
    if args.entries != ["show"]:
        with tempfile.TemporaryDirectory() as temporary:
            work = args.work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            for entry in args.entries or ENTRIES:
                identity = {"entry": entry, "samples": args.num_samples, "seq_len": args.seq_len}
                identity |= {"model": args.base.name, "calib": args.calib.name, "text": args.text.name}
                if args.blocks:
                    identity["blocks"] = args.blocks
                result_file.add(args.json, identity, args.again, entry, partial(measure, args, entry, work))
    table(result_file.read(args.json))


if __name__ == "__main__":
    main()
