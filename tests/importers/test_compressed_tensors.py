"""compressed-tensors' formats are decoded as its own decompressor does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.importers import open_checkpoint
from helpers import foreign
from helpers.runs import stored_tensors

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {  # name -> format, settings of weights, what the report says
    "int4": ("pack-quantized", INT4, "int4 in groups of 32"),
    "int4, zeros": ("pack-quantized", {**INT4, "symmetric": False}, "int4 in groups of 32"),
    "int8": ("pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}, "int8 by rows"),
    "int3, zeros": ("pack-quantized", {**INT4, "num_bits": 3, "symmetric": False}, "int3 in groups of 32"),
    "w8a8": ("int-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}, "int8 by rows"),
    "w8a8, zeros": (
        "int-quantized",
        {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": False},
        "int8 by rows",
    ),
    "fp8": ("float-quantized", FP8, "fp8 by rows"),
    "fp8, one scale": ("naive-quantized", {**FP8, "strategy": "tensor"}, "fp8 with one scale"),
    "fp8, blocks": (
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [48, 40]},
        "fp8 in blocks of 48 x 40",
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "fp4 in groups of 16",
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        "fp4 in groups of 32",
    ),
    "mxfp8": ("mxfp8-quantized", {**FP8, "strategy": "group", "group_size": 32}, "fp8 in groups of 32"),
}
Q = "model.layers.1.self_attn.q_proj"


def settings(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        **{"ignore": ["lm_head"], "config_groups": {"group_0": group}, **more},
    }


def parameters(weight: Tensor, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Scales and zero points in bfloat16, of the shapes that the strategy asks for."""
    rows, columns = weight.shape
    down, across = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(arguments.get("block_structure") or ()),
    }.get(arguments["strategy"], (1, arguments.get("group_size")))
    padded = torch.nn.functional.pad(weight, (0, -columns % across, 0, -rows % down))
    blocks = padded.unflatten(1, (-1, across)).unflatten(0, (-1, down)).transpose(1, 2)  # [., ., down, across]
    high, bits = blocks.abs().amax((2, 3)), arguments["num_bits"]
    most = (448 if bits == 8 else 6) if arguments["type"] == "float" else 2 ** (bits - 1) - 1
    scales = (high / most).bfloat16()
    found = {"weight_scale": scales.reshape(1) if arguments["strategy"] == "tensor" else scales}
    if arguments["strategy"] == "tensor_group":
        found["weight_global_scale"] = (448 * 6 / high.max()).reshape(1)
        found["weight_scale"] = (scales.float() * found["weight_global_scale"]).to(torch.float8_e4m3fn).bfloat16()
    if not arguments.get("symmetric", True):
        found["weight_zero_point"] = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), scales.shape).to(torch.int8)
    return found


def packer(form: str, arguments: dict[str, Any]) -> foreign.Pack:
    """Its own compressor, read again by its own decompressor."""
    base = foreign.tool("compressed_tensors.compressors.base")
    tool = foreign.tool("compressed_tensors.quantization")
    compressor = base.BaseCompressor.get_value_from_registry(form)
    scheme = tool.QuantizationScheme(targets=["Linear"], weights=tool.QuantizationArgs(**arguments))

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        state = {"weight": weight.bfloat16(), **parameters(weight, arguments)}
        packed = compressor.compress(state, scheme)
        decoded = compressor.decompress(dict(packed), scheme)["weight"]
        return {f".{key}": value for key, value in packed.items()}, decoded

    return pack


@pytest.mark.parametrize("case", CASES)
def test_its_own_reader_gives_the_same(case: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    form, arguments, words = CASES[case]
    both = foreign.written(pico_dir("llama"), tmp_path, settings(form, arguments), packer(form, arguments))
    foreign.check_tensors(both)
    assert open_checkpoint(both.quantized).base == f"compressed-tensors {words}"


def packed(name: str, weight: Tensor, order: bool = False) -> foreign.Packed:
    """int4 in groups of 32, by hand: no tool needed. order: groups of scattered inputs, as act-order made them."""
    inner = weight.shape[1]
    index = torch.arange(inner) // 32
    if order:
        index = index[torch.randperm(inner, generator=torch.Generator().manual_seed(0))]
    scales = torch.stack([weight[:, index == g].abs().amax(1) for g in range(inner // 32)], 1).div(7).bfloat16()
    codes = (weight / scales.float()[:, index]).round().clamp(-8, 7).long()
    stored = {
        ".weight_packed": foreign.stream(codes + 8, 4),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
        ".weight_g_idx": (index if order else torch.full((inner,), -1)).int(),
    }
    return stored, codes.bfloat16() * scales[:, index]


@pytest.mark.parametrize("order", [False, True])
def test_act_order(order: bool, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    arguments = {**INT4, "actorder": "group" if order else None}
    written = settings("pack-quantized", arguments)
    both = foreign.written(pico_dir("mixtral"), tmp_path, written, lambda name, weight: packed(name, weight, order))
    words = "compressed-tensors int4 in groups of 32" + (", act-order" if order else "")
    foreign.check(both, tmp_path / "out", words)


def test_several_groups(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    """A pattern and a name go before a class; static scales of inputs and caches are left out."""
    eight = {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}
    written = settings("mixed-precision", INT4)
    written["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$", Q], "weights": eight}

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        if not name.endswith("down_proj") and name != Q:
            return packed(name, weight)
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().clamp(-128, 127).long()
        stored = {
            ".weight_packed": foreign.stream(codes + 128, 8),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
            ".input_scale": torch.ones(1),
        }
        return stored, codes.bfloat16() * scales

    both = foreign.written(pico_dir("llama"), tmp_path, written, pack)
    foreign.restore(both.quantized, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    foreign.check_tensors(both)
    assert open_checkpoint(both.quantized).base == "compressed-tensors int4 in groups of 32 and int8 by rows"


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"format": "marlin-24"}, "format 'marlin-24' cannot be read; what can be: pack-quantized, int-"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparse weights .'sparse-bitmask'. cannot be read"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "weights in a rotated basis cannot be read"),
        ({"format": ["pack-quantized"]}, "format .'pack-quantized'. cannot be read"),
        ({"config_groups": None}, "has no config_groups that can be read"),
        ({"config_groups": {"g": []}}, "config_groups has .., which cannot be read"),
        ({"config_groups": {"g": {"targets": 4, "weights": INT4}}}, "targets 4 of config_groups is no list"),
        (
            {"config_groups": {name: {"targets": ["re:*"], "weights": INT4} for name in "xy"}},
            "'re:.' of config_groups is no regular expression",
        ),
        (
            {"config_groups": {name: {"targets": ["re:(.*a)*$"], "weights": INT4} for name in "xy"}},
            "of config_groups is too involved; name the modules",
        ),
        (
            {"config_groups": {name: {"targets": [f"re:{name}"], "weights": INT4} for name in "xy"}},
            "no group of quantization_config is that of model.layers.0.mlp.down_proj",
        ),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {**INT4, "num_bits": 9}}}}, "num_bits 9 of model"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {**INT4, "group_size": 0}}}},
            "strategy 'group' of .*, with .1, 0., cannot be read",
        ),
    ],
)
def test_options_that_cannot_be_read(
    changes: dict[str, Any], pattern: str, pico_dir: foreign.Pico, tmp_path: Path
) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, {**settings("pack-quantized", INT4), **changes}, packed)
    foreign.refused(both.quantized, pattern)


