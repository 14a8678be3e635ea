"""Packed checkpoints through transformers: what was saved is what is loaded, to the bit, or it is an error."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

import compress
from compress.errors import CheckpointError
from compress.formats import dense
from compress.formats import int as int_format
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.hf import CompressConfig, CompressQuantizer, build_config, register, scheme, swap
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight, Stored
from helpers.pico import PICO, round_to_nearest

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
KINDS = ["llama", "llama_tied", "qwen2", "opt", "phi3", "mixtral", "qwen3_moe"]
Packed = tuple[PreTrainedModel, Path]


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Every linear but the head packed in place: four bits as a rule, some three with zero points, one dense."""
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            model.set_submodule(name, Experts.from_fused(module))
    packed = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            packed[name] = _weight(name, module.weight.detach())
            model.set_submodule(name, PackedLinear.from_packed(packed[name], module.bias))
    config = build_config({name: w.stored for name, w in packed.items()})
    model.hf_quantizer, model.config.quantization_config = CompressQuantizer(config), config
    return model


def _weight(name: str, weight: Tensor) -> PackedWeight:
    if name.endswith(("1.self_attn.o_proj", "1.self_attn.out_proj")):
        params = dense.Params("float16")
        return PackedWeight(Stored("dense", params), dense.pack(weight, params), (weight.shape[0], weight.shape[1]))
    return round_to_nearest(weight, 3, 32, False) if "down_proj" in name else round_to_nearest(weight, 4, 32)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Packed]:
    """packed(name) -> the packed model in memory and its checkpoint in several shards, made once."""
    made: dict[str, Packed] = {}

    def make(name: str) -> Packed:
        if name not in made:
            model, directory = pack(PICO[name]()), tmp_path_factory.mktemp(name)
            model.save_pretrained(directory, max_shard_size="40KB")
            made[name] = (model, directory)
        return made[name]

    return make


@pytest.fixture
def llama(packed: Callable[[str], Packed], tmp_path: Path) -> Path:
    """A packed llama in one file, to be damaged."""
    packed("llama")[0].save_pretrained(tmp_path)
    return tmp_path


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def load(directory: Path, **options: Any) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", KINDS)
def test_loaded_equals_saved(name: str, packed: Callable[[str], Packed], tmp_path: Path) -> None:
    model, directory = packed(name)
    assert len(list(directory.glob("*.safetensors"))) > 1
    loaded = load(directory)
    expected = logits(model)
    assert torch.equal(logits(loaded), expected)
    assert not torch.equal(expected, logits(PICO[name]()))  # packing did change the weights
    stored = {n: p for n, p in loaded.named_parameters() if n.endswith(("words3", "words4", "scales", "zeros"))}
    assert stored and not any(p.requires_grad for p in stored.values())
    assert loaded.get_memory_footprint() == model.get_memory_footprint()

    loaded.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), expected)

    plain = loaded.dequantize()
    assert not any(isinstance(module, PackedLinear | Experts) for module in plain.modules())
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-5)  # experts run fused again
    plain.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    state = plain.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in load(tmp_path / "plain").state_dict().items())


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}])
@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_options_that_change_nothing(dtype: Any, device_map: Any, packed: Callable[[str], Packed]) -> None:
    model, directory = packed("qwen2")
    assert torch.equal(logits(load(directory, dtype=dtype, device_map=device_map)), logits(model))
    assert torch.equal(logits(compress.load(directory, dtype=dtype, device_map=device_map)), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_leaves_the_stored_tensors_alone(dtype: torch.dtype, packed: Callable[[str], Packed]) -> None:
    model, directory = packed("qwen2")
    loaded = load(directory, dtype=dtype)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            other = loaded.get_submodule(name)
            assert all(torch.equal(t, other.tensors[key]) for key, t in module.tensors.items())
            assert all(t.dtype == other.tensors[key].dtype for key, t in module.tensors.items())
            assert other.bias is None or other.bias.dtype == dtype
    assert logits(loaded).dtype == dtype
    error = (logits(loaded).float() - logits(model)).norm() / logits(model).norm()
    assert error < 0.05, f"relative error {error:.4f}"


def test_a_model_saved_in_bfloat16(tmp_path: Path) -> None:
    model = pack(PICO["mixtral"]().to(torch.bfloat16))
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(load(tmp_path)))
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_a_packed_head(tmp_path: Path) -> None:
    model = PICO["llama"]()
    weight = round_to_nearest(model.lm_head.weight, 8, 32)
    model.lm_head = PackedLinear.from_packed(weight)
    config = build_config({"lm_head": weight.stored})
    model.hf_quantizer, model.config.quantization_config = CompressQuantizer(config), config
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize("name", ["llama", "opt", "mixtral"])
def test_the_body_alone(name: str, packed: Callable[[str], Packed]) -> None:
    model, directory = packed(name)
    body = AutoModel.from_pretrained(directory)
    with torch.no_grad():
        assert torch.equal(body(IDS).last_hidden_state, model.base_model(IDS).last_hidden_state)


