"""Reading chosen tokens as a part of the cache: cropping, rows of a batch, checkpoints, generation, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.calib.kv import calibrate
from compress.errors import CheckpointError, CompressError, RecipeError
from compress.kv import generation
from compress.kv.cache import coded_layers, make_cache
from compress.kv.settings import cache_settings
from compress.runtime import kv_config
from helpers.pico import build
from helpers.reading_cases import WIDTH, cache, chunks, step

PARTS: dict[str, dict[str, Any]] = {
    "double_sparsity": {"keep": 0.2, "dense_layers": 0, "channels": 8},
    "tidal": {"keep": 0.2, "dense_layers": 0, "layers": [0]},
    "actqkv": {"keep": 0.2, "dense_layers": 0, "window": 4},
    "selective_values": {"eps": 0.01},
}
RECIPE = {"method": "kivi", "bits": 4, "group_size": 16, "sink": 2, "residual_length": 16}
STORED = {**RECIPE, "read": {"method": "double_sparsity", "keep": 0.25, "channels": 4, "dense_layers": 1}}


def run(made: Any, data: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    found = [[step(layer, q + i, k, v) for i, layer in enumerate(made.layers)] for q, k, v in data]
    return torch.cat([outputs[-1] for outputs in found], 1)


@pytest.mark.parametrize("method", PARTS)
def test_after_cropping_it_reads_as_if_the_tokens_had_never_come(method: str) -> None:
    read, data = {"method": method, **PARTS[method]}, chunks([150, 40, 1, 1, 1])
    if method == "actqkv":  # of a window, the queries before those that were cropped are not kept
        read["window"] = 1
    one, other = (cache(read, layers=2, residual_length=0) for _ in range(2))
    run(one, data[:2])
    one.crop(-40)
    run(other, data[:1])
    if method == "actqkv":  # densities are those of the latest query, which is gone
        for layer in one.layers:
            layer.reader.density = None
    torch.testing.assert_close(run(one, data[2:]), run(other, data[2:]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", PARTS)
def test_rows_are_moved_and_repeated(method: str) -> None:
    read, data = {"method": method, **PARTS[method]}, chunks([150, 1, 1], 3)
    made = cache(read, "kivi", layers=2)
    expected = run(made, data)[:, 151:]
    other = cache(read, "kivi", layers=2)
    run(other, data[:2])
    other.reorder_cache(torch.tensor([2, 0, 1]))
    found = run(other, [tuple(x[[2, 0, 1]] for x in data[2])])  # type: ignore[list-item]
    torch.testing.assert_close(found, expected[[2, 0, 1]], atol=2e-5, rtol=0)
    other = cache(read, "kivi", layers=2)
    run(other, data[:2])
    other.batch_select_indices(torch.tensor([1]))
    other.batch_repeat_interleave(2)
    found = run(other, [tuple(x[[1, 1]] for x in data[2])])  # type: ignore[list-item]
    torch.testing.assert_close(found, expected[[1, 1]], atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", PARTS)
def test_a_cache_that_was_reset_is_new(method: str) -> None:
    read, data = {"method": method, **PARTS[method]}, chunks([150, 1])
    made = cache(read, "kivi", layers=2)
    expected = run(made, data)
    made.reset()
    assert torch.equal(run(made, data), expected)


def small() -> PreTrainedModel:
    return build("llama", {"num_hidden_layers": 3, "max_position_embeddings": 512, "eos_token_id": None})


def tokens(rows: int, count: int) -> Tensor:
    return torch.randint(1, 64, (rows, count), generator=torch.Generator().manual_seed(rows))


def learned(model: PreTrainedModel) -> tuple[Any, dict[str, Tensor]]:
    settings = cache_settings(STORED)
    return settings, calibrate(model, coded_layers(model.config, settings), tokens(4, 60), reading=settings.read)[0]


def test_it_is_calibrated_stored_and_read_back(tmp_path: Path) -> None:
    model = small()
    settings, static = learned(model)
    assert set(static) == {f"layers.{i}.read.channels" for i in range(3)}
    assert all(x.shape == (2, 4) and x.dtype == torch.int16 for x in static.values())
    section = kv_config.write(tmp_path, settings, 3, static)
    again = kv_config.read(section, 3)
    assert again.read == settings.read and again.plain()["read"] == settings.plain()["read"]
    stored = kv_config.read_static(section, tmp_path, model.config, again)
    assert stored.keys() == static.keys() and all(torch.equal(stored[name], x) for name, x in static.items())
    section.pop("static")
    with pytest.raises(CheckpointError, match=r"layers\.0\.read\.channels is missing"):
        kv_config.read_static(section, tmp_path, model.config, again)


def test_skipped_layers_read_everything_and_are_not_calibrated(tmp_path: Path) -> None:
    model = small()
    settings = cache_settings({**STORED, "skip_layers": [-1]})
    static, _ = calibrate(model, coded_layers(model.config, settings), tokens(4, 60), reading=settings.read)
    assert set(static) == {"layers.0.read.channels", "layers.1.read.channels"}
    section = kv_config.write(tmp_path, settings, 3, static)
    again = kv_config.read(section, 3)
    made = make_cache(model.config, again, kv_config.read_static(section, tmp_path, model.config, again), "fused")
    generation.switch(model)
    with torch.inference_mode():
        model(input_ids=tokens(1, 60), past_key_values=made, use_cache=True)
    assert [layer.reader is None for layer in made.layers] == [False, False, True]


def test_generation_reads_chosen_tokens() -> None:
    """With all of them the text is that of dense reading; with few of them the steps still run, padded rows too."""
    model = small()
    settings, static = learned(model)
    assert settings.read is not None
    prompt, mask = tokens(2, 120), torch.ones(2, 120, dtype=torch.long)
    prompt[1, :30], mask[1, :30] = 0, 0
    texts = []
    for recipe in (RECIPE, {**STORED, "read": {**STORED["read"], "keep": 1.0}}, STORED):  # type: ignore[dict-item]
        generation.attach(model, recipe, static)
        made = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=40, do_sample=False)
        texts.append(made)
    assert torch.equal(texts[0], texts[1]) and texts[2].shape == (2, 160)


def test_other_tensors_than_those_of_the_settings_are_refused() -> None:
    model = small()
    settings, static = learned(model)
    generation.switch(model)
    bad = {
        "is missing": {},
        "channels is": {**static, "layers.0.read.channels": torch.zeros(2, 3, dtype=torch.int16)},
        "holds 1 twice": {**static, "layers.0.read.channels": torch.ones(2, 4, dtype=torch.int16)},
        r"holds \d+, which is not between 0 and 15": {
            **static,
            "layers.0.read.channels": static["layers.0.read.channels"] + 16,
        },
    }
    for words, tensors in bad.items():
        made = make_cache(model.config, settings, tensors, "fused")
        with pytest.raises(RecipeError, match=words) as caught:
            model(input_ids=tokens(1, 8), past_key_values=made, use_cache=True)
        assert "layer 0, read" in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_read_so_is_refused_in_a_line() -> None:
    model, data = small(), chunks([150, 1])
    with pytest.raises(RecipeError, match="path='fused'"):
        generation.attach(model, STORED, learned(small())[1], path="decode")
    assert not hasattr(model, "kv_cache")
    made = make_cache(model.config, {**RECIPE, "read": {"method": "tidal"}}, path="decode")
    with pytest.raises(RecipeError, match="only attention that reads stored codes"):
        model(input_ids=tokens(1, 8), past_key_values=made, use_cache=True)
    lloyd = cache({"method": "double_sparsity", "labels": "codes", "dense_layers": 0}, "lloyd")
    step(lloyd.layers[0], *data[0])
    with pytest.raises(RecipeError, match="set read.labels: store"):
        step(lloyd.layers[0], *data[1])
    tidal = cache({"method": "tidal", "dense_layers": 0, "layers": [0]}, layers=2, skip_layers=[0])
    for layer in tidal.layers:
        step(layer, *data[0])
    with pytest.raises(CompressError, match="layer 0 chooses tokens for layer 1"):
        step(tidal.layers[1], *data[1])
    masked = cache({"method": "tidal"})
    step(masked.layers[0], *data[0])
    with pytest.raises(CompressError, match="a mask for each head"):
        step(masked.layers[0], *data[1], mask=torch.ones(2, 4, 1, 151, dtype=torch.bool))


@pytest.mark.parametrize(
    ("read", "words"),
    [
        ({"method": "tidl"}, "did you mean 'tidal'"),
        ({"keep": 0.5}, "unknown read plugin"),
        ({"method": "tidal", "keep": 0}, "keep 0 is not above 0"),
        ({"method": "tidal", "keeep": 0.5}, "did you mean 'keep'"),
        ({"method": "tidal", "layers": [3, 2]}, "layers must be in ascending order"),
        ({"method": "double_sparsity", "channels": 0}, "channels 0 is not 1 or more"),
        ({"method": "actqkv", "block": 0}, "block 0 is not 1 or more"),
        ({"method": "selective_values", "eps": 1}, "eps 1 is not"),
        ("tidal", "must be keys with values"),
    ],
)
def test_impossible_settings(read: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        cache_settings({**RECIPE, "read": read})
    assert "kv_cache.read" in str(caught.value)


def test_settings_come_back_as_they_were_written() -> None:
    settings = cache_settings({**RECIPE, "read": {"method": "tidal", "keep": 0.5, "layers": [2, 7]}})
    assert cache_settings(settings.plain()) == settings
    assert "read" not in cache_settings(RECIPE).plain()
    assert settings.needs() == frozenset() and cache_settings(STORED).needs() == {"keys", "queries"}


def test_compiled_reading_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered rows of all codecs, through compiled code where there is some."""
    from compress.kernels import contract

    data = chunks([150, 1, 1])
    for codec in ("kivi", "lloyd"):
        for method in ("double_sparsity", "selective_values"):
            read = {"method": method, **PARTS[method]}
            expected = run(cache(read, codec), data)
            with monkeypatch.context() as patch:
                patch.setattr(contract, "SMALL", 0)
                found = run(cache(read, codec), data)
            assert (found - expected).norm() < 2e-3 * expected.norm()
    assert WIDTH % 16 == 0
