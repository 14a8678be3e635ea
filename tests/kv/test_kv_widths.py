"""Generation with every codec on heads of 16 to 256 channels, of which all or some turn; what does not fit is refused.

A codec is refused before anything is calibrated (compress/run/kv_cache.py), or generation works.
"""

from __future__ import annotations

from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress import plugins
from compress.calib.kv import calibrate
from compress.kernels import contract
from compress.kernels.cpu import kv_basis, kv_mixed
from compress.kv import generation
from compress.kv.codecs import pca
from compress.kv.layer import KVCache
from compress.kv.settings import cache_settings
from compress.run import kv_cache
from helpers.pico import of_type

TOKENS = 72
POLICY = {"sink": 2, "residual_length": 8, "flush": 8}
FINE: dict[str, dict[str, Any]] = {  # as exact as the codec can be, in groups that fit all widths
    "identity": {},
    "fp8": {},
    "kivi": {"bits": 8, "group_size": 8},
    "kvquant": {"bits": 7},
    "gear": {"bits": 8, "group_size": 8, "block_tokens": 8},
    "squat": {"bits": 8, "group_size": 8},
    "rotatekv": {"bits": 8, "group_size": 8},
    "lloyd": {"bits": 8},
    "zipvl": {"high": 8, "low": 8},
    "pca": {"bits": 7.0},
}
WIDTHS = (16, 24, 40, 48, 64, 80, 96, 128, 256)
PARTIAL = (  # model, width of a head, share that turns: 16, 20, 24, 8, 32, 64 and 6 channels
    ("gpt_neox", 64, 0.25),
    ("stablelm", 80, 0.25),
    ("gpt_neox", 96, 0.25),
    ("stablelm", 32, 0.25),
    ("gpt_neox", 128, 0.25),
    ("stablelm", 256, 0.25),
    ("stablelm", 24, 0.25),
)
SHAPES = (*(("llama", width, 1.0) for width in WIDTHS), *PARTIAL)


@once
def model(name: str, width: int, share: float) -> PreTrainedModel:
    """A model of one layer and two query heads."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    changes |= {"num_key_value_heads": 2 if name == "gpt_neox" else 1}
    if share == 1:
        return of_type(name, {**changes, "head_dim": width})
    turns = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    return of_type(name, {**changes, "hidden_size": 2 * width, "rope_parameters": turns})


def prompt() -> Tensor:
    return torch.randint(0, 250, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def generated(made: PreTrainedModel, settings: dict[str, Any] | None) -> Any:
    """Three tokens; with settings, through a cache of them, which was calibrated for the model."""
    if settings is not None:
        codings = kv_cache.check(made.config, cache_settings(settings))
        text = torch.randint(0, 250, (8, 64), generator=torch.Generator().manual_seed(2))
        generation.attach(made, settings, calibrate(made, codings, text, batch=8)[0])
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "output_logits": True}
    try:
        return made.generate(
            prompt(), attention_mask=torch.ones(1, TOKENS, dtype=torch.long), return_dict_in_generate=True, **how
        )
    finally:
        generation.detach(made)


@once
def exact(*shape: Any) -> Any:
    return generated(model(*shape), None)


def check_generation(shape: tuple[str, int, float], settings: dict[str, Any], error: float) -> None:
    """Logits behind the coded prompt are those of the exact cache, but for an error of their norm."""
    found, expected = generated(model(*shape), {**settings, **POLICY}), exact(*shape)
    assert isinstance(found.past_key_values, KVCache) and found.past_key_values.nbytes().codes > 0
    assert torch.equal(found.logits[0], expected.logits[0])  # of the prompt, which sees itself as it is
    assert found.sequences[0, TOKENS] == expected.sequences[0, TOKENS]
    difference = (found.logits[1] - expected.logits[1]).norm() / expected.logits[1].norm()
    assert difference <= error, (shape, settings, difference)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}")
@pytest.mark.parametrize("method", FINE)
def test_every_codec_on_every_width(method: str, shape: tuple[str, int, float]) -> None:
    check_generation(shape, {"method": method, **FINE[method]}, 0.2)


@pytest.mark.parametrize("method", plugins.names("kv"))
def test_defaults_work(method: str) -> None:
    """Groups choose a size that fits by themselves."""
    for shape in SHAPES[:1] if method == "commvq" else SHAPES[::2]:  # its codebooks take long
        settings = {"method": method, **POLICY, **({"block_tokens": 64} if method == "gear" else {})}
        kv_cache.check(model(*shape).config, cache_settings(settings))
        check_generation(shape, settings, 2.0)


@pytest.mark.parametrize("shape", PARTIAL, ids=lambda shape: f"{shape[0]}-{shape[1]}")
def test_keys_are_laid_out_for_tiles_only_where_these_can_turn_them(
    shape: tuple[str, int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor with AMX, up to the products themselves: too few codes are read for compiled code."""
    monkeypatch.setattr(kv_basis, "has_tiles", lambda: True)
    monkeypatch.setattr(kv_mixed, "supports", lambda width: True)
    monkeypatch.setattr(contract, "SMALL", 1 << 40)
    laid_out = []
    real = kv_basis._tiles

    def tiles(rows: Tensor, rotary: int, lanes: int) -> Tensor:
        laid_out.append(rotary)
        return real(rows, rotary, lanes)

    monkeypatch.setattr(kv_basis, "_tiles", tiles)
    check_generation(shape, {"method": "pca", "bits": 7.0}, 0.2)
    rotary = int(shape[1] * shape[2])
    assert laid_out == ([rotary] if rotary % 32 == 0 else [])


@pytest.mark.parametrize("shape", [PARTIAL[0], PARTIAL[4], ("llama", 80, 1.0)], ids=lambda s: f"{s[0]}-{s[1]}")
def test_compiled_readers_or_plain_ones(shape: tuple[str, int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many codes as compiled code wants, where there is such."""
    monkeypatch.setattr(contract, "SMALL", 0)
    check_generation(shape, {"method": "pca", "bits": 7.0}, 0.2)


def test_channels_that_compiled_code_can_turn() -> None:
    assert [rotary for rotary in range(0, 130, 2) if pca.can_turn(rotary)] == [0, 32, 64, 96, 128]
