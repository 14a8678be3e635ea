"""Experts that tokens go without: against a plain reference, off by default to the bit, and through a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from compress.errors import CheckpointError
from compress.model.skeleton import Skeleton
from compress.runtime.experts import Experts, is_fused_experts, magnitude, prune
from compress.runtime.hf import CompressConfig, CompressQuantizer, build_config
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from compress.types import ExpertPruning, Pruning
from helpers.expert_counts import counting
from helpers.pico import PICO, build, round_to_nearest

EXPERTS = 4
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
FIRST, SECOND = (f"model.layers.{i}.mlp.experts" for i in range(2))
PRUNINGS = {FIRST: Pruning(0.8), SECOND: Pruning(0.7, 52.0, 0.25)}


def routed(tokens: int, top_k: int, seed: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, index, weights."""
    generator = torch.Generator().manual_seed(seed)
    weights, index = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k)
    return torch.randn(tokens, 64, generator=generator), index, weights / weights.sum(1, keepdim=True)


def plainly(hidden: Tensor, index: Tensor, weights: Tensor, pruning: Pruning) -> tuple[Tensor, Tensor]:
    """The same in float64, token by token."""
    index, exact = index.clone(), weights.double()
    for t in range(len(hidden)):
        row, last = exact[t].clone(), int(exact[t].argmin())
        protected = pruning.protected is not None and hidden[t].abs().sum() >= pruning.protected
        if row[last] >= pruning.threshold * row.max() or protected or EXPERTS in index[t].tolist():
            continue
        index[t, last] = EXPERTS
        exact[t] *= 1 + pruning.taken * row[last] / (row.sum() - row[last])
        exact[t, last] = 0
    return index, exact


@pytest.mark.parametrize("protected", [None, 52.0])
@pytest.mark.parametrize("taken", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_pairs_and_raised_weights(
    top_k: int, protected: float | None, taken: float, dtype: torch.dtype
) -> None:
    hidden, index, weights = routed(200, top_k)
    weights = weights.to(dtype)
    index[7, 0] = EXPERTS  # a token that another process computes a part of
    got_index, got = prune(hidden, index, weights, pruning := Pruning(0.6, protected, taken), EXPERTS)
    want_index, want = plainly(hidden, index, weights, pruning)
    assert torch.equal(got_index, want_index) and got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 if dtype == torch.float32 else 3e-3)
    dropped = (got_index != index).any(1)
    assert 10 < dropped.sum() < 190 and not dropped[7]
    assert torch.equal(got[~dropped], weights[~dropped])
    assert not got[(got_index == EXPERTS) & (index != EXPERTS)].any()
    if protected is not None:
        assert not dropped[magnitude(hidden) >= protected].any() and (magnitude(hidden) >= protected).sum() > 20


def test_weights_that_do_not_sum_to_one_keep_their_sum() -> None:
    hidden, index, weights = routed(50, 3)
    got = prune(hidden, index, weights * 2.5, Pruning(0.9), EXPERTS)[1]
    torch.testing.assert_close(got.sum(1), torch.full((50,), 2.5))


def test_one_expert_a_token_is_never_dropped() -> None:
    hidden, index, weights = routed(50, 1)
    got_index, got = prune(hidden, index, weights, Pruning(1.0), EXPERTS)
    assert torch.equal(got_index, index) and torch.equal(got, weights)


def unfused(pruning: Pruning | None = None) -> tuple[nn.Module, Experts]:
    model = PICO["mixtral"]()
    model.set_experts_implementation("eager")
    fused = model.get_submodule(FIRST)
    experts = Experts.from_fused(fused)
    experts.pruning = pruning
    return fused, experts


@torch.no_grad()
@pytest.mark.parametrize("protected", [None, 52.0])
def test_pruned_experts_compute_what_the_fused_module_does_with_that_routing(protected: float | None) -> None:
    fused, experts = unfused(pruning := Pruning(0.6, protected))
    hidden, index, weights = routed(60, 2)
    want_index, want_weights = plainly(hidden, index, weights, pruning)
    expected = fused(hidden, want_index, want_weights.float())
    torch.testing.assert_close(experts(hidden, index, weights), expected)
    assert not torch.allclose(expected, fused(hidden, index, weights), atol=1e-2)


@torch.no_grad()
def test_off_is_as_ever_to_the_bit() -> None:
    fused, experts = unfused()
    inputs = routed(60, 2)
    expected = fused(*inputs)
    assert torch.equal(experts(*inputs), expected)
    with counting(experts) as pairs:
        assert torch.equal(experts(*inputs), expected)
    assert (pairs[""].routed, pairs[""].dropped, pairs[""].share) == (120, 0, 0.0)
    experts.pruning = Pruning(1e-9)  # which drops nothing
    assert torch.equal(experts(*inputs), expected)
    experts.pruning = Pruning(0.6)
    assert not torch.equal(experts(*inputs), expected)
    experts.pruning = None
    assert torch.equal(experts(*inputs), expected)


