"""Packed checkpoints in the grid format for tests of exports: one data type, or several by rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress import api
from compress.storage.paths import MANIFEST
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, Setup, job

TYPES = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-channel", "fp8-block")


def packed(folder: Path, model: str, kind: str, *settings: str, changes: Mapping[str, Any] | None = None) -> Path:
    """A model of two blocks with all linears of one type; fused linears share their tensor scale."""
    source = save_pico(model, folder / "model", dtype=torch.bfloat16, changes=changes)
    quantize = f"quantize={{method: grid_rtn, type: {kind}}}"
    api.quantize(job(source, Setup("int8", (*KEEP_TABLES, quantize, *settings)), folder / "packed"))
    set_tensor_scales(folder / "packed", {"": 2.0**-11})
    return folder / "packed"


def set_tensor_scales(directory: Path, values: dict[str, float]) -> None:
    """Change tensor scales: the end of a module's name -> the value, "" for all; the codes stay."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        for name in [name for name in tensors if name.endswith(".tensor_scale")]:
            for ending, value in values.items():
                if name.removesuffix(".tensor_scale").endswith(ending):
                    tensors[name] = torch.tensor([value])
        save_file(tensors, path, metadata)
    (directory / MANIFEST).unlink(missing_ok=True)  # the files are other ones now
