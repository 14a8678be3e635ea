"""Adapters merged into weights as they are read, against PEFT's own merge where that is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import api
from compress.errors import CheckpointError, OutputError
from compress.importers import open_checkpoint
from compress.model.load import load_model
from compress.run import source
from helpers.pico import build, of_type, save, save_pico
from helpers.runs import GPTQ, RTN, Setup, job

MODULES = ("q_proj", "down_proj")
RANK, ALPHA = 4, 6.0


def names(directory: Path) -> list[str]:
    tensors = open_checkpoint(directory).tensors
    return [name.removesuffix(".weight") for name in tensors if name.endswith(tuple(f"{m}.weight" for m in MODULES))]


def adapter(folder: Path, model: Path, seed: int = 0, **settings: Any) -> Path:
    """A LoRA as PEFT saves it, with random matrices for the modules of MODULES."""
    folder.mkdir()
    chosen = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**chosen, **settings}))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name in names(model):
        outputs, inputs = open_checkpoint(model).tensors[f"{name}.weight"].shape
        stem = f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / 8
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 8
        if settings.get("use_dora"):
            tensors[f"{stem}.lora_magnitude_vector"] = torch.rand(outputs, generator=generator) + 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Put tensors into an adapter, or take them out (None)."""
    file = folder / "adapter_model.safetensors"
    kept = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


def merged(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.read() for name, tensor in open_checkpoint(source.resolve(str(model), folder)).tensors.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_pico("llama", tmp_path / "model", shards=True, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / math.sqrt(RANK)),
        ({"alpha_pattern": {"q_proj": 1}}, {"q_proj": 1 / RANK, "down_proj": ALPHA / RANK}),
        ({"alpha_pattern": {r"layers\.\d+\.mlp.down_proj": 2.0}}, {"q_proj": ALPHA / RANK, "down_proj": 2 / RANK}),
        ({"alpha_pattern": {"^q_proj": 1, r"^self_attn\.": 1}}, ALPHA / RANK),  # no name of a module begins so
        ({"alpha_pattern": {"^model.*q_proj": 1}}, {"q_proj": 1 / RANK, "down_proj": ALPHA / RANK}),
    ],
)
def test_the_sum_is_taken_in_float32_and_rounded_once(
    model: Path, tmp_path: Path, settings: dict[str, Any], scaling: float | dict[str, float]
) -> None:
    folder = adapter(tmp_path / "lora", model, **settings)
    tensors, parts = open_checkpoint(model).tensors, load_file(folder / "adapter_model.safetensors")
    found = merged(model, folder)
    for name, tensor in tensors.items():
        expected, module = tensor.read(), name.removesuffix(".weight")
        if module in names(model):
            a, b = (parts[f"base_model.model.{module}.lora_{each}.weight"] for each in "AB")
            scale = scaling if isinstance(scaling, float) else scaling[module.split(".")[-1]]
            expected = (expected.float() + scale * (b @ a)).bfloat16()
            assert not torch.equal(expected, tensor.read())
        assert torch.equal(found[name], expected), name


PEFT: list[dict[str, Any]] = [
    {},
    {"use_rslora": True},
    {"use_dora": True},
    {"alpha_pattern": {"q_proj": 1}, "rank_pattern": {"q_proj": RANK}},
    {"alpha_pattern": {"^q_proj": 1, "^model.layers.1.mlp.down_proj": 2}},
]


