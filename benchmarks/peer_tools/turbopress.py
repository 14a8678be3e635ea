"""turbopress: its function for one matrix (rotation, equilibration, a small trellis with block feedback), in our walk.

The tool's own command replays the whole model for every block and downloads its texts; here the same function gets the
Hessians of the given windows, block by block behind quantized blocks, as the tool does. It keeps its tensors in a
pickle; here they are written as they are into a safetensors file, and the weights as the tool itself decodes them
beside it, uncounted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .blocks import Hessians, walk
from .common import Clock, read_others

DISTRIBUTION = "turbopress"
DECODED = "decoded"  # folder below what is stored


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trellis-states", type=int, default=64, help="of turbopress: 4, 8, 16 or 64")


def quantize(args: argparse.Namespace, windows: Tensor, out: Path) -> Clock:
    """Quantize all linears of the decoder with error feedback, the tool's default."""
    from transformers import AutoModelForCausalLM
    from turbopress.pipeline import quantize_matrix

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}

    def replace(_: str, hessians: Hessians) -> Mapping[str, Tensor]:
        new: dict[str, Tensor] = {}
        for name, first in hessians.first_reader.items():
            moment = hessians.moments[first]
            payload, new[name] = quantize_matrix(
                model.get_submodule(name).weight,
                moment.diagonal().sqrt(),
                args.bits,
                args.trellis_states,
                seed=len(stored),
                hessian=moment,
            )
            parts = {part: each for part, each in payload.items() if isinstance(each, Tensor)}
            stored.update({f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()})
        decoded.update({f"{name}.weight": weight.contiguous() for name, weight in new.items()})
        return new

    with Clock() as clock:
        walk(model, windows, args.batch_size, replace)
    stored |= read_others(args.model)
    save_file(stored, out / "model.safetensors")
    (out / DECODED).mkdir()
    save_file(decoded, out / DECODED / "model.safetensors")
    return clock


def restore(packed: Path, _: Path) -> dict[str, Tensor]:
    """Return the linears as the tool decodes them."""
    return load_file(packed / DECODED / "model.safetensors")
