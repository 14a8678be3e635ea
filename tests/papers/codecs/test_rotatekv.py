"""RotateKV: order and rotation against plain ones, the errors that they avoid, bytes, chunks, both ways of reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv.codec import Codec, Spec, rotate
from compress.kv.codecs import kivi
from compress.kv.rope import Rope
from compress.kv.settings import Policy
from compress.kv.token_store import Store
from compress.numerics import hadamard
from compress.papers.codecs import rotatekv
from helpers.kv_cases import refusal

HEADS, WIDTH = 4, 64
GAUSSIAN = {(2, 128, 0.8): 0.1623, (3, 128, 1.0): 0.0458, (4, 128, 1.0): 0.0100, (3, 128, 0.8): 0.0346}


def spec(kind: Any, heads: int = HEADS) -> Spec:
    return Spec(kind, 0, 1, heads, WIDTH, 2)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def key_like(tokens: int, heads: int = HEADS) -> Tensor:
    x = normal(1, heads, tokens, WIDTH)
    for head, channel, shift in ((0, 5, 12.0), (1, 17, 15.0), (1, 40, -9.0), (heads - 1, 60, 8.0)):
        x[:, head % heads, :, channel] += shift
    return x


def codec(kind: str, x: Tensor, heads: int = HEADS, **settings: Any) -> Codec:
    config = rotatekv.Config(**settings)
    samples = {"keys_pre": x[0].transpose(0, 1)}
    return rotatekv.build(config, spec(kind, heads), rotatekv.calibrate(config, spec(kind, heads), samples))


def error(made: Codec, x: Tensor) -> float:
    return float((made.decode(made.encode(x, {})) - x).square().mean())


@pytest.mark.parametrize(("bits", "group", "clip"), GAUSSIAN)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_gaussian_data(bits: int, group: int, clip: float, kind: str) -> None:
    x = normal(1, HEADS, 1024, WIDTH)
    made = codec(kind, x, bits=bits, group_size=group, clip=None if (bits, clip) != (3, 0.8) else clip)
    assert error(made, x) == pytest.approx(GAUSSIAN[bits, group, clip], rel=0.03)


def test_rotation_and_order_help_where_channels_stand_out() -> None:
    x = key_like(2048)
    plain = kivi.build(kivi.Config(bits=2, group_size=64, axis="token"), spec("keys"), {})
    made = codec("keys", x, group_size=64)
    unordered = rotatekv.build(rotatekv.Config(group_size=64), spec("keys"), {"order": torch.arange(256)})
    assert error(made, x) < 0.5 * error(unordered, x)
    assert error(unordered, x) < 0.6 * error(plain, x)


@pytest.mark.parametrize(("bits", "expected"), [(2, 0.72), (4, 0.030)])
def test_one_head_with_channels_that_stand_out(bits: int, expected: float) -> None:
    """A rotation alone, no order: the error over the variance of the noise."""
    x = normal(1, 1, 4096, 128)
    for channel, shift in {5: 12.0, 17: 15.0, 69: -9.0, 81: 8.0}.items():
        x[..., channel] += shift
    config = rotatekv.Config(bits=bits, group_size=128, clip=1.0)
    made = rotatekv.build(config, Spec("keys", 0, 1, 1, 128, 1), {"order": torch.arange(128)})
    assert error(made, x) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8])
def test_against_a_plain_coder(heads: int) -> None:
    x = key_like(40, heads)
    made = codec("keys", x, heads, bits=3, group_size=64)
    span = {1: 1, 2: 2, 4: 4, 6: 2, 8: 4}[heads]
    matrix = hadamard.transform(torch.eye(span * WIDTH, dtype=torch.float64)).mT
    order = made.static["order"].long()
    rows = x[0].transpose(0, 1).reshape(40, -1, span * WIDTH).double()
    turned = (rows @ matrix.mT).flatten(1)
    assert torch.equal(order, turned.sum(0).argsort(stable=True))
    found = torch.empty_like(turned)
    for token in range(40):
        for start in range(0, heads * WIDTH, 64):
            part = turned[token, order[start : start + 64]]
            low = part.min().half().double()
            scale = ((part.max() - part.min()) / 7).half().double()
            found[token, order[start : start + 64]] = ((part - low) / scale).round().clamp(0, 7) * scale + low
    expected = (found.reshape(40, -1, span * WIDTH) @ matrix).reshape(40, heads, WIDTH).transpose(0, 1)
    difference = (made.decode(made.encode(x, {}))[0] - expected).abs()
    assert (difference > 1e-3).double().mean() < 1e-3  # ties of rounding


def test_the_order_does_not_depend_on_that_of_the_samples() -> None:
    x = key_like(500)
    again = x[:, :, torch.randperm(500, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(codec("keys", x).static["order"], codec("keys", again).static["order"])


def test_clipping() -> None:
    x = torch.tensor([[-1.0, -0.2, 0.1, 3.0], [5.0, 6.0, 7.0, 9.0]])
    scale, low, codes = rotatekv.fit(x, 2, 0.5)
    torch.testing.assert_close(low[:, 0], torch.tensor([-0.5, 6.0]).half())
    torch.testing.assert_close(scale[:, 0], torch.tensor([2 / 3, 2 / 3]).half())
    assert codes.tolist() == [[0, 0, 1, 3], [0, 0, 2, 3]]


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_the_same_however_the_text_is_cut(kind: str) -> None:
    x = key_like(200)
    angle = torch.arange(200)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    cos, sin = torch.cat((angle, angle), -1).cos()[None], torch.cat((angle, angle), -1).sin()[None]
    found = []
    for cut in ([200], [50, 1, 1, 148]):
        rows = Rope()
        rows.append(cos, sin)
        store = Store(codec(kind, x), Policy(4, 20, 8), rows)
        for part in (rotate(x, cos, sin) if kind == "keys" else x).split(cut, 2):
            store.append(part)
        found.append(store.read())
        held = store.nbytes()
        assert held.codes + held.scales == pytest.approx(HEADS * 176 * WIDTH * (2 + 32 / 128) / 8, rel=0.01)
    assert torch.equal(*found)


def test_reading_values_without_decoding() -> None:
    x, p = normal(2, HEADS, 60, WIDTH), normal(2, HEADS, 3, 60, seed=1).softmax(-1)
    made = codec("values", x)
    block = made.encode(x, {})
    found = made.output(made.mix(p, block), p.sum(-1, keepdim=True), {})
    torch.testing.assert_close(found, p @ made.decode(block), atol=1e-5, rtol=0)


def test_what_is_refused() -> None:
    with pytest.raises(RecipeError, match="layer 0, values: group_size 96 does not divide the 256 channels"):
        codec("values", key_like(4), group_size=96)
    assert "order is missing, expected int16 [256]" in refusal("rotatekv", spec("keys"), {})
    own = codec("keys", key_like(4)).static
    own["order"][3] = own["order"][4]  # a channel that no group writes
    assert f"order holds {own['order'][4]} twice" in refusal("rotatekv", spec("keys"), own)
    for settings, match in (({"bits": 0}, "bits"), ({"group_size": 1}, "group_size"), ({"clip": 1.5}, "clip")):
        with pytest.raises(ValueError, match=match):
            rotatekv.Config(**settings)
