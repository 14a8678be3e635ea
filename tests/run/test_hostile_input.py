"""Hostile files, given to command lines: exit code 1 and one short line without a word of another file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CalibrationError
from compress.evaluate import generate
from compress.storage.checkpoint import CONFIG, INDEX
from helpers.runs import RTN, TEXT, Setup, cli, command, one_line

DEEP = "[" * 100_000
OTHER_FILE = "root:x:0:0:secret:/root\n"


@pytest.fixture
def model(pico_dir: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pico_dir("llama", shards=True), tmp_path / "model"))


def refused(*words: str) -> str:
    result = cli(*words)
    assert result.code == 1, result
    line = one_line(result)
    assert line.isprintable() and len(line) < 600 and "secret" not in line
    return line


@pytest.mark.parametrize("file", [CONFIG, INDEX])
@pytest.mark.parametrize(
    "text",
    [DEEP, OTHER_FILE, '{"a": ' + "1" * 6000 + "}", '{"a": "\\ud800"}'],
    ids=["deep", "other", "digits", "surrogate"],
)
def test_json_of_a_model(file: str, text: str, model: Path) -> None:
    (model / file).write_text(text)
    line = refused(*command(model, RTN, model.parent / "out"))
    assert f"{model / file} is not valid JSON" in line and line.endswith("download it again")


def test_a_billion_layers(model: Path) -> None:
    config = json.loads((model / CONFIG).read_text())
    (model / CONFIG).write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    line = refused("quantize", str(model), "--recipe", "int8", "--dry-run")
    assert "says 'num_hidden_layers' 1000000000, but 21 tensors are stored" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"text": "a"}\n' + DEEP, "line 2 is not JSON (nested more than 64 deep)"),
        ('{"n": ' + "1" * 6000 + "}", "line 1 is not JSON (an integer of 6000 digits)"),
        ('{"text": "\\ud800"}', "line 1 is not JSON ("),
        (OTHER_FILE, "line 1 is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (json.dumps({f"key{i}": 1 for i in range(10_000)}), "line 1 has no field 'text'; its fields: key0, key1, "),
    ],
    ids=["deep", "digits", "surrogate", "other", "keys"],
)
def test_lines_of_a_calibration(text: str, expected: str, model: Path) -> None:
    (model.parent / "calib.jsonl").write_text(text)
    words = command(model, Setup("int4", ("calibration.num_samples=2",)), model.parent / "out")
    assert f"calib.jsonl, {expected}" in refused(*words[:-1], str(model.parent / "calib.jsonl"))


@pytest.mark.parametrize("text", [DEEP, OTHER_FILE, "a\x1b[31m: &a [*a]"], ids=["deep", "other", "alias"])
def test_recipes(text: str, model: Path) -> None:
    (model.parent / "my.yaml").write_text(text)
    assert "my.yaml" in refused(*command(model, Setup(str(model.parent / "my.yaml")), model.parent / "out"))


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.update(model=None),
        lambda tokenizer: tokenizer["model"]["vocab"].update(a=2**40),
        lambda tokenizer: tokenizer.update(version="9"),
    ],
    ids=["model", "vocabulary", "version"],
)
def test_a_tokenizer(change: Callable[[dict[str, Any]], object], model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    change(tokenizer)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has no readable tokenizer (" in refused("eval", str(model), "--text", str(TEXT))


@pytest.mark.parametrize("token", [10**30, -1])
def test_tokens_of_a_model(token: Any, model: Path) -> None:
    """The library that draws tokens takes some of these for none."""
    for name in (CONFIG, "generation_config.json"):
        config = json.loads((model / name).read_text()) if (model / name).is_file() else {}
        (model / name).write_text(json.dumps({**config, "eos_token_id": token, "pad_token_id": None}))
    assert "token" in refused("generate", str(model), "--prompt", "a", "--max-new-tokens", "2")


def test_names_with_control_characters(tmp_path: Path) -> None:
    line = refused("quantize", str(tmp_path / "no\nmodel\x1b[31m"))
    assert "no model\\x1b[31m is neither a directory nor a hub id" in line


@pytest.mark.parametrize("prompt", ["\udcff", "a \ud800 b"])
def test_a_prompt_that_is_no_text(prompt: str, model: Path) -> None:
    with pytest.raises(CalibrationError, match="is not Unicode text; give it in UTF-8"):
        generate(model, prompt)
