"""Tiny weights that other tools made are decoded as these tools' own readers decode them, in every bit.

Each file beside data/make_tool_files.py was made by the tool of its name: settings, stored tensors, decoded weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress.errors import CheckpointError
from compress.importers import open_checkpoint
from helpers import foreign

FILES = sorted((Path(__file__).parent / "data").glob("*.safetensors"))
Q, OUT = "model.layers.0.self_attn.q_proj", 32


def cases(file: Path) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Case -> settings, tensors with "=" for the decoded weight."""
    with safe_open(file, "pt") as stored:
        settings = json.loads(stored.metadata()["settings"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return {
        case: (section, {n.partition("/")[2]: t for n, t in tensors.items() if n.partition("/")[0] == case})
        for case, section in settings.items()
    }


def written(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> Path:
    """A checkpoint of one linear; names with a dot are those of other modules."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "dtype": str(dtype).removeprefix("torch."), "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    named = {name if "model." in name else f"{Q}.{name}": tensor for name, tensor in tensors.items() if name != "="}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_weights_are_those_of_the_tool(file: Path, tmp_path: Path) -> None:
    for case, (settings, tensors) in cases(file).items():
        wanted = tensors["="]
        checkpoint = open_checkpoint(written(tmp_path / case, settings, tensors, wanted.dtype))
        weight = checkpoint.tensors[f"{Q}.weight"]
        assert set(checkpoint.tensors) <= {f"{Q}.weight", f"{Q}.bias"}, case
        if file.stem == "modelopt":  # whose reader gives 0.0 for the code of -0.0
            assert weight.dtype == wanted.dtype and torch.equal(weight.read(), wanted), case
        else:
            assert foreign.same(weight.read(), wanted), case
        assert torch.equal(weight.rows(3, len(wanted) - 2), wanted[3:-2]), case


def test_experts_and_convolutions_of_mlx(tmp_path: Path) -> None:
    """Experts of a layer lie in one tensor there, quantized or plain, and convolutions are turned."""
    settings, tensors = cases(Path(__file__).parent / "data" / "mlx.safetensors")["affine4"]
    layer, plain = "model.layers.0", torch.randn(2, 4, 8).half()
    stacked = {
        f"{layer}.mlp.switch_mlp.up_proj.{name}": torch.stack([tensor, tensor.roll(1, 0)])
        for name, tensor in tensors.items()
        if name != "="
    }
    others = {
        f"{layer}.block_sparse_moe.switch_mlp.down_proj.weight": plain,
        f"{layer}.mixer.conv1d.weight": torch.arange(12.0).view(3, 4, 1),
    }
    read = open_checkpoint(written(tmp_path / "experts", settings, {**stacked, **others}, torch.float16)).tensors
    for index, wanted in enumerate((tensors["="], tensors["="].roll(1, 0))):
        assert foreign.same(read[f"{layer}.mlp.experts.{index}.up_proj.weight"].read(), wanted)
        assert foreign.same(read[f"{layer}.block_sparse_moe.experts.{index}.w2.weight"].read(), plain[index])
    assert read[f"{layer}.mixer.conv1d.weight"].read().equal(torch.arange(12.0).view(3, 1, 4))
    changed = written(tmp_path / "changed", settings, tensors, torch.float16)
    foreign.configure(changed, model_type="qwen3_next")
    foreign.refused(changed, "models of type 'qwen3_next' cannot be read from MLX: norms are stored plus one")


@pytest.mark.parametrize("shape", [(), (3,)])
def test_fused_experts_of_modelopt(shape: tuple[int, ...], tmp_path: Path) -> None:
    """As its export turns them: each expert is quantized as [out, in], and stored as [in, out]."""
    settings, tensors = cases(Path(__file__).parent / "data" / "modelopt.safetensors")["nvfp4_awq"]
    name, factor = "model.layers.0.mlp.experts.gate_up_proj", tensors["weight_scale_2"]
    packed, scales = (torch.stack([tensors[key].t()] * 3) for key in ("weight", "weight_scale"))
    wanted = tensors["weight"], tensors["weight_scale"].float() * factor
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([wanted[0] & 15, wanted[0] >> 4], -1).flatten(1).long()
    plain = levels[codes & 7] * (1 - 2 * (codes >> 3)) * wanted[1].repeat_interleave(16, 1)
    stored = {name: packed, f"{name}_weight_scale": scales, f"{name}_weight_scale_2": factor.expand(shape)}
    stored |= {f"{name}_input_scale": torch.ones(())}
    stored = {key: value.contiguous() for key, value in stored.items()}
    read = open_checkpoint(written(tmp_path, {**settings, "quant_algo": "NVFP4"}, stored, torch.bfloat16)).tensors
    assert set(read) == {name} and foreign.same(read[name].read(), torch.stack([plain.t()] * 3).bfloat16())
    assert foreign.same(read[name].rows(1, 3), torch.stack([plain.t()] * 2).bfloat16())


def test_mxfp8_is_fp8_in_blocks_of_a_row(tmp_path: Path) -> None:
    codes, scales = torch.randn(OUT, 64).to(torch.float8_e4m3fn), torch.randint(110, 130, (OUT, 2), dtype=torch.uint8)
    stored = {"weight": codes, "weight_scale_inv": scales}
    read = open_checkpoint(written(tmp_path, {"quant_method": "mxfp8"}, stored, torch.bfloat16))
    wanted = codes.float() * (scales.float() - 127).exp2().repeat_interleave(32, 1)
    assert foreign.same(read.tensors[f"{Q}.weight"].read(), wanted.bfloat16())
    assert read.base == "fp8 in blocks of 1 x 32"


CHANGES: dict[str, list[tuple[dict[str, Any], dict[str, Tensor], str]]] = {
    "auto_round/auto_gptq_4": [
        ({"packing_format": "auto_round:exllamav2"}, {}, "packing_format .* cannot be read; what can be: auto_gptq"),
        ({"rotation_config": {"a": 1}}, {}, "weights in a rotated basis cannot be read"),
        ({"extra_config": {"((a)+": {"bits": 2}}}, {}, "of extra_config is too involved"),
        ({"extra_config": {Q: {"group_size": "x"}}}, {}, "group_size 'x' of model.* is no number"),
        ({}, {"hadamard_matrix": torch.ones(2, 2)}, "hadamard_matrix: weights with this beside them cannot be read"),
        ({"group_size": 16}, {}, "scales has 2 groups, 64 inputs in groups of 16 have another number"),
    ],
    "mlx/affine4": [
        ({"bits": 3}, {}, "which is not 'affine' of 3 bits in groups of 64 as config.json says"),
        ({"mode": "nvfp4"}, {}, "scales is stored as float16, not as uint8"),
        ({Q: {"bits": 4, "group_size": 32}}, {}, "which is not 'affine' of 4 bits in groups of 32"),
    ],
    "quark/int4_per_group_order": [
        (
            {"global_quant_config": {"weight": {"dtype": "fp6_e2m3", "qscheme": "per_group"}}},
            {},
            "cannot be read; what",
        ),
        ({"export": {"pack_method": "x"}}, {}, "pack_method 'x' is none of order, reorder"),
        ({"global_quant_config": {}}, {}, "nothing in quantization_config is of model"),
        ({"layer_quant_config": {"re:(a+)+": {}}}, {}, "of layer_quant_config is too involved"),
        ({}, {"weight_scale": torch.ones(3, 32)}, "do not belong together in groups of 32"),
        ({}, {"weight_zero_point": torch.ones(2, 32, dtype=torch.int32)}, "do not belong together in groups of 32"),
    ],
    "modelopt/nvfp4_svd": [
        ({}, {"pre_quant_scale": torch.ones(3)}, "pre_quant_scale has the shape .3., its weight asks for .64."),
        (
            {},
            {"svdquant_lora_b": torch.ones(32, 3)},
            "svdquant_lora_b has the shape .32, 3., its weight asks for .32, 4.",
        ),
    ],
    "gemma/int4": [({"module_quant_configs": {"q_proj": {"num_bits": 8}}}, {}, "num_bits 8, not 2 or 4")],
    "hqq/int4_axis1": [
        ({}, {"meta_scale.scale": torch.ones(2)}, "scales that are quantized cannot be read"),
        ({}, {"scale": torch.ones(7, 1)}, "do not belong to a weight .32, 64. of 4 bits"),
    ],
    "aqlm/2x8": [({}, {"codebooks": torch.ones(3, 256, 1, 8).half()}, "do not fit together")],
    "vptq/packed": [
        ({"config_for_layers": {}}, {}, "config_for_layers says .* which cannot be read"),
        ({}, {"perm": torch.ones(3).short()}, "perm has the shape .3., its weight asks for .64."),
    ],
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    file, _, name = case.partition("/")
    settings, tensors = cases(Path(__file__).parent / "data" / f"{file}.safetensors")[name]
    for changed, parts, words in CHANGES[case]:
        directory = written(tmp_path, {**settings, **changed}, {**tensors, **parts}, torch.bfloat16)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(directory)
