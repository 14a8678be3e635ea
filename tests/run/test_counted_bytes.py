"""Bits over the whole model: every stored byte that counts has its number in the denominator, and the rest is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import api
from compress.model.skeleton import UNUSED, Skeleton
from compress.run import plan, report
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import PICO, of_type, save, save_pico
from helpers.runs import RTN, Setup, job

TABLES = Setup("int8")  # embeddings and head, too
FAMILIES: dict[str, Callable[[Path], Path]] = {
    **{name: lambda folder, name=name: save_pico(name, folder) for name in PICO},  # type: ignore[misc]
    "with buffers": lambda folder: save(
        of_type(
            "glm4_moe",
            {
                **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 48},
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
                "first_k_dense_replace": 1,
            },
        ),
        folder,
    ),
}


def added(folder: Path, more: dict[str, Tensor]) -> Path:
    """Store further tensors in a checkpoint of one file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("setup", [RTN, TABLES], ids=["linears", "tables"])
def test_numbers_and_bytes_are_of_the_same_tensors(name: str, setup: Setup, tmp_path: Path) -> None:
    folder = FAMILIES[name](tmp_path / "model")
    source = open_checkpoint(folder)
    skeleton = Skeleton(source)
    made = plan.make(setup.load(), skeleton)
    assert not made.unused
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert made.numel == stored  # each file of a tied model holds the table once
    model: Any = skeleton.model
    buffers = sum(b.numel() for n, b in model.named_buffers() if n in model.state_dict() and n in skeleton.sources)
    assert made.numel == sum(p.numel() for p in model.parameters()) + buffers
    assert (buffers > 0) == (name == "with buffers")
    assert made.whole_bpw == 8 * made.nbytes / made.numel


def test_tensors_that_the_model_does_not_use_are_named_and_do_not_count(tmp_path: Path, capsys: Any) -> None:
    """Rotary tables of old checkpoints, masks, and a second copy of a tied table."""
    folder = save_pico("llama_tied", tmp_path / "model")
    before = api.quantize(job(folder, RTN, tmp_path / "plain"))
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5000), "lm_head.weight": table.clone()}
    added(folder, more)
    skeleton = Skeleton(open_checkpoint(folder))
    made = plan.make(RTN.load(), skeleton)
    nbytes = {name: 4 * tensor.numel() for name, tensor in more.items()}
    assert set(made.unused) & more.keys() and len(made.unused) == 2  # one of both copies
    assert sorted(made.unused_nbytes.values()) == sorted(nbytes.values())
    assert any("2 stored tensors that the model does not use" in line for line in made.messages)
    assert skeleton.other_nbytes(made.kept_nbytes)[UNUSED] == sum(nbytes.values())
    after = api.quantize(job(folder, RTN, tmp_path / "more"))
    assert after["whole"] == before["whole"]
    assert after["unused"] == made.unused_nbytes and "unused" not in before
    assert after["nbytes"]["total"] == before["nbytes"]["total"] + sum(nbytes.values())
    files = [load_file(file) for file in (tmp_path / "more").glob("*.safetensors")]
    assert after["nbytes"]["total"] == sum(t.numel() * t.element_size() for each in files for t in each.values())
    (tmp_path / "more" / "report.json").unlink()
    assert report.load(tmp_path / "more")["whole"] == pytest.approx(before["whole"])


def test_what_is_counted_is_in_the_result_lines(tmp_path: Path) -> None:
    from compress.cli.tables import result_lines

    folder = added(save_pico("llama", tmp_path / "model"), {"model.rotary_emb.inv_freq": torch.ones(8)})
    made = api.quantize(job(folder, RTN, tmp_path / "out"))
    lines = result_lines(json.loads((tmp_path / "out" / "report.json").read_text()), "out")
    assert made["unused"] == {"model.rotary_emb.inv_freq": 32}
    assert sum("does not use" in line and "model.rotary_emb.inv_freq" in line for line in lines) == 1
