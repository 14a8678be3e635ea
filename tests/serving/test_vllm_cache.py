"""Keys and values in packed pages of vLLM. Runs where vLLM is: `make vllm`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_vllm import in_rounds, needed
from transformers import AutoConfig

from compress.kv.cache import make_cache
from compress.model.load import load_model
from compress.runtime import kv_config
from helpers import pico, runs

pytestmark = needed

MEMORY = 4 << 20  # bytes of the cache
N = 32  # tokens of a page
FLIPPED = 0.05  # nats that sums which differ in their last bit may move, where a code lies at the edge of the next
EIGHT_BITS = 1e-3  # KL of 8-bit keys and values, by far
HEADS = {"num_attention_heads": 4, "head_dim": 32}  # two query heads for each KV head
GEMMA = {**HEADS, "num_key_value_heads": 2, "intermediate_size": 144, "query_pre_attn_scalar": 32}
OPTIONS = {"kv_cache_memory_bytes": MEMORY, "block_size": N, "max_model_len": 256, "max_logprobs": -1}
UNSET = "import os; os.environ.pop('VLLM_CPU_KVCACHE_SPACE')"  # it goes before `kv_cache_memory_bytes`
MIXED = "kv_cache.layers=[{match: 1, values: {bits: 4}}]"  # of 8 bits elsewhere
BYTES = {"eight": 2 * (32 + 4), "mixed": 32 + 4 + 16 + 4}  # of a token and KV head of 32 channels


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = prompt(96, 0)
FOUR = [prompt(length, length) for length in (5, 33, 64, 100)]
MANY = [prompt(5 + 7 * index, 100 + index) for index in range(16)]
HITS = [SHARED + prompt(20, 1), SHARED + prompt(9, 2)]  # the second meets pages of the first
AGAIN = [prompt(8, 3) * 8]  # its end is found in it: drafts


def fresh(*prompts: list[int], tokens: int = 6, **more: Any) -> dict[str, Any]:
    return {"prompts": list(prompts), "tokens": tokens, "fresh": True, **more}


ALONE = [fresh(each) for each in (*FOUR, *MANY, *HITS, *AGAIN)]
SCORED = fresh(prompt(120, 4), tokens=1, scored=-1)


def asked(directory: Path, folder: Path, rounds: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return in_rounds(directory, folder, rounds, patch=UNSET, **OPTIONS, **options)


def flat(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [answer for each in rounds for answer in each]


def check_same(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """The same tokens, unless two were as likely but for what a flipped code makes."""
    for answer, other in zip(answers, others, strict=True):
        assert answer["prompt"] == other["prompt"]
        for here, there, row in zip(answer["ids"], other["ids"], answer["logprobs"], strict=True):
            if here != there:
                assert abs(row[str(here)] - row.get(str(there), -torch.inf)) < FLIPPED
                break


def divergence(answer: dict[str, Any], other: dict[str, Any]) -> float:
    """KL of all next-token probabilities in a prompt."""
    p, q = torch.tensor(answer["scores"]).double(), torch.tensor(other["scores"]).double()
    assert p.shape == (119, pico.VOCAB_SIZE)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def mixed(packed: Callable[..., Path]) -> Path:
    """8-bit keys, 8- and 4-bit values by layer; weights as they are."""
    learned = ("kv_cache.method=balanced", *runs.SMALL)  # means and maps for each head
    return packed("llama", "kv8p", *learned, MIXED, **HEADS)


@pytest.fixture(scope="module")
def alone(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    rounds = [*ALONE, fresh(*FOUR), fresh(*MANY), fresh(HITS[0]), {**fresh(HITS[1]), "fresh": False}, SCORED]
    return {**asked(mixed, folder, rounds), "log": (folder / "log").read_text()}


def test_blocks_are_counted_from_the_bytes(alone: dict[str, Any]) -> None:
    sizes = [2 * N * BYTES[kind] for kind in ("eight", "mixed")]  # KV heads, tokens, bytes
    blocks = MEMORY // sum(sizes)
    assert alone["cache"] == {
        "blocks": blocks,
        "shapes": [[blocks, 2, N, BYTES[kind]] for kind in ("eight", "mixed")],
        "kinds": ["PagedAttention"] * 2,
    }
    assert f"{sum(sizes) // N} bytes a token, {sum(sizes) / (2 * 2 * N * 4 * 64):.3f} of vLLM's own" in alone["log"]


def test_requests_at_once_get_the_tokens_of_one_alone(alone: dict[str, Any]) -> None:
    answers = flat(alone["rounds"])
    check_same(answers[:20], answers[len(ALONE) : len(ALONE) + 20])


def test_cached_prefixes_give_the_tokens_of_fresh_ones(alone: dict[str, Any]) -> None:
    known, (first, second) = flat(alone["rounds"])[20:22], flat(alone["rounds"])[-3:-1]
    check_same(known, [first, second])
    assert [first["hits"], second["hits"]] == [0, len(SHARED)]


def test_chunks_give_what_one_chunk_gives(alone: dict[str, Any], mixed: Path, tmp_path: Path) -> None:
    chunked = asked(mixed, tmp_path, [*ALONE, SCORED], max_num_batched_tokens=N)
    check_same(flat(alone["rounds"])[: len(ALONE)], flat(chunked["rounds"])[:-1])
    assert divergence(flat(alone["rounds"])[-1], flat(chunked["rounds"])[-1]) < FLIPPED


def test_codes_are_near_to_exact_keys_and_values(alone: dict[str, Any], mixed: Path, tmp_path: Path) -> None:
    exact = asked(mixed.parent / "model", tmp_path, [SCORED])
    assert 1e-8 < divergence(exact["rounds"][0][0], flat(alone["rounds"])[-1]) < FLIPPED


@torch.no_grad()
def test_scores_are_those_of_transformers_with_the_same_codes(alone: dict[str, Any], mixed: Path) -> None:
    """There, too, a prompt reads its own tokens through the codes; some lie at the edge of the next."""
    model = load_model(mixed, dtype=torch.float32).eval()
    section = model.config.quantization_config.kv_cache
    settings = kv_config.read(section, 2)
    tensors = kv_config.read_static(section, mixed, model.config, settings)
    cache = make_cache(model.config, settings, static=tensors)
    known = model(torch.tensor(SCORED["prompts"]), past_key_values=cache).logits[0, :-1].log_softmax(-1)
    errors = (known - torch.tensor(flat(alone["rounds"])[-1]["scores"])).abs().amax(-1)
    assert errors[:8].max() < 1e-4 and errors.max() < FLIPPED and cache.nbytes().codes > 0


def test_a_recipe_that_pages_cannot_hold_has_its_nearest(packed: Callable[..., Path], tmp_path: Path) -> None:
    """Beside packed weights, and a layer that stays exact."""
    skipped = "kv_cache.skip_layers=[0]"
    directory = packed("llama", "w4kv4", *runs.SMALL, "quantize.group_size=32", skipped, **HEADS)
    served = asked(directory, tmp_path, [fresh(*FOUR)])
    sizes = [2 * 32 * 4, 2 * (16 + 4)]  # bytes of a token and KV head
    assert served["cache"]["kinds"] == ["CPUAttentionBackendImpl", "PagedAttention"]
    assert served["cache"]["shapes"][1][3] == sizes[1] and served["cache"]["blocks"] == MEMORY // (2 * N * sum(sizes))
    said = (tmp_path / "log").read_text()
    assert said.count("kv_cache: layer 1, keys: pages hold tokens coded alone") == 1 and "packed weights" in said


def test_drafts_are_verified_on_pages(alone: dict[str, Any], mixed: Path, tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    drafted = asked(mixed, tmp_path, ALONE, speculative_config=drafts, disable_log_stats=False)
    assert drafted["drafts"]["accepted_tokens"] > 0
    check_same(flat(alone["rounds"])[: len(ALONE)], flat(drafted["rounds"]))


def test_compiled_by_vllm(alone: dict[str, Any], mixed: Path, tmp_path: Path) -> None:
    compiled = asked(mixed, tmp_path, ALONE, enforce_eager=False)
    assert "saved AOT compiled function" in (tmp_path / "log").read_text()
    check_same(flat(alone["rounds"])[: len(ALONE)], flat(compiled["rounds"]))


def test_two_ranks_have_a_head_each(alone: dict[str, Any], mixed: Path, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    shared = asked(mixed, tmp_path, ALONE, tensor_parallel_size=2, environment=environment)
    assert shared["cache"]["blocks"] == MEMORY // (N * sum(BYTES.values()))
    check_same(flat(alone["rounds"])[: len(ALONE)], flat(shared["rounds"]))


def test_sliding_windows_are_coded_too(packed: Callable[..., Path], tmp_path: Path) -> None:
    """Three layers in four see 32 tokens; pages that differ by layer are not padded."""
    kinds = ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention")
    changes = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": N, **GEMMA}
    directory = packed("gemma3_text", "kv8p", MIXED, **changes)
    coded = asked(directory, tmp_path, [SCORED, *ALONE[:4], fresh(*FOUR)])
    exact = asked(directory.parent / "model", tmp_path, [SCORED])
    assert 1e-8 < divergence(exact["rounds"][0][0], coded["rounds"][0][0]) < FLIPPED
    check_same(flat(coded["rounds"])[1:5], flat(coded["rounds"])[5:])
    assert coded["cache"]["kinds"] == ["PagedAttention"] * 4
    assert coded["cache"]["blocks"] == MEMORY // (2 * N * BYTES["eight"])  # of one layer: each has blocks of its own


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from compress.serving import vllm_cache

    lines: list[str] = []
    monkeypatch.setattr(vllm_cache.logger, "warning", lines.append)
    monkeypatch.setattr(vllm_cache, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(vllm_cache, "get_tensor_model_parallel_world_size", lambda: 1)
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    engine = SimpleNamespace(
        kv_transfer_config=None,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    monkeypatch.setattr(vllm_cache, "get_current_vllm_config", lambda: engine)
    return lines


def attention(**changes: Any) -> Any:
    """A layer of vLLM as it is when its quantization method is asked."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    backend = AttentionBackendEnum.CPU_ATTN
    impl = SimpleNamespace(scale=0.1, alibi_slopes=None, logits_soft_cap=0)
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "head_size_v": 32, "sliding_window": None}
    facts |= {"attn_type": "decoder", "kv_cache_dtype": "auto", "kv_cache_torch_dtype": torch.float32}
    facts |= {"has_sink": False, "use_alibi_sqrt": False, "use_mm_prefix": False, "kv_sharing_target_layer_name": None}
    vars(layer).update({**facts, "impl": impl, "backend": backend, "attn_backend": backend.get_class(), **changes})
    return layer


