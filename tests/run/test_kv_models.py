"""Cache recipes on models of all sorts: generation works, or one line refuses before any work and says what to do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, recipe
from compress.errors import RecipeError, UnreadCacheError
from compress.kv import generation
from compress.kv.cache import make_cache
from compress.kv.settings import cache_settings
from compress.model import cache_pass
from compress.run import kv_cache
from compress.run.job import Job
from helpers.pico import of_type, save
from helpers.runs import TEXT, cli, one_line

HEADS: dict[str, Any] = {"head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 64}
LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 32},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
BY_LAYER: dict[str, Any] = {
    **HEADS,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "cohere": HEADS,
    "deepseek_v3": LATENT,
    "falcon_h1": {**HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "gemma2": {**HEADS, "sliding_window": 32},
    "gemma4_text": {
        **BY_LAYER,
        "vocab_size_per_layer_input": 264,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {**HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 32},
    "gpt2": {"n_inner": 64},
    "gptj": {"rotary_dim": 16},
    "jamba": {**HEADS, "attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False, "num_experts": 2},
    "llama": HEADS,
    "mamba": {"state_size": 16},
    "minimax": {**HEADS, "num_local_experts": 2, "layer_types": ["full_attention", "linear_attention"]},
    "mpt": {"use_cache": True},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64, "dropout": 0.0},
    "rwkv": {"attention_hidden_size": 64, "intermediate_size": 64},
    "stablelm": {"num_key_value_heads": 2, "intermediate_size": 64},
}
KIVI = "{method: kivi, bits: 4, group_size: 16, residual_length: 32, other_layers: exact}"
NO_LAYER = "no layer of this model has the full attention that is coded"
NO_ROPE = "stores keys before the rotary embedding, but this model has none of the half-split form; choose another"
NOT_WATCHED = "cannot be calibrated on this model, because "
NO_QUERIES = "with these settings needs the queries of attention, which cannot be replaced in this model; choose other"


def settings(text: str) -> Any:
    loaded = recipe.load("kv8", [f"kv_cache={text}"])
    assert loaded.kv_cache is not None
    return loaded.kv_cache


def generated(model: PreTrainedModel) -> Any:
    ids = torch.arange(90)[None] % 250
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how).past_key_values


@pytest.mark.parametrize("name", ["cohere", "deepseek_v3", "gemma4_text", "gptj", "jamba", "opt", "stablelm"])
def test_a_cache_from_recipe_to_generation(name: str, tmp_path: Path) -> None:
    directory = save(of_type(name, MODELS[name]), tmp_path / name)
    loaded = recipe.load("kv8", [f"kv_cache={KIVI}"])
    api.quantize(Job(str(directory), loaded, tmp_path / "out", calib=str(TEXT), pack=False))
    assert generated(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).nbytes().codes > 0


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4_text", "gpt2", "jamba"])
def test_a_recipe_as_it_is(name: str, tmp_path: Path) -> None:
    """Narrow latents, layers of other types and a model without linears need no setting."""
    directory = save(of_type(name, MODELS[name]), tmp_path / name)
    report = api.quantize(Job(str(directory), recipe.load("kv4"), tmp_path / "out", pack=False))
    others = {"gemma4_text": "1 of sliding_attention", "jamba": "1 of linear_attention"}.get(name)
    notes = report["notes"].get("kv_cache", [])
    expected = f"the cache of 1 of 2 layers ({others}) stays as it is; the others' is coded"
    assert notes == ([expected] if others else [])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(200)[None] % 250
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), output_logits=True, **how)
    assert found.past_key_values.nbytes().codes > 0
    exact = AutoModelForCausalLM.from_pretrained(directory).generate(
        ids, attention_mask=torch.ones_like(ids), output_logits=True, **how
    )
    first, wanted = (torch.stack(x.logits[:2]) for x in (found, exact))
    assert ((first - wanted).norm() / wanted.norm()).item() < 0.1


@pytest.mark.parametrize(
    ("name", "cache", "message"),
    [
        ("mamba", KIVI, NO_LAYER),
        ("rwkv", KIVI, NO_LAYER),
        ("falcon_h1", KIVI, NO_LAYER),
        ("falcon_h1", "{method: kivi}", NO_LAYER),
        (
            "jamba",
            "{method: kivi, other_layers: error}",
            "layer 0 is linear_attention, which is not coded; set kv_cache.other_layers: exact",
        ),
        (
            "minimax",
            "{method: kivi}",
            "this model takes no cache but one of its own class, MiniMaxCache; remove kv_cache",
        ),
        ("jamba", "{method: pca, other_layers: exact}", f"layer 1, keys: pca {NO_ROPE}"),
        (
            "gemma4_text",
            "{method: kivi, other_layers: error}",
            "layer 0 is sliding_attention, which is not coded; set kv_cache.other_layers",
        ),
        (
            "gemma4_text",
            "{method: kivi, group_size: 48, other_layers: exact}",
            "does not divide the head's 64 channels",
        ),
        ("gpt_oss", "{method: squat, other_layers: exact}", f"squat {NOT_WATCHED}its attention has sink logits"),
        ("gptj", "{method: kvquant}", f"kvquant {NOT_WATCHED}its attention is not called through the interface"),
        ("gptj", "{method: zipvl}", f"zipvl {NO_ROPE}"),
        ("mpt", "{method: pca}", f"layer 0, keys: pca {NOT_WATCHED}its attention is not called through the interface"),
        ("opt", "{method: lloyd}", f"lloyd {NO_ROPE}"),
        ("cohere", "{method: pca}", f"pca {NO_ROPE}"),
        ("deepseek_v3", "{method: kvquant}", f"kvquant {NOT_WATCHED}what it caches is not what its attention reads"),
        ("deepseek_v3", "{method: zipvl, judge: probes}", f"layer 0, keys: zipvl {NO_QUERIES}"),
        (
            "llama",
            "{method: rotatekv, group_size: 128}",
            "keys: group_size 128 does not divide the 64 channels of a token",
        ),
        ("llama", "{method: squat, group_size: 24}", "values: group_size 24 does not divide the head's 32 channels"),
    ],
)
def test_what_does_not_fit_is_said_before_any_work(name: str, cache: str, message: str) -> None:
    config = of_type(name, MODELS[name]).config
    with pytest.raises(RecipeError) as error:
        kv_cache.check(config, settings(cache))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_command_line_says_it_before_the_run(tmp_path: Path) -> None:
    directory = save(of_type("mamba", MODELS["mamba"]), tmp_path / "mamba")
    for command in (("plan",), ("quantize", "--out", str(tmp_path / "out"))):
        line = one_line(cli(command[0], str(directory), "--recipe", "w4kv4", *command[1:]))
        assert line.startswith(f"kv_cache: {NO_LAYER}")
    assert not list(tmp_path.glob("out*"))


def test_what_layers_cache_is_seen() -> None:
    find = lambda name: cache_pass.cached_layers(of_type(name, MODELS[name]).config)  # noqa: E731
    mixed = find("gemma4_text")
    assert [(h.keys, h.values, h.rotary) for h in mixed.by_layer.values()] == [((2, w), (2, w), w) for w in (32, 64)]
    assert mixed.widest == 64 * (2 + 2 + 4)
    latent = find("deepseek_v3")
    assert latent.by_layer[0].keys == (1, 32) and latent.by_layer[0].values == (1, 16) and not latent.is_fused
    assert latent.by_layer[0].unwatched == cache_pass.LATENTS
    assert list(find("jamba").by_layer) == [1] and not find("rwkv").by_layer
    plain = find("llama")
    assert plain.is_fused and plain.is_half_split and not plain.by_layer[1].unwatched
    assert find("stablelm").by_layer[0].rotary == 4
    assert not find("cohere").is_half_split


def test_a_model_that_cannot_run_without_data_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("needs data")

    monkeypatch.setattr(cache_pass, "_run", fail)
    found = cache_pass.cached_layers(of_type("llama", MODELS["llama"]).config)
    assert found == cache_pass.CachedLayers(
        dict.fromkeys(range(2), cache_pass.CachedHeads((2, 32), (2, 32), 32)), queries=4
    )


@pytest.mark.parametrize("name", ["gptj", "deepseek_v3"])
def test_codecs_that_need_queries_are_refused_when_they_are_attached(name: str) -> None:
    """Whether the model's class says that its attention cannot be replaced, or a forward pass shows it."""
    model = of_type(name, MODELS[name])
    with pytest.raises(RecipeError, match=f"kv_cache: keys: zipvl {NO_QUERIES}"):
        generation.attach(model, {"method": "zipvl", "judge": "probes"})
    assert not hasattr(model, "kv_cache") and generated(model) is not None
    generation.attach(model, {"method": "zipvl", "keys": {"method": "fp8"}, "values": {"judge": "probes"}})


