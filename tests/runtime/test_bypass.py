"""Sublayers that are passed over add nothing; caches stay equally long, and what is cropped away leaves no trace."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from compress import api
from compress.errors import UnreadCacheError, UnsupportedModelError
from compress.runtime import bypass
from compress.runtime.bypass import bypassed, early_exit, sublayers_of
from helpers.pico import PICO, of_type, save_pico
from helpers.runs import KEEP_TABLES, Setup, job

IDS = torch.randint(0, 256, (1, 48), generator=torch.Generator().manual_seed(5))
DEEPER = {"num_hidden_layers": 3}
GQA = {"num_key_value_heads": 2, "head_dim": 16}
GEMMA3 = {**GQA, "intermediate_size": 144, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS = {"gemma3": ("gemma3_text", GEMMA3), "phi": ("phi", {"intermediate_size": 144})}  # phi: parallel, one norm
NAMES = ["llama", "gemma2", "gemma3", "gpt_neox", "phi", "mixtral", "qwen3_moe"]


def build(name: str) -> Any:
    return PICO[name]() if name in PICO else of_type(*OTHERS[name])


class Nothing(nn.Module):
    """Adds nothing, by the hand of whoever reads the family's source; stores what it is told to."""

    def __init__(self, is_tuple: bool) -> None:
        super().__init__()
        self.is_tuple = is_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return (torch.zeros_like(x), None) if self.is_tuple else torch.zeros_like(x)


def without(model: Any, sublayers: set[bypass.Sublayer]) -> Any:
    """A copy of a model without a cache in which modules that add nothing stand in the place of sublayers."""
    copied = copy.deepcopy(model)
    blocks = next(each for each in copied.modules() if isinstance(each, nn.ModuleList))
    for number, kind in sublayers:
        for name, child in list(blocks[number].named_children()):
            is_attention = "attention" in type(child).__name__.lower() and "norm" not in name
            is_mlp = name == "mlp"
            if (is_attention and kind == "attention") or (is_mlp and kind == "mlp"):
                setattr(blocks[number], name, Nothing(is_attention))
    return copied


@torch.no_grad()
def logits(model: Any, cache: Any = None, ids: Tensor = IDS) -> Tensor:
    result = model(ids, past_key_values=cache, use_cache=cache is not None).logits
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_model_without_these_sublayers(name: str) -> None:
    model = build(name)
    whole = logits(model)
    assert len(sublayers_of(model)) == 4
    for chosen in ({(0, "attention")}, {(1, "mlp")}, {(0, "mlp"), (1, "attention")}, set(sublayers_of(model))):
        with bypassed(model, chosen):
            got = logits(model)
        torch.testing.assert_close(got, logits(without(model, chosen)), rtol=1e-5, atol=1e-5)
        assert chosen == set() or not torch.equal(got, whole)
    assert torch.equal(logits(model), whole)


