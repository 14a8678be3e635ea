"""Models at a level of their weights: what is read, computed and saved is that of the level, and no more."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils

from compress.errors import CheckpointError
from compress.formats import e8p
from compress.model.skeleton import Skeleton
from compress.run.source import resolve
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.levels import at_level
from compress.runtime.linear import PackedLinear, PackedModule
from compress.storage.checkpoint import open_checkpoint
from helpers.nested_models import nested_model, pack_model, rounded_in_parts
from helpers.pico import PICO, round_to_nearest
from helpers.stored import random_weight

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def load(directory: Path, **options: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, bits, tables in (("llama", (2, 2, 4), False), ("llama_tied", (4, 4), True), ("mixtral", (4, 4), False)):
        made[name] = tmp_path_factory.mktemp(name)
        nested_model(name, bits, tables).save_pretrained(made[name])
    made["original"] = tmp_path_factory.mktemp("original")
    nested_model("llama_tied", (4,), True, torch.float32).save_pretrained(made["original"])
    return made


class Recorder:
    """Stands in for `safe_open` of transformers: which tensors are read, and their bytes."""

    read: dict[str, int]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = safe_open(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> Any:
        return Slice(self._file.get_slice(name), name)


class Slice:
    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, item: Any) -> Tensor:
        tensor: Tensor = self._inner[item]
        Recorder.read[self._name] = tensor.nbytes
        return tensor


@pytest.mark.parametrize(
    ("name", "level", "format"),
    [
        ("llama", 2, "int"),
        ("llama", 4, "nested"),
        ("llama_tied", 4, "int"),
        ("mixtral", 4, "int"),
        ("original", 4, "int"),
        ("original", 32, "dense"),
    ],
)
def test_only_the_bytes_of_the_level_are_read(
    name: str, level: int, format: str, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_utils, "safe_open", Recorder)
    Recorder.read = {}
    model = load(saved[name], level=level)
    packed = {key: each for key, each in model.named_modules() if isinstance(each, PackedModule)}
    assert packed and {each.format for each in packed.values()} == {format}
    suffixes = ("_2", "_3")[1 if format == "nested" else 0 :]
    assert Recorder.read and not any(key.endswith(suffixes) for key in Recorder.read)
    assert not any(key.endswith(suffixes) for key in model.state_dict())
    level_nbytes = sum(Recorder.read.values())
    assert level_nbytes == model.get_memory_footprint() - sum(b.nbytes for b in model.buffers())

    Recorder.read = {}
    whole = load(saved[name])
    assert sum(Recorder.read.values()) > level_nbytes
    assert model.levels == whole.levels[: whole.levels.index(level) + 1] or model.levels == ()
    whole.set_level(level)
    assert torch.equal(logits(model), logits(whole))
    whole.set_level(None)
    assert torch.equal(logits(model), logits(whole)) == (format == "dense")


def test_a_level_of_integers_is_a_plain_checkpoint_of_them(saved: dict[str, Path], tmp_path: Path) -> None:
    """A model that was loaded at a level is saved as that level; it knows nothing of the others."""
    model = load(saved["llama"], level=2)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["default"]["format"] == "int" and "level" not in config and "left_out" not in config
    again = load(tmp_path)
    assert again.levels == () and torch.equal(logits(again), logits(model))
    with pytest.raises(CheckpointError, match="no levels"):
        load(tmp_path, level=2)


def test_a_model_at_a_level_is_saved_whole(saved: dict[str, Path], tmp_path: Path) -> None:
    model = load(saved["llama"])
    expected = logits(model)
    model.set_level(2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), expected)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "original"])
def test_levels_change_back_and_forth(name: str, saved: dict[str, Path]) -> None:
    model = load(saved[name])
    by_level = {level: logits(load(saved[name], level=level)) for level in model.levels}
    whole = logits(model)
    assert torch.equal(by_level[model.levels[-1]], whole)
    for _ in range(2):
        for level, expected in by_level.items():
            with at_level(model, level):
                assert torch.equal(logits(model), expected)
            assert model.level is None
    assert torch.equal(logits(model), whole)
    other = copy.deepcopy(model)
    other.set_level(model.levels[0])
    assert model.level is None and torch.equal(logits(model), whole)
    assert torch.equal(logits(other), by_level[model.levels[0]])


def test_levels_reach_wrapped_modules_and_copies_alone(saved: dict[str, Path]) -> None:
    model = load(next(iter(saved.values())))
    copied, level = copy.deepcopy(model), model.levels[0]
    copied.set_level(level)
    name, wrapped = next((n, m) for n, m in model.named_modules() if isinstance(m, PackedLinear) and m.known_levels)
    assert wrapped.level is None and copied.get_submodule(name).level == level
    model.set_submodule(name, torch.nn.Sequential(wrapped))
    with at_level(model, level):
        assert wrapped.level == level
    assert wrapped.level is None and copied.get_submodule(name).level == level


def test_a_level_is_what_is_decoded(saved: dict[str, Path]) -> None:
    model = load(saved["llama_tied"])
    packed = next(each for each in model.modules() if isinstance(each, PackedLinear))
    embedding = next(each for each in model.modules() if isinstance(each, PackedEmbedding))
    whole, table = packed.dequantize(torch.float32), embedding.dequantize(torch.float32)
    model.set_level(4)
    x = torch.eye(packed.in_features)
    assert not torch.equal(packed.dequantize(torch.float32), whole)
    torch.testing.assert_close(packed(x).T, packed.dequantize(torch.float32), rtol=0, atol=1e-3)
    assert torch.equal(embedding(torch.arange(7)), embedding.dequantize(torch.float32)[:7])
    assert not torch.equal(embedding.dequantize(torch.float32), table)
    expected = logits(model)
    torch.testing.assert_close(logits(model.dequantize()), expected, rtol=0, atol=1e-4)
    assert model.levels == ()


def test_an_original_computes_what_the_model_did(saved: dict[str, Path], tmp_path: Path) -> None:
    """Weights are equal to the bit, at the last level and whole; products are those of the kernel of plain weights."""
    before = PICO["llama_tied"]().eval()
    for model in (load(saved["original"]), load(saved["original"], level=32)):
        assert torch.equal(model.get_input_embeddings().dequantize(torch.float32), before.get_input_embeddings().weight)
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear) and name != "lm_head":
                assert torch.equal(module.dequantize(torch.float32), before.get_submodule(name).weight)
        torch.testing.assert_close(logits(model), logits(before), rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model)) and load(tmp_path).levels == ()


def test_unknown_levels_are_named(saved: dict[str, Path]) -> None:
    for level in (3, "4", True, 4.0, -1):
        with pytest.raises(CheckpointError, match=r"has the levels 2, 4, 8, not") as raised:
            load(saved["llama"], level=level)
        assert "\n" not in str(raised.value)
    model = load(saved["llama"], level=None)
    with pytest.raises(CheckpointError, match=r"has the levels 2, 4, 8, not 3; name one of them"):
        model.set_level(3)
    assert model.level is None


def test_a_directory_can_be_a_level(saved: dict[str, Path], tmp_path: Path) -> None:
    """The same file of weights under a config.json that names a level."""
    config = json.loads((saved["llama"] / "config.json").read_text())
    config["quantization_config"]["level"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(saved["llama"] / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), logits(load(saved["llama"], level=2)))


def test_a_level_of_e8p_takes_no_bytes(tmp_path: Path) -> None:
    model = PICO["llama"]()
    names = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and name != "lm_head"]
    params = e8p.Params(4, True)
    weights = {name: random_weight("e8p", params, tuple(model.get_submodule(name).weight.shape)) for name in names}
    pack_model(model, weights).save_pretrained(tmp_path)
    whole = load(tmp_path)
    assert whole.levels == (2, 4)
    low = load(tmp_path, level=2)
    assert not any(name.endswith("residual") for name in low.state_dict())
    whole.set_level(2)
    assert torch.equal(logits(whole), logits(low))


def mixed_model(name: str, kinds: Sequence[tuple[int, ...]]) -> PreTrainedModel:
    """A pico model whose linears have these kinds of parts in turn; one part has no levels."""
    model = PICO[name]()
    opened = {key: Experts.from_fused(each) for key, each in model.named_modules() if is_fused_experts(each)}
    linears = {key: each for key, each in model.named_modules() if isinstance(each, nn.Linear)}
    for key, experts in opened.items():
        linears |= {f"{key}.{inner}": each for inner, each in experts.named_modules() if isinstance(each, nn.Linear)}
    linears = {
        key: each for key, each in linears.items() if ".layers." in key and not key.endswith((".gate", ".router"))
    }
    weights = {}
    for number, (key, each) in enumerate(linears.items()):
        bits, weight = kinds[number % len(kinds)], each.weight.detach()
        weights[key] = rounded_in_parts(weight, bits) if len(bits) > 1 else round_to_nearest(weight, bits[0], 32)
    return pack_model(model, weights)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("llama", ((4, 4), (2, 2, 4), (2, 2), (4,))), ("mixtral", ((4,), (4, 4))), ("mixtral", ((4, 4), (2, 2, 4)))],
)
def test_weights_of_one_block_may_have_different_levels(
    name: str, kinds: Sequence[tuple[int, ...]], tmp_path: Path
) -> None:
    mixed_model(name, kinds).save_pretrained(tmp_path)
    model = load(tmp_path)
    low, *_, top = model.levels
    by_level = {level: logits(load(tmp_path, level=level)) for level in (None, *model.levels)}
    assert torch.equal(by_level[None], by_level[top])
    for level in (low, None, *reversed(model.levels), low, None):
        with at_level(model, level):
            assert torch.equal(logits(model), by_level[level]), level
    for level in model.levels[:-1]:
        skeleton = Skeleton(open_checkpoint(resolve(str(tmp_path), level=level)))
        skeleton.check_tensors()
        assert len(skeleton.checkpoint.tensors) == len(load(tmp_path, level=level).state_dict())


def test_a_plain_model_has_no_levels() -> None:
    model = PICO["llama"]()
    with pytest.raises(CheckpointError, match="has no levels, so no level 4"), at_level(model, 4):
        pass
