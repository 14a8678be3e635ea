"""What an engine can serve in a given memory, against sums that are written out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from compress import api, formats
from compress.cli import capacity as words
from compress.cli.options import parse_serve
from compress.errors import CompressError
from compress.kv.settings import cache_settings
from compress.model.load import plain_config
from compress.model.skeleton import Skeleton
from compress.run import capacity, kv_cache, plan_serving, prepare, rank_weights, source
from compress.run.capacity import ServingMemory
from compress.types import PackedWeight, Plan
from helpers.runs import KEEP_TABLES, RTN, Setup, cli, job, one_line

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 320, "dtype": "bfloat16"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LAYERS, POSITIONS = 2, 5000
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 16},
    "window": {"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 100}
    | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
    "latent": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    | {"n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16}
    | {"qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 64},
    "hybrid": {"model_type": "qwen3_next", "num_key_value_heads": 2, "head_dim": 16, **EXPERTS}
    | {"shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    "states": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "experts": {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 16, **EXPERTS},
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@pytest.fixture(scope="module")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model that has a config.json and nothing else."""

    def directory(name: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"capacity-{name}"
        if not path.is_dir():
            path.mkdir()
            config = {**SMALL, **MODELS[name], "num_hidden_layers": LAYERS, "max_position_embeddings": POSITIONS}
            config["architectures"] = [CLASSES[config["model_type"]]]
            (path / "config.json").write_text(json.dumps(config))
        return path

    return directory


def blocks(tokens: int, block: int) -> int:
    return (tokens + block - 1) // block


def grouped(tokens: int, block: int, devices: int) -> int:
    heads = {1: 2, 2: 1, 4: 1}[devices]
    return 2 * blocks(tokens, block) * block * 2 * heads * 16 * 2  # layers, keys and values, width, bytes


def window(tokens: int, block: int, devices: int) -> int:
    a_block = block * 2 * 1 * 16 * 2
    most = max(len({token // block for token in range(start, start + 100)}) for start in range(block))
    return (blocks(tokens, block) + min(blocks(tokens, block), most)) * a_block


def latent(tokens: int, block: int, devices: int) -> int:
    return 2 * blocks(tokens, block) * block * (32 + 16) * 2  # the latent and the rotary key, whole on every device


def hybrid(tokens: int, block: int, devices: int) -> int:
    state = 4 * 16 * 16 * 4 + (2 * 2 * 16 + 4 * 16) * 4 * 2  # float32; four columns of the convolution, bfloat16
    state, token = state // devices, 2 * (2 // min(devices, 2)) * 16 * 2
    larger = next(block * n for n in range(1, 10**6) if block * n * token >= state)
    return blocks(tokens, larger) * larger * token + larger * token


def states(tokens: int, block: int, devices: int) -> int:
    return 2 * (8 * 16 * 16 * 4 + (128 + 2 * 16) * 4 * 2) // devices  # float32; the convolution's four columns


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("expected", [grouped, window, latent, hybrid, states])
def test_bytes_of_a_sequence(expected: Callable[..., int], devices: int, config_dir: Callable[[str], Path]) -> None:
    config = plain_config(config_dir(expected.__name__))
    for block in (16, 128):
        kept = capacity.served_cache(config, None, ServingMemory(1 << 30, devices, 0, block))
        for tokens in (1, 15, 16, 17, 99, 100, 101, 129, 4096, 4999):
            assert kept.nbytes(tokens) == expected(tokens, block, devices), (block, tokens)


def rows(devices: int, name: str) -> int:
    """Bytes of the original on one device, added up by hand: bfloat16, vocabulary 320, hidden 64."""
    kv = 16 * max(1, (1 if name == "window" else 2) // devices)
    queries, inner, norms = 64 // devices, 128 // devices, 64
    attention = 64 * (2 * queries + 2 * kv)
    table = 320 // devices * 64
    if name == "window":
        return 2 * (2 * (attention + 3 * 64 * inner + 4 * norms + 2 * 16) + norms + table)
    if name == "experts":
        experts = 8 * 3 * 64 * (64 // devices) + 8 * 64  # and the router
        return 2 * (2 * (attention + experts + 2 * norms + 2 * 16) + norms + 2 * table)
    return 2 * (2 * (attention + 3 * 64 * inner + 2 * norms) + norms + 2 * table)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["grouped", "window", "experts"])
def test_bytes_of_plain_weights(name: str, devices: int, config_dir: Callable[[str], Path], tmp_path: Path) -> None:
    skeleton = Skeleton(source.open_or_imagine(job(config_dir(name), RTN, tmp_path / "out")))
    held = rank_weights.Devices(skeleton, devices).weights(None, torch.bfloat16)
    assert held.nbytes == rows(devices, name)
    assert bool(held.whole) == (devices > 1)


@pytest.mark.parametrize(("linear", "share"), [("q_proj", 4), ("k_proj", 2), ("v_proj", 2), ("o_proj", 4)])
def test_four_devices_share_gated_queries_and_two_kv_heads(
    linear: str, share: int, config_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    skeleton = Skeleton(source.open_or_imagine(job(config_dir("hybrid"), RTN, tmp_path / "out")))
    name = f"model.layers.1.self_attn.{linear}.weight"
    kept = {name: skeleton.checkpoint.tensors[name].nbytes}
    held = rank_weights.Devices(skeleton, 4).weights(Plan((), kept_nbytes=kept), torch.bfloat16)
    assert held.nbytes == kept[name] // share


@pytest.mark.parametrize("name", ["grouped", "experts", "latent", "hybrid"])
def test_packed_weights_are_cut_as_they_are_served(
    name: str, config_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """The sum over weights with numbers in them, cut for each device."""
    asked = job(config_dir(name), RTN, tmp_path / "out")
    skeleton = Skeleton(source.open_or_imagine(asked))
    planned = prepare.make_plans(asked, skeleton, [asked.recipe])[0][0]
    two = rank_weights.Devices(skeleton, 2).weights(planned, torch.bfloat16)
    sums = [0, 0]
    for layer in planned.packed:
        last = layer.spec.name.rsplit(".", 1)[1]
        shape = layer.spec.shape
        tensors = {n: torch.zeros(s, dtype=d) for n, (s, d) in formats.specs(layer.stored, shape).items()}
        weight = PackedWeight(layer.stored, tensors, shape)
        for device in range(2):
            spans = [range(n // 2 * device, n // 2 * (device + 1)) for n in shape]
            if last in ("q_a_proj", "kv_a_proj_with_mqa"):
                sums[device] += layer.nbytes
            elif last in ("o_proj", "down_proj", "out_proj"):
                sums[device] += formats.cut(weight, range(shape[0]), spans[1]).nbytes
            else:
                sums[device] += formats.cut(weight, spans[0], range(shape[1])).nbytes
    plain = rank_weights.Devices(skeleton, 2).weights(Plan((), kept_nbytes=planned.kept_nbytes), torch.bfloat16)
    assert max(sums) + plain.nbytes == two.nbytes
    one = rank_weights.Devices(skeleton, 1).weights(planned, torch.bfloat16)
    assert one.nbytes == planned.nbytes


def test_a_packed_checkpoint_is_planned_by_what_it_stores(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    asked = job(
        pico_dir("llama", dtype=torch.bfloat16),
        Setup("int8", (*KEEP_TABLES, "kv_cache.method=kivi")),
        tmp_path / "packed",
    )
    before = plan_serving.of_job(asked, ServingMemory(1 << 24))
    api.quantize(asked)
    after = plan_serving.of_job(job(tmp_path / "packed", RTN, tmp_path / "out"), ServingMemory(1 << 24))
    for told in (before, after):
        for row in told["choices"]:
            for key in ("weights", "cache"):
                row[key] = row[key] == "bf16"
    assert before == after


def test_a_checkpoint_that_says_a_cache_alone_is_planned(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    api.quantize(dataclasses.replace(job(pico_dir("llama"), Setup("kv4"), tmp_path / "cached"), pack=False))
    told = plan_serving.of_job(job(tmp_path / "cached", RTN, tmp_path / "out"), ServingMemory(1 << 24))
    assert [(row["weights"], row["cache"]) for row in told["choices"]] == [("bf16", "bf16"), ("bf16", "cached")]


def test_a_cache_that_keeps_exact_tokens_counts_at_its_most(config_dir: Callable[[str], Path]) -> None:
    config = plain_config(config_dir("grouped"))
    settings = cache_settings({"method": "kivi", "bits": 2, "residual_length": 32, "sink": 4, "values": {"bits": 4}})
    layers = kv_cache.CodedLayers(config, settings, {}, torch.bfloat16)
    grown = [layers.nbytes(tokens).total for tokens in range(1, 140)]
    assert any(later < sooner for sooner, later in zip(grown, grown[1:], strict=False))  # when tokens are coded
    for tokens in (30, 68, 99, 100, 139):
        assert layers.nbytes(tokens, at_most=True).total == max(grown[:tokens])


def test_a_cache_whose_tokens_are_coded_alone_lies_in_blocks(config_dir: Callable[[str], Path]) -> None:
    config = plain_config(config_dir("grouped"))
    settings = cache_settings({"method": "fp8", "sink": 0, "residual_length": 0})
    for devices, heads in ((1, 2), (2, 1), (4, 1)):
        kept = capacity.served_cache(config, settings, ServingMemory(1 << 30, devices))
        assert kept.nbytes(17) == 2 * 32 * 2 * heads * (16 + 2), devices  # bytes, and a float16 scale


def test_a_state_is_padded_to_a_block_of_one_coded_layer(config_dir: Callable[[str], Path]) -> None:
    config = plain_config(config_dir("hybrid"))
    config.num_hidden_layers, config.layer_types = 4, config.layer_types * 2
    settings = cache_settings({"method": "fp8", "sink": 0, "residual_length": 0})
    token, state = 2 * 2 * (16 + 2), 4 * 16 * 16 * 4 + (2 * 2 * 16 + 4 * 16) * 4 * 2
    block = next(16 * n for n in range(1, 10**6) if 16 * n * token >= state)
    assert capacity.served_cache(config, settings, ServingMemory(1 << 30)).nbytes(1) == 2 * block * token * 2


def test_coded_states_count_as_they_are_kept(config_dir: Callable[[str], Path]) -> None:
    config = plain_config(config_dir("hybrid"))
    plain, coded = (
        capacity.served_cache(config, settings, ServingMemory(1 << 30, block=1)).nbytes(100)
        for settings in (None, cache_settings({"states": 12}))
    )
    assert plain - coded == 4 * 16 * (16 * 4 - 16 - 8 - 4)  # rows: float32, less codes, residuals and a scale


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(CompressError, match="it has no cache, or its own"):
        capacity.count(1, capacity.ServedCache({}, 16), ServingMemory(1 << 20), None)


@pytest.mark.parametrize("name", MODELS)
def test_more_memory_serves_no_less(name: str, config_dir: Callable[[str], Path]) -> None:
    kept = capacity.served_cache(plain_config(config_dir(name)), None, ServingMemory(0))
    before: tuple[int, ...] = (0, 0)
    for nbytes in (0, 40_000, 100_000, 300_000, 1 << 20, 1 << 22):
        told = capacity.count(30_000, kept, ServingMemory(nbytes), POSITIONS)
        now = told["context"], told["batch"]["4096"]
        assert all(a <= b for a, b in zip(before, now, strict=True))
        assert kept.nbytes(max(1, told["context"])) <= told["room_nbytes"] or told["context"] == 0
        assert told["context"] == POSITIONS or kept.nbytes(told["context"] + 1) > told["room_nbytes"]
        before = now
    assert before == (POSITIONS, now[1]) and told["is_all_positions"] and told["batch"]["32768"] is None


def test_what_is_printed(config_dir: Callable[[str], Path]) -> None:
    words = ["plan", str(config_dir("grouped")), "--recipe", "w4kv4", "--serve", "2x1MiB", "--reserve", "25%"]
    shown = cli(*words)
    assert (shown.code, shown.err) == (0, "") and "there are no weights: sizes are those of config.json" in shown.out
    assert "2 devices of 1.00 MiB, 256.00 KiB of it each kept free" in shown.out
    assert "the model has 5,000 positions" in shown.out and "too long" in shown.out
    told = json.loads(cli(*words, "--json").out)
    assert [(row["weights"], row["cache"]) for row in told["choices"]] == [
        ("bf16", "bf16"),
        ("bf16", "w4kv4"),
        ("w4kv4", "bf16"),
        ("w4kv4", "w4kv4"),
    ]
    assert (told["devices"], told["nbytes"], told["reserve"], told["block"]) == (2, 1 << 20, 1 << 18, 16)


def test_words_of_a_choice() -> None:
    short = {"context": 2048, "is_all_positions": True, "batch": {"4096": None, "32768": None}}
    assert words.serving_line(short) == "serves: one sequence of 2,048 tokens (all positions)"
    free = {"context": capacity.UNLIMITED, "is_all_positions": False, "batch": {"4096": 7, "32768": 7}}
    assert words.serving_line(free).startswith("serves: one sequence of any length; at a time 7 of 4,096 tokens, or 7")
    assert words.serving_line({"reason": "it has no cache"}) == "serves: it has no cache"


def test_errors_are_one_line(config_dir: Callable[[str], Path]) -> None:
    said = one_line(cli("plan", str(config_dir("grouped")), "--serve", "3x1MiB"))
    assert said == "3 devices cannot share 4 query heads and 2 KV heads; give 1, 2, 4"


@pytest.mark.parametrize(
    ("serve", "reserve", "says"),
    [
        ("24", "10%", "'24' has no unit; 24GiB?"),
        ("0x1MiB", "10%", "'0x1MiB' is not a size such as 24GiB or 8x141GiB"),
        ("much", "10%", "'much' is not a size"),
        ("1MiB", "200%", "'200%' is not a share such as 10%"),
        ("1MiB", "some", "'some' is not a size"),
    ],
)
def test_wrong_usage(serve: str, reserve: str, says: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(says)):
        parse_serve(serve, reserve, "auto")


def test_blocks_are_those_of_the_device() -> None:
    assert parse_serve("8 x 1.5GB", "2GiB", "auto") == ServingMemory(1_500_000_000, 8, 2 << 30, 16)
    assert parse_serve("1GiB", "12.5%", "cpu") == ServingMemory(1 << 30, 1, 1 << 27, 128)


def test_a_configuration_of_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}')
    with pytest.raises(CompressError, match="has no weights, and transformers cannot make a model"):
        plan_serving.of_job(job(tmp_path, RTN, tmp_path / "out"), ServingMemory(1 << 30))
