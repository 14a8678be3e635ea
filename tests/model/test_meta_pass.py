"""What a forward pass without data finds, and that it runs once for one configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.model import meta_pass
from compress.model.load import open_config

BLOCK = "model.layers.0."


def test_what_feeds_what(pico_dir: Callable[..., Path]) -> None:
    found = meta_pass.flow(open_config(pico_dir("llama")), torch.float32)
    first = {"self_attn.q_proj": ("q", "k", "v"), "mlp.gate_proj": ("gate", "up"), "mlp.down_proj": ("down",)}
    for same, names in first.items():
        for name in names:
            part = "self_attn" if same.startswith("self_attn") else "mlp"
            assert found.shared[f"{BLOCK}{part}.{name}_proj"] == BLOCK + same
    assert {"", "lm_head", f"{BLOCK}mlp.act_fn"} <= found.called and "model.layers.9" not in found.called


def test_equal_configurations_share_a_pass(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of checkpoints in other places; one that differs in a value has a pass of its own."""
    passes, run = list[Any](), meta_pass.run_without_data
    monkeypatch.setattr(meta_pass, "run_without_data", lambda model: passes.append(model) or run(model))
    config = open_config(pico_dir("llama"))
    config.max_position_embeddings = 77  # of no other test
    elsewhere, deeper = copy.deepcopy(config), copy.deepcopy(config)
    elsewhere.name_or_path = "elsewhere"
    deeper.num_hidden_layers = 10
    found = [meta_pass.flow(each, torch.float32) for each in (config, elsewhere, deeper)]
    assert len(passes) == 2 and found[0] == found[1] and "model.layers.9" in found[2].called
    names = [f"{BLOCK}mlp.up_proj"]
    assert meta_pass.read_weights(config, torch.float32, names) == set()
    meta_pass.read_weights(elsewhere, torch.float32, names)
    meta_pass.read_weights(elsewhere, torch.float32, [*names, f"{BLOCK}mlp.down_proj"])
    assert len(passes) == 4
