"""Which linears are stored alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.allocate import table
from compress.model.skeleton import Skeleton
from compress.recipe.schema import Units
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import save_pico


def found(family: str, how: Units, tmp_path: Path) -> list[str]:
    skeleton = Skeleton(open_checkpoint(save_pico(family, tmp_path / family)))
    specs, _ = skeleton.linears()
    groups = table.group_linears(skeleton, specs, how)
    assert sorted(member.name for group in groups for member in group.members) == sorted(spec.name for spec in specs)
    return [group.name.replace("model.layers.", "") for group in groups if group.members[0].block == 0]


def test_fused_linears_of_one_module_read_the_same_input(tmp_path: Path) -> None:
    assert found("llama", "fused", tmp_path) == [
        "0.self_attn.{q_proj,k_proj,v_proj}",
        "0.self_attn.o_proj",
        "0.mlp.{gate_proj,up_proj}",
        "0.mlp.down_proj",
    ]


def test_parts_of_a_parallel_block_are_not_one_unit(tmp_path: Path) -> None:
    names = found("gpt_neox", "fused", tmp_path)
    assert len(names) == 4 and not any("attention" in name and "mlp" in name for name in names)


def test_all_experts_of_a_module_are_one_unit(tmp_path: Path) -> None:
    assert "0.mlp.experts" in found("mixtral", "fused", tmp_path)


def test_each_expert_by_itself(tmp_path: Path) -> None:
    names = found("mixtral", "expert", tmp_path)
    assert {"0.mlp.experts.0.{gate_proj,up_proj,down_proj}", "0.self_attn.{q_proj,k_proj,v_proj}"} <= set(names)


@pytest.mark.parametrize("how", ["linear", "block"])
def test_each_linear_or_a_whole_block(how: Units, tmp_path: Path) -> None:
    assert len(found("llama", how, tmp_path)) == {"linear": 7, "block": 1}[how]
