"""Recipes that leave the weights as they are: the text that they read, and what the checkpoint says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from compress import api
from compress.run import calibration_text, kv_cache
from compress.run.job import Job
from helpers.pico import save_pico
from helpers.runs import TEXT, Setup

PROBES = 1000  # tokens of self-checks, at most
CALIBRATION = ("calibration.num_samples=64", "calibration.seq_len=32", "calibration.importance=none")
CACHE = Setup("kv3", (*CALIBRATION, "kv_cache.residual_length=32"))
WITH_WEIGHTS = Setup("int4", (*CALIBRATION, "group_size=32", "embeddings={keep: true}", "head={keep: true}"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the tokens that go through the first and the last block, and those of the calibration text."""
    counts = {"first": 0, "last": 0, "text": 0}
    forward, calibration = LlamaDecoderLayer.forward, calibration_text.calibration

    def counted(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.device.type != "meta":
            counts["first" if self.self_attn.layer_idx == 0 else "last"] += hidden_states.shape[:2].numel()
        return forward(self, hidden_states, *args, **kwargs)

    def taken(*args: Any) -> Any:
        found = calibration(*args)
        counts["text"] = 0 if found is None else found.tokens.numel()
        return found

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    monkeypatch.setattr(calibration_text, "calibration", taken)
    monkeypatch.setattr(kv_cache, "CALIBRATION_TOKENS", 256)
    return counts


def job_of(model: Path, setup: Setup, out: Path) -> Job:
    recipe = setup.load()
    return Job(str(model), recipe, out, calib=str(TEXT), pack=recipe.packs)  # as the command line makes it


def run(setup: Setup, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    api.quantize(job_of(save_pico("llama", tmp_path / "model"), setup, out))
    return out


def test_only_what_the_cache_is_calibrated_on_goes_through_the_blocks(read: dict[str, int], tmp_path: Path) -> None:
    run(CACHE, tmp_path)
    assert read["text"] == 256
    assert all(256 <= read[block] <= 256 + PROBES for block in ("first", "last"))


def test_weights_that_need_text_get_all_of_it(read: dict[str, int], tmp_path: Path) -> None:
    cached = ("kv_cache={method: pca, residual_length: 32}",)
    run(WITH_WEIGHTS.set(*cached), tmp_path)
    assert read["text"] == 64 * 32 and read["first"] >= 64 * 32 + 256


def test_weights_that_need_no_text_do_not_ask_for_more(read: dict[str, int], tmp_path: Path) -> None:
    run(Setup("int8", (*CALIBRATION, "kv_cache={method: pca, residual_length: 32}")), tmp_path)
    assert read["text"] == 256


def card_of(setup: Setup, tmp_path: Path) -> str:
    return (run(setup, tmp_path) / "README.md").read_text()


def test_the_card_says_that_the_weights_are_those_of_the_original(tmp_path: Path) -> None:
    text = card_of(CACHE.set("kv_cache.values={bits: 2.5}"), tmp_path)
    assert "# model, with a compressed key-value cache (recipe `kv3`)" in text
    assert "The weights are those of the original" in text and "keeps an exact cache" in text
    assert "keys by `pca`, 3.125 bits, the last 32 tokens exact; values by `pca`, 2.5 bits" in text
    assert "ransformed" not in text and "packed" not in text


def test_a_cache_that_evicts_is_written(tmp_path: Path) -> None:
    text = card_of(Setup("kv4-half", ("kv_cache.residual_length=32", "kv_cache.group_size=auto")), tmp_path)
    assert "and the first 4. Tokens are evicted: 50% of the tokens stay, chosen by `expected_attention`." in text


@pytest.mark.parametrize(
    ("setup", "title"),
    [
        (WITH_WEIGHTS.set("kv_cache={method: kivi, residual_length: 32}"), "quantized with compress"),
        (CACHE.set("transform=[{method: rotate}]"), "transformed with compress"),
    ],
)
def test_other_cards_name_the_cache_too(setup: Setup, title: str, tmp_path: Path) -> None:
    text = card_of(setup, tmp_path)
    assert title in text and "Cache of generation: keys and values by `" in text
