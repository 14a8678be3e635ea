"""Principal components: bases and bits against plain algebra, errors where energy is uneven, bytes, both readings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.contract import MOST_MIXED_BITS
from compress.kv.codec import Codec, Spec, rotate
from compress.kv.codecs import components, lloyd, pca
from compress.kv.codecs.packed import row_nbytes
from compress.kv.rope import Rope
from compress.kv.settings import Policy
from compress.kv.token_store import Store
from helpers.kv_cases import refusal, through_a_model

HEADS, WIDTH, QUERIES = 2, 32, 2


def spec(kind: Any, heads: int = HEADS) -> Spec:
    return Spec(kind, 0, 1, heads, WIDTH, QUERIES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(tokens: int, heads: int = HEADS, seed: int = 0, fall: float = 0.7) -> Tensor:
    """[tokens, heads, WIDTH] of a mean and components whose deviations fall by this factor."""
    basis = torch.linalg.qr(normal(heads, WIDTH, WIDTH, seed=7))[0]
    x = normal(tokens, heads, WIDTH, seed=seed) * fall ** torch.arange(WIDTH)
    return (x[:, :, None] @ basis.mT)[:, :, 0] + 3 * normal(heads, WIDTH, seed=8)


def samples(heads: int = HEADS) -> dict[str, Tensor]:
    x = uneven(3000, heads)
    queries = normal(3000, heads * QUERIES, WIDTH, seed=1) * torch.logspace(0, 1, WIDTH)
    return {"keys_pre": x, "values": x, "queries_pre": queries}


def codec(kind: str, heads: int = HEADS, **settings: Any) -> Codec:
    config = pca.Config(**settings)
    return pca.build(config, spec(kind, heads), pca.calibrate(config, spec(kind, heads), samples(heads)))


def rows(x: Tensor) -> Tensor:
    """[tokens, heads, WIDTH] -> [1, heads, tokens, WIDTH]."""
    return x.transpose(0, 1)[None]


@pytest.mark.parametrize("unit", [1, 3, 4, 8])
@pytest.mark.parametrize("bits", [0.4, 2, 3.5, 7])
def test_bytes_do_not_depend_on_the_text(bits: float, unit: int) -> None:
    """What fills runs of equal bits comes out of the bits: a budget that was divided on another text is kept."""
    config, sizes = pca.Config(bits, unit), set()
    for fall in (0.5, 0.7, 0.9, 1.0):
        given = {"values": uneven(500, fall=fall)}
        static = pca.calibrate(config, spec("values"), given)
        made = pca.build(config, spec("values"), static)
        sizes.add(made.encode(rows(given["values"][:8]), {})["codes"].shape[-1])
        more = components.allocate(static["variances"], int(static["bits"].sum()) + unit, unit)
        assert row_nbytes(more) > bits * HEADS * WIDTH / 8 or int(more.sum()) + unit > bits * HEADS * WIDTH
    assert sizes == {math.ceil(bits * HEADS * WIDTH / 8)}


def test_errors_are_those_of_levels() -> None:
    for bits, expected in enumerate(components.GAUSSIAN_ERRORS):
        table, x = lloyd.levels(bits).double(), torch.linspace(-9, 9, 20_001, dtype=torch.float64)
        weight = (-x.square() / 2).exp()
        error = ((table[lloyd.nearest(x, table)] - x).square() * weight).sum() / weight.sum()
        assert float(error) == pytest.approx(expected, rel=0.006)


def test_bits_go_where_they_lower_the_error_most() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        variances = torch.rand(2, 4, generator=generator).exp().pow(3).sort(descending=True)[0]
        found = components.allocate(variances, 14, 1)
        assert int(found.sum()) == 14

        def error(bits: Tensor, variances: Tensor = variances) -> float:
            return float((variances * torch.tensor(components.GAUSSIAN_ERRORS)[bits.long()]).sum())

        for start in range(8):  # no bit is better elsewhere
            for stop in range(8):
                moved = found.flatten().int()
                moved[start] -= 1
                moved[stop] += 1
                if moved.min() >= 0 and moved.max() <= MOST_MIXED_BITS:
                    assert error(moved.view(2, 4)) >= error(found) - 1e-6
    assert components.allocate(torch.ones(2, 12), 23, 8).sum() in (20, 16)  # runs of 8 and of 4
    assert components.allocate(torch.zeros(1, 8), 100, 8).tolist() == [[7] * 8]


def test_components_of_keys_are_those_of_the_scores() -> None:
    x, q = (
        uneven(2000, fall=0.95).double(),
        normal(2000, HEADS, WIDTH, seed=3).double() * torch.logspace(0, 1, WIDTH).double(),
    )
    moment = torch.einsum("nhi,nhj->hij", q, q) / 2000
    alike = torch.full(x.shape[:2], 1 / len(x)).double()
    mean, back, variances = components.components(x, moment, alike, alike)
    for head in range(HEADS):
        z = torch.linalg.solve(back[head], (x[:, head] - mean[head]).T)
        torch.testing.assert_close(z @ z.T / 2000, torch.eye(WIDTH).double(), atol=1e-3, rtol=0)
        felt = back[head].T @ moment[head] @ back[head]  # of an error of z, squared and summed over queries
        torch.testing.assert_close(felt, variances[head].diag(), atol=2e-3 * float(variances[head, 0]), rtol=0)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
    again = components.components(x[order], moment, alike, alike)
    torch.testing.assert_close(again[2], variances)


def test_weights_of_tokens_are_copies_of_them() -> None:
    """A token that counts three times is as good as three tokens; heads have weights of their own."""
    x, times = uneven(60).double(), torch.randint(0, 4, (60, HEADS), generator=torch.Generator().manual_seed(2))
    weights = components.token_weights(times, 1.0)
    mean, back, variances = components.components(x, None, weights, weights)
    for head in range(HEADS):
        copied = x[:, head].repeat_interleave(times[:, head], 0)[:, None]
        alike = torch.full((len(copied), 1), 1 / len(copied)).double()
        expected = components.components(copied, None, alike, alike)
        torch.testing.assert_close(mean[head], expected[0][0])
        torch.testing.assert_close(variances[head], expected[2][0])
        torch.testing.assert_close(back[head] @ back[head].T, (expected[1] @ expected[1].mT)[0])
    roots = components.token_weights(times, 0.5)
    torch.testing.assert_close(roots.square() / roots.square().sum(0), weights)
    nothing = components.token_weights(torch.tensor([[0.0, 1.0], [0.0, 3.0]]), 1.0)
    assert nothing.tolist() == [[0.5, 0.25], [0.5, 0.75]]


def test_attention_sinks_are_coded_finely() -> None:
    """Values that nearly all attention reads, and that are far from the others' mean, have small errors."""
    given = samples()
    sinks = torch.arange(len(given["values"])) % 100 == 50
    given["values"][sinks] = 1e-3 * normal(int(sinks.sum()), HEADS, WIDTH, seed=4)
    errors = {}
    for name, share in (("alike", 1.0), ("read", 1e4)):
        read = torch.where(sinks, share, 1.0)[:, None, None].expand(-1, HEADS, 1)
        config = pca.Config(bits=3.0)
        made = pca.build(config, spec("values"), pca.calibrate(config, spec("values"), {**given, "attended": read}))
        x = rows(given["values"])
        missed = (made.decode(made.encode(x, {})) - x).square().sum(-1)
        errors[name] = float(missed[..., sinks].mean())
    assert errors["read"] < errors["alike"] / 100


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_the_error_is_far_below_that_of_a_rotation(kind: str) -> None:
    x = uneven(512, seed=5)
    made = codec(kind, bits=2.0)
    found = made.decode(made.encode(rows(x), {}))
    error = (found - rows(x)).square()
    if kind == "keys":
        error = error * torch.logspace(0, 1, WIDTH).square()
        scale = (rows(x) - rows(x).mean(2, keepdim=True)).square() * torch.logspace(0, 1, WIDTH).square()
    else:
        scale = (rows(x) - rows(x).mean(2, keepdim=True)).square()
    assert float(error.sum() / scale.sum()) < 0.1175 / 4
    finer = codec(kind, bits=4.0)
    assert (finer.decode(finer.encode(rows(x), {})) - rows(x)).square().sum() < 0.3 * (found - rows(x)).square().sum()


