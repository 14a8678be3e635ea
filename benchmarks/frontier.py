"""Quantize a real model with recipes of ours and with other tools, and score all alike: bits, divergence, CPU seconds.

    python benchmarks/frontier.py MODEL [ENTRY ...] --calib TEXT --text TEXT [TEXT ...] --peer TOOL=PYTHON [...]
    python benchmarks/frontier.py page        writes docs/results/frontier.md and its picture from the rows

An ENTRY is a recipe of ours, or the name of a row of PEERS, or a pattern over both (`'exl3*'`); without entries all are
measured in that order, those of tools that have no --peer left out. The tools are those of peer_tools/, each run by the
python of its own environment. Every entry is quantized once and scored on each text. Rows go to --json as they finish,
and those that are there with the same model, text and tokens are not measured again: `--again` does.

All calibrate on the same windows. Bits are counted from what is stored: of the decoder's linears, and of everything.
The divergence KL(model || quantized) is taken in float32 on the first windows of a text; `kl_blocks` are its means over
64 positions in a row, from which standard errors and those of differences of two rows are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import frontier_page
import result_file
from measure import ROOT, Run, absolute, in_fresh_process, key_value, run_child, run_quantize
from quantize import PEERS as PEERS_SCRIPT
from quantize import count_sizes, decode_peer, write_tokens

Row = dict[str, Any]
OURS = ("vq2bit", "vq3bit", "trellis4bit", "int4", "int3", "int2")
GROUP_64 = ("--group-size", "64")
TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "IQ2_XS", "IQ2_M", "IQ3_S", "IQ2_XXS", "IQ3_XXS", "IQ4_XS")
SCHEMES = ("NVFP4A16", "MXFP4A16", "FP8_DYNAMIC", "FP8_BLOCK")
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {  # name of a row -> tool, its options
    **{f"llama.cpp {kind}": ("llama-cpp", ("--type", kind)) for kind in TYPES},
    **{f"EXL3 {bits}, transforms of 64": ("exl3", ("--bits", str(bits), "--hadamard", "64")) for bits in (2, 3, 4)},
    **{f"EXL3 {bits}": ("exl3", ("--bits", str(bits))) for bits in (2, 3, 4)},
    **{f"HQQ {bits}, groups of 64": ("hqq", ("--bits", str(bits), *GROUP_64)) for bits in (4, 3, 2)},
    "llm-compressor GPTQ 4": ("llm-compressor", ("--bits", "4", *GROUP_64)),
    "llm-compressor AWQ 4": ("llm-compressor", ("--bits", "4", "--asymmetric", "--method", "awq", *GROUP_64)),
    **{f"AutoRound {bits}": ("auto-round", ("--bits", str(bits), *GROUP_64)) for bits in (4, 3)},
    "AutoRound 2": ("auto-round", ("--bits", "2", "--asymmetric", *GROUP_64)),
    "AutoRound 2, 1000 iterations": ("auto-round", ("--bits", "2", "--asymmetric", "--iterations", "1000", *GROUP_64)),
    **{f"llm-compressor {kind}": ("llm-compressor", ("--scheme", kind, "--method", "rtn")) for kind in SCHEMES},
    **{f"llm-compressor {kind} GPTQ": ("llm-compressor", ("--scheme", kind)) for kind in SCHEMES[:2]},
    **{f"turbopress {bits}": ("turbopress", ("--bits", str(bits))) for bits in (2, 3)},
}
# What a tool gets beside: windows that it can afford on a CPU, as many of them at once as it takes by itself.
BESIDE = {"auto-round": ("--tokens-a-window", "512", "--batch-size", "8")}
BLOCK = 64  # positions that stand together in a standard error


# Run in a fresh process: these import torch


def score(directory: Path, base: Path, text: Path, args: argparse.Namespace, kept: Path) -> Row:
    """Score a checkpoint on a text; logits of the base are kept in a file, [windows, seq_len - 1, vocabulary]."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from compress.evaluate import scores
    from compress.model import load

    cut = scores.text_windows([directory, base], text, args.seq_len, args.seq_len * args.windows)
    unscored = cut.prefix.unscored

    def logits(model: Any, window: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=window[None], use_cache=False).logits[0, unscored:-1]

    if not kept.exists():
        original = load.load_model(base, "float32")
        save_file({str(i): logits(original, window) for i, window in enumerate(cut.tokens)}, kept)
        del original
    model, figures = load.load_model(directory, "float32"), []
    with safe_open(kept, "pt") as stored:
        for i, window in enumerate(cut.tokens):
            pair = [logits(model, window), stored.get_tensor(str(i))]
            figures.append(scores.score(pair, window[unscored + 1 :]))
    row = asdict(scores.summary(torch.stack(figures, 1), text.name, args.seq_len, cut.prefix.text))
    blocks = torch.cat([torch.stack([part.mean() for part in each[2].split(BLOCK)]) for each in figures])
    row["kl_se"] = float(blocks.std() / len(blocks) ** 0.5)
    return row | {"kl_blocks": [float(f"{value:.4g}") for value in blocks.tolist()]}


# quantizing


class Built:
    """A quantized checkpoint: its directory as compress loads it, and what it took and stores."""

    def __init__(self, directory: Path, facts: Row) -> None:
        self.directory, self.facts = directory, facts