@pytest.mark.filterwarnings("ignore")  # transformers warns of a score that is not trained yet
def test_another_head_on_the_same_body(tmp_path: Path) -> None:
    """The packed output head is left out, and so it is of the list when the model is saved again."""
    model = pack(PICO["llama"]())
    weight = _weight("lm_head", model.lm_head.weight.detach())
    model.lm_head = PackedLinear.from_packed(weight)
    packed = {name: m.stored for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    model.config.quantization_config = build_config(packed)
    model.hf_quantizer = CompressQuantizer(model.config.quantization_config)
    model.save_pretrained(tmp_path / "packed")
    scored = AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed", num_labels=3)
    with torch.no_grad():
        scored.score.weight.normal_()
        assert torch.equal(scored.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
        for _ in range(2):  # the configuration names the new class after the first time
            scored.save_pretrained(tmp_path / "scored")
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scored")
        assert torch.equal(again(IDS).logits, scored(IDS).logits)
    listed = json.loads((tmp_path / "scored" / "config.json").read_text())["quantization_config"]["modules"]
    assert "lm_head" not in listed and listed.keys() | {"lm_head"} == packed.keys()


def test_offloaded_to_disk(packed: Callable[[str], Packed], tmp_path: Path) -> None:
    model, directory = packed("llama")
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"], "cpu")
    loaded = load(directory, device_map={**places, "model.layers.1": "disk"}, offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(loaded), logits(model))


def test_generate_and_copy(packed: Callable[[str], Packed]) -> None:
    model, directory = packed("mixtral")
    loaded = load(directory)
    tokens = loaded.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert tokens.shape[1] > IDS.shape[1]
    assert torch.equal(logits(copy.deepcopy(loaded)), logits(model))


def test_a_checkpoint_written_by_hand(tmp_path: Path) -> None:
    """What the engine does: tensors under `<module>.<tensor>`, and a list in config.json."""
    model = PICO["mixtral"]()
    body = {name: t for name, t in model.state_dict().items() if ".mlp.experts." not in name and "_proj" not in name}
    tensors, packed = {name: tensor.clone() for name, tensor in body.items()}, {}
    for name, module in pack(model).named_modules():
        if isinstance(module, PackedLinear):
            packed[name] = module
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.tensors.items()}
    save_file(tensors, tmp_path / "anything.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "anything.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        **model.config.to_dict(),
        "quantization_config": build_config({name: w.stored for name, w in packed.items()}).to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(load(tmp_path)), logits(model))


# ---------------------------------------------------------------- the list


def test_the_most_common_scheme_is_the_default() -> None:
    four, three = int_format.Params(4, 32, True, 16), int_format.Params(3, 32, True, 16)
    shape = (16, 64)
    weights = {
        "a": PackedWeight(Stored("int", three), {}, shape),
        "b": PackedWeight(Stored("int", four), {}, shape),
        "c": PackedWeight(Stored("int", four), {}, shape),
        "d": PackedWeight(Stored("dense", dense.Params("float16")), {}, shape),
    }
    config = build_config({name: w.stored for name, w in weights.items()})
    assert config.default["params"]["bits"] == 4
    assert config.modules["b"] == config.modules["c"] == {}
    assert config.modules["a"].keys() == {"params"} and config.modules["d"].keys() == {"format", "params"}
    again = CompressConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert {name: scheme(again, name) for name in weights} == {name: w.stored for name, w in weights.items()}


def test_nothing_packed_is_an_empty_list() -> None:
    assert build_config({}).modules == {}


def test_swap_fills_the_skeleton_on_meta(packed: Callable[[str], Packed]) -> None:
    model, _ = packed("qwen3_moe")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    swap(skeleton, model.config.quantization_config)
    assert skeleton.state_dict().keys() == model.state_dict().keys()
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_registering_again_does_no_harm(packed: Callable[[str], Packed]) -> None:
    register()
    register()
    assert torch.equal(logits(load(packed("llama")[1])), logits(packed("llama")[0]))


def test_tables_of_other_shapes_are_errors() -> None:
    config = CompressConfig(default={"format": "dense", "params": {}}, modules={"a": {"bits": 4}})
    with pytest.raises(CheckpointError, match=r"a has \['bits', 'format', 'params'\]"):
        scheme(config, "a")
    with pytest.raises(CheckpointError, match="c has"):
        scheme(CompressConfig(modules={"c": {"format": 4, "params": {}}}), "c")


# ---------------------------------------------------------------- errors, never random weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "version 2.*upgrade compress"),
        (lambda c: c.update(transforms=[]), r"unknown keys \['transforms'\].*upgrade compress"),
        (lambda c: c["default"].update(format="hologram"), "'hologram' is unknown.*upgrade compress"),
        (lambda c: c["default"].update(format="../int"), "is unknown to this version"),
        (lambda c: c["default"]["params"].update(colour=1), "unknown keys"),
        (lambda c: c["default"]["params"].update(bits=11), "bits 11"),
        (lambda c: c["default"].update(ops={"input": ["spin"]}), "transform 'spin' is unknown to this version"),
        (lambda c: c["default"].update(ops={"input": ["signs"]}), "_proj.in_signs is not in the checkpoint"),
        (lambda c: c.pop("default"), "needs just 'format' and 'params'"),
        (lambda c: c["modules"].update({"model.layers.7.mlp.up_proj": {}}), "no such module"),
        (lambda c: c["modules"].update({"model.norm": {}}), "LlamaRMSNorm, not a linear"),
        (lambda c: c["modules"].update({"lm_head": {}}), "lm_head.words4 is not in the checkpoint"),
    ],
)
def test_a_list_that_does_not_fit(change: Callable[[dict[str, Any]], object], message: str, llama: Path) -> None:
    edit_config(llama, change)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(llama)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("options", [{}, {"device_map": "auto"}, {"ignore_mismatched_sizes": True}])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({f"{Q}.words4": t[f"{Q}.words4"][:, :-1].contiguous()}),
        lambda t: t.update({f"{Q}.words4": t[f"{Q}.words4"].to(torch.int32)}),
        lambda t: t.pop(f"{Q}.words4"),
        lambda t: t.pop(f"{Q}.scales"),
    ],
    ids=["shape", "type", "words missing", "scales missing"],
)
def test_tensors_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], object], options: dict[str, Any], llama: Path
) -> None:
    edit_tensors(llama, change)
    with pytest.raises((CheckpointError, RuntimeError)):  # a wrong shape is transformers' own error
        AutoModelForCausalLM.from_pretrained(llama, **options)


