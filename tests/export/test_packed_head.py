"""An output head with a table of its own stays packed in compressed-tensors, and transformers without us reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compress import api, importers
from compress.export import convert
from compress.export.source import open_source
from compress.model.load import load_model
from helpers import without_us
from helpers.pico import save_pico
from helpers.runs import Setup, job, stored_tensors

FOUR_BITS = ("quantize.bits=4", "group_size=16")
INT8_INPUTS = ("quantize.bits=8", "group_size=-1", "activations={bits: 8, scale: token}")


def exported(folder: Path, model: str, *settings: str) -> tuple[Path, convert.ExportResult]:
    source = save_pico(model, folder / "model", dtype=torch.bfloat16)
    api.quantize(job(source, Setup("int8", settings), folder / "packed"))
    return folder / "out", convert.export(folder / "packed", "compressed-tensors", folder / "out")


HEADS = {  # settings, and the largest error
    "as the linears": ((*FOUR_BITS, "head={method: rtn, bits: 4, group_size: 16}"), 1e-4),
    "8 bits, a scale for a row": (FOUR_BITS, 1e-4),
    "beside int8 inputs": (INT8_INPUTS, 0.2),  # a last bit may round inputs to other codes
}


@pytest.mark.slow
def test_transformers_reads_packed_heads(tmp_path: Path) -> None:
    known, written = [], []
    for case, (settings, _) in HEADS.items():
        out, result = exported(tmp_path / case, "llama", "embeddings={keep: true}", *settings)
        assert not any("lm_head" in note for note in result.notes)
        assert "lm_head.weight_packed" in stored_tensors(out) and "lm_head.weight" not in stored_tensors(out)
        section = json.loads((out / "config.json").read_text())["quantization_config"]
        assert any("re:^lm_head$" in group["targets"] for group in section["config_groups"].values())
        head = next(each for each in open_source(out.with_name("packed")).packed if each.name == "lm_head")
        read = importers.open_checkpoint(out).tensors["lm_head.weight"].read()
        assert torch.equal(read, head.dense(read.dtype)), case
        with torch.no_grad():
            known.append(load_model(out.with_name("packed"), "float32")(without_us.TOKENS).logits)
        written.append(out)
    for (case, (_, bound)), ours, found in zip(HEADS.items(), known, without_us.logits(written, tmp_path), strict=True):
        assert (found - ours).abs().max() < bound, case


def test_a_tied_table_is_plain(tmp_path: Path) -> None:
    out, result = exported(tmp_path, "llama_tied", *FOUR_BITS)
    assert any(note.startswith("model.embed_tokens is written as plain") for note in result.notes)
    assert not [name for name in stored_tensors(out) if "lm_head" in name]


def test_a_head_beside_asymmetric_linears_is_plain(tmp_path: Path) -> None:
    """No version of transformers opens the two together."""
    out, result = exported(tmp_path, "llama", *FOUR_BITS, "symmetric=false", "head={method: rtn, bits: 8}")
    assert any("all are alike" in note and note.startswith("lm_head is written as plain") for note in result.notes)
    assert "lm_head.weight" in stored_tensors(out)