def build_ours(args: argparse.Namespace, recipe: str, work: Path) -> Built:
    """Quantize with a recipe of ours as it stands, but for the calibration windows."""
    values = [f"calibration.num_samples={args.samples}", f"calibration.seq_len={args.seq_len}"]
    options = [word for value in values for word in ("--set", value)]
    run, _ = run_quantize(args.model, recipe, args.calib, work / "out", args.env, options)
    sizes = in_fresh_process(count_sizes, work / "out", args.model)
    facts = {"tool": "compress", "version": version("compress-llm"), **asdict(run), **sizes}
    return Built(work / "out", facts)


def build_peer(args: argparse.Namespace, name: str, work: Path) -> Built:
    """Quantize with another tool, and decode what it stored."""
    tool, options = PEERS[name]
    tokens, out, plain = args.work / _tokens_name(args), work / "packed", work / "plain"
    if not tokens.exists():
        in_fresh_process(write_tokens, args.model, args.calib, args.samples, args.seq_len, tokens)
    options = ("--batch-size", str(args.batch_size), *options, *BESIDE.get(tool, ()))
    command = [args.peers[tool], PEERS_SCRIPT, "--tool", tool, *options]
    command += ["--model", args.model, "--tokens", tokens, "--out", out]
    output, run = run_child(command, args.env, work / "log")
    said = json.loads(output.strip().splitlines()[-1])
    costs: Run = replace(run, quantize_wall_s=said["quantize_wall_s"], quantize_cpu_s=said["quantize_cpu_s"])
    facts = {key: said[key] for key in ("tool", "version", "bpw", "whole_bpw", "checkpoint_bytes")}
    in_fresh_process(decode_peer, out, args.model, plain)
    return Built(plain, {**facts, "options": list(options), **asdict(costs)})


def _tokens_name(args: argparse.Namespace) -> str:
    return f"tokens-{args.model.name}-{args.calib.stem}-{args.samples}x{args.seq_len}.safetensors"


def processor_features() -> list[str]:
    """Return the instructions of this processor on which speed depends."""
    known = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile"}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return sorted(known & set(flags))


def measure(args: argparse.Namespace, entry: str) -> None:
    """Quantize an entry once and score it on every text that has no row yet."""
    work = args.work / "entry"

    @cache
    def build() -> Built:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        return build_peer(args, entry, work) if entry in PEERS else build_ours(args, entry, work)

    def row(text: Path) -> Row:
        built = build()
        kept = args.work / f"logits-{args.model.name}-{text.stem}-{args.windows}x{args.seq_len}.safetensors"
        figures = in_fresh_process(score, built.directory, args.model, text, _plain(args), kept)
        return {**built.facts, "processor_features": processor_features(), **figures, "text": text.name}

    for text in args.text:
        identity = {"entry": entry, "model": args.model.name, "calib": args.calib.name, "text": text.name}
        identity |= {"samples": args.samples, "seq_len": args.seq_len, "windows": args.windows}
        made: Callable[[], Row] = lambda text=text: row(text)  # noqa: E731
        done = result_file.add(args.json, identity, args.again, entry, made)
        if done is not None:
            print(
                f"{entry}, {text.name}: {done['bpw']:.3f} bits, KL {done['kl_mean']:.4f}", file=sys.stderr, flush=True
            )
    shutil.rmtree(work, ignore_errors=True)


def _plain(args: argparse.Namespace) -> argparse.Namespace:
    """Return what `score` needs of the options."""
    return argparse.Namespace(seq_len=args.seq_len, windows=args.windows)


def wanted(args: argparse.Namespace) -> list[str]:
    """Return the entries to measure; what cannot be is said and left out."""
    known = [*PEERS, *OURS]
    patterns = args.entries or ["*"]
    entries = [name for pattern in patterns for name in known if fnmatchcase(name, pattern)]
    entries += [name for name in patterns if name not in entries and not any(fnmatchcase(each, name) for each in known)]
    missing = sorted({PEERS[name][0] for name in entries if name in PEERS and PEERS[name][0] not in args.peers})
    for tool in missing:
        print(f"{tool}: left out, no --peer {tool}=PYTHON", file=sys.stderr)
    return [name for name in dict.fromkeys(entries) if name not in PEERS or PEERS[name][0] in args.peers]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint directory, or `page`")
    parser.add_argument("entries", nargs="*", metavar="ENTRY")
    parser.add_argument("--calib", type=absolute)
    parser.add_argument("--text", type=absolute, nargs="+", default=[])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4, help="windows that a tool takes in one pass")
    parser.add_argument("--peer", type=key_value, nargs="+", default=[], dest="peers", help="TOOL=PYTHON")
    parser.add_argument("--env", type=key_value, nargs="*", default=[("OMP_NUM_THREADS", "1")], metavar="NAME=VALUE")
    parser.add_argument("--again", action="store_true", help="measure rows that are there, too")
    parser.add_argument("--json", type=absolute, default=ROOT / "benchmarks/results/frontier.json")
    parser.add_argument("--work", type=absolute, help="keeps tokens and logits of the model as it is")
    args = parser.parse_args(argv)
    args.env = dict(args.env)
    os.environ.update(args.env)  # of the processes that score, too: two threads that spin cost more than they give
    args.peers = {tool: absolute(python) for tool, python in args.peers}
    if args.model != "page":
        if args.calib is None or not args.text:
            parser.error("give --calib and --text")
        args.model = absolute(args.model)
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if args.model == "page":
        frontier_page.write(result_file.read(args.json), ROOT / "docs/results")
        return
    with tempfile.TemporaryDirectory() as temporary:
        args.work = args.work or Path(temporary)
        args.work.mkdir(parents=True, exist_ok=True)
        for entry in wanted(args):
            measure(args, entry)


if __name__ == "__main__":
    main()
