"""Make small stand-ins for what the pages presume: python -m docs_lines.make model OUT | lora MODEL OUT.

model: the first two blocks of the bundled model. lora: a LoRA of rank 4 as PEFT saves it, with small random matrices.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

BUNDLED = Path("tests/models/books-8m")
BLOCKS = 2
RANK = 4
ADAPTED = ("q_proj", "down_proj")


def model(out: Path) -> None:
    """Write the first blocks of the bundled model as a checkpoint."""
    shutil.copytree(BUNDLED, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": BLOCKS}), encoding="utf-8")
    with safe_open(BUNDLED / "model.safetensors", "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if _block(name) < BLOCKS}  # noqa: SIM118
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})


def lora(base: Path, out: Path) -> None:
    """Write an adapter for some linears of a model."""
    out.mkdir()
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(ADAPTED), "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    with safe_open(base / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.split(".")[-2] in ADAPTED:
                outputs, inputs = file.get_slice(name).get_shape()
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / 16
                tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 16
    save_file(tensors, out / "adapter_model.safetensors")


def _block(name: str) -> int:
    """Return the number of the block that a tensor belongs to; -1: none."""
    return next((int(word) for word in name.split(".") if word.isdigit()), -1)


if __name__ == "__main__":
    {"model": model, "lora": lora}[sys.argv[1]](*map(Path, sys.argv[2:]))
