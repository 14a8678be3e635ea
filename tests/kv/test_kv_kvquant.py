"""KVQuant: levels against plain k-means, errors on Gaussian data, outliers, bytes, both paths, chunks, padding."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calib.kv import calibrate
from compress.errors import CalibrationError
from compress.kv import attention, hooks
from compress.kv.cache import make_cache
from compress.kv.codec import Codec, Spec, rotate, unrotate
from compress.kv.codecs import kvquant
from compress.kv.settings import Policy, cache_settings
from compress.kv.token_store import Store
from helpers.kv_cases import refusal
from helpers.pico import build

FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
LLOYD = {2: 0.1175, 3: 0.0345, 4: 0.0095}  # relative squared error of the best levels for N(0, 1)
HEADS, WIDTH = 2, 16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codec(kind: Any, x: Tensor, slopes: Tensor | None = None, **settings: Any) -> Codec:
    """Calibrated on x [tokens, h, width]."""
    config, spec = kvquant.Config(**settings), Spec(kind, 0, 1, x.shape[1], x.shape[2], 2)
    samples = {"keys_pre": x, "values": x, "gradients": torch.ones_like(x) if slopes is None else slopes}
    return kvquant.build(config, spec, kvquant.calibrate(config, spec, samples))


def rows(x: Tensor) -> Tensor:
    """[tokens, h, width] -> [1, h, tokens, width]."""
    return x.transpose(0, 1)[None]


@pytest.mark.parametrize("seed", range(4))
def test_levels_are_the_best_of_all_partitions(seed: int) -> None:
    x, weight = normal(14, seed=seed), normal(14, seed=seed + 9).square()
    ordered, order = x.double().sort()
    w = weight.double()[order]
    best = float("inf")
    for cuts in combinations(range(1, 14), 2):
        loss = 0.0
        for part in zip((0, *cuts), (*cuts, 14), strict=True):
            own, mass = ordered[slice(*part)], w[slice(*part)]
            loss += float((mass * (own - (mass * own).sum() / mass.sum()).square()).sum())
        best = min(best, loss)
    levels = kvquant.k_means(x, weight, 3)
    found = float((w * (ordered[:, None] - levels).square().amin(-1)).sum())
    assert best * (1 - 1e-9) <= found <= best * 1.3
    nearest = (ordered[:, None] - levels).abs().argmin(-1)
    for j in range(3):
        own = nearest == j
        torch.testing.assert_close(levels[j], (w * ordered)[own].sum() / w[own].sum())


def test_levels_of_few_values_and_without_weight() -> None:
    x = torch.tensor([1.0, 1.0, 2.0, 5.0])
    assert set(kvquant.k_means(x, torch.zeros(4), 4).tolist()) >= {1.0, 2.0, 5.0}
    assert torch.isfinite(kvquant.k_means(torch.ones(10), torch.ones(10), 8)).all()


@pytest.mark.parametrize("bits", LLOYD)
def test_gaussian_data(bits: int) -> None:
    x = normal(2000, HEADS, 32) * normal(1, HEADS, 32, seed=1).abs() + 3 * normal(1, HEADS, 32, seed=2)
    made = codec("keys", x, bits=bits, outliers=0.0, q_norm=False)
    block = made.encode(rows(x), {})
    error = (made.decode(block) - rows(x)).square().mean(2) / rows(x).var(2)
    assert float(error.mean()) == pytest.approx(LLOYD[bits], rel=0.1)  # ranges that reach to the last sample differ


@pytest.mark.parametrize("bits", LLOYD)
def test_gaussian_data_of_one_range(bits: int) -> None:
    """Two tokens that the loss does not feel give all channels the range of -5 to 5, so that levels are Lloyd-Max's."""
    x, slopes = normal(4000, HEADS, 32), torch.ones(4000, HEADS, 32)
    x[0], x[1], slopes[:2] = -5.0, 5.0, 0.0
    made = codec("keys", x, slopes, bits=bits, outliers=0.0, q_norm=False)
    error = (made.decode(made.encode(rows(x[2:]), {})) - rows(x[2:])).square().mean()
    assert float(error) == pytest.approx(LLOYD[bits], rel=0.03)


