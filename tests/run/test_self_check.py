"""Before a checkpoint is put in place: its files hold what was written, and transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress import api, recipe
from compress.errors import CheckpointError, UnsupportedModelError
from compress.model import dry_load
from compress.run import verify
from compress.run.job import Job
from compress.runtime import hf
from compress.storage.checkpoint import CONFIG, MANIFEST, read_header
from helpers.pico import EOS_ID, ODD, VOCAB_SIZE, pico_tokenizer, save_pico
from helpers.runs import GPTQ, RTN, job

COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
INITIALIZED = {  # their _init_weights names the weights of linears, whatever was loaded
    "mamba": {**MAMBA, "intermediate_size": 64, "time_step_rank": 16},
    "mamba2": {**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "falcon_mamba": {**MAMBA, "intermediate_size": 64, "time_step_rank": 16},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 128},
    "nanochat": {**ATTENTION, "hidden_size": 64, "intermediate_size": 128},
    "recurrent_gemma": {**ATTENTION, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128},
}
LLAMA4: dict[str, Any] = {
    "text_config": {
        **COMMON,
        **ATTENTION,
        "hidden_size": 64,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [],
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
}
IDS = torch.arange(24)[None]


def family(model_type: str, directory: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**COMMON, **INITIALIZED[model_type]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "A_log" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.save_pretrained(directory)
    pico_tokenizer().save_pretrained(directory)
    return directory


def without_placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed linears have no weight while transformers initializes, as those of any architecture not thought of."""
    monkeypatch.setattr(hf, "_packed_modules", lambda model: [])


@pytest.mark.parametrize("model_type", INITIALIZED)
def test_families_whose_initialization_names_weights(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load; where they would not, the run is refused before its first block."""
    source, out = family(model_type, tmp_path / "model"), tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(UnsupportedModelError, match="no attribute 'weight'.*another"):
        without_placeholder(patch)
        api.quantize(job(source, RTN, out))
    assert not list(tmp_path.glob("out*"))
    setup = RTN.set("ignore=['*.dt_proj']") if model_type == "mamba" else RTN  # it reads that weight itself
    assert api.quantize(job(source, setup, out))["self_check"] == "passed"
    packed = AutoModelForCausalLM.from_pretrained(out)
    assert any(hasattr(module, "packed") for module in packed.modules())
    assert not any(hasattr(module, "weight") for module in packed.modules() if hasattr(module, "packed"))
    original = AutoModelForCausalLM.from_pretrained(source)(IDS).logits
    difference = packed(IDS).logits - original
    assert difference.norm() < 0.1 * original.norm()


def test_a_model_that_reads_a_packed_weight(tmp_path: Path) -> None:
    """It is kept, with that reason."""
    report = api.quantize(job(family("mamba", tmp_path / "model"), RTN, tmp_path / "out"))
    read = {name for name, why in report["kept"].items() if why == "the model's own code reads its weight"}
    assert read == {f"backbone.layers.{block}.mixer.dt_proj" for block in range(2)} and report["layers"]


def test_what_transformers_cannot_load_is_not_put_in_place(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the class and its reason; the blocks stay for the next run, which goes on with them."""
    asked = job(pico_dir("llama"), RTN, tmp_path / "out")

    def fails(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise AttributeError("'PackedLinear' object has no attribute 'bit_length'")

    with monkeypatch.context() as patch:
        patch.setattr(dry_load, "check_planned", lambda *args: None)
        patch.setattr("transformers.LlamaForCausalLM._initialize_missing_keys", fails)
        expected = r"self-check failed: .*AutoModelForCausalLM fails \(AttributeError: .*'bit_length'\)"
        with pytest.raises(CheckpointError, match=expected):
            api.quantize(asked)
    assert not asked.out.exists()
    report = api.quantize(asked)
    assert report["self_check"] == "passed" and report["resumed_blocks"] == report["blocks"] == 2


def test_a_wrapper_whose_own_class_has_other_names(tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(CONFIG_MAPPING["llama4"](**LLAMA4)).save_pretrained(source)
    pico_tokenizer().save_pretrained(source)
    assert api.quantize(job(source, RTN, tmp_path / "whole"))["self_check"] == "passed"
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")).__name__.startswith("Llama4ForCond")
    config = json.loads((source / CONFIG).read_text())
    (source / CONFIG).write_text(json.dumps({**config, "architectures": ["Llama4ForCausalLM"]}))
    assert api.quantize(job(source, RTN, out))["self_check"] == "passed"
    original = AutoModelForCausalLM.from_pretrained(source)(IDS).logits
    difference = AutoModelForCausalLM.from_pretrained(out)(IDS).logits - original
    assert difference.norm() < 0.1 * original.norm()


@pytest.mark.parametrize(("index", "name"), [(1, "model.layers.1.mlp.up_proj"), (2, "lm_head.weight")])
def test_a_flipped_byte_that_no_output_shows(
    index: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the padding of packed words, or in the output head, which the probe does not reach."""
    asked = job(save_pico("llama", tmp_path / "model", changes=ODD), GPTQ, tmp_path / "out")
    file, self_check = f"model-{index + 1:05d}-of-00003.safetensors", verify.self_check

    def damaged(directory: Path, hashes: Any, expected: list[str], device: torch.device, *rest: Any) -> str:
        content = bytearray((directory / file).read_bytes())
        stored = next(t for key, t in read_header(directory / file).items() if key.startswith(name))
        content[stored.offset + stored.nbytes - 1] ^= 0x80
        (directory / file).write_bytes(content)
        assert verify.replay(directory, device, rest[0]) == expected
        return self_check(directory, hashes, expected, device, *rest)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=f"{file} does not hold what was written"):
        patch.setattr(verify, "self_check", damaged)
        api.quantize(asked)
    assert not asked.out.exists()
    report = api.quantize(asked)
    assert report["self_check"] == "passed" and report["resumed_blocks"] == index


def test_hashes_that_the_environment_asks_for_are_not_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is written last, and the self-check loads what has none yet."""
    monkeypatch.setenv("COMPRESS_VERIFY", "1")
    api.quantize(job(save_pico("llama", tmp_path / "model"), RTN, tmp_path / "out"))
    assert (tmp_path / "out" / MANIFEST).is_file()


def test_a_cache_that_needs_queries_is_written(tmp_path: Path) -> None:
    """Whether attention gives them cannot be tried on a model without weights."""
    model = save_pico("llama", tmp_path / "model", changes={"head_dim": 32})
    asked = recipe.load("int8", ["kv_cache={method: zipvl, judge: probes}"])
    api.quantize(Job(str(model), asked, tmp_path / "out"))
    assert "kv_cache" in json.loads((tmp_path / "out" / CONFIG).read_text())["quantization_config"]
