"""Fused experts in mxfp4 are decoded as transformers does, and turned as the model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers import foreign, pico

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
CONFIG: dict[str, Any] = {
    **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
}
EXPERTS = "model.layers.0.mlp.experts"


def pack(name: str, weight: Tensor) -> foreign.Packed | None:
    """Any codes, and exponents down to the smallest."""
    if weight.dim() != 3:
        return None
    experts, inner, out = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(0, 256, (experts, out, inner // 32, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(116, 122, blocks.shape[:-1], generator=generator).to(torch.uint8)
    scales[0, 0, 0], scales[-1, -1, -1] = 0, 130
    return {"_blocks": blocks, "_scales": scales}, convert_moe_packed_tensors(blocks, scales)


@pytest.fixture
def both(tmp_path: Path) -> foreign.Both:
    return foreign.written(pico.save(pico.of_type("gpt_oss", CONFIG), tmp_path / "model"), tmp_path, SETTINGS, pack)


def test_transformers_gives_the_same(both: foreign.Both) -> None:
    foreign.check_tensors(both)
    foreign.check_model(both)


DAMAGE: dict[str, dict[str, Tensor | None]] = {
    "gate_up_proj_scales is missing": {f"{EXPERTS}.gate_up_proj_scales": None},
    "down_proj_scales has the shape .4, 2, 3., its weight asks for .4, 64, 3.": {
        f"{EXPERTS}.down_proj_scales": torch.zeros(4, 2, 3, dtype=torch.uint8)
    },
    "down_proj_blocks has the shape .* not .experts, out, groups, 16.": {
        f"{EXPERTS}.down_proj_blocks": torch.zeros(4, 64, 3, 8, dtype=torch.uint8)
    },
    "down_proj_scales is stored as int8, not as uint8": {
        f"{EXPERTS}.down_proj_scales": torch.zeros(4, 64, 3, dtype=torch.int8)
    },
}


@pytest.mark.parametrize("pattern", DAMAGE)
def test_damage_is_named(pattern: str, both: foreign.Both) -> None:
    foreign.restore(both.quantized, DAMAGE[pattern])
    foreign.refused(both.quantized, pattern)
