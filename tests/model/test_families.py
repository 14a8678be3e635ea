"""Structures beside the pico models': what a block returns, linears with a forward of their own, types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress import api
from compress.errors import CompressError
from helpers.pico import EOS_ID, VOCAB_SIZE, pico_tokenizer
from helpers.runs import GPTQ, RTN, Setup, job

COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
OTHERS = {
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 128},  # blocks return tuples
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},  # linears with their own forward
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},  # weights stored as [in, out]
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},  # reads the weight of a linear itself
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},  # no maximum position
}
ROTATED = Setup("trellis4bit", ("state_bits=8", "calibration.num_samples=8", "calibration.seq_len=32"))


def build(model_type: str, directory: Path) -> Path:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**COMMON, **OTHERS[model_type])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    pico_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama", "opt"])
@pytest.mark.parametrize("setup", [RTN, GPTQ, ROTATED], ids=["rtn", "gptq", "rotated"])
def test_bfloat16_passes_its_own_check(name: str, setup: Setup, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Experts see a handful of rows, which a packed linear multiplies by a kernel of its own: the check decodes."""
    source = pico_dir(name, dtype=torch.bfloat16)
    report = api.quantize(job(source, setup, tmp_path / "out"))
    assert report["self_check"] == "passed"
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert packed.dtype == torch.bfloat16
    tokens = torch.arange(40)[None]
    original = AutoModelForCausalLM.from_pretrained(source)(tokens).logits.float()
    difference = packed(tokens).logits.float() - original
    assert difference.norm() < 0.7 * original.norm()


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_structures(model_type: str, tmp_path: Path) -> None:
    source = build(model_type, tmp_path / "model")
    report = api.quantize(job(source, GPTQ, tmp_path / "out"))
    assert report["layers"] and report["self_check"] == "passed"
    tokens = torch.arange(40)[None]
    original = AutoModelForCausalLM.from_pretrained(source)(tokens).logits.float()
    difference = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits.float() - original
    assert difference.norm() < 0.7 * original.norm()


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_configuration_without_dtype(name: str, null: bool, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The packed model loads in the type of the original, not in that of its scales."""
    source = tmp_path / "model"
    source.mkdir()
    for path in pico_dir(name, dtype=torch.bfloat16).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype")
    if null:
        config["dtype"] = None
    (source / "config.json").write_text(json.dumps(config))
    api.quantize(job(source, RTN, tmp_path / "out"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "damage",
    [{"hidden_act": "nothing"}, {"hidden_size": "wide"}, {"num_attention_heads": 0}, {"quantization_config": 4}],
    ids=lambda damage: next(iter(damage)),
)
def test_a_damaged_configuration_is_one_line(
    damage: dict[str, object], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for path in pico_dir("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **damage}))
    with pytest.raises(CompressError) as caught:
        api.quantize(job(source, RTN, tmp_path / "out"))
    assert "\n" not in str(caught.value) and str(source) in str(caught.value)
    assert not (tmp_path / "out").exists()
