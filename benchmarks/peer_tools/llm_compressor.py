"""llm-compressor: GPTQ with its defaults, AWQ, or plain rounding; stored as compressed-tensors, pack-quantized."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .common import Clock, restore_modules, unpack_words

DISTRIBUTION = "llmcompressor"
METHOD = "compressed-tensors"
MARK = ".weight_packed"


def quantize(args: argparse.Namespace, windows: Tensor, out: Path) -> Clock:
    """Run a modifier with its defaults; that of GPTQ: static order of columns, damping 0.01, blocks of 128."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    rows = windows.tolist()
    calibration = {
        "dataset": Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}),
        "batch_size": args.batch_size,
        "num_calibration_samples": len(rows),
        "max_seq_length": windows.shape[1],
        "shuffle_calibration_samples": False,
    }
    with Clock() as clock:
        oneshot(model=model, recipe=_modifier(args), **({} if args.method == "rtn" else calibration))
    model.save_pretrained(out, save_compressed=True)
    return clock


def _modifier(args: argparse.Namespace) -> Any:
    """Return the modifier of a method."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    weights = {
        "num_bits": args.bits,
        "type": "int",
        "symmetric": not args.asymmetric,
        "strategy": "group",
        "group_size": args.group_size,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    kind = GPTQModifier if args.method == "gptq" else QuantizationModifier
    rounding = kind(config_groups=groups, ignore=["lm_head"])
    if args.method != "awq":
        return rounding
    if not torch.accelerator.is_available():  # AWQ pins what it keeps for a GPU, and fails where there is none
        torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    return [AWQModifier(), rounding]


def restore(packed: Path, _: Path) -> dict[str, Tensor]:
    """Return the plain tensors, and the linears decoded."""
    return restore_modules(packed, MARK, decode)


def decode(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the weight [out, in]: codes are stored + 2^(bits-1), zero points likewise and packed along the rows."""
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    rows, columns = parts["weight_shape"].tolist()
    scale = parts["weight_scale"].float()  # [rows, groups]
    codes = unpack_words(parts["weight_packed"], bits, columns).float() - 2 ** (bits - 1)
    zero = torch.zeros_like(scale)
    if "weight_zero_point" in parts:
        zero = unpack_words(parts["weight_zero_point"].T.contiguous(), bits, rows).T.float() - 2 ** (bits - 1)
    repeats = columns // scale.shape[1]
    return (codes - zero.repeat_interleave(repeats, 1)) * scale.repeat_interleave(repeats, 1)
