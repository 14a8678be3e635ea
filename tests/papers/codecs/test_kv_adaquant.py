"""KV-AdaQuant: norms, whose weights make keys and values, the published greedy, and the bits of a calibrated cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calib.kv import calibrate
from compress.errors import CalibrationError
from compress.kv.codec import Spec
from compress.kv.codecs import kivi
from compress.kv.settings import cache_settings
from compress.papers.codecs import kv_adaquant
from helpers.kv_cases import normal, windows
from helpers.pico import build

RECIPE = {"method": "kv_adaquant", "bits": 3.0, "sink": 4, "residual_length": 32}
SPEC = Spec("keys", 0, 2, 2, 16, 2)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (7, 7)])
def test_norms(shape: tuple[int, int]) -> None:
    matrix = normal(*shape, seed=3)
    expected = [float(torch.linalg.matrix_norm(matrix.double(), which)) for which in ("fro", 2)]
    assert kv_adaquant.norms(matrix) == pytest.approx(expected)


def published(costs: list[float], sizes: list[int], config: kv_adaquant.Config) -> list[int]:
    """The greedy in steps of one raise, all candidates looked at."""
    bits = [config.widths[0]] * len(costs)
    while True:
        best, at = 0.0, -1
        for i, now in enumerate(bits):
            higher = [width for width in config.widths if width > now]
            if not higher:
                continue
            used = sum(b * size for b, size in zip(bits, sizes, strict=True)) + (higher[0] - now) * sizes[i]
            gain = costs[i] * (2.0 ** (-2 * now) - 2.0 ** (-2 * higher[0])) / (higher[0] - now)
            if used <= config.bits * sum(sizes) + 1e-6 and gain > best:
                best, at = gain, i
        if at < 0:
            return bits
        bits[at] = next(width for width in config.widths if width > bits[at])


@pytest.mark.parametrize("seed", range(6))
def test_bits_are_those_of_the_published_greedy(seed: int) -> None:
    draw = random.Random(seed)
    costs, sizes = [draw.uniform(0.1, 100) for _ in range(12)], [draw.choice([64, 64, 128]) for _ in range(12)]
    config = kv_adaquant.Config(bits=draw.choice([1.5, 2.0, 3.0, 4.25]))
    assert kv_adaquant.allocate_bits(costs, sizes, config) == published(costs, sizes, config)


def given(kind: str, model: Any) -> list[Tensor]:
    """The weights of keys or values of all layers, by the names that these models have."""
    rows = []
    for layer in model.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "qkv_proj"):
            queries, width = (
                model.config.num_attention_heads,
                model.config.hidden_size // model.config.num_attention_heads,
            )
            start = (queries + (kind == "values") * model.config.num_key_value_heads) * width
            rows.append(attention.qkv_proj.weight[start : start + model.config.num_key_value_heads * width])
        else:
            rows.append(getattr(attention, "k_proj" if kind == "keys" else "v_proj").weight)
    return rows


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
def test_the_weights_of_keys_and_values_are_found(kind: str) -> None:
    """Also behind a norm of keys, and among the rows of one product."""
    model = build(kind)
    made, _ = calibrate(model, cache_settings(RECIPE).by_layer(model.config.num_hidden_layers), windows(2, 60))
    for name in ("keys", "values"):
        for layer, weight in enumerate(given(name, model)):
            expected = [float(torch.linalg.matrix_norm(weight.detach().double(), which)) for which in ("fro", 2)]
            assert made[f"layers.{layer}.{name}.norms"][:2].tolist() == pytest.approx(expected, rel=1e-5)
    assert all(not p.requires_grad or p.grad is None for p in model.parameters())


@pytest.mark.parametrize("of", ["weights", "cache"])
@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_the_larger_kind_gets_more_bits(of: str, norm: str) -> None:
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(8)
    layers = cache_settings({**RECIPE, "of": of, "norm": norm}).by_layer(model.config.num_hidden_layers)
    made, _ = calibrate(model, layers, windows(2, 60))
    bits = {kind: [int(x) for name, x in made.items() if name.endswith(f"{kind}.bits")] for kind in ("keys", "values")}
    assert min(bits["keys"]) > max(bits["values"])
    assert sum(bits["keys"]) + sum(bits["values"]) <= 3.0 * 2 * len(bits["keys"])


def test_codes_are_those_of_kivi() -> None:
    x = normal(1, 2, 64, 16)
    made = kv_adaquant.build(kv_adaquant.Config(axis="token"), SPEC, {"bits": torch.tensor([4])})
    other = kivi.build(kivi.Config(4, axis="token"), SPEC, {})
    assert torch.equal(made.decode(made.encode(x, {})), other.decode(other.encode(x, {})))


def test_what_means_nothing_is_refused() -> None:
    for wrong in ({"widths": (4, 2)}, {"widths": ()}, {"bits": 9.0}, {"widths": (2, 16)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            kv_adaquant.Config(**wrong)  # type: ignore[arg-type]
    samples = {"keys": normal(20, 2, 16), "projections": torch.zeros(0, 0)}
    with pytest.raises(CalibrationError, match=r"set kv_cache\.of to cache"):
        kv_adaquant.calibrate(kv_adaquant.Config(), SPEC, samples)
    assert kv_adaquant.calibrate(kv_adaquant.Config(of="cache"), SPEC, samples)["norms"][0] == 0
