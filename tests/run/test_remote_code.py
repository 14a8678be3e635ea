"""References to code that came with a checkpoint are left out of what is written; what needs that code is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress import api
from compress.errors import CheckpointError
from helpers.pico import save_pico
from helpers.runs import RTN, job

AUTO_MAP = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}


def with_code(folder: Path, **tokenizer: str) -> Path:
    """A model of a class that transformers has, whose configuration and tokenizer name code beside it."""
    directory = save_pico("llama", folder)
    (directory / "own.py").write_text("raise RuntimeError('this was run')\n")
    for name, changes in (("config.json", {}), ("tokenizer_config.json", tokenizer)):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**values, **changes, "auto_map": AUTO_MAP}))
    return directory


def test_the_references_go_with_the_code(tmp_path: Path) -> None:
    source = with_code(tmp_path / "model")
    api.quantize(job(source, RTN, tmp_path / "out"))
    out = tmp_path / "out"
    assert not list(out.glob("*.py"))
    assert [path.name for path in out.glob("*.json") if "auto_map" in path.read_text()] == []
    before, after = (json.loads((each / "tokenizer_config.json").read_text()) for each in (source, out))
    assert after == {key: value for key, value in before.items() if key != "auto_map"}
    assert AutoModelForCausalLM.from_pretrained(out, local_files_only=True).config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(out, local_files_only=True)("a")["input_ids"]
    assert api.load(out) is not None


def test_a_tokenizer_that_needs_the_code_is_refused(tmp_path: Path) -> None:
    source = with_code(tmp_path / "model", tokenizer_class="OwnTokenizer")
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="names code of its own"):
        api.quantize(job(source, RTN, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
