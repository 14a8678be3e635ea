"""Packed checkpoints in the grid format for tests of exports, and compressed-tensors as its own package decodes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress import api
from compress.storage.paths import MANIFEST
from helpers import foreign
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, Setup, job, stored_tensors

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


def section(out: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
    return settings


def decompressed(out: Path) -> dict[str, Tensor]:
    """Every packed weight as the package of the format decodes it, by the group whose targets name it."""
    foreign.tool("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(section(out))
    tensors, weights = stored_tensors(out), {}
    for module in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        matched = [
            scheme
            for scheme in config.config_groups.values()
            for target in scheme.targets
            if target == "Linear" or re.match(target.removeprefix("re:"), module)
        ]
        assert len(matched) == 1, module  # groups are disjoint
        own = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
        compressor = BaseCompressor.get_value_from_registry(matched[0].format)
        weights[module] = compressor.decompress(own, matched[0])["weight"]
    return weights
