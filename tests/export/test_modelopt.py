"""modelopt directories: our importer and the package give the bits of ours; settings are as the package writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import importers
from compress.errors import CheckpointError, ExportError
from compress.export import convert
from compress.export.source import open_source
from compress.storage.json_text import loads
from helpers import foreign
from helpers.grids import packed, set_tensor_scales
from helpers.runs import SMALL, stored_tensors

STATIC_FP4 = "activations={bits: 4, scale: tensor, dtype: nvfp4}"
STATIC_FP8 = "activations={scale: tensor, dtype: fp8}"
MIXED = ("rules=[{match: '*mlp*', type: fp8-channel}]",)
CASES = [  # type of all linears, settings, what it is called
    ("nvfp4", (), "W4A16_NVFP4"),
    ("nvfp4", (*SMALL, STATIC_FP4), "NVFP4"),
    ("fp8", (*SMALL, STATIC_FP8), "FP8"),
    ("fp8-channel", ("activations={dtype: fp8}",), "FP8_PER_CHANNEL_PER_TOKEN"),
    ("mxfp8", ("activations={dtype: mxfp8}",), "MXFP8"),
    ("nvfp4", MIXED, "MIXED_PRECISION"),
]


def exported(directory: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The directory that is written, the section of config.json, and the file beside it."""
    out = directory.with_name("out")
    convert.export(directory, "modelopt", out)
    section = loads((out / "config.json").read_bytes())["quantization_config"]
    return out, section, loads((out / "hf_quant_config.json").read_bytes())


def slow_weight(tensors: dict[str, Tensor], module: str) -> Tensor:
    """A weight in float64, number by number from the description of the format."""
    codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    if codes.dtype == torch.uint8:
        values = torch.tensor([*levels, *(-level for level in levels)], dtype=torch.float64)
        numbers = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(1)
        return numbers * scale.double().repeat_interleave(16, 1) * tensors[f"{module}.weight_scale_2"].double()
    numbers = codes.double()
    if scale.dtype == torch.uint8:
        return numbers * 2.0 ** (scale.double() - 127).repeat_interleave(32, 1)
    if scale.dim() == 4:
        assert scale.shape[1] == scale.shape[3] == 1
        wide = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return numbers * wide[: codes.shape[0], : codes.shape[1]].double()
    return numbers * scale.double().reshape(-1, 1)


def assert_equal(source: Path, out: Path) -> None:
    read, tensors = importers.open_checkpoint(out).tensors, stored_tensors(out)
    for weight in open_source(source).packed:
        ours = read[f"{weight.name}.weight"].read()
        assert torch.equal(ours, weight.dense(ours.dtype)), weight.name
        assert torch.equal(slow_weight(tensors, weight.name).float(), weight.dense(torch.float32)), weight.name
    for name, stored in open_source(source).plain.items():
        assert torch.equal(read[name].read(), stored.read()), name


@pytest.mark.parametrize(("kind", "settings", "name"), CASES)
def test_weights_come_back(kind: str, settings: tuple[str, ...], name: str, tmp_path: Path) -> None:
    source = packed(tmp_path, "llama", kind, *settings)
    out, section, described = exported(source)
    assert_equal(source, out)
    assert section["quant_algo"] == described["quantization"]["quant_algo"] == name
    assert described["quantization"]["kv_cache_quant_algo"] is None and section["kv_cache_scheme"] is None
    assert described["quantization"]["exclude_modules"] == section["ignore"] == ["lm_head"]
    stored = stored_tensors(out)
    for weight in open_source(source).packed:
        scale = stored.get(f"{weight.name}.input_scale")
        assert (scale is not None) == weight.stored.has_in_scale
        assert scale is None or (scale.shape == () and scale == weight.read().tensors["in_scale"])
    settings_file = out / "config.json"  # older readers have the file beside it alone
    facts = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps({key: facts[key] for key in facts if key != "quantization_config"}))
    assert_equal(source, out)