@pytest.mark.parametrize(("kind", "heads", "bits"), [("keys", 2, 2.0), ("values", 3, 2.5), ("values", 1, 1.25)])
def test_against_a_plain_coder(kind: str, heads: int, bits: float) -> None:
    config = pca.Config(bits=bits)
    static = pca.calibrate(config, spec(kind, heads), samples(heads))
    assert int(static["bits"].sum()) <= bits * heads * WIDTH
    made = pca.build(config, spec(kind, heads), static)
    x = rows(uneven(40, heads, seed=9))
    block = made.encode(x, {})
    norms = 2.0 ** ((block["norms"].double() - 128) / pca.NORM_STEPS)
    back = static["back"].double()
    expected = torch.empty_like(x, dtype=torch.float64)
    for head in range(heads):
        y = torch.linalg.solve(back[head], (x[0, head].double() - static["mean"][head].double()).T).T
        y /= norms[0, head]
        for c in range(WIDTH):
            table = pca.table(int(static["bits"][head, c])).double()
            y[:, c] = table[(y[:, c, None] - table).abs().argmin(-1)]
        expected[0, head] = (y * norms[0, head]) @ back[head].T + static["mean"][head].double()
    difference = (made.decode(block) - expected).abs() > 1e-3
    assert difference.double().mean() < 2e-3  # ties


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_the_same_however_the_text_is_cut(kind: str) -> None:
    x = rows(uneven(200))
    angle = torch.arange(200)[:, None] * 10000.0 ** (-torch.arange(16) / 16)
    cos, sin = torch.cat((angle, angle), -1).cos()[None], torch.cat((angle, angle), -1).sin()[None]
    found = []
    for cut in ([200], [50, 1, 1, 148]):
        turns = Rope()
        turns.append(cos, sin)
        store = Store(codec(kind, bits=2.5), Policy(4, 20, 8), turns)
        for part in (rotate(x, cos, sin) if kind == "keys" else x).split(cut, 2):
            store.append(part)
        found.append(store.read())
        held = store.nbytes()
        words = held.codes / (176 * HEADS * WIDTH) * 8
        assert 2.25 <= words <= 2.5 + 3 * 15 / (HEADS * WIDTH)  # a run short of bits, or words that are not full
        assert held.scales == 176 * HEADS
    assert torch.equal(*found)


