"""Structure: the linears of every architecture, which of them share an input, and blocks that run one by one."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from compress.errors import CheckpointError, UnsupportedModelError
from compress.model import load
from compress.model.blockwise import HiddenStates, record_inputs, run_block
from compress.model.skeleton import MIN_FEATURES, Skeleton
from compress.numerics import products
from compress.runtime import expert_layouts
from compress.runtime.experts import Experts
from compress.storage.checkpoint import CONFIG, open_checkpoint
from helpers.pico import PICO, save_pico
from helpers.runs import stored_tensors

CPU = torch.device("cpu")
IDS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(1))  # longer than the sliding windows
MOE = {"mixtral", "qwen3_moe"}

Block = dict[str, tuple[int, int]]  # linear of a block -> shape
ATTENTION: Block = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
}


def mlp(inner: int, prefix: str = "mlp") -> Block:
    return {f"{prefix}.gate_proj": (inner, 64), f"{prefix}.up_proj": (inner, 64), f"{prefix}.down_proj": (64, inner)}


def experts(count: int, inner: int) -> Block:
    return {name: shape for e in range(count) for name, shape in mlp(inner, f"mlp.experts.{e}").items()}


EXPECTED: dict[str, tuple[str, Block]] = {  # blocks, linears of each
    "llama": ("model.layers", ATTENTION | mlp(192)),
    "llama_tied": ("model.layers", ATTENTION | mlp(192)),
    "mistral": ("model.layers", ATTENTION | mlp(128)),
    "qwen2": ("model.layers", ATTENTION | mlp(160)),
    "qwen3": ("model.layers", ATTENTION | mlp(192)),
    "gemma": ("model.layers", ATTENTION | mlp(144)),
    "gemma2": ("model.layers", ATTENTION | mlp(144)),
    "phi3": (
        "model.layers",
        {
            "self_attn.qkv_proj": (128, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_up_proj": (384, 64),
            "mlp.down_proj": (64, 192),
        },
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        {
            "attention.query_key_value": (192, 64),
            "attention.dense": (64, 64),
            "mlp.dense_h_to_4h": (256, 64),
            "mlp.dense_4h_to_h": (64, 256),
        },
    ),
    "opt": (
        "model.decoder.layers",
        {f"self_attn.{name}": (64, 64) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        | {"fc1": (128, 64), "fc2": (64, 128)},
    ),
    "mixtral": ("model.layers", ATTENTION | experts(4, 96)),
    "qwen3_moe": ("model.layers", ATTENTION | experts(8, 48)),
}


def skeleton(directory: Path) -> Skeleton:
    return Skeleton(open_checkpoint(directory))


def test_every_architecture_is_expected() -> None:
    assert EXPECTED.keys() == PICO.keys()


@pytest.mark.parametrize("name", PICO)
def test_linears(name: str, pico_dir: Callable[..., Path]) -> None:
    blocks, expected = EXPECTED[name]
    specs, kept = skeleton(pico_dir(name, shards=True)).linears()
    assert kept == {}
    assert {spec.name: spec.shape for spec in specs} == {
        f"{blocks}.{i}.{linear}": shape for i in range(2) for linear, shape in expected.items()
    }
    for spec in specs:
        assert spec.name.startswith(f"{blocks}.{spec.block}.")
        assert spec.dtype == torch.float32
        assert spec.is_expert == (".experts." in spec.name)


@pytest.mark.parametrize("name", PICO)
def test_linears_with_one_key_read_the_same_tensor_and_others_do_not(name: str, pico_dir: Callable[..., Path]) -> None:
    """Against a forward pass: the very tensor objects that arrive at each linear."""
    model = skeleton(pico_dir(name))
    keys = {spec.name: spec.input_key for spec in model.linears()[0]}
    stream = HiddenStates(len(IDS), None)
    calls = record_inputs(model, IDS, len(IDS), stream, CPU)
    block = model.load_block(0, CPU)
    arrived: dict[str, Tensor] = {}
    for relative, module in block.named_modules():
        full = model.block_prefix(0) + relative
        if full in keys:
            module.register_forward_pre_hook(lambda _, x, full=full: arrived.update({full: x[0]}))
    run_block(block, calls[0][len(IDS)], stream.read(0, len(IDS)), "block")
    assert arrived.keys() == {n for n in keys if n.startswith(model.block_prefix(0))}  # all experts were reached
    for a, x in arrived.items():
        assert keys[a] in arrived
        for b, y in arrived.items():
            assert (keys[a] == keys[b]) == (x is y), f"{a}, {b}"


def outputs_of_blocks(model: PreTrainedModel, blocks: str) -> list[Tensor]:
    """What each block gives in a forward pass of the whole model."""
    found: list[Tensor] = []
    for block in model.get_submodule(blocks):  # type: ignore[attr-defined]
        block.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad(), products.Widened():
        model(IDS)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PICO)
def test_blocks_one_by_one_give_what_the_whole_model_gives(
    name: str, dtype: torch.dtype, pico_dir: Callable[..., Path]
) -> None:
    """To the bit; experts that are taken apart: to 1e-6 (bfloat16: to two units in the last place)."""
    directory = pico_dir(name, shards=True, dtype=dtype)
    model = skeleton(directory)
    assert model.dtype == dtype
    stream = HiddenStates(len(IDS), None)
    calls = record_inputs(model, IDS, len(IDS), stream, CPU)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    for index, expected in enumerate(outputs_of_blocks(whole, EXPECTED[name][0])):
        block = model.load_block(index, CPU)
        out = run_block(block, calls[index][len(IDS)], stream.read(0, len(IDS)), "block")
        tolerance = 0.0 if name not in MOE else 1e-6 if dtype == torch.float32 else 2**-7
        assert out.dtype == dtype
        assert (out - expected).abs().max() <= tolerance * expected.abs().max(), f"block {index}"
        stream.write(0, expected)
        model.free()


@pytest.mark.parametrize("name", PICO)
def test_blocks_are_filled_and_emptied(name: str, pico_dir: Callable[..., Path]) -> None:
    model = skeleton(pico_dir(name, shards=True))
    whole = PICO[name]()
    for experts_module in [n for n, m in whole.named_modules() if hasattr(m, "gate_up_proj") and n.endswith("experts")]:
        whole.set_submodule(experts_module, Experts.from_fused(whole.get_submodule(experts_module)))
    expected = dict(whole.named_parameters())
    structure = {n: p.shape for n, p in model.model.named_parameters()}
    for _ in range(2):
        assert all(p.is_meta for p in model.model.parameters())
        block = model.load_block(1, CPU)
        for relative, parameter in block.named_parameters():
            assert torch.equal(parameter, expected[model.block_prefix(1) + relative]), relative
            assert not parameter.requires_grad
        others = [p for p in model.model.parameters() if not any(p is q for q in block.parameters())]
        assert others and all(p.is_meta for p in others)
        model.free()
        assert {n: p.shape for n, p in model.model.named_parameters()} == structure
    model.load_rest(CPU)
    filled = {n for n, p in model.model.named_parameters() if not p.is_meta}
    assert all(torch.equal(model.model.get_parameter(n), whole.get_parameter(n)) for n in filled)
    head = {"lm_head.weight", "embed_out.weight"}
    assert {n for n, _ in whole.named_parameters() if ".layers." not in n} - filled <= head


@pytest.mark.parametrize("name", PICO)
def test_every_stored_tensor_has_its_place(name: str, pico_dir: Callable[..., Path]) -> None:
    model = skeleton(pico_dir(name))
    names = {stored.name for sources in model.sources.values() for stored in sources}
    assert names == stored_tensors(pico_dir(name)).keys()
    sizes = {n: stored.nbytes for n, stored in model.checkpoint.tensors.items()}
    by_kind = model.other_nbytes(sizes)
    embeddings = 264 * 64 * 4
    tied = PICO[name]().config.tie_word_embeddings
    assert by_kind["embeddings"] == embeddings and by_kind["output head"] == (0 if tied else embeddings)
    assert sum(by_kind.values()) == sum(sizes.values())
    for spec in model.linears()[0]:
        size = sum(stored.nbytes for stored in model.weight_sources(spec))
        numel = spec.shape[0] * spec.shape[1]
        assert size % (4 * numel) == 0 and (size == 4 * numel or spec.is_expert)


def test_batches_of_other_sizes_have_calls_of_their_own(pico_dir: Callable[..., Path]) -> None:
    model, parts = skeleton(pico_dir("mistral")), {}
    for batch in (1, 2, 3):
        stream = HiddenStates(len(IDS), None)
        calls = record_inputs(model, IDS, batch, stream, CPU)
        assert calls[0].keys() == {min(batch, len(IDS) - start) for start in range(0, len(IDS), batch)}
        parts[batch] = stream.read(0, len(IDS)).clone()
    assert torch.equal(parts[1], parts[3]) and torch.equal(parts[2], parts[3])


def test_blocks_whose_arguments_depend_on_the_tokens_are_refused(pico_dir: Callable[..., Path]) -> None:
    model, calls = skeleton(pico_dir("llama")), itertools.count()
    rotary = model.model.get_submodule("model.rotary_emb")
    rotary.register_forward_hook(lambda _, __, out: (out[0] + next(calls), out[1]))
    record_inputs(model, IDS, len(IDS), HiddenStates(len(IDS), None), CPU)
    with pytest.raises(UnsupportedModelError, match="arguments that differ between samples"):
        record_inputs(model, IDS, 1, HiddenStates(len(IDS), None), CPU)
    assert all(parameter.is_meta for parameter in model.model.parameters())  # and nothing is left in memory


# ---------------------------------------------------------------- what does not fit


def save(directory: Path, model_type: str, values: dict[str, int]) -> None:
    """A model of an architecture or of sizes that the pico models do not have."""
    common = {"vocab_size": 264, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    config = CONFIG_MAPPING[model_type].from_dict({"num_hidden_layers": 2, "pad_token_id": 0, **common, **values})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def test_narrow_linears_are_kept(tmp_path: Path) -> None:
    """A linear with fewer than MIN_FEATURES outputs costs more in padding than it saves."""
    narrow = MIN_FEATURES - 2
    save(tmp_path, "llama", {"head_dim": narrow, "num_key_value_heads": 1, "num_hidden_layers": 1})
    specs, kept = skeleton(tmp_path).linears()
    assert kept == {
        f"model.layers.0.self_attn.{name}": f"narrower than {MIN_FEATURES} features" for name in ("k_proj", "v_proj")
    }
    assert len(specs) == 5


GPT_OSS = {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "intermediate_size": 96}


def test_experts_in_transposed_parameters_with_biases_are_linears(tmp_path: Path) -> None:
    save(tmp_path, "gpt_oss", GPT_OSS)
    model = skeleton(tmp_path)
    specs, kept = model.linears()
    experts = {spec.name.removeprefix("model.layers.1.mlp.experts."): spec for spec in specs if spec.block == 1}
    assert len(specs) == 2 * (4 + 3 * 4) and kept == {}
    assert (experts["3.up_proj"].shape, experts["3.down_proj"].shape) == ((96, 64), (64, 96))
    assert experts["3.up_proj"].input_key == experts["3.gate_proj"].name
    stored = [tensor.name.rpartition(".")[2] for tensor in model.weight_sources(experts["3.up_proj"])]
    assert stored == ["gate_up_proj", "gate_up_proj_bias"]


def test_experts_in_a_layout_that_is_not_known_are_kept_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "gpt_oss", GPT_OSS)
    monkeypatch.setattr(expert_layouts, "CALLS", {})
    specs, kept = skeleton(tmp_path).linears()
    assert len(specs) == 2 * 4 and not any(spec.is_expert for spec in specs)
    reason = "experts that are called with (hidden_states, router_indices, routing_weights), which is not known"
    assert kept == {f"model.layers.{i}.mlp.experts": reason for i in range(2)}


def test_experts_that_compute_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "gpt_oss", GPT_OSS)
    monkeypatch.setattr(expert_layouts, "own_interleaved", expert_layouts.own_concatenated)
    with pytest.raises(UnsupportedModelError, match="GptOssExperts computes something else than its parameters' names"):
        skeleton(tmp_path).load_block(0, torch.device("cpu"))


@pytest.fixture
def llama(pico_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy in one file, to be damaged."""
    return Path(shutil.copytree(pico_dir("llama"), tmp_path / "llama"))


