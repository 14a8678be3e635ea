"""torchao's tensors, as transformers saves them, are decoded as they decode themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.importers import open_checkpoint
from helpers import foreign

SETTINGS = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2}}}
Q = "model.layers.1.self_attn.q_proj"


def configs() -> dict[str, Any]:
    """What to quantize with -> what the report says."""
    ao = foreign.tool("torchao.quantization")
    granularity = ao.granularity
    return {
        "torchao int8": ao.Int8WeightOnlyConfig(version=2),
        "torchao integers": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=granularity.PerGroup(32), mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "torchao float8": ao.Float8WeightOnlyConfig(),
    }


@pytest.mark.parametrize("words", ["torchao int8", "torchao integers", "torchao float8"])
def test_its_own_reader_gives_the_same(words: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    ao, config = foreign.tool("torchao.quantization"), configs()[words]
    support = foreign.tool("torchao.prototype.safetensors.safetensors_support")
    metadata: dict[str, str] = {}

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16))
        model[0].weight.data.copy_(weight)
        ao.quantize_(model, config)
        quantized = model[0].weight
        stored, facts = support.flatten_tensor_state_dict({f"{name}.weight": quantized.data})
        metadata.update({key: value for key, value in facts.items() if key != "tensor_names"})
        return {key.removeprefix(name): value for key, value in stored.items()}, quantized.dequantize().detach()

    both = foreign.written(pico_dir("llama"), tmp_path, SETTINGS, pack, metadata=metadata)
    foreign.check(both, tmp_path / "out", words)


def int8(metadata: dict[str, str], kind: str = "Int8Tensor", **more: Any) -> foreign.Pack:
    """By hand: no tool needed."""

    def pack(name: str, weight: Tensor) -> foreign.Packed:
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().to(torch.int8)
        facts = {
            "_type": kind,
            "_data": {"block_size": [1, weight.shape[1]], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}},
            "_tensor_data_names": ["qdata", "scale"],
            **more,
        }
        metadata[f"{name}.weight"] = json.dumps(facts)
        return {"._weight_qdata": codes, "._weight_scale": scales}, codes.bfloat16() * scales

    return pack


def test_by_hand(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    metadata: dict[str, str] = {"tensor_names": "[]"}
    both = foreign.written(pico_dir("llama"), tmp_path, SETTINGS, int8(metadata), metadata=metadata)
    foreign.check_tensors(both)
    assert open_checkpoint(both.quantized).base == "torchao int8"


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        (
            {"kind": "Int4TilePackedTo4dTensor"},
            "is a 'Int4TilePackedTo4dTensor', which cannot be read; what can be: Int8",
        ),
        ({"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}, "has 'act_pre_scale', which cannot be read"),
        ({"_tensor_data_names": ["qdata", "scale", "zero_point"]}, "_weight_zero_point is missing"),
        ({"_data": None}, "cannot be read"),
    ],
)
def test_what_cannot_be_read(more: dict[str, Any], pattern: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    metadata: dict[str, str] = {}
    both = foreign.written(pico_dir("llama"), tmp_path, SETTINGS, int8(metadata, **more), metadata=metadata)
    foreign.refused(both.quantized, pattern)


def test_files_without_metadata(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, SETTINGS, int8({}))
    foreign.refused(both.quantized, "say nothing of how the weights are stored")
