"""The cache in generate: identity and 8 bits against transformers' own cache, chunks, cropping, other layers, bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress.errors import CompressError, RecipeError
from compress.kv import attention, hooks
from compress.kv.cache import make_cache
from compress.kv.codecs import identity
from compress.kv.layer import CachePath, KVCache
from helpers.pico import build

MODELS = ("llama", "qwen3", "gpt_neox", "gemma2", "mistral")
IDENTITY = {"method": "identity", "sink": 4, "residual_length": 16, "other_layers": "exact"}
KIVI = {
    "method": "kivi",
    "bits": 8,
    "group_size": 32,
    "values": {"group_size": 16},
    "sink": 2,
    "residual_length": 8,
    "flush": 1,
    "other_layers": "exact",
}
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}


@once
def model(name: str) -> PreTrainedModel:
    changes = {"llama": {"max_position_embeddings": 2048}, "full": FULL}.get(name)
    return build("llama" if name == "full" else name, changes)


def prompt(batch: int = 2, tokens: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(0, 250, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["decode", "fused"])
def path(request: pytest.FixtureRequest) -> CachePath:
    attention.register()
    return request.param


def prepared(name: str, path: CachePath) -> PreTrainedModel:
    made = model(name)
    own = "eager" if name == "gemma2" else "sdpa"
    made.set_attn_implementation(own if path == "decode" else attention.NAME)
    return made


@once
def expected(name: str, **settings: Any) -> Tensor:
    """What is generated with transformers' cache; `pads` of the second row are padding."""
    return prepared(name, "decode").generate(**arguments(**settings))


def arguments(batch: int = 2, pads: int = 0, **settings: Any) -> dict[str, Any]:
    ids = prompt(batch, seed=1)  # without a tie among the logits that 8 bits could turn
    mask = torch.ones_like(ids)
    mask[-1, :pads] = 0
    own = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    return {**own, **settings}


def generated(name: str, path: CachePath, recipe: dict[str, Any], **settings: Any) -> tuple[Tensor, KVCache]:
    made = prepared(name, path)
    own = make_cache(made.config, recipe, path=path)
    return made.generate(past_key_values=own, **arguments(**settings)), own


CASES = [(name, KIVI, name == "llama") for name in MODELS[:4]] + [
    ("llama", IDENTITY, False),
    ("gemma2", IDENTITY, True),
]
CASES += [("mistral", IDENTITY, False)]


@pytest.mark.parametrize(("name", "recipe", "attached"), CASES)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_left_padding(
    name: str, recipe: dict[str, Any], attached: bool, beams: int, path: CachePath
) -> None:
    if attached:
        hooks.attach(model(name))
    try:
        found, _ = generated(name, path, recipe, pads=7, num_beams=beams)
    finally:
        hooks.detach(model(name))
    assert torch.equal(found, expected(name, pads=7, num_beams=beams))


def test_identity_gives_the_logits_to_the_bit() -> None:
    made = prepared("llama", "decode")
    own, theirs = make_cache(made.config, IDENTITY), DynamicCache(config=made.config)
    for part in prompt(tokens=50).split([30, 1, 1, 11, 1, 6], 1):
        with torch.no_grad():
            a, b = (made(part, past_key_values=cache).logits for cache in (own, theirs))
        assert torch.equal(a, b)
    plain = make_cache(made.config, IDENTITY)
    made(prompt(), past_key_values=plain)  # with gradients: none of them is kept
    assert not plain.layers[0].stores["keys"].read().requires_grad
    assert own.get_seq_length() == 50
    assert own.layers[0].get_mask_sizes(3) == (53, 0)


def test_sampling_and_assisted_decoding(path: CachePath) -> None:
    torch.manual_seed(0)
    sampled = expected("llama", do_sample=True)
    torch.manual_seed(0)
    expected.cache_clear()
    assert torch.equal(generated("llama", path, IDENTITY, do_sample=True)[0], sampled)
    for recipe in (IDENTITY, KIVI):
        found, own = generated("llama", path, recipe, batch=1, prompt_lookup_num_tokens=5)
        assert torch.equal(found, expected("llama", batch=1, prompt_lookup_num_tokens=5))
        assert own.get_seq_length() == found.shape[1] - 1