@pytest.mark.parametrize("settings", PEFT, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_the_result_is_that_of_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    directory = save_pico("llama", tmp_path / "model")
    folder = adapter(tmp_path / "lora", directory, **settings)
    expected = peft.PeftModel.from_pretrained(build("llama"), folder).merge_and_unload().state_dict()
    found = load_model(source.resolve(str(directory), folder)).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(("module", "outputs"), [("c_attn", 192), ("c_proj", 64)])
def test_weights_that_are_stored_turned(module: str, outputs: int, use_dora: bool, said: bool, tmp_path: Path) -> None:
    """Whatever the settings say, which PEFT corrects while it reads them; one of the weights is square."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_attention_heads": 4}
    directory = save(of_type("gpt2", sizes), tmp_path / "model")
    folder, generator = tmp_path / "lora", torch.Generator().manual_seed(0)
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "fan_in_fan_out": said, "use_dora": use_dora}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": [module]}))
    stem = f"base_model.model.transformer.h.1.attn.{module}"
    a, b = torch.randn(4, 64, generator=generator), torch.randn(outputs, 4, generator=generator)
    magnitude = torch.rand(outputs, generator=generator)
    tensors = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    save_file(
        {**tensors, **({f"{stem}.lora_magnitude_vector": magnitude} if use_dora else {})},
        folder / "adapter_model.safetensors",
    )
    name = f"transformer.h.1.attn.{module}.weight"
    weight = open_checkpoint(directory).tensors[name].read()
    expected = weight + 2 * (b @ a).T
    if use_dora:
        expected = expected * (magnitude / expected.norm(dim=0))
    assert torch.allclose(merged(directory, folder)[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_square_weights_that_are_not_turned(name: str, tmp_path: Path) -> None:
    """The same without biases, and with biases, where the settings call them turned."""
    directory = save_pico(name, tmp_path / "model")
    folders = [adapter(tmp_path / str(said), directory, fan_in_fan_out=said) for said in (False, True)]
    found = [merged(directory, folder) for folder in folders]
    assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())


def test_a_tensor_is_the_same_in_parts_in_rows_and_whole(model: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", model, use_dora=True)
    for tensor in open_checkpoint(source.resolve(str(model), folder)).tensors.values():
        whole = tensor.read()
        parts = torch.cat(list(tensor.parts())).view(tensor.dtype).view(tensor.shape)
        assert torch.equal(whole, parts) and torch.equal(whole[3:20], tensor.rows(3, 20))


def test_names_may_begin_otherwise(model: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", model)
    tensors = {
        name.replace(".model.model.", ".model."): t
        for name, t in load_file(folder / "adapter_model.safetensors").items()
    }
    other = adapter(tmp_path / "other", model)
    save_file(tensors, other / "adapter_model.safetensors")
    found = merged(model, other)
    assert all(torch.equal(found[name], tensor) for name, tensor in merged(model, folder).items())


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "a flag that is none": ({"use_rslora": 7}, {}, "has use_rslora 7, which is neither true nor false"),
    "another flag": ({"fan_in_fan_out": "x"}, {}, "has fan_in_fan_out 'x', which is neither true nor false"),
    "another kind": ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'; only LORA is merged"),
    "trained whole modules": ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save \['lm_head'\], which is not"),
    "biases": ({"bias": "all"}, {}, "trained biases"),
    "a base that was changed": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights 'pissa' changes the base"),
    "some tokens only": ({"alora_invocation_tokens": [1]}, {}, "alora_invocation_tokens"),
    "a list of alphas": ({"alpha_pattern": ["q"]}, {}, "alpha_pattern .* is no table"),
    "an unused tensor": (
        {},
        {"base_model.model.lm_head.weight": torch.ones(4)},
        "'base_model.model.lm_head.weight' is no",
    ),
    "half a pair": ({}, {A: None}, "A and B of .*q_proj' do not fit"),
    "ranks that differ": ({}, {A: torch.ones(3, 64)}, "A and B of .*q_proj' do not fit"),
    "another width": ({}, {A: torch.ones(4, 32)}, r"made for .*q_proj.weight of shape \[64, 32\], the checkpoint has"),
    "another model": (
        {},
        {
            A.replace("q_proj", "qq_proj"): torch.ones(4, 64),
            A.replace("q_proj.lora_A", "qq_proj.lora_B"): torch.ones(64, 4),
        },
        "changes 'model.layers.0.self_attn.qq_proj.weight', which the checkpoint does not store",
    ),
    "DoRA without lengths": ({"use_dora": True, "r": 5}, {}, "use_dora and the tensors"),
    "no number": ({"lora_alpha": "six"}, {}, "lora_alpha 'six'"),
    "an endless pattern": ({"alpha_pattern": {"(a+)+": 1}}, {}, "is too involved"),
    "no pattern": ({"alpha_pattern": {"(": 1}}, {}, "is no regular expression"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_merged_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    settings, tensors, said = BAD[name]
    folder = adapter(tmp_path / "lora", model)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    change(folder, **tensors)
    with pytest.raises(CheckpointError, match=said):
        merged(model, folder)


@pytest.mark.parametrize("name", ["lm_head.base_layer.weight", "model.embed_tokens.lora_embedding_A"])
def test_an_adapter_of_one_of_two_tied_tables(name: str, tmp_path: Path) -> None:
    """PEFT itself would merge it into both, so that is no advice."""
    for model, said in (("llama", "merge the adapter with PEFT"), ("llama_tied", "would change both; give it two")):
        directory = save_pico(model, tmp_path / model)
        folder = adapter(tmp_path / f"{model}-lora", directory)
        change(folder, **{f"base_model.model.{name}": torch.ones(4, 64)})
        with pytest.raises(CheckpointError, match=said):
            merged(directory, folder)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_directory_that_is_no_adapter(file: str, model: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", model)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"has no {file}"):
        merged(model, folder)


def test_a_quantized_adapter_is_that_of_the_merged_model(model: Path, tmp_path: Path) -> None:
    """Quantizing with an adapter writes what quantizing the merged checkpoint writes; the report names it."""
    folder = adapter(tmp_path / "lora", model)
    whole = load_model(source.resolve(str(model), folder))
    save(whole, tmp_path / "whole")
    reports = {}
    for name, given, lora in (("one", model, folder), ("two", tmp_path / "whole", None)):
        task = job(given, GPTQ, tmp_path / name)
        reports[name] = api.quantize(type(task)(**{**vars(task), "adapter": lora}))
    assert reports["one"]["base"] == "adapter lora merged" and reports["two"]["base"] is None
    shards = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "two")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


def test_an_adapter_on_what_compress_wrote_in_full_precision(model: Path, tmp_path: Path) -> None:
    """Its manifest lists the files of the checkpoint, and the adapter is loaded beside them."""
    task = job(model, Setup("quarot4bit", ("calibration.num_samples=2", "calibration.seq_len=16")), tmp_path / "out")
    api.quantize(type(task)(**{**vars(task), "pack": False}))
    folder = adapter(tmp_path / "lora", tmp_path / "out")
    assert load_model(source.resolve(str(tmp_path / "out"), folder)) is not None


def test_a_run_is_not_resumed_with_another_adapter(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.run import write

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    folder = adapter(tmp_path / "lora", model)
    task = job(model, RTN, tmp_path / "out")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(write, "finish", stop)
        api.quantize(type(task)(**{**vars(task), "adapter": folder}))
    other = adapter(tmp_path / "other", model, seed=1)
    with pytest.raises(OutputError, match="another adapter"):
        api.quantize(type(task)(**{**vars(task), "adapter": other}))
