"""Saved caches: what comes back, generation from it, and files that are damaged or of something else."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from compress.calib.kv import calibrate
from compress.errors import CheckpointError, CompressError, OutputError, RecipeError, UnsupportedModelError
from compress.kv import attention, generation, hooks, saved
from compress.kv.cache import make_cache
from compress.kv.hooks import cache_argument
from compress.kv.saved import columns, file, load_cache, raw_nbytes, save_cache, token_ids
from compress.kv.settings import cache_settings
from compress.storage import checkpoint, files
from helpers.pico import build, of_type

TOKENS = 300


def model(kind: str = "llama") -> PreTrainedModel:
    return built(kind)


@once
def built(kind: str) -> PreTrainedModel:
    made = build(kind, {"head_dim": 32, "max_position_embeddings": 2048})
    hooks.attach(made)
    attention.register()
    return made


def prompt(rows: int = 1, count: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(tokens: Tensor, cache: Any, kind: str = "llama", **more: Any) -> Any:
    model(kind)(input_ids=tokens, past_key_values=cache, use_cache=True, **more)
    return cache


def exact(kind: str = "llama", rows: int = 1) -> Any:
    return read(prompt(rows), DynamicCache(config=model(kind).config), kind)


@torch.no_grad()
def after(cache: Any, kind: str = "llama", **more: Any) -> Tensor:
    """Logits of 20 tokens that follow."""
    rows = cache.layers[0].batch_size if hasattr(cache.layers[0], "stores") else cache.layers[0].keys.shape[0]
    return model(kind)(input_ids=prompt(rows, 20, seed=1), past_key_values=cache, use_cache=True, **more).logits


def states(cache: Any) -> list[Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # of gemma2 the first layer has a sliding window
def test_lossless_comes_back_bit_for_bit(kind: str, rows: int, tmp_path: Path) -> None:
    cache = exact(kind, rows)
    found = save_cache(cache, tmp_path / "x.kv", model(kind), prompt(rows), "lossless")
    loaded = load_cache(model(kind), tmp_path / "x.kv", prompt(rows))
    assert all(torch.equal(a, b) for a, b in zip(states(cache), states(loaded), strict=True))
    assert torch.equal(token_ids(found), prompt(rows))
    assert raw_nbytes(found) == sum(x.numel() * x.element_size() for x in states(cache))
    assert torch.equal(after(cache, kind), after(loaded, kind))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox"])  # gpt_neox turns some channels of a head
def test_a_rounded_cache_is_as_near_as_asked(kind: str, tmp_path: Path) -> None:
    cache = exact(kind)
    layers = len(cache.layers)
    save_cache(cache, tmp_path / "x.kv", model(kind), prompt(), "standard")
    loaded = load_cache(model(kind), tmp_path / "x.kv")
    for index, (x, y) in enumerate(zip(states(cache), states(loaded), strict=True)):
        noise = saved._noise(saved.NOISE["standard"], index // 2, layers)
        assert noise is not None
        assert torch.equal(x[:, :, :4], y[:, :, :4])
        variance = x[:, :, 4:].double().movedim(2, 0).flatten(1).var(0).mean().item()
        assert 0.3 * noise * variance < (x - y)[:, :, 4:].square().mean().item() < 1.2 * noise * variance
        assert x.dtype == y.dtype


def test_better_quality_takes_more_bytes(tmp_path: Path) -> None:
    sizes = {}
    for quality in saved.NOISE:
        save_cache(exact(), tmp_path / quality, model(), prompt(), quality)
        sizes[quality] = (tmp_path / quality).stat().st_size
    assert sizes["small"] < sizes["standard"] < sizes["high"] < sizes["lossless"]


def test_parts_of_the_tokens_are_those_of_the_whole(tmp_path: Path) -> None:
    found = save_cache(exact(), tmp_path / "x.kv", model(), prompt())
    whole = found.tensor("1.keys")
    chunks = [found.tensor("1.keys", (i, i + 1)) for i in range(found.parts["1.keys"].chunks)]
    assert len(chunks) == 2 and chunks[0].shape[2] == columns.CHUNK
    assert torch.equal(torch.cat(chunks, 2), whole)


def test_generation_goes_on_from_the_loaded_cache(tmp_path: Path) -> None:
    found = save_cache(exact(), tmp_path / "x.kv", model(), prompt())
    decoded = DynamicCache(config=model().config)
    for index, layer in enumerate(load_cache(model(), found).layers):
        decoded.update(layer.keys, layer.values, index)
    whole = torch.cat((prompt(), prompt(1, 6, seed=2)), 1)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(whole)}
    expected = model().generate(whole, past_key_values=decoded, **options)
    assert torch.equal(model().generate(whole, past_key_values=load_cache(model(), found), **options), expected)


def test_equal_caches_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        save_cache(exact(), tmp_path / name, model(), prompt())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_cache_that_gradients_could_flow_through_is_saved_without_them(tmp_path: Path) -> None:
    with torch.enable_grad():
        cache = model()(input_ids=prompt(), use_cache=True).past_key_values
        assert cache.layers[0].keys.requires_grad
        save_cache(cache, tmp_path / "grad.kv", model(), prompt())
    save_cache(exact(), tmp_path / "plain.kv", model(), prompt())
    assert (tmp_path / "grad.kv").read_bytes() == (tmp_path / "plain.kv").read_bytes()


CODECS: dict[str, dict[str, Any]] = {
    "kivi": {"bits": 4, "group_size": 32, "skip_layers": [0]},
    "lloyd": {"bits": 3, "keys": {"rope": "pre"}},
    "gear": {"bits": 4, "group_size": 32, "block_tokens": 32},
    "pca": {"bits": 4.0},
}


@once
def static(method: str) -> dict[str, Tensor]:
    settings = cache_settings({"method": method, **CODECS[method]})
    return calibrate(model(), settings.by_layer(2), prompt(8, 60, seed=2))[0] if settings.needs() else {}


@pytest.mark.parametrize("method", CODECS)
@pytest.mark.parametrize("pads", [0, 9])
def test_codes_come_back_bit_for_bit(method: str, pads: int, tmp_path: Path) -> None:
    settings = {"method": method, **CODECS[method], "sink": 2, "residual_length": 32}
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :pads] = 0
    cache = make_cache(model().config, settings, static(method))
    read(prompt(2), cache, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    found = save_cache(cache, tmp_path / "x.kv", model(), prompt(2))
    loaded = load_cache(model(), found, static=static(method))
    sizes = [each.nbytes()._replace(allocated=0, static=0) for each in (loaded, cache)]  # type: ignore[attr-defined]
    assert sizes[0] == sizes[1]
    more = {"attention_mask": torch.cat((mask, torch.ones(2, 20, dtype=torch.long)), 1)}
    positions = {"position_ids": torch.arange(20)[None] + mask.sum(-1, keepdim=True)}
    assert torch.equal(after(loaded, **more, **positions), after(cache, **more, **positions))
    if static(method):
        with pytest.raises(CheckpointError, match="saved with other calibrated tensors"):
            load_cache(model(), found, static={})


@pytest.mark.parametrize("method", ["kivi", "pca"])
def test_generation_with_the_cache_of_the_model_itself(method: str, tmp_path: Path) -> None:
    """Its calibrated tensors are those of the model; without a question the last token is read again."""
    settings = {"method": method, **CODECS[method], "sink": 2, "residual_length": 32}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt())}
    generation.attach(model(), settings, static(method))
    try:
        cache: Any = read(prompt(), generation.fresh(model()))
        found = save_cache(cache, tmp_path / "x.kv", model(), prompt())
        loaded: Any = load_cache(model(), found)
        for each in (cache, loaded):
            each.crop(-1)
        expected = model().generate(prompt(), past_key_values=cache, **options)
        assert torch.equal(model().generate(prompt(), past_key_values=loaded, **options), expected)
    finally:
        generation.detach(model())
        hooks.attach(model())


def test_chosen_tokens_are_read_as_before(tmp_path: Path) -> None:
    read_some = {"method": "tidal", "keep": 0.1, "dense_layers": 0, "layers": [0]}
    settings = {"method": "kivi", **CODECS["kivi"], "skip_layers": [], "sink": 2, "residual_length": 32}
    found, logits = [], []
    for recipe in ({**settings, "read": read_some}, settings):
        generation.attach(model(), recipe)
        try:
            cache = read(prompt(), generation.fresh(model()))
            found = [load_cache(model(), save_cache(cache, tmp_path / "x.kv", model(), prompt())), cache]
            logits.append([after(each) for each in found])
        finally:
            generation.detach(model())
            hooks.attach(model())
    assert all(torch.equal(*both) for both in logits)
    assert not torch.allclose(logits[0][0], logits[1][0], atol=1e-4)


def test_damaged_bytes_are_found(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.kv", exact()
    save_cache(cache, path, model(), prompt())
    whole, expected = path.read_bytes(), states(load_cache(model(), path))
    places = torch.randint(0, len(whole), (40,), generator=torch.Generator().manual_seed(0)).tolist()
    found = 0
    for place in [0, 9, 200, *places, len(whole) - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            loaded = states(load_cache(model(), path))
        except CheckpointError as error:
            found += 1
            assert "\n" not in str(error)
        else:  # a byte that says nothing, such as white space
            assert all(torch.equal(a, b) for a, b in zip(expected, loaded, strict=True))
    assert found >= 42


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "x.kv"
    save_cache(exact(), path, model(), prompt())
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(CheckpointError, match="truncated|not a safetensors file"):
        load_cache(model(), path)


def test_files_of_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.kv"
    with pytest.raises(CheckpointError, match="is not there"):
        load_cache(model(), path)
    checkpoint.write_shard(path, {"x": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="holds no saved cache"):
        load_cache(model(), path)
    save_cache(exact(), path, model(), prompt(), facts={"model_name": "pico"})
    with pytest.raises(CheckpointError, match=r"another model \(pico\)"):
        load_cache(model("qwen2"), path)
    with pytest.raises(CheckpointError, match="another prompt"):
        load_cache(model(), path, prompt(seed=5))
    monkeypatch.setattr(file, "VERSION", 2)
    with pytest.raises(CheckpointError, match="version 1, this reads 2"):
        load_cache(model(), path)


def test_one_changed_weight_is_another_model(tmp_path: Path) -> None:
    save_cache(exact(), tmp_path / "x.kv", model(), prompt())
    weight = model().get_parameter("model.layers.1.self_attn.k_proj.weight")
    with torch.no_grad():
        weight[0, 0] += 1
        try:
            with pytest.raises(CheckpointError, match="another model"):
                load_cache(model(), tmp_path / "x.kv")
        finally:
            weight[0, 0] -= 1


class Adapted(nn.Module):
    """A linear with adapters that are switched and scaled without a change of weights, as PEFT's layers are."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapters, self.scaling = ["one"], {"one": 2.0, "two": 2.0}
        self.merged_adapters: list[str] = []
        self.disable_adapters = False


