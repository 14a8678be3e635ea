"""GPTQModel with its defaults, or its plain rounding."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

from torch import Tensor

from .common import Clock
from .gptq_layout import restore

__all__ = ["DISTRIBUTION", "METHOD", "quantize", "restore"]
DISTRIBUTION = "gptqmodel"
METHOD = "gptq"


def quantize(args: argparse.Namespace, windows: Tensor, out: Path) -> Clock:
    """Run GPTQModel on the windows."""
    vision = types.ModuleType("gptqmodel.models.definitions.internvl_chat")
    vision.__dict__["InternVLChatQModel"] = None
    sys.modules.setdefault(vision.__name__, vision)  # the one definition that needs torchvision, which is not declared
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import RTNConfig

    kind = {"gptq": QuantizeConfig, "rtn": RTNConfig}[args.method]
    config = kind(bits=args.bits, group_size=args.group_size, sym=not args.asymmetric)
    model = GPTQModel.load(str(args.model), config)
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in windows.tolist()]
    with Clock() as clock:
        model.quantize(data if args.method == "gptq" else None, batch_size=args.batch_size)
    model.save(str(out))
    return clock
