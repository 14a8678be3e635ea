"""Subspaces trained through a model: gradients against plain autograd in float64, attention, what training brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from compress.calib import kv as calib_kv
from compress.errors import CalibrationError
from compress.kv import hooks
from compress.kv.cache import coded_layers, make_cache
from compress.kv.codec import Spec, rotate
from compress.kv.settings import cache_settings
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.papers.codecs import cskv, matryoshka, model_distillation
from compress.papers.codecs.attended_text import cayley
from compress.storage.checkpoint import open_checkpoint

LAYERS, HEADS, GROUP, WIDTH, SINK, TAIL = 2, 2, 2, 8, 2, 5
RECIPE = {"method": "matryoshka", "basis": "orthogonal", "train": "model", "unit": 2, "exact_tail": TAIL, "sink": SINK}
Spaces = dict[tuple[int, str], matryoshka.NestedSubspace]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=WIDTH, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)  # so that attention looks somewhere
    return model


def tokens(samples: int = 4, length: int = 24) -> Tensor:
    return torch.randint(0, 61, (samples, length), generator=torch.Generator().manual_seed(1))


def subspaces() -> Spaces:
    """A start of its own for each, and a place away from it."""
    generator, spaces = torch.Generator().manual_seed(2), Spaces()
    for layer in range(LAYERS):
        for kind in ("keys", "values"):
            start = torch.linalg.qr(torch.randn(HEADS, WIDTH, WIDTH, generator=generator))[0]
            mean = torch.randn(HEADS, WIDTH, generator=generator)
            space = matryoshka.NestedSubspace({"back": start, "mean": mean}, torch.device("cpu"))
            space.free.data += 0.1 * torch.randn(space.free.shape, generator=generator)
            spaces[layer, kind] = space
    return spaces


def text_of(model: Any, ids: Tensor, file: Path | None = None) -> calib_kv.TextPass:
    seen: Any = calib_kv.Loaded(model) if isinstance(model, LlamaForCausalLM) else model
    tap = calib_kv._Tap(seen.model, SINK, TAIL)
    return calib_kv.TextPass(seen, ids, torch.device("cpu"), 2, tap, file)


def slow_logits(model: LlamaForCausalLM, ids: Tensor, spaces: Spaces | None) -> Tensor:
    """A decoder written out, query by query, for one sample [1, n]; the model is in float64."""
    hidden = model.model.embed_tokens(ids)
    turns = model.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    for index, layer in enumerate(model.model.layers):
        x, at = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (at.q_proj, at.k_proj, at.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *turns)
        states = {"keys": k, "values": v}
        cut = dict(states)
        for kind in states if spaces is not None else ():
            assert spaces is not None
            space = spaces[index, kind]
            kept = (space.start.double() @ cayley(space.free.double())) * space.is_kept
            mean = space.mean.double()[:, None]
            cut[kind] = (states[kind] - mean) @ kept @ kept.mT + mean
        rows = []
        for now in range(ids.shape[1]):
            coded = [j for j in range(now + 1) if SINK <= j <= now - TAIL]
            exact = [j for j in range(now + 1) if j not in coded]
            heads = []
            for head in range(q.shape[1]):
                keys, values = (
                    torch.cat((cut[kind][0, head // GROUP, coded], states[kind][0, head // GROUP, exact]))
                    for kind in ("keys", "values")
                )
                heads.append((keys @ q[0, head, now] / WIDTH**0.5).softmax(0) @ values)
            rows.append(torch.cat(heads))
        hidden = hidden + at.o_proj(torch.stack(rows)[None])
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[0]


@pytest.mark.parametrize("language", [0.0, 0.75])
def test_gradients_against_plain_autograd(language: float) -> None:
    """One step over two samples: its loss and the gradients of all parameters of all layers."""
    model, ids, spaces = llama(), tokens(), subspaces()
    settings = model_distillation.DistillationSettings(1, 1e-3, 48, language, TAIL, 0)
    made = model_distillation._Distillation(text_of(model, ids), spaces, settings)
    seen: dict[int, Any] = {}

    def descend(parameters: Any, steps: int, rate: float, loss: Any, check: Any) -> None:
        seen[0] = loss(0), [p.grad.clone() for p in parameters]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_distillation, "descend", descend)
        made.run()
    spaces_again = subspaces()
    generator = torch.Generator().manual_seed(0)
    for space in spaces_again.values():
        space.draw(generator)
    model, total = model.double(), torch.zeros((), dtype=torch.float64)
    for sample in ids[:2]:
        with torch.no_grad():
            expected = slow_logits(model, sample[None], None).log_softmax(-1)
        found = slow_logits(model, sample[None], spaces_again).log_softmax(-1)
        total = total + (1 - language) * (expected.exp() * (expected - found)).sum()
        total = total - language * found[:-1].gather(1, sample[1:, None]).sum()
    total = total / ids[:2].numel()
    total.backward()
    loss, slopes = seen[0]
    assert loss == pytest.approx(total.item(), rel=1e-4)
    for slope, parameter in zip(slopes, (p for s in spaces_again.values() for p in s.parameters), strict=True):
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0
        torch.testing.assert_close(slope, parameter.grad, atol=2e-5 * float(parameter.grad.abs().max()), rtol=2e-3)


def test_all_channels_change_nothing() -> None:
    model, spaces = llama(), subspaces()
    made = model_distillation._Distillation(
        text_of(model, tokens()), spaces, model_distillation.DistillationSettings(1, 1e-3, 24, 0.0, TAIL, 0)
    )
    with torch.no_grad(), made.attention.replace_attention():
        plain = model(tokens()).logits
        made.attention.is_on = True
        torch.testing.assert_close(model(tokens()).logits, plain, atol=2e-4, rtol=1e-3)
        for space in spaces.values():
            space.draw(torch.Generator().manual_seed(4))
        assert not torch.allclose(model(tokens()).logits, plain, atol=1e-2)


def test_ranks_are_drawn_for_each_head() -> None:
    space, generator = subspaces()[0, "keys"], torch.Generator().manual_seed(3)
    drawn = set()
    for _ in range(600):
        space.draw(generator)
        drawn.add(tuple(space.is_kept.sum((1, 2)).int().tolist()))
        assert bool((space.is_kept.diff(dim=2) <= 0).all())  # the leading ones stay
    assert len(drawn) == 64


def test_training_lowers_the_divergence_of_all_budgets() -> None:
    """From bases that are no components; kept is what is best on text that is not trained on."""
    model, ids, spaces = llama(), tokens(12), subspaces()
    settings = model_distillation.DistillationSettings(24, 3e-2, 96, 0.0, TAIL, 0)
    before, after = model_distillation.train(text_of(model, ids), spaces, settings)
    assert after < 0.8 * before
    for space in spaces.values():
        turn = space.start @ cayley(space.free.detach())
        torch.testing.assert_close(turn.mT @ turn, torch.eye(WIDTH).expand(HEADS, -1, -1), atol=1e-5, rtol=0)


def test_streamed_blocks_give_what_a_loaded_model_gives(tmp_path: Path) -> None:
    """Calibration of a cache, trained through the model: of a checkpoint, spilled, and of the model in memory."""
    model = llama()
    model.save_pretrained(tmp_path / "model")
    settings = cache_settings({**RECIPE, "steps": 2, "batch_tokens": 48, "residual_length": 8})
    codings = coded_layers(model.config, settings)
    loaded, _ = calib_kv.calibrate(model, codings, tokens())
    skeleton = Skeleton(open_checkpoint(tmp_path / "model"))
    streamed, _ = calib_kv.calibrate(skeleton, codings, tokens(), file=tmp_path / "states")
    plain, _ = calib_kv.calibrate(model, coded_layers(model.config, cache_settings({**RECIPE, "steps": 0})), tokens())
    for name, tensor in loaded.items():
        torch.testing.assert_close(streamed[name].double(), tensor.double(), atol=2e-3, rtol=2e-2)
    assert any(not torch.equal(plain[name], loaded[name]) for name in loaded if name.endswith("back"))


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_shared_subspaces_are_cut_as_the_codec_stores_them(kind: Any, bits: Any) -> None:
    config, spec = cskv.Config(keep=0.4, bits=bits, ranks="even"), Spec(kind, 0, 1, HEADS, WIDTH, GROUP)
    states = torch.randn(50, HEADS, WIDTH, generator=torch.Generator().manual_seed(5))
    names = ("keys_pre", "queries_pre", "values", "gradients")
    static = cskv.calibrate(config, spec, dict.fromkeys(names, states))
    x = torch.randn(1, HEADS, 9, WIDTH, generator=torch.Generator().manual_seed(6))
    angles = torch.rand(1, 9, WIDTH // 2, generator=torch.Generator().manual_seed(7)).repeat(1, 1, 2)
    turns = angles.cos(), angles.sin()
    codec = cskv.build(config, spec, static)
    expected = codec.decode(codec.encode(x, {}))
    space = cskv.SharedSubspace(config, spec, static, torch.device("cpu"))
    if kind == "keys":
        x, expected = rotate(x, *turns), rotate(expected, *turns)
    torch.testing.assert_close(space.cut(x, turns).detach(), expected, atol=2e-3, rtol=2e-3)


def test_shared_subspaces_are_healed() -> None:
    """Through calibration: the KL of the text through caches of 4 bits, from closed forms and behind training."""
    model, ids = llama(), tokens(10)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    hooks.attach(model)
    divergences = []
    for steps in (0, 16):
        recipe = {"method": "cskv", "keep": 0.25, "bits": 4, "ranks": "even", "steps": steps, "language": 0.0}
        recipe |= {"batch_tokens": 216, "rate": 0.01, "sink": SINK, "residual_length": 4, "flush": 4}
        static, _ = calib_kv.calibrate(model, coded_layers(model.config, cache_settings(recipe)), ids)
        cache = make_cache(model.config, recipe, static)
        with torch.no_grad():
            expected, parts = model(ids).logits.log_softmax(-1), []
            for part in ids.split(4, 1):
                parts.append(model(part, past_key_values=cache).logits.log_softmax(-1))
        divergences.append(kl.from_log_probs(expected, torch.cat(parts, 1)).mean().item())
    assert divergences[1] < 0.97 * divergences[0]


def test_texts_that_end_among_the_sinks_are_exact() -> None:
    """Also where a piece of queries does."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, other = (torch.randn(1, h, 300, 8, generator=generator) for h in (4, 2, 2, 2))
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    for sink, tail in ((280, 4), (400, 0)):
        found = model_distillation.attend_mixed(query, (key, value), (other, other), None, None, sink, tail)
        torch.testing.assert_close(found[:, :, :280], exact[:, :, :280])


def test_one_sample_is_refused() -> None:
    with pytest.raises(CalibrationError, match="two samples"):
        model_distillation.train(
            text_of(llama(), tokens(1)), subspaces(), model_distillation.DistillationSettings(1, 1e-3, 1, 0.0, 0, 0)
        )
