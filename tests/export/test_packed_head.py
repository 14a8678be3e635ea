"""An output head with a table of its own stays packed in compressed-tensors, and transformers without us reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress import api, importers
from compress.export import convert
from compress.export.source import open_source
from compress.model.load import load_model
from pico import save_pico
from runs import Setup, job, stored_tensors

TOKENS = torch.arange(40).view(2, 20) * 5
FOUR_BITS = ("quantize.bits=4", "group_size=16")
INT8_INPUTS = ("quantize.bits=8", "group_size=-1", "activations={bits: 8, scale: token}")
LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
assert "compress" not in sys.modules
with torch.no_grad():
    print(model(torch.arange(40).view(2, 20) * 5).logits.tolist())
"""


def exported(folder: Path, model: str, *settings: str) -> tuple[Path, convert.Result]:
    source = save_pico(model, folder / "model", dtype=torch.bfloat16)
    api.quantize(job(source, Setup("int8", settings), folder / "packed"))
    return folder / "out", convert.export(folder / "packed", "compressed-tensors", folder / "out")


HEADS = {
    "as the linears": (*FOUR_BITS, "head={method: rtn, bits: 4, group_size: 16}"),
    "8 bits, a scale for a row": FOUR_BITS,
    "beside int8 inputs": INT8_INPUTS,
}


@pytest.mark.parametrize("case", HEADS)
def test_transformers_reads_a_packed_head(case: str, tmp_path: Path) -> None:
    out, result = exported(tmp_path, "llama", "embeddings={keep: true}", *HEADS[case])
    assert not any("lm_head" in note for note in result.notes)
    assert "lm_head.weight_packed" in stored_tensors(out) and "lm_head.weight" not in stored_tensors(out)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert any("re:^lm_head$" in group["targets"] for group in settings["config_groups"].values())
    head = next(weight for weight in open_source(tmp_path / "packed").packed if weight.name == "lm_head")
    read = importers.open_checkpoint(out).tensors["lm_head.weight"].read()
    assert torch.equal(read, head.dense(read.dtype))
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOGITS, str(out)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        ours = load_model(tmp_path / "packed", "float32")(TOKENS).logits
    found = torch.tensor(json.loads(done.stdout))
    assert (found - ours).abs().max() < (
        0.2 if case == "beside int8 inputs" else 1e-4
    )  # it rounds inputs to other codes


def test_a_tied_table_is_plain(tmp_path: Path) -> None:
    out, result = exported(tmp_path, "llama_tied", *FOUR_BITS)
    assert any(note.startswith("model.embed_tokens is written as plain") for note in result.notes)
    assert not [name for name in stored_tensors(out) if "lm_head" in name]


def test_a_head_beside_asymmetric_linears_is_plain(tmp_path: Path) -> None:
    """No version of transformers opens the two together."""
    out, result = exported(tmp_path, "llama", *FOUR_BITS, "symmetric=false", "head={method: rtn, bits: 8}")
    assert any("all are alike" in note and note.startswith("lm_head is written as plain") for note in result.notes)
    assert "lm_head.weight" in stored_tensors(out)