def test_reading_values_without_decoding() -> None:
    x, p = rows(uneven(60)), normal(1, HEADS, 3, 60, seed=1).softmax(-1) * 0.5
    made = codec("values")
    block = made.encode(x, {})
    found = made.output(made.mix(p, block), p.sum(-1, keepdim=True), {})
    torch.testing.assert_close(found, p @ made.decode(block), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bits", [2.0, 7.0])
def test_calibrated_on_a_model(bits: float) -> None:
    """Both paths give the same logits for a padded batch; seven bits stay near those of the exact cache."""
    recipe = {"method": "pca", "bits": bits, "residual_length": 4, "flush": 4}
    _, (decoded, fused, exact) = through_a_model(recipe, repeats=4)
    torch.testing.assert_close(decoded, fused, atol=1e-4, rtol=1e-4)
    if bits == 7:
        assert float((decoded - exact).norm() / exact.norm()) < 0.022


def test_extremes() -> None:
    made = codec("values", bits=0.25)
    x = rows(uneven(20))
    for scale in (0.0, 1e-6, 1e4):
        assert torch.isfinite(made.decode(made.encode(x * scale, {}))).all()


def test_what_is_refused() -> None:
    missing = refusal("pca", spec("keys"), {})
    assert "layer 0, keys: pca is calibrated, but mean is missing" in missing and "; calibrate the cache" in missing
    own = pca.calibrate(pca.Config(), spec("values"), samples())
    assert "mean is float16 [2, 32], expected float16 [3, 32]" in refusal("pca", spec("values", 3), own)
    for settings, match in (({"bits": 0.0}, "bits 0.0"), ({"unit": 0}, "unit 0")):
        with pytest.raises(ValueError, match=match):
            pca.Config(**settings)
