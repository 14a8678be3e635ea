"""Adapters: taken out of a packed checkpoint in PEFT's format, trained on the frozen base, loaded again, refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compress
from compress import api
from compress.errors import CheckpointError, OutputError
from compress.export import peft as adapter
from compress.formats import lowrank
from compress.runtime.linear import PackedLinear
from compress.types import LowRank
from helpers import problems
from helpers.pico import round_to_nearest, save_pico
from helpers.runs import GPTQ, RTN, job, stored_tensors

TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
WITH_PART = ("bits=4", "lowrank={rank: 4, bits: 8, metric: none}")


def packed(folder: Path, name: str = "llama", *settings: str) -> Path:
    out = folder / "packed"
    api.quantize(job(save_pico(name, folder / "model"), RTN.set(*(settings or WITH_PART)), out))
    return out


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A packed checkpoint with parts in a rotated basis; its base; its adapter."""
    folder = tmp_path_factory.mktemp("split")
    whole = packed(folder, "llama", *WITH_PART, "incoherence=true")
    assert adapter.export(whole, folder / "base", folder / "adapter") == 14
    return whole, folder / "base", folder / "adapter"


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def loss_of(model: nn.Module) -> Tensor:
    found = model(input_ids=TOKENS).logits[:, :-1]
    return nn.functional.cross_entropy(found.flatten(0, 1), TOKENS[:, 1:].flatten())


def train(model: nn.Module, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW(adapter.parameters(model), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_base_and_adapter_are_the_same_function(split: tuple[Path, Path, Path]) -> None:
    whole, base, directory = split
    expected = logits(compress.load(whole))
    model = compress.load(base)
    assert not any(isinstance(m, PackedLinear) and m.lowrank for m in model.modules())
    assert (logits(model) - expected).abs().max() > 1e-3
    assert adapter.load(model, directory) == 14
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)


def test_the_files_are_those_of_peft(split: tuple[Path, Path, Path]) -> None:
    whole, base, directory = split
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == config["lora_alpha"] == 4
    assert config["base_model_name_or_path"] == str(base) and not config["rank_pattern"]
    tensors = load_file(directory / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    assert len(tensors) == 28 and name in config["target_modules"]
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    assert a.shape == (4, 192) and b.shape == (64, 4) and a.dtype == torch.float32
    layers = [dict(compress.load(path).named_modules())[name] for path in (whole, base)]
    difference = layers[0].dequantize(torch.float32) - layers[1].dequantize(torch.float32)  # type: ignore[operator]
    torch.testing.assert_close(b @ a, difference, rtol=1e-3, atol=1e-5)
    left = stored_tensors(base)
    assert not any(lowrank.PREFIX in key for key in left)
    assert all(torch.equal(left[key], tensor) for key, tensor in stored_tensors(whole).items() if key in left)


def test_training_on_the_packed_base_lowers_the_loss_and_is_loaded_again(
    split: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, base, directory = split
    model = compress.load(base).train()
    adapter.load(model, directory)
    frozen = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in frozen.items())
    adapter.save(model, tmp_path / "trained", str(base))
    again = compress.load(base)
    adapter.load(again, tmp_path / "trained")
    torch.testing.assert_close(logits(again), logits(model.eval()), rtol=0, atol=0)


def test_new_adapters_change_nothing_until_they_are_trained(tmp_path: Path) -> None:
    base = packed(tmp_path, "llama", "bits=4")
    model = compress.load(base)
    before = logits(model)
    assert adapter.attach(model, 3, "*_proj") == 14
    assert torch.equal(logits(model), before)
    losses = train(model.train(), 5)
    assert losses[-1] < losses[0]
    adapter.save(model, tmp_path / "adapter", str(base))
    again = compress.load(base)
    assert adapter.load(again, tmp_path / "adapter") == 14
    torch.testing.assert_close(logits(again), logits(model.eval()), rtol=0, atol=0)


def test_parts_become_adapters_in_memory(split: tuple[Path, Path, Path], tmp_path: Path) -> None:
    whole, base, directory = split
    model = compress.load(whole)
    expected = logits(model)
    assert adapter.separate(model) == 14
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)
    assert adapter.fingerprint(model) == adapter.fingerprint(compress.load(base))
    adapter.save(model, tmp_path / "adapter", str(base))
    saved, exported = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "adapter", directory))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in exported.items())


