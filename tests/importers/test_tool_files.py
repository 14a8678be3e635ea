"""Tiny weights that other tools made are decoded as these tools' own readers decode them, in every bit.

Each file beside data/make_tool_files.py was made by the tool of its name: settings, stored tensors, decoded weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress.errors import CheckpointError
from compress.importers import open_checkpoint
from helpers import foreign

FILES = sorted((Path(__file__).parent / "data").glob("*.safetensors"))
Q = "model.layers.0.self_attn.q_proj"


def cases(file: Path) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Case -> settings, tensors with "=" for the decoded weight."""
    with safe_open(file, "pt") as stored:
        settings = json.loads(stored.metadata()["settings"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return {
        case: (section, {n.partition("/")[2]: t for n, t in tensors.items() if n.partition("/")[0] == case})
        for case, section in settings.items()
    }


def written(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> Path:
    """A checkpoint of one linear; names with a dot are those of other modules."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "dtype": str(dtype).removeprefix("torch."), "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    named = {name if "." in name else f"{Q}.{name}": tensor for name, tensor in tensors.items() if name != "="}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_weights_are_those_of_the_tool(file: Path, tmp_path: Path) -> None:
    for case, (settings, tensors) in cases(file).items():
        wanted = tensors["="]
        checkpoint = open_checkpoint(written(tmp_path / case, settings, tensors, wanted.dtype))
        weight = checkpoint.tensors[f"{Q}.weight"]
        assert set(checkpoint.tensors) <= {f"{Q}.weight", f"{Q}.bias"}, case
        assert foreign.same(weight.read(), wanted), case
        assert foreign.same(weight.rows(3, len(wanted) - 2), wanted[3:-2]), case


CHANGES = {
    "auto_round/auto_gptq_4": [
        ({"packing_format": "auto_round:exllamav2"}, {}, "packing_format .* cannot be read; what can be: auto_gptq"),
        ({"rotation_config": {"a": 1}}, {}, "weights in a rotated basis cannot be read"),
        ({"extra_config": {"((a)+": {"bits": 2}}}, {}, "of extra_config is too involved"),
        ({"extra_config": {Q: {"group_size": "x"}}}, {}, "group_size 'x' of model.* is no number"),
        ({}, {"hadamard_matrix": torch.ones(2, 2)}, "hadamard_matrix: weights with this beside them cannot be read"),
        ({"group_size": 16}, {}, "scales has 2 groups, 64 inputs in groups of 16 have another number"),
    ],
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    file, _, name = case.partition("/")
    settings, tensors = cases(Path(__file__).parent / "data" / f"{file}.safetensors")[name]
    for changed, parts, words in CHANGES[case]:
        directory = written(tmp_path, {**settings, **changed}, {**tensors, **parts}, torch.bfloat16)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(directory)