def test_a_missing_bias(packed: Callable[[str], Packed], tmp_path: Path) -> None:
    packed("qwen2")[0].save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(f"{Q}.bias"))
    with pytest.raises(CheckpointError, match="q_proj.bias is not in the checkpoint"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_expert_that_is_not_listed(packed: Callable[[str], Packed], tmp_path: Path) -> None:
    packed("mixtral")[0].save_pretrained(tmp_path)
    edit_config(tmp_path, lambda c: c["modules"].pop("model.layers.1.mlp.experts.2.up_proj"))
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj is not listed"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_experts_of_another_layout(packed: Callable[[str], Packed]) -> None:
    model = PICO["mixtral"]()
    model.model.layers[0].mlp.experts.more = torch.nn.Parameter(torch.zeros(4, 3, 3))
    with pytest.raises(CheckpointError, match="layers.0.mlp.experts"):
        swap(model, packed("mixtral")[0].config.quantization_config)


def test_a_tied_head_cannot_be_packed(packed: Callable[[str], Packed]) -> None:
    config = copy.deepcopy(packed("llama_tied")[0].config.quantization_config)
    config.modules["lm_head"] = {}
    with pytest.raises(CheckpointError, match="tied to model.embed_tokens.weight"):
        swap(PICO["llama_tied"](), config)


def test_packing_on_the_way_in_is_refused(pico_dir: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="compress quantize"):
        AutoModelForCausalLM.from_pretrained(pico_dir("llama"), quantization_config=build_config({}))
