"""Every recipe that stores nothing but keys and values writes a checkpoint that loads and generates through its cache.

A new recipe enters by itself; trainings are cut short.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import api, recipe
from compress.kv.layer import KVCache
from compress.model import load
from compress.recipe import sources
from compress.run import kv_cache
from compress.run.job import Job
from helpers.pico import save_pico
from helpers.runs import TEXT

CALIBRATION = ("calibration.num_samples=4", "calibration.seq_len=64")


def short(name: str) -> list[str]:
    """Return settings with which a recipe trains for a step or two, where it trains."""
    data = sources.data(name)
    steps = ["kv_cache.steps=2"] if "steps" in data["kv_cache"] else []
    return steps + [f"transform.{i}.heal=1" for i, step in enumerate(data.get("transform", [])) if "heal" in step]


LOADED = {name: recipe.load(name) for name in recipe.names()}
CACHES = [name for name, r in LOADED.items() if r.kv_cache is not None and r.quantize.method == "keep"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("models") / "model", changes={"max_position_embeddings": 1024})


@pytest.mark.parametrize("name", CACHES)
def test_its_bytes_are_known_before_it_is_calibrated(name: str, model: Path) -> None:
    settings = LOADED[name].kv_cache
    assert settings is not None
    size = kv_cache.bytes_at_context(load.load_config(model), settings, {}, torch.bfloat16, 1000)
    assert 0 < size.bytes_per_token - size.static / 1000 < size.exact_bytes_per_token


@pytest.mark.parametrize("name", CACHES)
def test_a_recipe_is_calibrated_and_its_cache_used(name: str, model: Path, tmp_path: Path) -> None:
    chosen = recipe.load(name, [*CALIBRATION, *short(name)])
    api.quantize(Job(str(model), chosen, tmp_path / "out", calib=str(TEXT), pack=chosen.packs))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(440)[None] % 250
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    made = loaded.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert made.sequences.shape == (1, 444)
    cache = made.past_key_values
    assert isinstance(cache, KVCache) and cache.nbytes().codes > 0