@pytest.mark.parametrize(
    "changed",
    [
        {"active_adapters": ["two"]},
        {"active_adapters": ["one", "two"]},
        {"disable_adapters": True},
        {"scaling": {"one": 1.0, "two": 2.0}},
        {"merged_adapters": ["one"]},
    ],
    ids=str,
)
def test_other_adapters_are_another_model(changed: dict[str, Any], tmp_path: Path) -> None:
    attention = model().model.layers[0].self_attn
    plain, cache = attention.k_proj, exact()
    attention.k_proj = adapted = Adapted(plain)
    try:
        save_cache(cache, tmp_path / "x.kv", model(), prompt())
        load_cache(model(), tmp_path / "x.kv")
        for name, value in changed.items():
            setattr(adapted, name, value)
        with pytest.raises(CheckpointError, match="another model"):
            load_cache(model(), tmp_path / "x.kv")
    finally:
        attention.k_proj = plain


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="finest"):
        save_cache(exact(), tmp_path / "x", model(), prompt(), "finest")
    with pytest.raises(CompressError, match="the cache is of 300 tokens"):
        save_cache(exact(), tmp_path / "x", model(), prompt(count=20))
    odd = exact()
    odd.layers[1] = type("OddLayer", (), {"is_initialized": True})()
    with pytest.raises(UnsupportedModelError, match="layer 1 of the cache is a OddLayer"):
        save_cache(odd, tmp_path / "x", model(), prompt())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quality", ["lossless", "standard", "coded"])