def test_missing_weights(llama: Path) -> None:
    tensors = stored_tensors(llama)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors")
    model = skeleton(llama)
    assert isinstance(model.load_block(0, CPU), nn.Module)
    with pytest.raises(CheckpointError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        model.load_block(1, CPU)


def test_unknown_models(llama: Path) -> None:
    config = json.loads((llama / CONFIG).read_text())
    (llama / CONFIG).write_text(json.dumps({**config, "model_type": "perpetuum_mobile"}))
    with pytest.raises(UnsupportedModelError, match="perpetuum_mobile") as caught:
        skeleton(llama)
    assert "\n" not in str(caught.value)


def test_a_model_without_blocks(llama: Path) -> None:
    config = json.loads((llama / CONFIG).read_text())
    (llama / CONFIG).write_text(json.dumps({**config, "num_hidden_layers": 0}))
    with pytest.raises(UnsupportedModelError):
        skeleton(llama).linears()


def test_the_dtype_of_most_values_where_the_configuration_names_none(tmp_path: Path) -> None:
    save_pico("llama", tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}))
    assert skeleton(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("is_hub_quiet", [False, True])
def test_loading_shows_no_progress_and_keeps_the_settings(
    is_hub_quiet: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, before = save_pico("llama", tmp_path / "model"), logging.is_progress_bar_enabled()
    capfd.readouterr()
    logging.enable_progress_bar()
    (disable_progress_bars if is_hub_quiet else enable_progress_bars)()
    try:
        skeleton = Skeleton(open_checkpoint(directory))
        skeleton.load_block(0, torch.device("cpu"))
        load.load_model(directory)
        assert logging.is_progress_bar_enabled() and are_progress_bars_disabled() == is_hub_quiet
        logging.disable_progress_bar()
        skeleton.load_block(1, torch.device("cpu"))
        assert not logging.is_progress_bar_enabled() and are_progress_bars_disabled()
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert capfd.readouterr() == ("", "")