def test_a_fused_cache_that_attention_cannot_read() -> None:
    """A sub-model, attention of another kind, attention weights: one line, and all is as before."""
    model = of_type("llama", MODELS["llama"])
    model.set_attn_implementation("eager")
    section = cache_settings({"method": "kivi", "group_size": 16, "residual_length": 32})
    generation.attach(model, section)
    expected = generated(model).nbytes()
    ids = torch.arange(90)[None]
    fused = partial(make_cache, model.config, section, path="fused")
    for call in (model.model, of_type("llama", MODELS["llama"])):
        with pytest.raises(UnreadCacheError, match="past_key_values=..., to the whole model that") as error:
            call(ids, past_key_values=fused(), use_cache=True)
        assert "\n" not in str(error.value)
    with pytest.raises(UnreadCacheError, match="no attention weights; ask for no output_attentions") as error:
        model(ids, past_key_values=fused(), output_attentions=True)
    assert "\n" not in str(error.value)
    with pytest.raises(UnreadCacheError, match="no attention weights"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    assert model.config._attn_implementation == "eager"
    assert generated(model).nbytes() == expected
    weights = model(ids, past_key_values=make_cache(model.config, section), output_attentions=True).attentions
    assert [x.shape for x in weights] == [(1, 4, 90, 90)] * 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("use_cache", False, "use_cache: false, so that"), ("cross_attention_layers", [1], "attend to images")],
)
def test_a_cache_that_is_not_kept_or_is_looked_into_is_refused(key: str, value: Any, said: str) -> None:
    config = of_type("llama", HEADS).config
    setattr(config, key, value)
    with pytest.raises(RecipeError, match=said):
        kv_cache.check(config, cache_settings({"method": "kivi"}))