@pytest.mark.parametrize("bits", [2, 3])
def test_chunks_do_not_change_what_is_read(bits: int, path: CachePath) -> None:
    """Chunks that end where groups do are token by token: the tail is never shorter than a chunk."""
    made, ids = prepared("full", path), prompt(1, 96)
    recipe = {**KIVI, "bits": bits, "group_size": 16, "sink": 0, "residual_length": 16, "flush": 16}
    logits = []
    for size in (1, 16):
        own = make_cache(made.config, recipe, path=path)
        with torch.no_grad():
            logits.append(torch.cat([made(part, past_key_values=own).logits for part in ids.split(size, 1)], 1))
    torch.testing.assert_close(logits[1], logits[0], atol=2e-3, rtol=0)
    with torch.no_grad():
        exact = made(ids).logits
    assert (logits[0] - exact).abs().max() > 0.02


def test_exact_prefill(path: CachePath) -> None:
    made, ids = prepared("full", path), prompt(1, 64)
    exact = make_cache(made.config, {**KIVI, "bits": 2}, path=path)
    strict = make_cache(made.config, {**KIVI, "bits": 2, "exact_prefill": False}, path=path)
    with torch.no_grad():
        plain = made(ids, use_cache=False).logits
        torch.testing.assert_close(made(ids, past_key_values=exact).logits, plain, atol=1e-5, rtol=1e-5)
        first = made(ids, past_key_values=strict).logits
        assert (first - plain).abs().max() > 0.01
    assert exact.nbytes() == strict.nbytes()


def operation(name: str) -> Callable[[Any], None]:
    index = torch.tensor([1, 0])
    return {
        "reorder": lambda cache: cache.reorder_cache(index),
        "repeat": lambda cache: cache.batch_repeat_interleave(2),
        "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
        "mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
        "crop": lambda cache: cache.crop(-6),
    }[name]


@pytest.mark.parametrize("name", ["reorder", "repeat", "select", "mask", "crop"])
def test_operations(name: str, path: CachePath) -> None:
    """After an operation the model goes on as it does after the same operation on transformers' cache."""
    made, ids = prepared("full", path), prompt(2, 60)
    own, theirs = make_cache(made.config, KIVI, path=path), DynamicCache(config=made.config)
    with torch.no_grad():
        for cache in (own, theirs):
            made(ids, past_key_values=cache)
            operation(name)(cache)
        assert own.get_seq_length() == theirs.get_seq_length()
        batch = theirs.layers[0].keys.shape[0]
        assert own.batch_size == batch
        step = prompt(1, 1).expand(batch, -1)
        a, b = (made(step, past_key_values=cache).logits for cache in (own, theirs))
    torch.testing.assert_close(a, b, atol=0.05, rtol=0)


class Pre(identity.Identity):
    """Exact keys from before the rotary embedding."""

    rope = "pre"