@pytest.mark.parametrize("name", NAMES)
def test_caches_stay_equal_in_length_and_other_layers_hold_what_they_would(name: str) -> None:
    model, chosen = build(name), {(0, "attention"), (0, "mlp")}
    cache = DynamicCache(config=model.config)
    with bypassed(model, chosen):
        got = logits(model, cache)
        assert torch.equal(got, logits(model))
    assert [layer.get_seq_length() for layer in cache.layers] == [48, 48]
    assert not cache.layers[0].keys.any() and not cache.layers[0].values.any()
    other = DynamicCache(config=model.config)
    logits(model, other)
    assert cache.layers[0].keys.shape == other.layers[0].keys.shape
    embedded = model.get_input_embeddings()(IDS)
    if name not in ("gemma2", "gemma3"):  # which scale embeddings
        one = copy.deepcopy(model)
        blocks = next(each for each in one.modules() if isinstance(each, nn.ModuleList))
        seen = list[Tensor]()
        blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with bypassed(one, chosen):
            logits(one)
        assert torch.equal(seen[0], embedded)  # the second block reads what the first would have


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_is_cropped_and_the_target_goes_on_as_if_it_had_not_been(name: str) -> None:
    model = build(name)
    plain, shared = DynamicCache(config=model.config), DynamicCache(config=model.config)
    shared.activate_past_recording()
    for cache in (plain, shared):
        logits(model, cache, IDS[:, :40])
    shared.crop(0)
    for _ in range(2):
        with bypassed(model, {(0, "attention"), (1, "mlp")}):
            for token in range(40, 44):
                logits(model, shared, IDS[:, token : token + 1])
        shared.crop(-4)
        verified = logits(model, shared, IDS[:, 40:44])
        shared.crop(-4)
    logits(model, shared, IDS[:, 40:44])
    assert torch.equal(verified, logits(model, plain, IDS[:, 40:44]))
    for mine, other in zip(shared.layers, plain.layers, strict=True):
        width = other.keys.shape[-2]
        assert torch.equal(mine.keys[:, :, -width:], other.keys)
        assert torch.equal(mine.values[:, :, -width:], other.values)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_packed_models(name: str, tmp_path: Path) -> None:
    source, out = save_pico(name, tmp_path / name), tmp_path / "out"
    api.quantize(job(source, Setup("int8", KEEP_TABLES), out))
    model: Any = AutoModelForCausalLM.from_pretrained(out).eval()
    chosen = {(0, "mlp"), (1, "attention")}
    with bypassed(model, chosen):
        got = logits(model)
        steps, cache = list[Tensor](), DynamicCache(config=model.config)
        for token in range(8):  # by programs, where they run
            steps.append(logits(model, cache, IDS[:, token : token + 1]))
    torch.testing.assert_close(torch.cat(steps, 1), got[:, :8], rtol=1e-4, atol=1e-4)
    model.dequantize()
    torch.testing.assert_close(got, logits(without(model, chosen)), rtol=1e-4, atol=1e-4)


def test_early_exit_is_the_first_blocks_alone() -> None:
    model = of_type("llama", {**GQA, "intermediate_size": 96, **DEEPER})
    assert early_exit(model, 1) == {(i, kind) for i in (1, 2) for kind in ("attention", "mlp")}
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:1]
    with bypassed(model, early_exit(model, 1)):
        assert torch.equal(logits(model), logits(short))


def test_a_first_token_without_an_embedding_says_nothing() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0  # padding
    assert len(bypass.sublayers_of(model)) == 2 * len(model.model.layers)


def test_bypasses_nest_and_are_of_their_thread_and_their_model() -> None:
    model, other = build("llama"), build("llama")
    whole, inside = logits(model), list[Tensor]()
    with bypassed(model, {(0, "mlp")}):
        first = logits(model)
        with bypassed(model, {(1, "mlp")}):
            assert bypass.active(model) == {(1, "mlp")}
        assert bypass.active(model) == {(0, "mlp")} and torch.equal(logits(model), first)
        thread = threading.Thread(target=lambda: inside.append(logits(model)))
        thread.start()
        thread.join()
        assert torch.equal(inside[0], whole) and torch.equal(logits(other), whole)
        assert torch.equal(logits(copy.deepcopy(model)), whole)
    copied = copy.deepcopy(model)
    with bypassed(copied, {(0, "mlp")}):
        assert torch.equal(logits(copied), first) and torch.equal(logits(model), whole)
    with pytest.raises(KeyboardInterrupt), bypassed(model, {(0, "mlp")}):
        raise KeyboardInterrupt
    assert bypass.active(model) == frozenset()


def test_what_cannot_be_passed_over_is_said() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="attention.*not among the sublayers"), bypassed(model, {(7, "attention")}):
        pass
    with pytest.raises(UnsupportedModelError, match="more than add"):  # its MLP has no module
        sublayers_of(build("opt"))
    with pytest.raises(UnsupportedModelError, match="more than add"):  # sublayers are given what they add to
        sublayers_of(of_type("bloom", {"n_head": 4}))
    cache = DynamicCache(config=model.config)
    cache.layers[0].is_told_of_passes = True  # type: ignore[attr-defined]
    with pytest.raises(UnreadCacheError, match="drops tokens"), bypassed(model, {(0, "attention")}):
        logits(model, cache)
