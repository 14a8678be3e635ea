"""The layout of GPTQ checkpoints, versions 1 and 2, which GPTQModel and AutoRound write; no tool of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .common import restore_modules, unpack_words

MARK = ".qweight"


def restore(packed: Path, _: Path) -> dict[str, Tensor]:
    """Return the plain tensors, and the linears decoded."""
    return restore_modules(packed, MARK, decode)


def decode(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the weight [out, in]: codes packed along the inputs, zero points along the outputs.

    Version 1 stores the zero point less one. AutoRound writes the same layout without the groups of the columns, and
    says the version in another place.
    """
    bits, rows = config["bits"], parts["scales"].shape[1]
    columns = parts["qweight"].shape[0] * 32 // bits
    size = columns if config["group_size"] == -1 else config["group_size"]
    group = parts.get("g_idx", torch.arange(columns) // size).long()  # of each input column
    codes = unpack_words(parts["qweight"].T.contiguous(), bits, columns)  # [rows, columns]
    zeros = unpack_words(parts["qzeros"], bits, rows).T  # [rows, groups]
    version = config.get("packing_format") or config.get("checkpoint_format", "gptq")
    if version in ("gptq", "auto_round:auto_gptq"):
        zeros = (zeros + 1) & (2**bits - 1)
    return (codes - zeros[:, group]).float() * parts["scales"].T.float()[:, group]