def test_blocks_and_experts(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
    source = packed(tmp_path / "blocks", "llama", "fp8-block", "activations={dtype: fp8-block}", changes=wide)
    out, section, _ = exported(source)
    assert_equal(source, out)
    assert section["quant_algo"] == "FP8_PB_WO"
    assert stored_tensors(out)["model.layers.0.mlp.down_proj.weight_scale"].shape == (2, 1, 3, 1)
    source = packed(tmp_path / "experts", "mixtral", "nvfp4")
    assert_equal(source, exported(source)[0])


def test_experts_of_a_layer_share_the_scale_of_their_inputs(tmp_path: Path) -> None:
    source = packed(tmp_path, "mixtral", "nvfp4", *SMALL, STATIC_FP4)
    stored = stored_tensors(exported(source)[0])
    ours = {weight.name: weight.read().tensors["in_scale"] for weight in open_source(source).packed}
    for layer in range(2):
        for parts in (("w1", "w3"), ("w2",)):
            names = [f"model.layers.{layer}.block_sparse_moe.experts.{e}.{part}" for e in range(4) for part in parts]
            assert {float(stored[f"{name}.input_scale"]) for name in names} == {
                max(float(ours[name]) for name in names)
            }


def test_the_settings_are_those_that_the_package_writes(tmp_path: Path) -> None:
    """Its own conversion of the older layout into the newer one."""
    convert_settings = foreign.tool("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    for number, (kind, settings, name) in enumerate(CASES):
        _, section, described = exported(packed(tmp_path / str(number), "llama", kind, *settings))
        expected = convert_settings(described)
        if "config_groups" not in expected:  # it has none for FP8 by rows, nor for MXFP8
            section.pop("config_groups")
        assert {key: section[key] for key in expected} == expected, name


def test_the_package_decodes_our_weights(tmp_path: Path) -> None:
    types = foreign.tool("modelopt.torch.quantization.qtensor")
    for number, (kind, settings, _) in enumerate(CASES[:5]):
        source = packed(tmp_path / str(number), "llama", kind, *settings)
        tensors = stored_tensors(exported(source)[0])
        for weight in open_source(source).packed:
            codes, scale = tensors[f"{weight.name}.weight"], tensors[f"{weight.name}.weight_scale"]
            arguments = (weight.shape, torch.float32, codes)
            if kind == "nvfp4":
                double = tensors[f"{weight.name}.weight_scale_2"]
                theirs = types.NVFP4QTensor(*arguments).dequantize(
                    scale=scale, double_scale=double, block_sizes={-1: 16}
                )
            elif kind == "mxfp8":
                theirs = types.MXFP8QTensor(*arguments).dequantize(scale=scale)
            else:
                theirs = types.FP8QTensor(*arguments).dequantize(scale=scale[:, None] if scale.dim() else scale)
            assert torch.equal(theirs, weight.dense(torch.float32)), weight.name


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mxfp4", (), "of the type mxfp4, which no engine multiplies there"),
        ("fp8", (), "set activations: {bits: 8, scale: tensor, dtype: fp8}"),
        ("nvfp4", ("activations={dtype: fp8}",), "engines quantize inputs otherwise beside nvfp4"),
        ("fp8-block", (), "its 64 inputs are no whole blocks of 128"),
    ],
)
def test_refusals(kind: str, settings: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    source = packed(tmp_path, "llama", kind, *settings)
    with pytest.raises(ExportError) as error:
        exported(source)
    assert reason in str(error.value)


def test_notes_and_unequal_tensor_scales(tmp_path: Path) -> None:
    source = packed(tmp_path / "mx", "llama", "mxfp8")
    assert any("round the inputs" in note for note in convert.export(source, "modelopt", tmp_path / "out").notes)
    source = packed(tmp_path / "nv", "llama", "nvfp4")
    set_tensor_scales(source, {"up_proj": 2.0**-12})
    with pytest.raises(ExportError, match="gate_proj and .*up_proj read the same input"):
        exported(source)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"quant_algo": "W3A16"}, "quant_algo 'W3A16' cannot be read; what can be: FP8"),
        ({"quant_algo": "MIXED_PRECISION"}, "has no quantized_layers that can be read"),
    ],
)
def test_what_the_importer_refuses(change: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    out, section, _ = exported(packed(tmp_path, "llama", "mxfp8"))
    foreign.configure(out, quantization_config={**section, **change})
    with pytest.raises(CheckpointError, match=pattern):
        importers.open_checkpoint(out)
