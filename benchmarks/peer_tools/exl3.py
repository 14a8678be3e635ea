"""EXL3 on the CPU: our own re-implementation of its algorithm (benchmarks/exl3_cpu.py), marked so wherever it stands.

Runs where compress is installed. Embeddings and head stay as they are; the tool itself stores a head of 6 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .blocks import Hessians, walk
from .common import Clock, read_checkpoint, read_others, source_linears, take_parts

DISTRIBUTION = ""  # not the tool's
SETTING = "exl3.json"
ROOT = Path(__file__).resolve().parents[2]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hadamard", type=int, default=128, help="of EXL3: size of the transforms, to which it pads")
    parser.add_argument("--code", default="mul1", choices=("mul1", "mcg"), help="of EXL3")
    parser.add_argument("--two-sided", type=Path, metavar="FOLDER", help="EXL3: gradients that compress keeps there")


def quantize(args: argparse.Namespace, windows: Tensor, out: Path) -> Clock:
    """Quantize block by block, each behind the quantized ones before it, as the tool does."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import exl3_cpu
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    setting = exl3_cpu.Setting(args.bits, args.code, args.hadamard)
    stored: dict[str, Tensor] = {}

    def replace(prefix: str, hessians: Hessians) -> Mapping[str, Tensor]:
        new: dict[str, Tensor] = {}
        for first, moment in hessians.moments.items():
            readers = [name for name, source in hessians.first_reader.items() if source == first]
            weights = [model.get_submodule(name).weight.data.T.float() for name in readers]
            outputs = None if args.two_sided is None else [_output_moment(args.two_sided, name) for name in readers]
            packed = exl3_cpu.quantize_readers(weights, moment, setting, len(stored), outputs)
            for name, weight, each in zip(readers, weights, packed, strict=True):
                new[name] = exl3_cpu.decode(each, setting, (weight.shape[0], weight.shape[1])).T
                stored.update({f"{name}.{part}": tensor.contiguous() for part, tensor in each._asdict().items()})
                stored[f"{name}.{args.code}"] = torch.zeros(1, dtype=torch.int32)  # the number that names the code
        print(prefix, file=sys.stderr, flush=True)
        return new

    with Clock() as clock:
        walk(model, windows, args.batch_size, replace)
    stored |= read_others(args.model)
    save_file(stored, out / "model.safetensors")
    (out / SETTING).write_text(json.dumps({"bits": args.bits, "code": args.code, "hadamard": args.hadamard}))
    return clock


def _output_moment(folder: Path, name: str) -> Tensor:
    """Return the second moment of the loss's gradients at a linear's outputs, from what compress keeps of its pass."""
    for file in sorted(folder.glob("[0-9]*.safetensors")):
        with safe_open(file, "pt") as stored:
            if f"{name}.moment" in stored.keys():  # noqa: SIM118 (safe_open is not a mapping)
                return stored.get_tensor(f"{name}.moment").float()
            if f"{name}.entries" in stored.keys():  # noqa: SIM118
                rows = stored.get_tensor(f"{name}.entries").float() * stored.get_tensor(f"{name}.scales")[:, None]
                return rows.T @ rows
    raise SystemExit(f"{folder} has no gradients of {name}")


def restore(packed: Path, model: Path) -> dict[str, Tensor]:
    """Return the plain tensors, and the linears decoded."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import exl3_cpu

    setting, stored = exl3_cpu.Setting(**json.loads((packed / SETTING).read_text())), read_checkpoint(packed)
    plain = {}
    for name, (rows, columns) in source_linears(model).items():
        parts = take_parts(stored, name)
        weight = exl3_cpu.decode(
            exl3_cpu.Packed(*(parts[part] for part in exl3_cpu.Packed._fields)), setting, (columns, rows)
        )
        plain[f"{name}.weight"] = weight.T.contiguous()
    return plain | {name: tensor.float() for name, tensor in stored.items()}