def test_levels_go_where_the_loss_is_sensitive() -> None:
    x, slopes = normal(1500, HEADS, WIDTH), 0.02 * torch.ones(1500, HEADS, WIDTH)
    slopes[x > 1] = 1.0
    blind, aware = (codec("keys", x, s, bits=2, outliers=0.0, q_norm=False) for s in (None, slopes))
    losses = [
        float((rows(slopes) * (made.decode(made.encode(rows(x), {})) - rows(x))).square().mean())
        for made in (blind, aware)
    ]
    assert losses[1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("q_norm", [False, True])
def test_against_a_plain_reference(kind: str, q_norm: bool) -> None:
    """Token by token and channel by channel in float64, from the stored tables."""
    x = normal(300, HEADS, WIDTH) * normal(1, HEADS, WIDTH, seed=1)
    made = codec(kind, x, normal(300, HEADS, WIDTH, seed=2), bits=2, outliers=0.1, q_norm=q_norm)
    block = made.encode(rows(x), {})
    found = made.decode(block)[0].transpose(0, 1).double()
    levels, outputs = made.static["levels"].double(), made.static["outputs"].double()
    assert torch.equal(levels, outputs) != q_norm
    for t in range(0, 300, 29):
        flat = x[t].double().flatten()
        if kind == "keys":
            offset, scale = (made.static[name].double().flatten() for name in ("offsets", "scales"))
        else:
            offset, scale = (block[name][0, 0, t].double() for name in ("offsets", "scales"))
            ordered = flat.sort().values
            widths = [float(ordered[len(flat) - 4 + j] - ordered[j]) for j in range(4)]  # three are cut
            assert float(scale) == pytest.approx(min(widths) / 2, rel=2e-3)
        dense = outputs[((flat - offset) / scale)[:, None].sub(levels).abs().argmin(-1)] * scale + offset
        worst = (flat - dense).abs().topk(3).indices
        expected = dense.clone()
        expected[worst] = flat[worst]
        torch.testing.assert_close(found[t].flatten(), expected, atol=2e-3, rtol=0)


def test_q_norm_keeps_mean_and_variance() -> None:
    x = normal(2000, HEADS, WIDTH)
    made = [codec("keys", x, bits=2, outliers=0.0, q_norm=on) for on in (False, True)]
    plain, spread = (one.decode(one.encode(rows(x), {})) for one in made)
    assert float(plain.var()) < 0.93 * float(x.var())
    assert float(spread.var()) == pytest.approx(float(x.var()), rel=0.02)
    assert float(spread.mean()) == pytest.approx(float(x.mean()), abs=0.01)


def test_channels_that_do_not_vary_and_tokens_of_zeros() -> None:
    x = normal(100, HEADS, WIDTH)
    x[:, 0, 3] = 2.5
    made = codec("keys", x)
    assert float((made.decode(made.encode(rows(x), {}))[0, 0, :, 3] - 2.5).abs().max()) < 1e-4
    values = codec("values", x)
    assert float(values.decode(values.encode(rows(x) * 0, {})).abs().max()) < 1e-4


def pico() -> tuple[Any, dict[str, Any]]:
    return build("llama", FULL), {"method": "kvquant", "bits": 3, "sink": 2, "residual_length": 8, "flush": 8}


def prompt(batch: int, tokens: int) -> Tensor:
    return torch.randint(0, 250, (batch, tokens), generator=torch.Generator().manual_seed(1))


def test_bytes_paths_and_chunks() -> None:
    """Through the cache: bytes are those of the formula, both paths read the same, chunks do not matter."""
    model, recipe = pico()
    static, _ = calibrate(model, cache_settings(recipe).by_layer(2), prompt(4, 64))
    hooks.attach(model)
    attention.register()
    ids, logits = prompt(2, 90), {}
    for path, chunks in (("decode", [82, 8]), ("fused", [82, 8]), ("fused", [10] + [8] * 10)):
        model.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
        cache = make_cache(model.config, recipe, static, path)
        with torch.no_grad():
            logits[path, len(chunks)] = [model(part, past_key_values=cache).logits for part in ids.split(chunks, 1)][-1]
    first, second, third = logits.values()
    torch.testing.assert_close(second, first, atol=1e-4, rtol=0)
    assert (third - second).abs().max() > 1e-4  # the prompt itself was read exactly, or in codes
    assert 0.003 < (first - model(ids, use_cache=False).logits[:, -8:]).abs().max() < 3
    found, channels = cache.nbytes(), HEADS * WIDTH
    bits = 3 + (16 + 8) / channels + (32 / channels) / 2  # keys and values on average, one slot a token
    assert 8 * (found.codes + found.scales + found.extras) / (2 * 2 * 2 * channels * 80) == pytest.approx(
        bits, rel=0.01
    )
    assert found.static == sum(tensor.numel() * 2 for tensor in static.values()) == 2 * 2 * (2 * channels + 4 * 8)


def filled(kind: str, x: Tensor, chunks: list[int], pads: Tensor | None = None) -> Store:
    made = codec(kind, normal(200, HEADS, WIDTH, seed=5))
    turns = torch.arange(x.shape[2])[:, None] * torch.logspace(0, -2, WIDTH // 2).repeat(2)
    made_rope = Turns(turns.cos()[None], turns.sin()[None])
    store = Store(made, Policy(2, 8, flush=1), made_rope)  # type: ignore[arg-type]
    for part in x.split(chunks, 2):
        store.append(part, pads)
    return store


class Turns:
    """Rotary rows of all tokens, whatever was seen."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.stack((self.cos[:, start:stop], self.sin[:, start:stop]), 1)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_chunks_and_padding_of_the_store(kind: str) -> None:
    x = normal(2, HEADS, 50, WIDTH, seed=7)
    whole = filled(kind, x, [50]).read()
    for chunks in ([1] * 50, [13, 1, 36]):
        torch.testing.assert_close(filled(kind, x, chunks).read(), whole, atol=1e-6, rtol=0)
    pads, junk = torch.tensor([0, 7]), x.clone()
    junk[1, :, :7] = 1e4
    padded = filled(kind, junk, [50], pads).read()
    assert torch.equal(filled(kind, x, [50], pads).read()[1, :, 7:], padded[1, :, 7:])
    torch.testing.assert_close(padded[0], whole[0])
    assert torch.equal(padded[1, :, 7:9], x[1, :, 7:9])  # the first real tokens are exact


def test_keys_are_coded_before_rope() -> None:
    x = normal(1, HEADS, 40, WIDTH)
    store = filled("keys", x, [40])
    cos, sin = store.rope.rows(2, 32).unbind(1)  # type: ignore[union-attr]
    plain = unrotate(x[:, :, 2:32], cos, sin)
    made = store.codec
    torch.testing.assert_close(store.read()[:, :, 2:32], rotate(made.decode(made.encode(plain, {})), cos, sin))


def test_errors() -> None:
    spec = Spec("keys", 3, 4, HEADS, WIDTH, 2)
    assert "layer 3, keys: kvquant is calibrated, but levels is missing" in refusal("kvquant", spec, {})
    own = codec("keys", normal(100, HEADS, WIDTH), bits=3).static
    assert "levels is float16 [8], expected float16 [16]" in refusal("kvquant", spec, own, bits=4)
    with pytest.raises(CalibrationError, match="3 calibration tokens are too few"):
        codec("values", normal(3, HEADS, WIDTH))
    for settings in ({"bits": 9}, {"outliers": 0.5}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            kvquant.Config(**settings)  # type: ignore[arg-type]
