"""The affine format of MLX, decoded here as its documentation says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress import api
from compress.errors import ExportError
from compress.export import convert
from compress.export.source import open_source
from compress.export.targets import mlx
from compress.importers import open_checkpoint
from helpers.engines import FOUR_BITS, packed
from helpers.pico import of_type, save, save_pico
from helpers.runs import SMALL, Setup, job, stored_tensors

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
GEMMA3: dict[str, Any] = {
    **{
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "sliding_window": 32,
    },
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
DEEPSEEK: dict[str, Any] = {
    **{"intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 16},
}


def decoded(tensors: dict[str, Tensor], name: str, bits: int, group: int) -> Tensor:
    """w = scale * code + bias, codes in a little-endian stream of bits; in float32."""
    words = tensors[f"{name}.weight"]
    octets = words.contiguous().view(torch.uint8).numpy()
    bit = np.unpackbits(octets, axis=-1, bitorder="little")
    fields = bit.reshape(*octets.shape[:-1], -1, bits) * (1 << np.arange(bits))
    codes = torch.from_numpy(fields.sum(-1)).float().unflatten(-1, (-1, group))
    scales, biases = (tensors[f"{name}.{key}"].float()[..., None] for key in ("scales", "biases"))
    return (codes * scales + biases).flatten(-2)


@pytest.mark.parametrize(
    ("settings", "bits", "group"),
    [
        (FOUR_BITS, 4, 32),
        (("bits=3", "group_size=64"), 3, 64),
        (("bits=2", "group_size=32"), 2, 32),
        (("bits=5", "group_size=32", "symmetric=false"), 6, 32),
        (("bits=6", "group_size=32", "symmetric=false"), 8, 32),
        (("bits=7", "group_size=-1"), 8, 64),
    ],
)
def test_weights_are_exact(settings: tuple[str, ...], bits: int, group: int, tmp_path: Path) -> None:
    """Linears of 64 columns and of 160, which groups of 64 do not divide: these have groups of 32."""
    checkpoint = packed("qwen2", tmp_path, settings)
    convert.export(checkpoint, "mlx", tmp_path / "out")
    tensors = stored_tensors(tmp_path / "out")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    again = open_checkpoint(tmp_path / "out")
    for weight in open_source(checkpoint).packed:
        form = section.get(weight.name, section)
        found = decoded(tensors, weight.name, form["bits"], form["group_size"])
        assert torch.equal(found, weight.dense(torch.float32)), weight.name
        kind = tensors[f"{weight.name}.scales"].dtype
        assert torch.equal(again.tensors[f"{weight.name}.weight"].read(), weight.dense(torch.float32).to(kind))
    form = section.get("model.layers.0.mlp.up_proj", section)
    assert (form["bits"], form["group_size"]) == (bits, group)
    form = section.get("model.layers.0.mlp.down_proj", section)
    assert (form["bits"], form["group_size"]) == (bits, 32)
    form = section.get("lm_head", section)
    assert (form["bits"], form["group_size"]) == (8, 64)


def test_everything_is_of_one_type_and_the_configuration_is_whole(tmp_path: Path) -> None:
    checkpoint = packed(
        "llama_tied", tmp_path, changes={"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    )
    convert.export(checkpoint, "mlx", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 5e4 and config["tie_word_embeddings"] is True and config["dtype"] == "float16"
    assert config["quantization"] == config["quantization_config"] and str(tmp_path) not in json.dumps(config)
    types = {tensor.dtype for tensor in stored_tensors(tmp_path / "out").values()}
    assert types == {torch.uint32, torch.float16}
    assert not [name for name in stored_tensors(tmp_path / "out") if name.startswith("lm_head")]


def test_a_checkpoint_without_packed_weights_keeps_its_types(tmp_path: Path) -> None:
    source = save_pico("llama", tmp_path / "model", dtype=torch.bfloat16)
    convert.export(source, "mlx", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and not [key for key in config if key.startswith("quantization")]
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "out").values()} == {torch.bfloat16}


NAMED_OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # model type -> changes, what config.json has
    "phi": (
        {"intermediate_size": 128},
        {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "head_dim": 16},
    ),
    "stablelm": ({"intermediate_size": 128, "num_key_value_heads": 2}, {"partial_rotary_factor": 0.25}),
    "gemma3_text": (
        {**GEMMA3, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 1e4}}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 3,
        },
    ),
}


@pytest.mark.parametrize("kind", NAMED_OTHERWISE)
def test_settings_have_the_names_of_mlx_lm(kind: str, tmp_path: Path) -> None:
    """Those that are absent would be its defaults, which are of other models: 0.4 of a head in place of 0.5."""
    changes, expected = NAMED_OTHERWISE[kind]
    convert.export(save(of_type(kind, changes), tmp_path / "model"), "mlx", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in expected} == expected


def test_what_chooses_experts_stays_in_float32(tmp_path: Path) -> None:
    """A large offset with a small spread: rounded to 16 bits it would choose others."""
    model = of_type("deepseek_v3", DEEPSEEK).bfloat16()
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = 6.817 + 0.246 * torch.rand(8, generator=torch.Generator().manual_seed(0))
    source = save(model, tmp_path / "model")
    with pytest.raises(ExportError, match=r"kv_b_proj in two and rounds both anew; set ignore: \['\*.kv_b_proj'\]"):
        api.quantize(job(source, Setup("int8", (*FOUR_BITS, "export=mlx")), tmp_path / "packed"))
    api.quantize(job(source, Setup("int8", (*FOUR_BITS, "ignore=['*.kv_b_proj']")), tmp_path / "packed"))
    for target, dtype in (("mlx", None), ("mlx", torch.bfloat16), ("dense", torch.float16)):
        convert.export(tmp_path / "packed", target, tmp_path / "out", dtype, overwrite=True)
        found = stored_tensors(tmp_path / "out")["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert torch.equal(found, gate.e_score_correction_bias), (target, dtype)


def test_single_numbers_are_turned_into_the_type(tmp_path: Path) -> None:
    model = of_type("apertus", {"intermediate_size": 128, "num_key_value_heads": 2})
    convert.export(save(model, tmp_path / "model"), "mlx", tmp_path / "out", torch.float16)
    tensors = stored_tensors(tmp_path / "out")
    numbers = {name: value for name, value in model.state_dict().items() if not value.dim()}
    assert numbers and all(torch.equal(tensors[name], value.half()) for name, value in numbers.items())


def test_architectures_that_mlx_lm_computes_otherwise_or_that_were_not_tried(tmp_path: Path) -> None:
    changes = {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16}
    source = save(of_type("glm", changes), tmp_path / "glm")
    with pytest.raises(ExportError, match="computes models of type glm otherwise: it turns all of a head"):
        convert.export(source, "mlx", tmp_path / "out")
    sizes = {key: value for key, value in DEEPSEEK.items() if "lora" not in key and "rope" not in key}
    source = save(of_type("dots1", {**sizes, "n_shared_experts": 1}), tmp_path / "dots1")
    with pytest.raises(ExportError, match="does not load models of type dots1 packed"):
        api.quantize(job(source, Setup("int8", (*FOUR_BITS, "export=mlx")), tmp_path / "packed"))
    assert not convert.export(source, "mlx", tmp_path / "plain").notes
    source = save(of_type("arcee", changes), tmp_path / "arcee")
    assert "models of type arcee were not tried" in " ".join(convert.export(source, "mlx", tmp_path / "out").notes)
    tried = {
        *mlx.DATA["same"],
        *mlx.DATA["others"],
        *(kind for kinds in mlx.DATA["rounded"].values() for kind in kinds),
    }
    assert tried <= set(CONFIG_MAPPING.keys())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_one_tensor(name: str, tmp_path: Path) -> None:
    checkpoint = packed(name, tmp_path)
    convert.export(checkpoint, "mlx", tmp_path / "out")
    published = {"mixtral": "block_sparse_moe.experts.{}.w2", "qwen3_moe": "mlp.experts.{}.down_proj"}[name]
    folder = published.partition(".")[0]
    found = decoded(stored_tensors(tmp_path / "out"), f"model.layers.1.{folder}.switch_mlp.down_proj", 4, 32)
    weights = {weight.name: weight for weight in open_source(checkpoint).packed}
    stack = [weights[f"model.layers.1.{published.format(index)}"] for index in range(len(found))]
    assert torch.equal(found, torch.stack([weight.dense(torch.float32) for weight in stack]))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [(("bits=8", "symmetric=false"), "asymmetric codes of 8 bits"), (("bits=4", "group_size=16"), "groups of 16")],
)
def test_what_does_not_fit_is_refused(settings: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path, settings)
    with pytest.raises(ExportError, match=reason):
        convert.export(checkpoint, "mlx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_types_of_blocks_and_mixtures(tmp_path: Path) -> None:
    """A value is a point of E2M1, or a number of E4M3, times 2 ^ (exponent - 127); config.json names the modes."""
    model = save_pico("llama", tmp_path / "model", dtype=torch.bfloat16)
    rules = "rules=[{match: '*down_proj', type: mxfp8}, {match: '*o_proj', method: rtn, bits: 4, group_size: 32}]"
    api.quantize(job(model, Setup("mxfp4", (*SMALL, "incoherence=false", rules)), tmp_path / "packed"))
    convert.export(tmp_path / "packed", "mlx", tmp_path / "out")
    tensors = stored_tensors(tmp_path / "out")
    points = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    modes = {"q_proj": {"bits": 4, "mode": "mxfp4"}, "down_proj": {"bits": 8, "mode": "mxfp8"}, "o_proj": {"bits": 4}}
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    for weight in open_source(tmp_path / "packed").packed:
        kind = modes.get(weight.name.rpartition(".")[2], {})
        if "layers" in weight.name and kind:
            assert {**section, **section.get(weight.name, {})}.items() >= kind.items()
        if "mode" not in kind:
            continue
        octets = tensors[f"{weight.name}.weight"].contiguous().view(torch.uint8)
        if kind["bits"] == 4:
            codes = torch.stack((octets & 15, octets >> 4), -1).flatten(1).long()
            numbers = points[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        else:
            numbers = octets.view(torch.float8_e4m3fn).float()
        exponents = tensors[f"{weight.name}.scales"].float() - 127
        found = numbers * exponents.exp2().repeat_interleave(32, 1)
        assert torch.equal(found, weight.dense(torch.float32)), weight.name
        assert f"{weight.name}.biases" not in tensors


def test_types_with_a_scale_of_the_matrix_are_refused(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    with pytest.raises(ExportError, match="it is of the type nvfp4, which no engine multiplies there"):
        api.plan(job(model, Setup("nvfp4-w4a16", (*SMALL, "incoherence=false", "export=mlx")), tmp_path / "packed"))
