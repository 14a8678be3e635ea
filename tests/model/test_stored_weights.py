"""A checkpoint holds what its model uses and nothing unknown; floating weights are not stored as bare codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from compress.errors import CheckpointError
from compress.model import load, stored_weights
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint
from helpers.runs import RTN, cli, command, one_line

Q = "model.layers.1.self_attn.q_proj"
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture
def changed(pico_dir: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """changed(name, {tensor name: tensor}) -> a copy of a pico checkpoint with these tensors added or replaced."""

    def make(name: str, tensors: dict[str, Tensor]) -> Path:
        directory = Path(shutil.copytree(pico_dir(name), tmp_path / "model"))
        file = directory / "model.safetensors"
        save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
        return directory

    return make


def refused(directory: Path, pattern: str) -> None:
    """Neither what reads block by block nor what loads whole models takes it."""
    with pytest.raises(CheckpointError, match=pattern):
        Skeleton(open_checkpoint(directory)).check_tensors()
    with pytest.raises(CheckpointError, match=pattern):
        load.load_model(directory)


def accepted(directory: Path) -> None:
    Skeleton(open_checkpoint(directory)).check_tensors()
    assert load.load_model(directory).config.vocab_size


def float8(name: str, directory: Path) -> dict[str, Tensor]:
    """A linear as DeepSeek stores it: codes, and the inverse of the scale of each block."""
    weight = load_file(directory / "model.safetensors")[f"{name}.weight"]
    scale = weight.abs().max() / 448
    return {f"{name}.weight": (weight / scale).to(FLOAT8), f"{name}.weight_scale_inv": scale.reshape(1, 1)}


@pytest.mark.parametrize("words", ["quantize", "plan", "eval"])
def test_float8_without_its_configuration(
    words: str, changed: Callable[..., Path], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    directory = changed("llama", float8(Q, pico_dir("llama")))
    out = tmp_path / "out"
    lines = {
        "quantize": command(directory, RTN, out),
        "plan": ["plan", str(directory), *RTN.options()],
        "eval": ["eval", str(directory), "--text", str(Path(__file__)), "--seq-len", "32"],
    }
    result = cli(*lines[words])
    assert result.code == 1 and not out.exists()
    line = one_line(result)
    assert f"stores 1 tensors as float8, first {Q}.weight" in line and "has no quantization_config" in line


def test_float8_without_scales_at_all(changed: Callable[..., Path], pico_dir: Callable[..., Path]) -> None:
    tensors = float8(Q, pico_dir("llama"))
    del tensors[f"{Q}.weight_scale_inv"]
    refused(changed("llama", tensors), "as float8, first")


def test_float8_with_its_configuration_is_left_to_transformers(
    changed: Callable[..., Path], pico_dir: Callable[..., Path]
) -> None:
    directory = changed("llama", float8(Q, pico_dir("llama")))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert open_checkpoint(directory).tensors[f"{Q}.weight"].dtype == FLOAT8


def test_scales_of_weights_that_look_plain(changed: Callable[..., Path]) -> None:
    scales = {f"model.layers.{i}.mlp.up_proj.weight_scale": torch.ones(1) for i in range(2)}
    refused(
        changed("llama", scales),
        r"has 2 tensors that LlamaForCausalLM does not use, first model\.layers\.0\.mlp\.up_proj\.weight_scale "
        r"\(torch\.float32, \[1\]\).*give the original checkpoint",
    )


def test_layers_that_the_configuration_leaves_out(changed: Callable[..., Path]) -> None:
    directory = changed("llama", {})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    refused(directory, r"has 9 tensors that LlamaForCausalLM does not use, first model\.layers\.1\.")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_integers_in_the_place_of_weights(dtype: torch.dtype, changed: Callable[..., Path]) -> None:
    codes = torch.zeros(64, 64, dtype=dtype)
    refused(changed("llama", {f"{Q}.weight": codes}), f"{Q}.weight is stored as {dtype}.*give the original")


def test_what_older_versions_stored_is_known(changed: Callable[..., Path]) -> None:
    attention = "gpt_neox.layers.0.attention"
    old = {
        f"{attention}.rotary_emb.inv_freq": torch.ones(2),
        f"{attention}.masked_bias": torch.tensor(-1e9),
        f"{attention}.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
    }
    accepted(changed("gpt_neox", old))


def test_a_mask_is_known_by_its_shape(changed: Callable[..., Path]) -> None:
    mask = {"model.layers.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    accepted(changed("llama", mask))


def test_a_bias_that_the_model_has_no_place_for(changed: Callable[..., Path]) -> None:
    refused(changed("llama", {"model.layers.0.attn.bias": torch.ones(64)}), r"first model\.layers\.0\.attn\.bias")


def test_what_the_class_ignores_is_known(changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = changed("llama", {"extra.layers.0.mlp.up_proj.weight": torch.ones(4, 4)})
    refused(directory, r"first extra\.layers\.0")
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^extra\."])
    accepted(directory)


def test_a_copy_of_a_tied_weight_is_the_same(changed: Callable[..., Path], pico_dir: Callable[..., Path]) -> None:
    embeddings = load_file(pico_dir("llama_tied") / "model.safetensors")["model.embed_tokens.weight"]
    directory = changed("llama_tied", {"lm_head.weight": embeddings.clone()})
    Skeleton(open_checkpoint(directory)).check_tensors()
    save_file(
        {**load_file(directory / "model.safetensors"), "lm_head.weight": embeddings + 1},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differ.*set tie_word_embeddings to false"):
        Skeleton(open_checkpoint(directory)).check_tensors()


def test_tensors_that_are_only_renamed_are_told_from_others(pico_dir: Callable[..., Path]) -> None:
    skeleton = Skeleton(open_checkpoint(pico_dir("mixtral")))
    converted = stored_weights.names_of_converted(skeleton.model, skeleton.checkpoint)
    assert {name for name in converted if ".layers.0." in name} == {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"
        for expert in range(skeleton.model.config.num_local_experts)
        for part in ("w1", "w2", "w3")
    }
