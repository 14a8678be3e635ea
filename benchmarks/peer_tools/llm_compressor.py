"""llm-compressor: GPTQ with its defaults, AWQ, or plain rounding, to integers or to a data type of its presets.

It stores compressed-tensors. Inputs that a preset quantizes at run time, too, are not: only weights are compared.
"""

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
MARK = ".weight_scale"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a preset."""
    parser.add_argument(
        "--scheme", default="", help="of llm-compressor, in place of integers: NVFP4A16, FP8_BLOCK, ..."
    )


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

    kind = GPTQModifier if args.method == "gptq" else QuantizationModifier
    if args.scheme:
        return kind(targets=["Linear"], scheme=args.scheme, ignore=["lm_head"])
    weights = {
        "num_bits": args.bits,
        "type": "int",
        "symmetric": not args.asymmetric,
        "strategy": "group",
        "group_size": args.group_size,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
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
    """Return the weight [out, in] of integers or of a data type."""
    weights = config["config_groups"]["group_0"]["weights"]
    return (
        decode_type(parts, weights) if weights.get("type") == "float" else decode_integers(parts, weights["num_bits"])
    )


def decode_integers(parts: Mapping[str, Tensor], bits: int) -> Tensor:
    """Return W [out, in]: codes are stored + 2^(bits-1), zero points likewise and packed along the rows."""
    rows, columns = parts["weight_shape"].tolist()
    scale = parts["weight_scale"].float()  # [rows, groups]
    codes = unpack_words(parts["weight_packed"], bits, columns).float() - 2 ** (bits - 1)
    zero = torch.zeros_like(scale)
    if "weight_zero_point" in parts:
        zero = unpack_words(parts["weight_zero_point"].T.contiguous(), bits, rows).T.float() - 2 ** (bits - 1)
    repeats = columns // scale.shape[1]
    return (codes - zero.repeat_interleave(repeats, 1)) * scale.repeat_interleave(repeats, 1)


def decode_type(parts: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Tensor:
    """Return W [out, in]: float8, or e2m1 with the even column in the low half of a byte, times scales of blocks."""
    if "weight_packed" in parts:
        octets = parts["weight_packed"].int()
        codes = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
        values = torch.tensor(E2M1)[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    else:
        values = parts["weight"].float()
    scale = parts["weight_scale"]
    wide = torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()
    if "weight_global_scale" in parts:
        wide = wide / parts["weight_global_scale"].float()
    wide = wide.reshape(-1, 1) if wide.ndim < 2 else wide
    rows, columns = weights.get("block_structure") or (1, -(-values.shape[1] // wide.shape[1]))
    wide = wide.repeat_interleave(rows, 0) if wide.shape[0] > 1 or rows > 1 else wide
    return values * wide[: len(values)].repeat_interleave(columns, 1)[:, : values.shape[1]]