@torch.no_grad()
def test_a_token_is_pruned_alike_whatever_is_beside_it() -> None:
    _, experts = unfused(Pruning(0.6, 50.0))
    hidden, index, weights = routed(40, 2)
    together = experts(hidden, index, weights)
    for t in range(40):
        one = experts(hidden[t : t + 1], index[t : t + 1], weights[t : t + 1])
        torch.testing.assert_close(one[0], together[t], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_as_many_pairs_are_dropped_as_by_hand() -> None:
    _, experts = unfused(pruning := Pruning(0.6))
    inputs = routed(60, 2)
    dropped = int((plainly(*inputs, pruning)[0] == EXPERTS).sum())
    with counting(nn.ModuleDict({"experts": experts})) as pairs:
        experts(*inputs)
        experts(*inputs)
    experts(*inputs)
    assert 0 < dropped < 60
    assert (pairs["experts"].routed, pairs["experts"].dropped) == (240, 2 * dropped)
    assert pairs["experts"].share == dropped / 120


# ---------------------------------------------------------------- through a checkpoint


def pack(name: str, prunings: dict[str, Pruning]) -> PreTrainedModel:
    """A model with packed experts."""
    model = build(name)
    packed = {}
    for path, module in list(model.named_modules()):
        if is_fused_experts(module):
            model.set_submodule(path, Experts.from_fused(module))
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".experts." in path:
            packed[path] = round_to_nearest(module.weight, 4, 32)
            model.set_submodule(path, PackedLinear.from_packed(packed[path]))
    config = build_config({name: w.stored for name, w in packed.items()}, prunings)
    model.hf_quantizer, model.config.quantization_config = CompressQuantizer(config), config
    for path, pruning in prunings.items():
        model.get_submodule(path).pruning = pruning
    return model


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A model that prunes, and its checkpoint."""
    model = pack(request.param, PRUNINGS)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits


def test_what_is_saved_prunes_when_it_is_loaded(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, directory = saved
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = logits(model)
    for other in (loaded, again):
        assert {name: other.get_submodule(name).pruning for name in PRUNINGS} == PRUNINGS
        with counting(other) as pairs:
            assert torch.equal(logits(other), expected)
        assert all(0 < p.share < 0.5 for p in pairs.values()) and len(pairs) == 2
    for name in PRUNINGS:
        loaded.get_submodule(name).pruning = None
    assert not torch.allclose(logits(loaded), expected, atol=1e-2)


def test_the_bare_body_and_the_skeleton_prune_too(saved: tuple[PreTrainedModel, Path]) -> None:
    body = AutoModel.from_pretrained(saved[1])
    skeleton = Skeleton(open_checkpoint(saved[1]))
    skeleton.check_tensors()
    for index, (name, pruning) in enumerate(PRUNINGS.items()):
        assert body.get_submodule(name.removeprefix("model.")).pruning == pruning
        assert skeleton.load_block(index, torch.device("cpu")).get_submodule("mlp.experts").pruning == pruning


def test_a_dequantized_model_has_all_experts_again(saved: tuple[PreTrainedModel, Path]) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(saved[1])
    pruned = logits(loaded)
    for name in PRUNINGS:
        loaded.get_submodule(name).pruning = None
    expected = logits(loaded)
    torch.testing.assert_close(logits(loaded.dequantize()), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(pruned, expected, atol=1e-2)


def test_without_pruning_the_configuration_is_as_before() -> None:
    packed = {"linear": round_to_nearest(torch.ones(32, 32), 4, 32)}
    assert (
        "experts" not in build_config({name: w.stored for name, w in packed.items()}).to_dict()
        and "experts" not in CompressConfig(experts={}).to_dict()
    )
    config = build_config({name: w.stored for name, w in packed.items()}, PRUNINGS).to_dict()
    assert config["experts"] == {
        FIRST: {"threshold": 0.8, "protected": None, "taken": 1.0},
        SECOND: {"threshold": 0.7, "protected": 52.0, "taken": 0.25},
    }
    assert CompressConfig(**config).to_dict() == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update({FIRST: [0.5]}), "experts is not a table of tables"),
        (lambda e: e[FIRST].pop("threshold"), "has no threshold"),
        (lambda e: e[FIRST].update(threshold="0.5"), "threshold '0.5'"),
        (lambda e: e[FIRST].update(threshold=True), "threshold True"),
        (lambda e: e[FIRST].update(threshold=None), "threshold None"),
        (lambda e: e[FIRST].update(threshold=1.5), "threshold 1.5 is not above 0"),
        (lambda e: e[FIRST].update(threshold=float("nan")), "has threshold nan"),
        (lambda e: e[FIRST].update(taken=-1.0), "taken -1.0"),
        (lambda e: e[FIRST].update(taken=None), "taken None"),
        (lambda e: e[FIRST].update(protected=-1.0), "protected -1.0"),
        (lambda e: e[FIRST].update(attention=1.0), r"unknown keys \['attention'\]; upgrade"),
        (lambda e: e.update({"model.layers.9.mlp.experts": {"threshold": 0.5}}), "has no such module"),
        (lambda e: e.update({"model.layers.0.mlp": {"threshold": 0.5}}), "not a module of packed experts"),
    ],
)
def test_a_configuration_that_does_not_fit(
    change: Callable[[dict[str, Any]], object], message: str, saved: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    for path in saved[1].iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((saved[1] / "config.json").read_text())
    change(config["quantization_config"]["experts"])
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_experts_is_a_table() -> None:
    with pytest.raises(CheckpointError, match="experts is not a table"):
        CompressConfig(experts=["model"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Pruning(0.0), "threshold"),
        (lambda: Pruning(0.5, 0.0), "protected"),
        (lambda: Pruning(0.5, taken=1.5), "taken"),
        (lambda: ExpertPruning(layers=-1), "layers"),
        (lambda: ExpertPruning(protected=1.0), "protected"),
        (lambda: ExpertPruning(protected=-0.1), "protected"),
    ],
)
def test_settings_out_of_range(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        make()