@pytest.mark.parametrize("name", ["jamba", "mamba"])
def test_states_of_recurrences(name: str, quality: str, tmp_path: Path) -> None:
    """Codes and lossless states come back bit for bit, others within one rounding to int8."""
    sizes = {"num_key_value_heads": 2, "intermediate_size": 96, "num_experts": 1, "attn_layer_offset": 1}
    sizes |= {"num_experts_per_tok": 1, "attn_layer_period": 2, "use_mamba_kernels": False}
    hybrid = of_type(name, sizes if name == "jamba" else {"state_size": 16})
    argument, text = cache_argument(hybrid), prompt()
    is_coded = quality == "coded"
    cache = make_cache(hybrid.config, {"states": 12}) if is_coded else DynamicCache(config=hybrid.config)
    with torch.no_grad():
        hybrid(input_ids=text, use_cache=True, **{argument: cache})
    file = save_cache(cache, tmp_path / "x", hybrid, text, "lossless" if is_coded else quality)
    loaded = load_cache(hybrid, tmp_path / "x", text)
    assert raw_nbytes(file) > 0
    wanted, found = (x.layers[0].recurrent_states[0] for x in (cache, loaded))
    both = [x.decode() if is_coded else x for x in (wanted, found)]
    error = (both[1] - both[0]).norm() / both[0].norm()
    assert 0 < error < 0.01 if quality == "standard" else torch.equal(*both)
    assert torch.equal(cache.layers[0].conv_states[0], loaded.layers[0].conv_states[0])
    with torch.no_grad():
        after = [hybrid(text[:, :1], use_cache=True, **{argument: x}).logits for x in (cache, loaded)]
    assert (after[0] - after[1]).norm() / after[0].norm() < (0.05 if quality == "standard" else 1e-6)


def test_layers_with_states_and_keys_are_not_saved(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 2, "intermediate_size": 64, "mamba_d_ssm": 64, "mamba_n_heads": 4}
    hybrid = of_type("falcon_h1", {**sizes, "mamba_d_head": 16, "mamba_d_state": 16})
    cache = DynamicCache(config=hybrid.config)
    with torch.no_grad():
        hybrid(input_ids=prompt(), past_key_values=cache, use_cache=True)
    with pytest.raises(UnsupportedModelError, match="layer 0 of the cache is a LinearAttentionAndFullAttentionLayer"):
        save_cache(cache, tmp_path / "x", hybrid, prompt())


def failing(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["sync", "os.replace"])
def test_a_file_is_replaced_as_a_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fail = tmp_path / "x.kv", failing
    save_cache(exact(), path, model(), prompt(), "small")
    before: Callable[[], bytes] = path.read_bytes
    old = before()
    monkeypatch.setattr(files.os if name == "os.replace" else files, name.rpartition(".")[2], fail)
    with pytest.raises(OutputError, match="No space left"):
        save_cache(exact(), path, model(), prompt(), "high")
    assert before() == old and list(tmp_path.iterdir()) == [path]
