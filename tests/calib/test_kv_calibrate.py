"""Samples of keys, values, queries and gradients against the whole model run by transformers, and what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.calib.kv import SAMPLES, calibrate
from compress.errors import CalibrationError, UnsupportedModelError
from compress.kv.codec import Spec
from compress.kv.codecs import identity
from compress.kv.settings import cache_settings
from compress.model.skeleton import Skeleton
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import build, round_to_nearest, save_pico

FULL = {"layer_types": ["full_attention"] * 2}
SINK, TOKENS = 2, 12
Learn = Callable[[Any, Spec, Mapping[str, Tensor]], dict[str, Tensor]]


def prompt(samples: int = 3, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, 250, (samples, tokens), generator=torch.Generator().manual_seed(3))


def settings(**recipe: Any) -> Any:
    return cache_settings({"method": "identity", "sink": SINK, **recipe}).by_layer(2)


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes identity a codec that keeps its samples as they are, or what `of` makes of them."""

    def made(needs: tuple[str, ...] = SAMPLES, of: Learn = lambda config, spec, samples: dict(samples)) -> None:
        monkeypatch.setattr(identity, "NEEDS", frozenset(needs))
        monkeypatch.setattr(identity, "calibrate", of, raising=False)

    return made


def plain(model: PreTrainedModel, tokens: Tensor, heads: int) -> dict[str, Tensor]:
    """Keys before RoPE, values and their gradients, from hooks on the whole model: [samples * tokens, h, width]."""
    held: dict[str, Tensor] = {}
    hooks = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            out.retain_grad()
            held[name] = out

        return hook

    for i, layer in enumerate(model.model.layers):
        keys = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)
        hooks += [keys.register_forward_hook(keep(f"{i}.keys"))]
        hooks += [layer.self_attn.v_proj.register_forward_hook(keep(f"{i}.values"))]
    logits = model(tokens, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    found = {}
    for name, x in held.items():
        for kind, tensor in (("", x), (".gradients", x.grad)):
            found[name + kind] = tensor.detach().reshape(*tokens.shape, heads, -1)[:, SINK:].flatten(0, 1)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_samples_are_those_of_the_whole_model(name: str, learn: Callable[..., None]) -> None:
    learn()
    model, tokens = build(name, FULL), prompt()
    found, facts = calibrate(model, settings(), tokens, batch=2)
    model.set_attn_implementation("eager")
    expected = plain(model, tokens, 2)
    for i in range(2):
        for kind in ("keys", "values"):
            own, name = f"layers.{i}.{kind}.", "keys_pre" if kind == "keys" else "values"
            close(found[own + name], expected[f"{i}.{kind}"])
            close(found[own + "gradients"], expected[f"{i}.{kind}.gradients"])
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    for i in range(2):
        keys = cache.layers[i].keys[:, :, SINK:].transpose(1, 2).flatten(0, 1)
        close(found[f"layers.{i}.keys.keys"], keys)
    assert found["layers.1.values.queries"].shape == (3 * (TOKENS - SINK), 4, 16)
    size = found["layers.0.keys.queries"].norm(dim=-1)
    close(found["layers.0.keys.queries_pre"].norm(dim=-1), size)
    assert facts["tokens"] == 3 * TOKENS
    assert facts["nbytes"] == sum(x.numel() * 4 for x in found.values())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)


def test_batches_files_and_skeletons_change_nothing(learn: Callable[..., None], tmp_path: Path) -> None:
    learn()
    model, tokens = build("llama"), prompt(4)
    found, _ = calibrate(model, settings(), tokens, batch=4)
    again, _ = calibrate(model, settings(), tokens, batch=4, file=tmp_path / "states")
    skeleton = Skeleton(open_checkpoint(save_pico("llama", tmp_path / "m")))
    streamed, _ = calibrate(skeleton, settings(), tokens, "cpu", batch=4)
    single, _ = calibrate(model, settings(), tokens, batch=1)
    assert not (tmp_path / "states").exists()
    for name, x in found.items():
        assert torch.equal(again[name], x)
        assert torch.equal(streamed[name], x)
        close(single[name], x)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_packed_linears(learn: Callable[..., None]) -> None:
    """Gradients pass through packed linears as through those of their decoded weights."""
    learn(("gradients",))
    packed, plain_model = build("llama"), build("llama")
    for name in [name for name, module in packed.named_modules() if isinstance(module, nn.Linear) and "proj" in name]:
        linear = packed.get_submodule(name)
        made = PackedLinear.from_packed(round_to_nearest(linear.weight, 8, -1))
        packed.set_submodule(name, made)
        plain_model.set_submodule(name, made.to_linear(torch.float32))
    found, _ = calibrate(packed, settings(), prompt())
    expected, _ = calibrate(plain_model, settings(), prompt())
    for name, x in expected.items():
        assert x.any()
        close(found[name], x)


def test_only_what_is_needed_and_nothing_left_behind(learn: Callable[..., None]) -> None:
    seen: list[tuple[Spec, set[str]]] = []
    learn(
        ("queries", "values"), lambda config, spec, samples: {"n": seen.append((spec, set(samples))) or torch.ones(1)}
    )
    model = build("llama")
    before = model.config._attn_implementation
    runs = [0, 0]
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    recipe = {"layers": {"1": {"method": "kivi"}}, "values": {"residual_length": 3}}
    found, facts = calibrate(model, settings(**recipe), prompt(), batch=3)
    assert set(found) == {"layers.0.keys.n", "layers.0.values.n"}
    assert runs == [1, 0]  # nothing is wanted of the second layer
    assert [spec for spec, _ in seen] == [Spec(kind, 0, 2, 2, 16, 2, torch.float32) for kind in ("keys", "values")]
    assert all(names == {"queries", "values"} for _, names in seen)
    assert model.config._attn_implementation == before
    assert facts["layers"] == 1
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_calibrate() -> None:
    found, facts = calibrate(build("llama"), settings(), prompt())
    assert not found
    assert facts["tokens"] == facts["nbytes"] == 0


def test_errors(learn: Callable[..., None]) -> None:
    learn(("keys_pre",))
    with pytest.raises(CalibrationError, match="more than 3 tokens"):
        calibrate(build("llama"), settings(), prompt(2, 3))
    with pytest.raises(UnsupportedModelError, match="layer 0 have no rotary"):
        calibrate(build("opt"), settings(), prompt())
    with pytest.raises(UnsupportedModelError, match="2 decoder blocks.* 3 layers"):
        calibrate(build("llama"), cache_settings({"method": "identity"}).by_layer(3), prompt())
