"""FP4 and FP8 types in compressed-tensors: our importer and the package's own decompressors give the bits of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress import importers
from compress.errors import ExportError
from compress.export import convert, grids
from compress.export.source import open_source
from compress.export.targets import compressed_tensors
from compress.export.weights import StoredWeight
from compress.quant import grid_types
from compress.types import Activations, Stored
from helpers import foreign, without_us
from helpers.grids import TYPES, decompressed, packed, section, set_tensor_scales
from helpers.runs import stored_tensors

MIXED = ("rules=[{match: '*.1.*down_proj', type: mxfp8}, {match: '*mlp*', type: fp8-channel}]",)


def exported(directory: Path) -> Path:
    out = directory.with_name("out")
    convert.export(directory, "compressed-tensors", out)
    return out


@pytest.mark.parametrize(
    ("model", "kind", "settings"),
    [*(("llama", kind, ()) for kind in TYPES), ("mixtral", "nvfp4", ()), ("qwen2", "nvfp4", MIXED)],
)
def test_weights_come_back(model: str, kind: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    source = packed(tmp_path, model, kind, *settings)
    out = exported(source)
    read, theirs, weights = importers.open_checkpoint(out).tensors, decompressed(out), open_source(source).packed
    assert theirs.keys() == {weight.name for weight in weights}
    for weight in weights:
        ours = read[f"{weight.name}.weight"].read()
        assert torch.equal(ours, weight.dense(ours.dtype)), weight.name
        assert torch.equal(theirs[weight.name], weight.dense(theirs[weight.name].dtype)), weight.name
    for name, stored in open_source(source).plain.items():
        assert torch.equal(read[name].read(), stored.read()), name


LAYOUTS = {  # of q_proj [64, 64] of a llama
    "nvfp4": {"weight_packed": (64, 32), "weight_scale": (64, 4), "weight_global_scale": (1,)},
    "mxfp4": {"weight_packed": (64, 32), "weight_scale": (64, 2)},
    "mxfp8": {"weight": (64, 64), "weight_scale": (64, 2)},
    "fp8": {"weight": (64, 64), "weight_scale": (1,)},
    "fp8-channel": {"weight": (64, 64), "weight_scale": (64, 1)},
    "fp8-block": {"weight": (64, 64), "weight_scale": (1, 1)},
}


@pytest.mark.parametrize("kind", TYPES)
def test_names_and_shapes(kind: str, tmp_path: Path) -> None:
    out, prefix = exported(packed(tmp_path, "llama_tied", kind)), "model.layers.0.self_attn.q_proj."
    stored = {name.removeprefix(prefix): t for name, t in stored_tensors(out).items() if name.startswith(prefix)}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == LAYOUTS[kind]
    settings = section(out)
    assert settings["ignore"] == ["lm_head"]  # tied: without a tensor, yet a linear
    assert settings["config_groups"]["group_0"]["targets"] == ["Linear"]
    if kind == "nvfp4":
        assert float(stored["weight_global_scale"]) == 2048


FP4_INPUTS = Activations(4, "tensor", dtype="nvfp4")
PRESETS = {  # of the package, by the type of weights and that of inputs
    "NVFP4A16": ("nvfp4", None),
    "NVFP4": ("nvfp4", FP4_INPUTS),
    "MXFP4A16": ("mxfp4", None),
    "MXFP4": ("mxfp4", Activations(4, dtype="mxfp4")),
    "MXFP4XFP8": ("mxfp4", Activations(dtype="fp8-block")),
    "MXFP8A16": ("mxfp8", None),
    "MXFP8": ("mxfp8", Activations(dtype="mxfp8")),
    "FP8": ("fp8", Activations(scale="tensor", dtype="fp8")),
    "FP8_DYNAMIC": ("fp8-channel", Activations(dtype="fp8")),
    "FP8_BLOCK": ("fp8-block", Activations(dtype="fp8-block")),
}
COMPARED = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "scale_dtype")


@pytest.mark.parametrize("name", PRESETS)
def test_settings_are_those_of_the_presets(name: str) -> None:
    foreign.tool("compressed_tensors")
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    kind, inputs = PRESETS[name]
    stored = Stored("grid", grid_types.TYPES[kind], activations=inputs)
    assert compressed_tensors.refuses(weight := StoredWeight("q_proj", (128, 128), stored)) is None
    ours = QuantizationScheme.model_validate({"targets": ["Linear"], **compressed_tensors._scheme(weight)})
    theirs = preset_name_to_scheme(name, ["Linear"])
    for part in ("weights", "input_activations"):
        mine, expected = getattr(ours, part), getattr(theirs, part)
        assert (mine is None) == (expected is None), part
        for key in COMPARED if expected is not None else ():
            assert getattr(mine, key) == getattr(expected, key), (part, key)


def test_inputs_that_engines_round_otherwise_are_refused() -> None:
    for kind, inputs in (("nvfp4", Activations(4, dtype="nvfp4")), ("fp8-block", Activations()), ("mxfp8", FP4_INPUTS)):
        weight = StoredWeight("q_proj", (128, 128), Stored("grid", grid_types.TYPES[kind], activations=inputs))
        assert f"engines quantize inputs otherwise beside {kind}" in (compressed_tensors.refuses(weight) or "")


def test_groups_of_several_types(tmp_path: Path) -> None:
    groups = section(exported(packed(tmp_path, "llama", "nvfp4", *MIXED)))["config_groups"].values()
    assert sorted((group["format"], sorted(group["targets"])) for group in groups) == [
        (
            "float-quantized",
            [
                r"re:^model\.layers\.0\.mlp\.down_proj$",
                r"re:^model\.layers\.\d+\.mlp\.gate_proj$",
                r"re:^model\.layers\.\d+\.mlp\.up_proj$",
            ],
        ),
        ("mxfp8-quantized", [r"re:^model\.layers\.1\.mlp\.down_proj$"]),
        ("nvfp4-pack-quantized", [rf"re:^model\.layers\.\d+\.self_attn\.{name}_proj$" for name in "koqv"]),
    ]


@pytest.mark.parametrize(
    ("model", "kind", "settings", "reason"),
    [
        ("llama", "nf4", (), "it is of the type nf4, which no engine multiplies there"),
        (
            "llama",
            "nvfp4",
            ("rules=[{match: '*k_proj', type: mxfp4}]",),
            "q_proj .*k_proj .* need one format for both",
        ),
        ("qwen3_moe", "nvfp4", ("rules=[{match: '*experts.1.up_proj', type: mxfp8}]",), "experts.1.gate_proj .* one"),
    ],
)
def test_refusals(model: str, kind: str, settings: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=reason):
        exported(packed(tmp_path, model, kind, *settings))


@pytest.mark.parametrize(
    ("model", "ending", "other"),
    [("llama", "1.self_attn.k_proj", "q_proj"), ("mixtral", "1.mlp.experts.3.up_proj", "w1")],
)
def test_unequal_tensor_scales_of_fused_linears_are_refused(
    model: str, ending: str, other: str, tmp_path: Path
) -> None:
    source = packed(tmp_path, model, "nvfp4")
    set_tensor_scales(source, {ending: 2.0**-12})
    with pytest.raises(ExportError, match=f"{other} and .* take one tensor scale for both"):
        exported(source)
    set_tensor_scales(source, {"": 2.0**-11, "o_proj": 2.0**-12, "down_proj": 2.0**-10})  # that read alone
    exported(source)


def test_fused_linears_are_found_by_what_they_read(tmp_path: Path) -> None:
    source = packed(tmp_path, "qwen3_moe", "fp8-channel")
    export = convert.prepare(open_source(source), "compressed-tensors")
    endings = sorted({tuple(w.module.rpartition(".")[2] for w in group) for group in grids.fused_linears(export)})
    assert endings == [("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")]


def test_a_packed_head_becomes_plain(tmp_path: Path) -> None:
    source = packed(tmp_path, "llama", "fp8-channel", "head={method: rtn, bits: 8, group_size: -1}")
    result = convert.export(source, "compressed-tensors", tmp_path / "out")
    assert any("lm_head is written as plain bfloat16" in note for note in result.notes)
    assert {"lm_head"} <= set(section(tmp_path / "out")["ignore"])


@pytest.mark.slow
def test_transformers_without_us(tmp_path: Path) -> None:
    """The logits of the same weights as plain numbers, in every bit.

    That reader decodes FP4 and MXFP8 to bfloat16, and rounds the scales of FP8 to the type of the model.
    """
    for dtype, kinds in (("bfloat16", TYPES[:3]), ("float32", TYPES[3:])):
        written = []
        for kind in kinds:
            source = packed(tmp_path / kind, "llama", kind)
            convert.export(source, "dense", source.with_name("dense"), getattr(torch, dtype))
            written += [exported(source), source.with_name("dense")]
        logits = without_us.logits(written, tmp_path, dtype)
        for kind, theirs, plain in zip(kinds, logits[::2], logits[1::2], strict=True):
            assert torch.equal(theirs, plain), kind
