"""A checkpoint whose tensors have the right shapes and impossible values: refused wherever they are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress.allocate.variants import Database
from compress.errors import CheckpointError
from compress.formats import codebook
from compress.model.skeleton import Skeleton
from compress.run import report, shards
from compress.runtime.hf import CompressQuantizer, build_config
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint, write_shard
from compress.types import LayerReport, PackedWeight
from helpers import stored
from helpers.pico import PICO

NAME = "model.layers.1.self_attn.q_proj"
LINE = f"{NAME}.order holds 7 twice; download or write the checkpoint again"
IDS = torch.arange(12)[None]


def weight() -> PackedWeight:
    return stored.random_weight("codebook", codebook.Params((4,), 2, 16, permuted=True, outliers=2), (64, 64))


def damaged() -> dict[str, Tensor]:
    tensors = dict(weight().tensors)
    tensors["order"] = tensors["order"].where(tensors["order"] != 3, 7)
    return tensors


def model() -> PreTrainedModel:
    made = PICO["llama"]()
    assert isinstance(made.get_submodule(NAME), nn.Linear)
    made.set_submodule(NAME, PackedLinear.from_packed(weight()))
    config = build_config({NAME: weight().stored})
    made.hf_quantizer, made.config.quantization_config = CompressQuantizer(config), config
    return made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint whose order has column 7 twice, and column 3 never."""
    made = tmp_path / "model"
    model().save_pretrained(made)
    tensors = load_file(made / "model.safetensors")
    changed = {f"{NAME}.{key}": tensor for key, tensor in damaged().items()}
    save_file({**tensors, **changed}, made / "model.safetensors", metadata={"format": "pt"})
    return made


def refusal(read: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read()
    return str(caught.value)


def test_loading_through_transformers(directory: Path) -> None:
    assert refusal(lambda: AutoModelForCausalLM.from_pretrained(directory)) == LINE


def test_what_is_offloaded_is_checked_when_it_is_first_used(directory: Path, tmp_path: Path) -> None:
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"], "cpu")
    places |= {"model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(directory, device_map=places, offload_folder=tmp_path / "off")
    for _ in range(2):
        assert refusal(lambda: loaded(IDS)) == LINE


def test_loading_block_by_block(directory: Path) -> None:
    skeleton = Skeleton(open_checkpoint(directory))
    skeleton.load_block(0, torch.device("cpu"))
    assert refusal(lambda: skeleton.load_block(1, torch.device("cpu"))) == LINE


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict(assign: bool) -> None:
    made, good = model(), weight().tensors
    state = {**made.state_dict(), f"{NAME}.order": damaged()["order"]}
    assert refusal(lambda: made.load_state_dict(state, assign=assign)) == LINE
    assert refusal(lambda: made.load_state_dict({f"{NAME}.order": damaged()["order"]}, strict=False)) == LINE
    made.load_state_dict({**state, f"{NAME}.order": good["order"]}, assign=assign)
    with pytest.raises(RuntimeError, match="size mismatch for order"):  # torch's own errors come first
        PackedLinear.from_packed(weight()).load_state_dict({"order": good["order"][1:]}, strict=False)


def test_a_finished_block(tmp_path: Path) -> None:
    write_shard(tmp_path / "block", {f"{NAME}.{key}": tensor for key, tensor in damaged().items()})
    row = LayerReport(NAME, (64, 64), "vptq", weight().stored, 4.0, 1, 0.0, None, 0, 0.0)
    record = {"file": "block", "layers": [report.to_dict(row)]}
    output, skeleton = SimpleNamespace(model=tmp_path), SimpleNamespace()
    assert refusal(lambda: shards.restore_block(output, skeleton, 1, torch.device("cpu"), record)) == LINE  # type: ignore[arg-type]


def test_the_weights_behind_a_measured_option(tmp_path: Path) -> None:
    database, block = Database(tmp_path / "measured"), nn.Linear(4, 3)
    with database.hold({}, {}):
        database.add_state(0, {"weight": torch.ones(3, 4)})
        database.restore_state(0, block)
        assert torch.equal(block.weight, torch.ones(3, 4))
        for state in ({"weight": torch.ones(4, 3)}, {"other": torch.ones(3, 4)}):
            database.add_state(0, state)
            line = refusal(lambda: database.restore_state(0, block))
            assert f"the block has no {next(iter(state))} of shape " in line and line.endswith("; measure again")


def test_a_measured_option(tmp_path: Path) -> None:
    database = Database(tmp_path / "measured")
    with database.hold({}, {}):
        database.add(0, {f"{NAME}@0": weight()}, {})
    original = torch.zeros(1)
    assert database.weight(0, NAME, 0, original).shape == (64, 64)
    path = database.records / "00000.safetensors"
    write_shard(path, {f"{NAME}@0.{key}": tensor for key, tensor in damaged().items()})
    line = refusal(lambda: Database(tmp_path / "measured").weight(0, NAME, 0, original))
    assert line.endswith(LINE.replace(NAME, f"{NAME}@0"))