def test_ranks_and_scalings_of_their_own(tmp_path: Path) -> None:
    base = packed(tmp_path, "llama", "bits=4")
    model = compress.load(base)
    adapter.attach(model, 2, "*.q_proj")
    adapter.attach(model, 5, "*.down_proj", seed=1)
    adapter.attach(model, 5, "*.up_proj", seed=2)
    train(model, 2)
    adapter.save(model, tmp_path / "a", str(base))
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["r"] == 5 and set(config["rank_pattern"].values()) == {2} and len(config["rank_pattern"]) == 2
    first, second = compress.load(base), compress.load(base)
    adapter.load(first, tmp_path / "a")
    torch.testing.assert_close(logits(first), logits(model), rtol=0, atol=0)
    file.write_text(json.dumps({**config, "lora_alpha": 10, "alpha_pattern": {"q_proj": 4}}))  # twice as much of all
    adapter.load(second, tmp_path / "a")
    for name, module in adapter.adapted_linears(second).items():
        assert torch.equal(module.lora_b, 2 * adapter.adapted_linears(first)[name].lora_b)


def without_fingerprint(directory: Path, changes: dict[str, Tensor | None]) -> None:
    """As PEFT saves it: no word of the base."""
    tensors: dict[str, Tensor | None] = {**load_file(directory / adapter.WEIGHTS_FILE), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / adapter.WEIGHTS_FILE, metadata={"format": "pt"})


NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{NAME}.lora_A.weight": None}, "holds more than pairs"),
        ({f"{NAME}.lora_A.weight": torch.ones(4, 65)}, r"of shape \(64, 65\), but here it is \(64, 64\)"),
        ({f"{NAME}.lora_A.weight": torch.ones(5, 64)}, r"has lora_A \[5, 64\] and lora_B \[64, \d\], no pair"),
        ({f"{NAME}.lora_A.weight": torch.tensor(1.0)}, r"has lora_A \[\] and"),
        ({f"{NAME}x.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}, "which is no packed linear of this model"),
    ],
)
def test_adapters_that_do_not_fit(
    changes: dict[str, Tensor | None], said: str, split: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, base, directory = split
    model = compress.load(base)
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    without_fingerprint(tmp_path, changes)
    with pytest.raises(CheckpointError, match=said):
        adapter.load(model, tmp_path)
    assert not adapter.adapted_linears(model)


def test_without_a_fingerprint_what_fits_is_loaded(split: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, base, directory = split
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    without_fingerprint(tmp_path, {})
    assert adapter.load(compress.load(base), tmp_path) == 14


def test_adapters_of_another_base_are_one_clear_line(split: tuple[Path, Path, Path], tmp_path: Path) -> None:
    whole, base, directory = split
    other = packed(tmp_path, "llama", "bits=3")
    with pytest.raises(CheckpointError, match=r"was trained on another base; load the packed model it was made for$"):
        adapter.load(compress.load(other), directory)
    with pytest.raises(CheckpointError, match="has a low-rank part of its own; load the base"):
        adapter.load(compress.load(whole), directory)
    with pytest.raises(CheckpointError, match="has no low-rank parts; `attach` makes new adapters"):
        adapter.export(other, tmp_path / "b", tmp_path / "a")
    with pytest.raises(CheckpointError, match="is not a packed checkpoint"):
        adapter.export(tmp_path / "model", tmp_path / "b", tmp_path / "a")
    with pytest.raises(OutputError, match="exists already"):
        adapter.export(whole, base, tmp_path / "a")
    with pytest.raises(CheckpointError, match="has no adapters to save"):
        adapter.save(compress.load(base), tmp_path / "a", "")


@pytest.mark.parametrize(
    ("key", "value"), [("use_dora", True), ("bias", "all"), ("peft_type", "IA3")], ids=["dora", "bias", "kind"]
)
def test_other_kinds_of_adapters_are_refused(
    key: str, value: object, split: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", key: value}
    (tmp_path / adapter.CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is no plain LoRA adapter"):
        adapter.load(compress.load(split[1]), tmp_path)


def test_experts_have_adapters_too(tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    whole = folder / "packed"
    setup = GPTQ.set("lowrank={rank: 2}", "calibration.num_samples=2")
    api.quantize(job(save_pico("mixtral", folder / "model"), setup, whole))
    expected = logits(compress.load(whole))
    count = adapter.export(whole, folder / "base", folder / "adapter")
    model = compress.load(folder / "base")
    assert adapter.load(model, folder / "adapter") == count == 2 * (4 + 4 * 3)
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factors_of_a_packed_linear_can_be_trained_in_place(dtype: torch.dtype) -> None:
    """Gradients of A and B are those of the plain product, where they are parameters of any floating type."""
    shape, kind = (48, 96), LowRank(5)
    part = lowrank.pack(problems.random(5, 96, seed=1), problems.random(5, 48, seed=2), kind)
    weight = round_to_nearest(problems.random(*shape), 4, 32)
    tensors = {**weight.tensors, **{lowrank.PREFIX + name: tensor for name, tensor in part.items()}}
    layer = PackedLinear.from_packed(
        dataclasses.replace(weight, tensors=tensors, stored=dataclasses.replace(weight.stored, lowrank=kind))
    )
    x = problems.random(3, 96, seed=3).to(dtype)
    with torch.no_grad():
        before = layer(x)  # factors are in the cache
    for name in part:
        key = lowrank.PREFIX + name
        setattr(layer, key, nn.Parameter(layer.get_parameter(key).float()))
    layer(x).float().square().sum().backward()
    a, b = (layer.get_parameter(key).detach().double().requires_grad_() for key in ("lowrank_a", "lowrank_b"))
    expected = x.double() @ (problems.decoded(weight) + b @ a).T
    expected.square().sum().backward()
    for key, wanted in (("lowrank_a", a.grad), ("lowrank_b", b.grad)):
        found = layer.get_parameter(key).grad
        assert wanted is not None and found is not None
        assert (found - wanted).norm() < (1e-5 if dtype == torch.float32 else 0.02) * wanted.norm()
    with torch.no_grad():
        layer.get_parameter("lowrank_b").mul_(2)
        assert not torch.equal(layer(x), before)


@pytest.mark.filterwarnings("ignore")  # of another package
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral"])
def test_peft_itself_trains_saves_and_loads(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    rule = "rules=[{match: '*.1.*', bits: 4, lowrank: {rank: 6}}]"
    whole = packed(tmp_path, name, *WITH_PART, "incoherence=true", rule)
    base, saved = tmp_path / "base", tmp_path / "adapter"
    adapter.export(whole, base, saved)

    def loaded(directory: Path) -> Any:
        return peft.PeftModel.from_pretrained(compress.load(base), directory, is_trainable=True)

    model = loaded(saved)
    torch.testing.assert_close(logits(model.eval()), logits(compress.load(whole)), rtol=1e-4, atol=1e-4)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stored = load_file(saved / adapter.WEIGHTS_FILE)
    assert sum(p.numel() for p in trained) == sum(tensor.numel() for tensor in stored.values())
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(10):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    model.save_pretrained(tmp_path / "trained")
    ours = compress.load(base)
    assert adapter.load(ours, tmp_path / "trained") == len(stored) // 2
    after = logits(model)
    torch.testing.assert_close(logits(ours), after, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(loaded(tmp_path / "trained").eval()), after, rtol=1e-4, atol=1e-4)
    adapter.save(ours, tmp_path / "again", str(base))
    torch.testing.assert_close(logits(loaded(tmp_path / "again").eval()), after, rtol=1e-4, atol=1e-4)
