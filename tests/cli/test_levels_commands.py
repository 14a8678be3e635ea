"""Levels on the command line: inspect shows them, eval, generate and export take one, exporters ask for one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from compress.errors import CheckpointError, ExportError, OutputError
from compress.export import level as level_export
from compress.export.convert import export
from compress.run import plan_summary, report, verify
from helpers.nested_models import nested_model
from helpers.pico import pico_tokenizer
from helpers.runs import TEXT, cli, one_line


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nested")
    nested_model("llama_tied", (4, 4), tables=True).save_pretrained(directory, max_shard_size="60KB")
    pico_tokenizer().save_pretrained(directory)
    return directory


def tensor_names(directory: Path) -> dict[str, bytes]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            tensors |= {name: opened.get_tensor(name).numpy().tobytes() for name in names}
    return tensors


def test_inspect_shows_what_each_level_takes(nested: Path, tmp_path: Path) -> None:
    facts = report.load(nested)
    low, whole = plan_summary.level_sizes(facts["layers"], facts["nbytes"]["total"])
    assert (low.level, whole.level) == (4, 8)
    assert whole.nbytes == facts["nbytes"]["total"] and whole.bpw == pytest.approx(facts["bpw"])
    level_export.export(nested, 4, tmp_path / "low")
    exported = report.load(tmp_path / "low")
    assert low.nbytes == exported["nbytes"]["total"] and low.bpw == pytest.approx(exported["bpw"])
    shown = cli("inspect", str(nested))
    assert shown.code == 0 and "level 4: " in shown.out, shown.err
    assert len(json.loads(cli("inspect", str(nested), "--json").out)["levels"]) == 2


def test_a_level_is_exported_as_it_is_stored(nested: Path, tmp_path: Path) -> None:
    out = tmp_path / "low"
    result = cli("export", str(nested), "--level", "4", "--out", str(out))
    assert result.code == 0, result.err
    whole, low = tensor_names(nested), tensor_names(out)
    assert low and all(whole[name] == data for name, data in low.items())
    assert not any(name.endswith("_2") for name in low) and len(list(out.glob("*.safetensors"))) > 1
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["default"]["format"] == "int" and config["default"]["params"]["bits"] == 4
    assert verify.verify(out)["blocks"] == verify.verify(nested)["blocks"] == 2
    with pytest.raises(OutputError, match="exists already"):
        level_export.export(nested, 4, out)
    assert os.listdir(tmp_path) == ["low"]


def test_other_formats_are_of_a_named_level(nested: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"has the levels 4, 8, of which 4 is plain integers; add --level 4"):
        export(nested, "gptq", tmp_path / "gptq")
    result = cli("export", str(nested), "--to", "gptq", "--level", "4", "--out", str(tmp_path / "gptq"))
    assert result.code == 0, result.err
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    assert config["quantization_config"]["bits"] == 4


def test_a_level_is_scored_and_written_with(nested: Path, tmp_path: Path) -> None:
    level_export.export(nested, 4, tmp_path / "low")
    options = ("--text", str(TEXT), "--max-tokens", "128", "--seq-len", "64", "--json")
    whole, low, alone = (
        json.loads(cli("eval", *place, *options).out)["perplexity"]
        for place in ((str(nested),), (str(nested), "--level", "4"), (str(tmp_path / "low"),))
    )
    assert low == alone != whole
    written = [
        cli("generate", *place, "--prompt", "abc", "--max-new-tokens", "4").out
        for place in ((str(nested), "--level", "4"), (str(tmp_path / "low"),))
    ]
    assert written[0] == written[1]


def test_unknown_levels_are_one_line(nested: Path, tmp_path: Path) -> None:
    for command in (("eval", str(nested), "--text", str(TEXT)), ("export", str(nested), "--out", str(tmp_path / "x"))):
        result = cli(*command, "--level", "3")
        assert result.code == 1 and "has the levels 4, 8, not 3" in one_line(result)
    level_export.export(nested, 4, tmp_path / "low")
    with pytest.raises(CheckpointError, match="no levels"):
        level_export.export(tmp_path / "low", 4, tmp_path / "lower")
    assert sorted(os.listdir(tmp_path)) == ["low"]


def test_the_original_is_a_level_on_the_command_line(tmp_path: Path) -> None:
    directory = tmp_path / "nested"
    nested_model("llama_tied", (4,), True, torch.float32).save_pretrained(directory)
    pico_tokenizer().save_pretrained(directory)
    facts = report.load(directory)
    low, whole = plan_summary.level_sizes(facts["layers"], facts["nbytes"]["total"])
    assert (low.level, whole.level, whole.bpw) == (4, 32, 32.0)
    for level in (low, whole):
        out = tmp_path / f"of{level.level}"
        result = cli("export", str(directory), "--level", str(level.level), "--out", str(out))
        assert result.code == 0, result.err
        assert report.load(out)["nbytes"]["total"] == level.nbytes
        assert verify.verify(out)["blocks"] == 2
        given = tensor_names(directory)
        assert all(given[name] == data for name, data in tensor_names(out).items())
    options = ("--text", str(TEXT), "--max-tokens", "128", "--seq-len", "64", "--json")
    places = [(str(directory),), (str(directory), "--level", "32"), (str(tmp_path / "of32"),)]
    scores = [json.loads(cli("eval", *place, *options).out)["perplexity"] for place in places]
    assert len(set(scores)) == 1
