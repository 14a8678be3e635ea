"""The command line on GGUF files and adapters: the whole way, and what is refused before anything is imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers import gguf_files
from helpers.pico import build, save_pico
from helpers.runs import RTN, TEXT, cli, one_line, report_of, stored_tensors

EVAL = ["--text", str(TEXT), "--seq-len", "32", "--max-tokens", "256", "--json"]


def lora(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    stem = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    tensors = {f"{stem}A.weight": torch.ones(2, 64), f"{stem}B.weight": torch.full((192, 2), 0.05)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_a_gguf_file_becomes_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = gguf_files.write(build("llama"), tmp_path / "tiny.Q8_0.gguf", "llama", ("Q8_0",))
    out = tmp_path / "out"
    result = cli("quantize", str(file), *RTN.options(), "--out", str(out))
    assert result.code == 0, result
    report = report_of(out)
    assert (report["model"], report["base"]) == ("tiny.Q8_0", "GGUF (Q8_0, float32)")
    assert stored_tensors(out)["model.embed_tokens.weight"].dtype == torch.bfloat16
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any("gguf" in name for name in names)
    assert cli("verify", str(out)).code == 0
    for base in (file, file.parent / "folder"):
        if base != file:
            base.mkdir()
            shutil.copy(file, base)
        scored = cli("eval", str(out), "--base", str(base), *EVAL)
        assert scored.code == 0 and 0 < json.loads(scored.out)["kl_mean"] < 0.01, scored


def test_an_adapter_is_merged_by_every_command(tmp_path: Path) -> None:
    model, adapter, out = save_pico("llama", tmp_path / "model"), lora(tmp_path / "lora"), tmp_path / "out"
    planned = cli("plan", str(model), *RTN.options(), "--adapter", str(adapter), "--json")
    assert planned.code == 0 and json.loads(planned.out)["nbytes"]["total"] > 0
    assert cli("quantize", str(model), *RTN.options(), "--adapter", str(adapter), "--out", str(out)).code == 0
    assert report_of(out)["base"] == "adapter lora merged"
    divergences = []
    for words in ([], ["--adapter", str(adapter)]):
        scored = cli("eval", str(out), "--base", str(model), *EVAL, *words)
        assert scored.code == 0, scored
        divergences.append(json.loads(scored.out)["kl_mean"])
    assert 5 * divergences[1] < divergences[0]


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    result = cli("quantize", str(model), *RTN.options(), "--adapter", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.code == 1 and "has no adapter_config.json" in one_line(result)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.gguf", None, "absent.gguf is not there"),
        ("text.gguf", b"no model", "is not a GGUF file"),
        ("short.gguf", b"GGUF\x03\x00\x00\x00", "is damaged"),
    ],
)
def test_a_file_that_is_no_model(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = cli("quantize", str(tmp_path / name), *RTN.options(), "--out", str(tmp_path / "out"))
    assert result.code == 1 and said in one_line(result)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
