"""A configuration that speaks of another size of model is refused from the headers alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CheckpointError, CompressError
from compress.model.skeleton import Skeleton
from compress.storage import json_text
from compress.storage.checkpoint import CONFIG, open_checkpoint

SIZES = ("hidden_size", "vocab_size", "intermediate_size", "head_dim", "max_position_embeddings")
COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@pytest.fixture
def model(pico_dir: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pico_dir("llama"), tmp_path / "model"))


def changed(model: Path, key: str, value: Any) -> Path:
    config = json.loads((model / CONFIG).read_text())
    (model / CONFIG).write_text(json.dumps({**config, key: value}))
    return model


@pytest.mark.parametrize("key", [*SIZES, *COUNTS, "num_experts", "n_layer", "encoder_layers"])
@pytest.mark.parametrize("value", [1 << 40, 10**30, 1e30, float("inf"), float("nan")])
def test_sizes_that_nothing_bears_out(key: str, value: float, model: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(changed(model, key, value))
    line = str(caught.value)
    assert line.startswith(f"{model / CONFIG} says '{key}' ") and line.endswith(
        "are of two models, download both again"
    )
    assert "tensors are stored, the largest of 16,896 numbers" in line


@pytest.mark.parametrize(
    "value", [[10**9], [{"a": {"num_layers": 10**9}}], {"text_config": {"num_hidden_layers": 10**9}}]
)
def test_sizes_in_inner_tables(value: Any, model: Path) -> None:
    with pytest.raises(CheckpointError, match="layers' 1000000000, but "):
        open_checkpoint(changed(model, "extra_layers", value))


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**9), ("num_experts", 10**6)])
def test_counts_are_answered_at_once(key: str, value: int, model: Path) -> None:
    started = time.process_time()
    with pytest.raises(CheckpointError, match=f"says '{key}' {value}, but "):
        open_checkpoint(changed(model, key, value))
    assert time.process_time() - started < 1


def test_what_is_no_size_may_be_large(model: Path) -> None:
    changed(model, "rope_theta", 1e12)
    changed(model, "some_token_id", 1 << 40)
    assert len(open_checkpoint(changed(model, "max_position_embeddings", 1 << 20)).tensors) == 21


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size"])
@pytest.mark.parametrize("value", [-1, 0, 1.5, "x", [], None, True, {}])
def test_sizes_that_are_none(key: str, value: Any, model: Path) -> None:
    """Where transformers takes it for another size, the stored shapes tell; null may be a default."""
    try:
        skeleton = Skeleton(open_checkpoint(changed(model, key, value)))
        skeleton.check_tensors()
        skeleton.linears()
    except CompressError as error:
        assert len(str(error)) < 600
    else:
        assert (key, value) == ("head_dim", None)


def test_how_weights_are_packed_is_no_size_of_the_model() -> None:
    packing = {"default": {"params": {"scale_block": 1 << 30}}}
    json_text.check_sizes({"hidden_size": 8, "quantization_config": packing}, CONFIG, 3, 64)
    with pytest.raises(CheckpointError, match="scale_block"):
        json_text.check_sizes({"hidden_size": 8, "other": packing}, CONFIG, 3, 64)