def asymmetric(groups: int) -> foreign.Pack:
    """int4 in groups of 32, with zero points of so many groups."""

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        stored, decoded = packed(name, weight)
        points = foreign.stream(torch.full((groups, weight.shape[0]), 8), 4).t().contiguous()
        return {**stored, ".weight_zero_point": points}, decoded

    return pack


def test_zero_points_are_those_of_the_scales(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    written = settings("pack-quantized", {**INT4, "symmetric": False})
    fitting = foreign.written(
        pico_dir("llama"), tmp_path / "2", written, lambda name, w: asymmetric(w.shape[1] // 32)(name, w)
    )
    foreign.check_tensors(fitting)
    for groups in (1, 3, 4, 7):
        both = foreign.written(pico_dir("llama"), tmp_path / f"{groups} groups", written, asymmetric(groups))
        foreign.refused(both.quantized, r"weight_zero_point has the shape .*, not that of .* zero points of 4 bits")


def test_numbers_of_another_type_than_is_stored(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings("pack-quantized", {**INT4, "type": "float"}), packed)
    foreign.refused(both.quantized, "weight_packed is stored as int32, and config.json says .* of type 'float'")


DAMAGE: dict[str, dict[str, Tensor | None]] = {
    "q_proj.weight_scale is missing": {f"{Q}.weight_scale": None},
    "q_proj.weight_shape is missing": {f"{Q}.weight_shape": None},
    "weight_shape says .64, 80., but .* has the shape .64, 8. for 4 bits": {
        f"{Q}.weight_shape": torch.tensor([64, 80])
    },
    "weight_scale has the shape .64, 3., but .* in blocks of 1 x 32 needs .64, 2.": {
        f"{Q}.weight_scale": torch.ones(64, 3)
    },
    "weight_g_idx speaks of group 2, there are 2": {f"{Q}.weight_g_idx": torch.arange(64).int() // 24},
}


@pytest.mark.parametrize("pattern", DAMAGE)
def test_damage_is_named(pattern: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings("pack-quantized", INT4), packed)
    foreign.restore(both.quantized, DAMAGE[pattern])
    foreign.refused(both.quantized, pattern)


def sparse(scale: bool) -> foreign.Pack:
    """2:4 sparse weights as version 0.12 of the package stores them: bits of a mask, and what it leaves, in order."""

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        kept = weight.abs().view(len(weight), -1, 4).argsort(-1).argsort(-1).ge(2).view(weight.shape)
        factors = weight.abs().amax(1, keepdim=True) / 448 if scale else torch.ones(len(weight), 1)
        values = (weight / factors).to(torch.float8_e4m3fn if scale else torch.bfloat16)
        bits = np.packbits(kept.numpy(), axis=-1, bitorder="little")
        stored = {
            ".compressed": values.float()[kept].view(len(weight), -1).to(values.dtype),
            ".bitmask": torch.from_numpy(bits),
            ".shape": torch.tensor(weight.shape)[:, None],
            **({".weight_scale": factors} if scale else {}),
        }
        return stored, (torch.where(kept, values.float(), 0.0) * factors).bfloat16()

    return pack


@pytest.mark.parametrize("scale", [False, True])
def test_sparse(scale: bool, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    sparsity = {"format": "sparse-24-bitmask", "global_sparsity": 0.5, "sparsity_structure": "2:4", "ignore": []}
    groups = {"group_0": {"targets": ["Linear"], "weights": FP8}} if scale else {}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized" if scale else "dense"}
    given = {**settings, "config_groups": groups, "sparsity_config": sparsity}
    both = foreign.written(pico_dir("llama"), tmp_path, given, sparse(scale))
    foreign.check_tensors(both)
    base = open_checkpoint(both.quantized).base
    assert base == "compressed-tensors " + ("fp8 by rows and " if scale else "") + "2:4 sparse"
    stored = stored_tensors(both.quantized)
    name = "model.layers.1.mlp.up_proj.bitmask"
    foreign.restore(both.quantized, {name: stored[name] ^ 1})
    foreign.refused(both.quantized, "half of the bits")
