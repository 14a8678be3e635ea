"""What is left alone by default: gates of recurrences and routers, unless a rule of the recipe says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compress import recipe
from compress.model.skeleton import Skeleton
from compress.model.spared import spared_linears
from compress.run import plan
from compress.storage.checkpoint import open_checkpoint
from compress.types import Plan
from helpers.pico import of_type, save

HEADS: dict[str, Any] = {"head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 64}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
DELTA = {f"linear_{key}": 16 for key in ("key_head_dim", "value_head_dim", "num_value_heads")}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**HEADS, **MIXED, **EXPERTS, **DELTA, "linear_num_key_heads": 4, "num_experts": 16},
    "kimi_linear": {
        **{**MIXED, **LATENT, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4},
        **{"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 16},
    },
    "jamba": {
        **{**HEADS, "attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
        **{"num_experts": 1, "mamba_dt_rank": 16},
    },
    "afmoe": {**HEADS, "moe_intermediate_size": 32, "num_experts": 16, "num_dense_layers": 1, "num_shared_experts": 1},
}
SPARED = {
    "qwen3_next": {"linear_attn.in_proj_ba": Plan.GATE},  # the shared expert's rows are as many as there are experts
    "kimi_linear": {f"self_attn.{name}": Plan.GATE for name in ("b_proj", "forget_gate.f_a_proj")}
    | {"self_attn.forget_gate.f_b_proj": Plan.GATE},
    "jamba": {"mamba.x_proj": Plan.GATE, "mamba.dt_proj": Plan.GATE},
    "afmoe": {"mlp.router.gate": Plan.ROUTER},
}


def made(name: str, folder: Path, settings: Sequence[str] = (), base: str = "int4-round") -> tuple[Plan, Skeleton]:
    directory = folder / name
    if not directory.exists():
        save(of_type(name, MODELS[name]), directory)
    skeleton = Skeleton(open_checkpoint(directory))
    return plan.make(recipe.load(base, list(settings)), skeleton), skeleton


def ends(names: Any) -> set[str]:
    return {".".join(name.split(".")[3:]) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spared")


@pytest.mark.parametrize("name", MODELS)
def test_gates_and_routers_are_left_alone(name: str, folder: Path) -> None:
    planned, skeleton = made(name, folder)
    found = spared_linears(skeleton)
    assert {".".join(path.split(".")[3:]): reason for path, reason in found.items()} == SPARED[name]
    assert planned.spared_names and ends(planned.spared_names) <= SPARED[name].keys()
    assert not {layer.spec.name for layer in planned.layers} & {*planned.spared_names}
    assert any("or choose experts stay as they are: " in line for line in planned.messages)
    others = {n for n, reason in planned.kept_reasons.items() if n in found} - {*planned.spared_names}
    assert all("narrower" in planned.kept_reasons[n] or "weight" in planned.kept_reasons[n] for n in others)


@pytest.mark.parametrize("name", MODELS)
def test_a_rule_wins(name: str, folder: Path) -> None:
    spared = made(name, folder)[0].spared_names
    rule = f"rules=[{{match: [{', '.join(spared)}], bits: 3}}]"
    planned, _ = made(name, folder, [rule])
    assert not planned.spared_names and {layer.spec.name for layer in planned.layers} >= {*spared}


def test_at_8_bits_gates_are_as_the_recipe_says(folder: Path) -> None:
    planned, _ = made("jamba", folder, base="int8")
    assert not planned.spared_names and "mamba.x_proj" in ends(layer.spec.name for layer in planned.layers)
    assert ends(made("afmoe", folder, base="int8")[0].spared_names) == {"mlp.router.gate"}
