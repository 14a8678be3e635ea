"""Quantize a model with another tool, on given token windows, and read back what that tool wrote.

Quantize (run by the interpreter of the environment that has the tool; compress need not be installed there, but for
the tools that say so in peer_tools/):
    python benchmarks/peers.py --tool llm-compressor --bits 4 --group-size 128 --model DIR --tokens F --out DIR
prints one JSON line: seconds of quantization alone (model loading, imports and saving excluded), peak memory, tool
version, stored bits per weight of the decoder's linears and bytes of the checkpoint, both counted from the files.

Decode (needs torch and safetensors only, none of the tools):
    python benchmarks/peers.py --decode PACKED --model DIR --out DIR
writes a plain float32 checkpoint, so that one evaluator scores all. The readers in peer_tools/ follow the formats'
documents and share no code with the tools or with compress.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import pkgutil
import shutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import peer_tools
import torch
from peer_tools.common import owner, peak_rss, read_checkpoint, read_headers, read_shapes, source_linears
from safetensors.torch import load_file, save_file

SOURCE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SAID = "peer.json"  # which tool wrote a folder


@cache
def load_tools() -> dict[str, ModuleType]:
    """Return the modules of peer_tools/ that are tools, by the name of --tool."""
    names = [module.name for module in pkgutil.iter_modules(peer_tools.__path__)]
    modules = {name.replace("_", "-"): importlib.import_module(f"peer_tools.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "DISTRIBUTION")}


def quantize(args: argparse.Namespace) -> dict[str, Any]:
    """Run the tool; return the facts that the benchmark's table needs, seconds and bytes in the names."""
    tool = load_tools()[args.tool]
    windows = load_file(args.tokens)["tokens"]  # [n, seq_len] int64
    args.out.mkdir(parents=True, exist_ok=True)
    clock = tool.quantize(args, windows, args.out)
    (args.out / SAID).write_text(json.dumps({"tool": args.tool}))
    return {
        "tool": args.tool,
        "version": importlib.metadata.version(tool.DISTRIBUTION) if tool.DISTRIBUTION else "",
        "quantize_wall_s": clock.wall,
        "quantize_cpu_s": clock.cpu,
        "peak_rss_bytes": peak_rss(),
        "threads": torch.get_num_threads(),
        **sizes(args.out, args.model),
    }


def tool_of(packed: Path) -> ModuleType | None:
    """Return the module of the tool that wrote a folder, None for a checkpoint of compress."""
    if (packed / SAID).exists():
        return load_tools()[json.loads((packed / SAID).read_text())["tool"]]
    method = json.loads((packed / "config.json").read_text())["quantization_config"]["quant_method"]
    return next((tool for tool in load_tools().values() if getattr(tool, "METHOD", "") == method), None)


def sizes(directory: Path, model: Path) -> dict[str, float]:
    """Count stored bits: `bpw` per weight of the packed linears, `whole_bpw` of all tensors per weight of the source.

    Everything stored below the name of a linear counts but the bias; a linear that is kept as it was does not.
    """
    tool = tool_of(directory)
    count = getattr(tool, "stored_bytes", None)
    stored: dict[str, int] = count(directory, model) if count else read_headers(directory)
    linears, kept = source_linears(model), set() if count else plain_weights(stored)
    linears = {name: shape for name, shape in linears.items() if f"{name}.weight" not in kept}
    packed = sum(size for name, size in stored.items() if owner(name, linears) and not name.endswith(".bias"))
    return {
        "bpw": 8 * packed / sum(rows * columns for rows, columns in linears.values()),
        "whole_bpw": 8 * sum(stored.values()) / sum(math.prod(shape) for shape in read_shapes(model).values()),
        "checkpoint_bytes": sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        or sum(stored.values()),
    }


def plain_weights(stored: dict[str, int]) -> set[str]:
    """Return the names of weights beside which lies no scale."""
    return {name for name in stored if name.endswith(".weight") and f"{name}_scale" not in stored}


def decode(packed: Path, model: Path, out: Path) -> None:
    """Write the packed checkpoint as a plain float32 one; config and tokenizer come from the source model."""
    tool = tool_of(packed)
    if tool is None:
        raise SystemExit(f"{packed}: no tool of peer_tools/ wrote this")
    plain, shapes = tool.restore(packed, model), read_shapes(model)
    if missing := [f"{name}.weight" for name in source_linears(model) if f"{name}.weight" not in plain]:
        raise SystemExit(f"{packed}: {len(missing)} linears are neither packed nor plain, the first {missing[0]}")
    for name, tensor in plain.items():
        assert tuple(tensor.shape) == shapes.get(name, tuple(tensor.shape)), name
    left = {name: tensor.float() for name, tensor in read_checkpoint(model).items() if name not in plain}
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in {**left, **plain}.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in SOURCE_FILES:
        if (model / name).exists():
            shutil.copy(model / name, out / name)
    plain_config = json.loads((out / "config.json").read_text()) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(plain_config, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=sorted(load_tools()))
    parser.add_argument("--decode", type=Path, metavar="PACKED")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, help="safetensors file with `tokens` int64 [n, seq_len]")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--method", choices=("gptq", "awq", "rtn"), default="gptq")
    parser.add_argument("--batch-size", type=int, default=1, help="calibration windows in one forward pass")
    for tool in load_tools().values():
        if hasattr(tool, "add_options"):
            tool.add_options(parser)
    args = parser.parse_args()
    if not args.decode and not (args.tool and args.tokens):
        parser.error("give --tool and --tokens, or --decode")
    return args


def main() -> None:
    args = parse()
    if args.decode:
        decode(args.decode, args.model, args.out)
    else:
        print(json.dumps(quantize(args)), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