def cache_of(directory: Path) -> Any:
    from compress.serving.vllm_cache import VllmCache
    from compress.serving.vllm_cache_settings import CheckpointCache

    config = AutoConfig.from_pretrained(directory)
    return VllmCache(CheckpointCache(config.quantization_config["kv_cache"], str(directory), config))


@pytest.mark.parametrize(
    "reason, changes",
    [
        ("attention sinks", {"has_sink": True}),
        ("ALiBi", {"use_alibi_sqrt": True}),
        ("a cap on scores", {"impl": SimpleNamespace(alibi_slopes=None, logits_soft_cap=50.0)}),
        ("attention of encoders", {"attn_type": "encoder_only"}),
        ("tokens of images that attend to later ones", {"use_mm_prefix": True}),
        ("attention of a kind of their own", {"attn_backend": object}),
    ],
)
def test_what_pages_cannot_hold_keeps_vllms_cache(
    reason: str, changes: dict[str, Any], mixed: Path, said: list[str]
) -> None:
    cache, layer = cache_of(mixed), attention(**changes)
    for index in (0, 1, 1):  # the last is asked again
        cache.place(layer, f"model.layers.{index}.self_attn.attn")
    cache.finish()
    assert type(layer.impl) is SimpleNamespace
    first = "(the first is model.layers.0.self_attn.attn): vLLM keeps a cache of its own there"
    assert said == [f"the kv_cache section is not applied to layers with {reason} {first}"]


