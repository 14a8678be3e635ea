"""Where compress is not installed, loading a packed checkpoint raises an error that says what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import compress
from compress import api
from compress.runtime.linear import PackedLinear
from compress.storage import json_text
from compress.storage.checkpoint import CONFIG, open_checkpoint
from helpers.pico import save_pico
from helpers.runs import RTN, job

TOKENS = torch.arange(32).view(2, 16)
STOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "compress":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import transformers
for case in sys.argv[1:]:
    kind, _, directory = case.partition(":")
    try:
        getattr(transformers, kind).from_pretrained(directory)
    except ValueError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    api.quantize(job(save_pico("llama", folder / "model"), RTN, folder / "packed"))
    return folder / "packed"


@pytest.fixture(scope="module")
def saved(packed: Path) -> Path:
    """The same, loaded and saved by transformers."""
    directory = packed.parent / "saved"
    AutoModelForCausalLM.from_pretrained(packed).save_pretrained(directory)
    return directory


def test_a_process_without_us_fails_and_says_why(packed: Path, saved: Path) -> None:
    cases = [f"AutoModelForCausalLM:{packed}", f"AutoModel:{packed}", f"AutoModelForCausalLM:{saved}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": ""}
    command = [sys.executable, "-c", STOCK, *cases]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3 and all(line.endswith(json_text.NOTICE) for line in lines)


def logits(model: Any) -> torch.Tensor:
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    with torch.no_grad():
        return model(TOKENS).logits


def test_with_us_all_loads_as_before(packed: Path, saved: Path) -> None:
    expected = logits(compress.load(packed))
    model = AutoModelForCausalLM.from_pretrained(packed)
    assert not hasattr(model.config, json_text.NOTICE_KEY)
    assert torch.equal(logits(model), expected)
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(packed, config=AutoConfig.from_pretrained(packed))), expected
    )
    assert torch.equal(logits(compress.load(saved)), expected)


def test_checkpoints_without_the_notice_load(saved: Path, tmp_path: Path) -> None:
    """As older versions wrote them."""
    expected = logits(compress.load(saved))
    config = json.loads((saved / CONFIG).read_text())
    assert config[json_text.NOTICE_KEY] == json_text.NOTICE
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / CONFIG).write_text(json.dumps(json_text.remove_notice(config)))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_the_notice_is_not_seen_by_readers_of_checkpoints(packed: Path) -> None:
    assert json_text.NOTICE_KEY not in open_checkpoint(packed).config


def test_what_is_dequantized_is_saved_as_plain(packed: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(packed)
    model.dequantize()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert json_text.NOTICE_KEY not in config and "quantization_config" not in config


def test_what_is_packed_no_more_leaves_the_list(packed: Path, tmp_path: Path) -> None:
    """As where an adapter was merged into some linears: the others stay packed."""
    model = AutoModelForCausalLM.from_pretrained(packed)
    expected = logits(model)
    name = "model.layers.0.mlp.up_proj"
    was = model.get_submodule(name)
    model.set_submodule(name, was.to_linear(torch.float32))
    model.save_pretrained(tmp_path / "mixed")
    mixed = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed")
    assert isinstance(mixed.get_submodule(name), torch.nn.Linear)
    torch.testing.assert_close(logits(mixed), expected, rtol=1e-3, atol=1e-4)
    model.set_submodule(name, was)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), expected)
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.to_linear(torch.float32))
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / CONFIG).read_text())


def test_the_notice_is_there_when_files_are_uploaded(packed: Path, tmp_path: Path) -> None:
    """With push_to_hub=True transformers uploads inside of what saves the configuration."""
    config, uploaded = AutoConfig.from_pretrained(packed), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transformers.configuration_utils.hf_api", MagicMock())
        patched.setattr(
            type(config),
            "_upload_modified_files",
            lambda *_, **__: uploaded.append(json.loads((tmp_path / CONFIG).read_text())),
        )
        config.save_pretrained(str(tmp_path), push_to_hub=True)
    assert [values.get(json_text.NOTICE_KEY) for values in uploaded] == [json_text.NOTICE]


def test_other_configurations_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be writing the same file."""
    config, stock = LlamaConfig(), LlamaConfig.to_json_string

    def half(self: LlamaConfig, *values: Any, **options: Any) -> str:
        return stock(self, *values, **options)[:-9]

    monkeypatch.setattr(LlamaConfig, "to_json_string", half)
    config.save_pretrained(tmp_path)
    assert (tmp_path / CONFIG).is_file()


def test_saving_experts_that_are_packed_in_part_leaves_them_as_they_are(tmp_path: Path) -> None:
    api.quantize(job(save_pico("mixtral", tmp_path / "model"), RTN, tmp_path / "packed"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    name = "model.layers.0.mlp.experts"
    experts, expected = model.get_submodule(name), logits(model)
    experts["0"]["up_proj"] = experts["0"]["up_proj"].to_linear(torch.float32)
    model.save_pretrained(tmp_path / "mixed")
    assert model.get_submodule(name) is experts
    mixed = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed")
    assert type(mixed.get_submodule(name)) is not type(experts)
    torch.testing.assert_close(logits(mixed), expected, rtol=1e-3, atol=1e-4)
