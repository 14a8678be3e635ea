"""Files beside a model's weights that change what these mean are used, refused, or named as left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_gptq_import import AWQ, awq, gptq, settings

from compress import api
from compress.errors import CheckpointError
from compress.importers import DROPPED, companions, open_checkpoint
from compress.model.load import load_model
from helpers import foreign
from helpers.pico import save_pico
from helpers.runs import RTN, job


@pytest.fixture
def model(pico_dir: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pico_dir("llama"), tmp_path / "model"))


def put(model: Path, name: str, text: str = "{}") -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(text)


def refused(model: Path, words: str) -> None:
    """Before anything is planned, and where a model is loaded whole."""
    for read in (open_checkpoint, load_model):
        with pytest.raises(CheckpointError, match=words) as raised:
            read(model)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", "has adapter_config.json, so its weights are not those .* give it as --adapter"),
        ("hf_quant_config.json", "quant_algo 'None' cannot be read; what can be: FP8"),
    ],
)
def test_what_is_refused(name: str, words: str, model: Path) -> None:
    put(model, name)
    refused(model, words)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    put(tmp_path, "adapter_config.json")
    with pytest.raises(CheckpointError, match="is an adapter and no model; give the model, and this as --adapter"):
        open_checkpoint(tmp_path)


def test_weights_under_the_names_of_their_publisher(tmp_path: Path) -> None:
    put(tmp_path, "config.json", '{"model_type": "llama"}')
    save_file({"layers.0.wq.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    refused(tmp_path, "has its weights in consolidated.safetensors only")


@pytest.mark.parametrize(
    ("file", "pack", "old"),
    [
        ("quantize_config.json", gptq(4, "gptq", True), {"bits": 4, "group_size": 32, "desc_act": True}),
        ("quant_config.json", awq, {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_settings_of_older_checkpoints_are_used(
    file: str, pack: foreign.Pack, old: dict[str, object], pico_dir: foreign.Pico, tmp_path: Path
) -> None:
    written = AWQ if pack is awq else settings(4, order=True)
    both = foreign.written(pico_dir("llama"), tmp_path, written, pack, torch.float16)
    config = json.loads((both.quantized / "config.json").read_text())
    del config["quantization_config"]
    (both.quantized / "config.json").write_text(json.dumps(config))
    (both.quantized / file).write_text(json.dumps(old))
    foreign.check_tensors(both)
    for damaged in ({**old, "quant_method": 3}, {**old, "group_size": "x"}):
        (both.quantized / file).write_text(json.dumps(damaged))
        foreign.refused(both.quantized, "names no quant_method|group_size 'x'")


def test_settings_beside_plain_weights_are_refused(model: Path) -> None:
    put(model, "quantize_config.json", '{"bits": 4, "group_size": 32}')
    refused(model, "or a file of settings beside it, says that it is quantized .*, but no weight is stored so; remove")


def test_a_section_without_a_tool_on_plain_weights_is_left_out(model: Path, tmp_path: Path) -> None:
    """The weights are what they are, and the result says what was left out; with packed ones it is an error."""
    shutil.copytree(model, tmp_path / "plain")
    foreign.configure(model, quantization_config={"bits": 4, "group_size": 32, "some": "training"}, quantization="own")
    both = foreign.Both(model, tmp_path / "plain")
    foreign.check(both, tmp_path / "out", DROPPED)
    assert open_checkpoint(model).config["quantization"] == "own"
    for name, packed in (("a.qweight", torch.ones(2, 2)), ("a.weight", torch.ones(2, 2, dtype=torch.uint8))):
        foreign.restore(model, {name: packed})
        foreign.configure(model, quantization_config={"bits": 4})
        foreign.refused(model, "quantization_config .'bits': 4. names no quant_method")
        foreign.restore(model, {name: None})


LEFT_OUT = {
    "pytorch_model.bin": "other copies of weights",
    "pytorch_model.bin.index.json": "an index of other weights",
    "consolidated.safetensors": "weights that are not of this model's index",
    "model.gguf": "other copies of weights",
    "original/params.json": "other copies of weights",
    "custom_generate/generate.py": "code, which is not run",
    "modeling_x.py": "code, which is not run",
    "kv_cache_scales.json": "scales of another tool's cache",
    "additional_chat_templates/tools.jinja": "more chat templates",
    "adapter_model.bin": "an adapter without its settings",
    "adapter_model.safetensors": "an adapter without its settings",
    "optimizer.npz": "other copies of weights",
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_named(name: str, model: Path) -> None:
    checkpoint = open_checkpoint(model)
    assert list(companions.notes(checkpoint)) == []
    put(model, name)
    top = f"{Path(name).parts[0]}/" if "/" in name else name
    assert list(companions.notes(checkpoint)) == [f"left out of model: {top} ({LEFT_OUT[name]})"]


def test_an_index_beside_a_single_file(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model", shards=True)
    shards = [file.name for file in open_checkpoint(model).files]
    assert len(shards) > 1
    tensors = {name: tensor.read() for name, tensor in open_checkpoint(model).tensors.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    said = " ".join(companions.notes(open_checkpoint(model)))
    assert shards[0] in said and "model.safetensors.index.json" in said


def test_tokens_beyond_the_table_and_templates_that_differ(model: Path) -> None:
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    put(model, "added_tokens.json", json.dumps({"<in>": size - 1, "<out>": size, "<far>": size + 7}))
    put(model, "chat_template.jinja", "{{ messages }}")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    put(model, "tokenizer_config.json", json.dumps({**tokenizer, "chat_template": "other"}))
    config = json.loads((model / "config.json").read_text())
    put(model, "config.json", json.dumps({**config, "auto_map": {"AutoModel": "x.Y"}}))
    code, template, tokens = companions.notes(open_checkpoint(model))
    assert "auto_map" in code and "not run" in code
    assert "differs and is not used" in template
    assert tokens.startswith("the tokenizer has 2 tokens that the model has no rows for, first '<far>'")


def test_a_run_names_each_file_once(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [name for name in LEFT_OUT if "/" not in name] + ["optimizer.ckpt", "handler.pkl", "id_rsa", "notes.md"]
    for name in names:
        put(model, name)
    api.quantize(job(model, RTN, tmp_path / "out"))
    said = [record.message for record in caplog.records if record.message.startswith("left out of model: ")]
    listed = [name for line in said for name in line.removeprefix("left out of model: ").split(" (")[0].split(", ")]
    assert sorted(listed) == sorted(names)