def test_a_layer_reads_the_pages_of_another_as_they_were_written(mixed: Path, said: list[str]) -> None:
    from compress.serving import vllm_cache

    cache, target = cache_of(mixed), attention()
    layers = vllm_cache.get_current_vllm_config().compilation_config.static_forward_context
    names = [f"model.layers.{index}.self_attn.attn" for index in range(2)]
    layers[names[0]] = target
    sharing = attention(kv_sharing_target_layer_name=names[0])
    for layer, name in zip((target, sharing), names, strict=True):
        cache.place(layer, name)
    assert sharing.impl.cache is target.impl.cache and sharing.attn_backend is target.attn_backend and not said
    draft = attention()
    cache.place(draft, "mtp.layers.0.self_attn.attn")
    assert type(draft.impl) is SimpleNamespace


def test_as_much_memory_is_taken_while_vllm_measures_it(
    mixed: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.kv.pages import Turn

    layer, turned = attention(), list[tuple[int, ...]]()
    cache_of(mixed).place(layer, "model.layers.0.self_attn.attn")
    for name in ("query", "out_of"):
        turn = getattr(Turn, name)
        monkeypatch.setattr(Turn, name, lambda self, x, turn=turn: turned.append(tuple(x.shape)) or turn(self, x))
    query, output = torch.randn(7, 4, 32), torch.full((7, 4, 32), torch.nan)
    layer.impl.forward(layer, query, query[:, :2], query[:, :2], torch.empty(0), None, output)
    assert turned == [(7, 4, 32)] * 2 and not output.any() and not said


def test_a_gpu_without_kernels_is_told_of_vllms_own_types(
    mixed: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.serving import vllm_cache

    monkeypatch.setattr(vllm_cache, "is_read", lambda layer, layer_cache: False)
    layer = attention()
    cache_of(mixed).place(layer, "model.layers.0.self_attn.attn")
    (line,) = said
    assert "--kv-cache-dtype int8_per_token_head (72 bytes) or --kv-cache-dtype turboquant_k8v4 (52 bytes)" in line
    assert type(layer.impl) is SimpleNamespace