@pytest.mark.parametrize(("name", "beams"), [("llama", 3), ("qwen3", 1), ("gpt_neox", 1)])
def test_keys_before_rope(name: str, beams: int, path: CachePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary rows follow padding, beams and cropping: turning keys back and forth changes nothing."""
    monkeypatch.setattr(identity, "Identity", Pre)
    hooks.attach(model(name))
    try:
        found, own = generated(name, path, IDENTITY, pads=7, num_beams=beams)
        cropped, _ = generated(name, path, IDENTITY, batch=1, prompt_lookup_num_tokens=5)
    finally:
        hooks.detach(model(name))
    assert torch.equal(found, expected(name, pads=7, num_beams=beams))
    assert torch.equal(cropped, expected(name, batch=1, prompt_lookup_num_tokens=5))
    assert own.nbytes().state >= own.rope.nbytes > 0
    with pytest.raises(CompressError, match="attach"):
        generated(name, path, IDENTITY)


def test_reset_and_errors(path: CachePath) -> None:
    made, ids = prepared("full", path), prompt(1)
    own = make_cache(made.config, KIVI, path=path)
    first = made.generate(ids, max_new_tokens=8, past_key_values=own)
    before = own.nbytes()
    own.reset()
    assert own.get_seq_length() == 0
    assert own.nbytes() == own.nbytes()._replace(allocated=0, static=0)
    assert torch.equal(made.generate(ids, max_new_tokens=8, past_key_values=own), first)
    assert own.nbytes() == before
    with pytest.raises(ValueError, match="negative"):
        own.crop(3)
    with pytest.raises(CompressError, match="offload"):
        own.layers[0].offload()


def test_other_layers() -> None:
    with pytest.raises(RecipeError, match="layer 0 is sliding_attention.*other_layers: exact"):
        make_cache(model("gemma2").config, {"method": "kivi", "other_layers": "error"})
    own = make_cache(model("gemma2").config, KIVI)
    assert own.is_sliding == [True, False]
    prepared("gemma2", "decode").generate(prompt(), max_new_tokens=4, past_key_values=own)
    parts = own.nbytes()
    assert parts.exact > 0
    assert parts.codes > 0


def test_bytes_are_those_of_the_formula() -> None:
    made = prepared("full", "decode")
    recipe = {**KIVI, "bits": 3, "values": {"group_size": 16, "bits": 2}, "skip_layers": [-1]}
    own = make_cache(made.config, recipe)
    tokens = 2 + 8 + 160
    with torch.no_grad():
        made(prompt(3, tokens), past_key_values=own)
    numel = 3 * 2 * 16  # of keys or values of one token
    bits = (3 + 32 / 32) + (2 + 32 / 16)
    expected = numel * (160 * bits / 8 + 2 * 10 * 4 + 2 * tokens * 4)  # float32 model, the second layer exact
    assert own.nbytes().total == pytest.approx(expected, rel=0.01)
    assert own.nbytes().static == 0


def test_long_generation_does_not_drift(path: CachePath) -> None:
    """8 bits follow the exact cache for 200 steps, and what is stored is what encoding it all at once gives."""
    made, ids = prepared("llama", path), prompt(1, 20)
    own = make_cache(made.config, KIVI, path=path)
    with torch.no_grad():
        found = made.generate(ids, max_new_tokens=200, do_sample=False, past_key_values=own, eos_token_id=None)
        theirs, again = DynamicCache(config=made.config), make_cache(made.config, KIVI)
        prepared("llama", "decode")
        exact = made(found[:, :-1], past_key_values=theirs).logits[:, 19:].argmax(-1)
    assert (exact == found[:, 20:]).float().mean() > 0.98
    layer, kept = own.layers[0], theirs.layers[0]
    layer.commit()
    again.layers[0].update(kept.keys, kept.values)
    for kind in ("keys", "values"):
        one, all_at_once = layer.stores[kind].read(), again.layers[0].stores[kind].read()
        torch.testing.assert_close(one, all_at_once, atol=0.05, rtol=0)


def test_bfloat16(path: CachePath) -> None:
    made = build("llama", FULL).to(torch.bfloat16)
    made.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
    own = make_cache(made.config, {**KIVI, "bits": 4}, path=path)
    made.generate(prompt(), max_new_tokens=5, past_key_values=own)
    assert own.layers[0].stores["keys"].read().dtype == torch.bfloat16


def test_old_names_of_paths_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    config = model("llama").config
    for old, new in (("materialise", "decode"), ("scores", "fused")):
        assert make_cache(config, KIVI, path=old).path == new
        assert capsys.readouterr().err == f"compress: path={old!r} is now called {new!r}\n"
    with pytest.raises(RecipeError, match="unknown path 'fuse'; known: decode, fused; did you mean 'fused'"):
        make_cache(config, KIVI, path="fuse")
