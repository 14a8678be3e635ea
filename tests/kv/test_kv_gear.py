"""GEAR: its parts against plain references, errors, bytes, both paths, chunks, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv import attention
from compress.kv.cache import make_cache
from compress.kv.codec import Spec
from compress.kv.codecs import gear, kivi
from compress.kv.settings import Policy
from compress.kv.token_store import Store
from helpers.pico import build

FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
HEADS, WIDTH, BLOCK = 2, 32, 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spec(kind: Any = "keys", width: int = WIDTH) -> Spec:
    return Spec(kind, 1, 2, HEADS, width, 2)


def codec(kind: str = "keys", width: int = WIDTH, **settings: Any) -> gear.Gear:
    own = {"block_tokens": BLOCK, "group_size": 32, **settings}
    made = gear.build(gear.Config(**own), spec(kind, width), {})
    assert isinstance(made, gear.Gear)
    return made


def error(made: Any, x: Tensor) -> float:
    return float((made.decode(made.encode(x, {})) - x).square().sum())


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_without_its_parts_it_is_kivi(kind: str) -> None:
    x = normal(2, HEADS, 2 * BLOCK, WIDTH)
    made, plain = codec(kind, rank=0, sparse=0.0), kivi.build(kivi.Config(2, 32), spec(kind), {})
    found, expected = made.encode(x, {}), plain.encode(x, {})
    assert found.keys() == expected.keys() == made.fields.keys()
    assert all(torch.equal(found[name], rows) for name, rows in expected.items())
    whole = codec(kind, rank=0, sparse=0.0, group_size=None).encode(x, {})
    assert whole["scales"].shape == ((2, HEADS, 2, WIDTH) if kind == "keys" else (2, HEADS, 2 * BLOCK, 1))


def test_the_low_rank_part_is_near_the_best() -> None:
    """Against the singular value decomposition, for an error with structure and for one without."""
    structured = normal(3, BLOCK, 2) @ normal(3, 2, WIDTH, seed=1) + 0.1 * normal(3, BLOCK, WIDTH, seed=2)
    for x, tolerance in ((structured, 1e-3), (normal(3, BLOCK, WIDTH, seed=3), 0.05)):
        left, right = gear.low_rank(x, 2)
        found = float((x.double() - left.double() @ right.double()).square().sum())
        values = torch.linalg.svdvals(x.double())
        best = float(values[:, 2:].square().sum())
        assert best * (1 - 1e-6) <= found + 1e-4 * float(x.square().sum())
        assert found <= best * (1 + tolerance)
        assert left.dtype == right.dtype == torch.float16
    caught = 1 - found / float(x.square().sum())
    assert 0.08 < caught < 0.25  # of an error without structure there is little to catch


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_outliers_are_exact_and_do_not_widen_the_rest(kind: str) -> None:
    x = normal(1, HEADS, BLOCK, WIDTH)
    if kind == "keys":  # one large and one small token in each channel
        where = torch.randint(0, BLOCK, (1, HEADS, 1, WIDTH), generator=torch.Generator().manual_seed(4))
        spikes = torch.zeros_like(x).scatter_(2, where, 30.0).scatter_(2, (where + 9) % BLOCK, -30.0)
    else:  # of each token one large channel in the first head, and a small one in the second
        spikes = torch.zeros_like(x)
        spikes[:, 0, :, 3], spikes[:, 1, :, 8] = 30.0, -30.0
    spiky = torch.where(spikes != 0, spikes, x)
    made = codec(kind, rank=0, sparse=0.02)
    assert made.ends == 1
    found = made.decode(made.encode(spiky, {}))
    assert torch.equal(found[spikes != 0], spiky[spikes != 0].half().float()) or (
        (found - spiky)[spikes != 0].abs().max() < 0.02
    )
    plain = codec(kind, rank=0, sparse=0.0)
    assert error(made, spiky) < 1.05 * error(plain, x)
    assert error(plain, spiky) > 5 * error(made, spiky)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_against_a_plain_reference(kind: str) -> None:
    """Integers of what stays, the best product for the rest, the set-aside entries exact: in float64."""
    x = normal(1, HEADS, BLOCK, WIDTH)
    made = codec(kind, sparse=0.1, rank=3)
    found = made.decode(made.encode(x, {})).double()
    rows = x[0].double() if kind == "keys" else x[0].double().transpose(0, 1).reshape(BLOCK, -1)
    aside = torch.zeros_like(rows, dtype=torch.bool)
    vectors = (
        [(h, slice(None), c) for h in range(HEADS) for c in range(WIDTH)] if kind == "keys" else list(range(BLOCK))
    )
    for vector in vectors:
        ordered = rows[vector].argsort()
        mask = torch.zeros(len(ordered), dtype=torch.bool)
        mask[ordered[: made.ends]] = mask[ordered[-made.ends :]] = True
        aside[vector] = mask
        rows[vector] = torch.where(mask, rows[vector][~mask].mean(), rows[vector])
    if kind == "values":
        rows, aside = (t.view(BLOCK, HEADS, WIDTH).transpose(0, 1) for t in (rows, aside))
    plain = kivi.build(kivi.Config(2, 32), spec(kind), {})
    dense = plain.decode(plain.encode(rows[None].float(), {}))[0].double()
    missed = torch.where(aside, 0.0, x[0].double() - dense)
    u, s, v = torch.linalg.svd(missed)
    best = dense + u[..., :3] @ (s[..., :3, None] * v[..., :3, :])
    expected = torch.where(aside, x[0].double(), best)
    assert float((found[0][aside] - expected[aside]).abs().max()) < 2e-3
    own, ideal = ((t - x[0]).square().sum() for t in (found[0], expected))
    assert float(own) == pytest.approx(float(ideal), rel=0.03)


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize(("rank", "sparse"), [(0, 0.05), (2, 0.0), (2, 0.05)])
@pytest.mark.parametrize("rows", [3, 40])
def test_reading_without_decoding(kind: str, rank: int, sparse: float, rows: int) -> None:
    made, x = codec(kind, rank=rank, sparse=sparse), normal(2, HEADS, 2 * BLOCK, WIDTH)
    block = made.encode(x, {})
    dense = made.decode(block).double()
    if kind == "keys":
        q = normal(2, HEADS, rows, WIDTH, seed=1)
        out = torch.empty(2, HEADS, rows, 2 * BLOCK + 3)[..., 2:-1]
        made.write_scores(q, block, out)
        torch.testing.assert_close(out.double(), q.double() @ dense.mT, atol=3e-3, rtol=0)
        torch.testing.assert_close(made.scores(q, block), out)
    else:
        p = normal(2, HEADS, rows, 2 * BLOCK, seed=1).softmax(-1)
        torch.testing.assert_close(made.mix(p, block).double(), p.double() @ dense, atol=1e-3, rtol=0)


def prompt(batch: int, tokens: int) -> Tensor:
    return torch.randint(0, 250, (batch, tokens), generator=torch.Generator().manual_seed(1))


def test_bytes_and_paths() -> None:
    model = build("llama", FULL)
    own = {"group_size": 16, "rank": 1, "sparse": 0.02, "block_tokens": 32}
    recipe = {"method": "gear", "bits": 3, **own, "sink": 2, "residual_length": 8, "flush": 1}
    attention.register()
    ids, logits = prompt(2, 202), []
    for path in ("decode", "fused"):
        model.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
        cache = make_cache(model.config, recipe, path=path)  # type: ignore[arg-type]
        with torch.no_grad():
            logits.append([model(part, past_key_values=cache).logits for part in ids.split([180, 22], 1)][-1])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    found, numel = cache.nbytes(), 2 * 2 * 192 * 2 * 2 * 16  # layers, batch, tokens, keys and values, heads, width
    keys, values = 2 * 24 / 32, 2 * 24 / 32  # one slot at each end of 32 tokens, and of 32 channels of two heads
    bits = 3 + 32 / 16 + 16 * (1 / 16 + 1 / 32) + (keys + values) / 2
    assert 8 * (found.codes + found.scales + found.extras) / numel == pytest.approx(bits, rel=0.01)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_chunks_and_padding(kind: str) -> None:
    x = normal(2, HEADS, 150, WIDTH, seed=7)

    def read(states: Tensor, chunks: list[int], pads: Tensor | None = None) -> Tensor:
        store = Store(codec(kind, bits=4), Policy(2, 8, flush=1))
        for part in states.split(chunks, 2):
            store.append(part, pads)
        assert store.coded == 128
        return store.read()

    whole = read(x, [150])
    for chunks in ([1] * 150, [90, 1, 59]):
        torch.testing.assert_close(read(x, chunks), whole, atol=2e-3, rtol=0)
    pads, junk = torch.tensor([0, 9]), x.clone()
    junk[1, :, :9] = 1e4
    padded = read(junk, [150], pads)
    assert torch.equal(read(x, [150], pads)[1, :, 9:], padded[1, :, 9:])
    torch.testing.assert_close(padded[0], whole[0], atol=2e-3, rtol=0)
    assert float((padded[1, :, 9:] - x[1, :, 9:]).square().mean()) < 0.01


def test_errors() -> None:
    with pytest.raises(RecipeError, match="layer 1, keys: group_size 48 does not divide the block_tokens 64"):
        codec(group_size=48)
    with pytest.raises(RecipeError, match="layer 1, values: group_size 32 does not divide the head's 80"):
        codec("values", 80, group_size=32)
    for settings in ({"bits": 0}, {"rank": -1}, {"sparse": 0.5}, {"group_size": 1}, {"block_tokens": 1}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            gear.Config(**settings)  # type: ignore[arg-type]
