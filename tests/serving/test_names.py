"""Names of an engine's layers and of the checkpoint's modules find each other."""

from __future__ import annotations

import re

from compress.serving import config

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
BLOCK = "model.layers.3"


def test_linears_of_a_fused_layer() -> None:
    listed = {f"{BLOCK}.self_attn.k_proj", f"{BLOCK}.mlp.down_proj"}
    fused = [f"{BLOCK}.self_attn.{letter}_proj" for letter in "qkv"]
    assert config.names_of_linears(f"{BLOCK}.self_attn.qkv_proj", listed, FUSED) == fused
    assert config.names_of_linears(f"{BLOCK}.mlp.down_proj", listed, FUSED) == [f"{BLOCK}.mlp.down_proj"]
    assert config.names_of_linears("qkv_proj", set(), FUSED) == FUSED["qkv_proj"]
    stored_fused = {f"{BLOCK}.self_attn.qkv_proj"}
    assert config.names_of_linears(f"{BLOCK}.self_attn.qkv_proj", stored_fused, FUSED) == [*stored_fused]


def test_experts_are_found_where_transformers_has_them() -> None:
    listed = {f"{BLOCK}.mlp.experts.{i}.{name}" for i in range(2) for name in ("gate_proj", "up_proj", "down_proj")}
    module = f"{BLOCK}.mlp.experts"
    for prefix in (module, f"{module}.routed_experts", f"{BLOCK}.block_sparse_moe.experts"):
        assert config.module_of_experts(prefix, listed) == module
    assert config.module_of_experts("model.layers.30.mlp.experts", listed) is None


def test_tensors_of_experts_are_renamed_for_the_loader() -> None:
    module, prefix = f"{BLOCK}.mlp.experts", f"{BLOCK}.block_sparse_moe.experts"
    renamed = config.expert_name_patterns(module, prefix, ("w1", "w3", "w2"))

    def mapped(name: str) -> str:
        for old, new in renamed.items():
            name = re.sub(old, new, name)
        return name

    assert mapped(f"{module}.11.up_proj.words4") == f"{prefix}.11.w3.words4"
    assert mapped(f"{module}.0.down_proj.scales") == f"{prefix}.0.w2.scales"
    other = f"model.layers.31.{module.removeprefix('model.layers.3.')}.0.up_proj.words4"
    assert mapped(other) == other
    assert config.expert_name_patterns(module, module, ("gate_proj", "up_proj", "down_proj")) == {}


def test_tables_lie_outside_of_the_blocks() -> None:
    listed = ["model.embed_tokens", f"{BLOCK}.mlp.up_proj", "lm_head"]
    assert config.names_of_tables(listed) == ["model.embed_tokens", "lm_head"]
