"""HQQ: data-free rounding with the half-quadratic search of zero points, groups along the inputs.

The tool keeps its tensors in a pickle; here they are written as they are into a safetensors file: `W_q`, `scale`,
`zero`. Codes of 4 bits lie two in a byte and those of 2 bits four, the first part of the rows highest; those of 3 bits
ten in a word of 32 bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .common import Clock, read_checkpoint, source_linears, take_parts

DISTRIBUTION = "hqq"
CODES_OF_A_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # bits -> codes in what is stored at once


def quantize(args: argparse.Namespace, _: Tensor, out: Path) -> Clock:
    """Round every linear of the decoder by the tool's layer; scales and zero points in bfloat16."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    config = BaseQuantizeConfig(nbits=args.bits, group_size=args.group_size, axis=1)
    stored: dict[str, Tensor] = {}
    with Clock() as clock:
        for name in source_linears(args.model):
            layer = HQQLinear(
                model.get_submodule(name), config, compute_dtype=torch.bfloat16, device="cpu", initialize=True
            )
            parts = {"W_q": layer.W_q.data, "scale": layer.meta["scale"], "zero": layer.meta["zero"]}
            stored |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    kept = model.state_dict().items()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    linears = {f"{name}.weight" for name in source_linears(args.model)}
    stored |= {name: tensor.clone() for name, tensor in kept if name not in linears | tied}
    save_file(stored, out / "model.safetensors")
    (out / "hqq.json").write_text(json.dumps({"bits": args.bits, "group_size": args.group_size}))
    return clock


def restore(packed: Path, model: Path) -> dict[str, Tensor]:
    """Return the plain tensors, and the linears decoded."""
    facts, stored = json.loads((packed / "hqq.json").read_text()), read_checkpoint(packed)
    plain = {
        f"{name}.weight": decode(take_parts(stored, name), shape, facts["bits"])
        for name, shape in source_linears(model).items()
    }
    return plain | {name: tensor.float() for name, tensor in stored.items()}


def decode(parts: Mapping[str, Tensor], shape: tuple[int, int], bits: int) -> Tensor:
    """Return the weight [out, in], (code - zero) * scale, from words [rows of codes / codes of a word, group size]."""
    words, count = parts["W_q"].long() & 0xFFFFFFFF, CODES_OF_A_WORD[bits]
    shifts = [bits * (count - 1 - i) for i in range(count)]
    codes = torch.cat([(words >> shift) & (2**bits - 1) for shift in shifts])
    scale, zero = (parts[name].float().reshape(-1, 1) for name in ("scale", "zero"))
    values = (codes[: len(scale)].float() - zero) * scale
    return values.reshape(shape)
