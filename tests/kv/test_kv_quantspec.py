"""QuantSpec's two planes: the paper's rule in float64, int4 as the upper plane, reading by kernels, and drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import CompressError
from compress.kernels import contract, llvm
from compress.kv.codec import Spec
from compress.kv.codecs import kivi
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import KINDS, Policy
from compress.kv.token_store import Store
from compress.papers.codecs import quantspec
from helpers.kv_cases import HEADS, WIDTH, Case, normal

RECIPE: dict[str, Any] = {"group_size": 16}
CASE = Case("quantspec", RECIPE, lambda kind, static: 10)


def codec(kind: Any, width: int = 64, group_size: int = 16) -> Any:
    return quantspec.build(quantspec.Config(group_size), Spec(kind, 0, 1, 2, width, 4), {})


def by_the_paper(x: Tensor, group: int, axis: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, lower, s, min of groups along an axis of x [B, h, n, width], float64, for the float16 of s and min."""
    groups = x.double().unflatten(axis, (-1, group))
    inner = axis + 1
    low, high = groups.amin(inner, keepdim=True), groups.amax(inner, keepdim=True)
    scale = ((high - low) / 15).clamp(min=kivi.MIN_SCALE).half().double()
    low = low.half().double()
    upper = ((groups - low) / scale).round().clamp(0, 15)
    lower = ((groups - low - upper * scale) / (scale / 16)).round().clamp(-8, 7) + 8
    whole = [part.expand_as(groups).flatten(axis, inner) for part in (upper, lower, scale, low)]
    return whole[0], whole[1], whole[2], whole[3]


@pytest.mark.parametrize("kind", KINDS)
def test_planes_follow_the_rule_of_the_paper(kind: str) -> None:
    x, made = normal(1, 2, 256, 64) * 3 + 1, codec(kind)
    rows = made.encode(x, {})
    upper, lower, scale, low = by_the_paper(x, 16, 2 if kind == "keys" else 3)
    both = 16 * made.codes.unpack(rows).long() + made.lower.unpack(rows).long()
    expected = (16 * upper + lower).long()
    assert ((both - expected).abs() <= 1).all()  # of the order in which float32 rounds
    assert (both == expected).double().mean() > 0.999
    target, draft = low + scale * (upper + (lower - 8) / 16), low + scale * upper
    for read, wanted in ((made, target), (made.upper, draft)):
        off = (read.decode(rows).double() - wanted).abs()
        assert (off > 1e-5).double().mean() < 1e-3
    error = (made.decode(rows).double() - x).abs() / scale
    assert error.max() <= (1 + 2**-5) / 16  # a rest above 7.5 / 16 is cut to 7 / 16, and the minimum is rounded
    assert (error > 1.02 / 32).double().mean() < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_the_upper_plane_is_int4(kind: str) -> None:
    x, made = normal(2, 2, 96, 64), codec(kind)
    rows = made.encode(x, {})
    alone = kivi.build(kivi.Config(4, 16), Spec(kind, 0, 1, 2, 64, 4), {})  # type: ignore[arg-type]
    for name, tensor in alone.encode(x, {}).items():
        assert torch.equal(rows[name], tensor), name
    assert torch.equal(made.upper.decode(rows), alone.decode(alone.encode(x, {})))


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(("width", "rows"), [(64, 1), (64, 7), (128, 4)])
def test_both_planes_are_read_without_decoding(
    is_compiled: bool, width: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled and not llvm.available():
        pytest.skip("no compiled functions here")
    monkeypatch.setattr(contract, "SMALL", 0 if is_compiled else 1 << 40)
    q, p = normal(2, 2, rows, width, seed=1), normal(2, 2, rows, 96, seed=2).softmax(-1)
    for kind in KINDS:
        made = codec(kind, width)
        assert made.at_once(q) == kivi.ALL or not is_compiled
        block = made.encode(normal(2, 2, 96, width) + 2, {})
        for read in (made, made.upper):
            dense = read.decode(block).double()
            out = torch.empty(2, 2, 96, width)
            read.write(block, out)
            torch.testing.assert_close(out.double(), dense, atol=2e-6, rtol=1e-6)
            scores = torch.empty(2, 2, rows, 96)
            read.write_scores(q, block, scores)
            for found, expected in ((scores, q.double() @ dense.mT), (read.mix(p, block), p.double() @ dense)):
                torch.testing.assert_close(found.double(), expected, atol=4e-4 * float(expected.abs().max()), rtol=0)


def feed(cache: KVCache, x: Tensor) -> None:
    layer = cache.layers[0]
    assert isinstance(layer, CodedLayer)
    layer.update(x, x + 1)
    layer.commit()


def stored(cache: KVCache) -> dict[str, Tensor]:
    """All that a cache stores, by name."""
    layer = cache.layers[0]
    assert isinstance(layer, CodedLayer)
    parts = {}
    for kind, store in layer.stores.items():
        buffers = {"sink": store.sink, "tail": store.tail, **store.fields}
        parts |= {f"{kind}.{name}": buffer.view() for name, buffer in buffers.items() if buffer.length}
    return parts


@pytest.mark.parametrize("path", ["decode", "fused"])
def test_a_cache_that_held_drafts_is_as_if_there_had_been_none(path: Any) -> None:
    x, plain, drafted = normal(1, HEADS, 300, WIDTH), CASE.cache(path), CASE.cache(path)
    for cache in (plain, drafted):
        feed(cache, x[:, :, :100])
    drafted.holds = True
    at = 100
    for accepted in (1, 4, 3, 1, 5, 2) * 12:
        for i in range(5):
            feed(drafted, normal(1, HEADS, 1, WIDTH, seed=i))
        drafted.crop(-5)
        feed(drafted, torch.cat((x[:, :, at : at + accepted], normal(1, HEADS, 5 - accepted, WIDTH, seed=7)), 2))
        if accepted < 5:
            drafted.crop(accepted - 5)
        drafted.settle()
        for token in range(at, at + accepted):
            feed(plain, x[:, :, token : token + 1])
        at += accepted
        found, expected = stored(drafted), stored(plain)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert drafted.get_seq_length() == plain.get_seq_length() == at
    drafted.reset()
    assert not drafted.holds


def test_what_is_held_stays_exact_until_it_is_settled() -> None:
    store = Store(codec("keys", 16), Policy(4, 32, flush=16))
    x = normal(1, 2, 200, 16)
    for start in range(0, 200, 5):
        store.append(x[:, :, start : start + 5], holds=True)
    assert store.coded == 0
    assert torch.equal(store.read(), x)
    store.settle()
    assert store.coded == (200 - 4 - 32) // 16 * 16
    again = Store(codec("keys", 16), Policy(4, 32, flush=16))
    again.append(x)
    assert torch.equal(again.read(), store.read())


def test_drafts_read_the_upper_plane_of_a_cache() -> None:
    cache, x = CASE.cache("fused"), normal(1, HEADS, 200, WIDTH)
    feed(cache, x)
    layer = cache.layers[0]
    assert isinstance(layer, CodedLayer)
    for kind, store in layer.stores.items():
        whole = store.read()
        with cache.read_upper():
            upper = store.read()
        alone = Store(kivi.build(kivi.Config(4, 16), store.codec.spec, {}), store.policy)
        alone.append(x if kind == "keys" else x + 1)
        assert torch.equal(upper, alone.read())
        assert torch.equal(store.read(), whole)
        assert not torch.equal(upper, whole)


def test_a_cache_without_planes_says_so() -> None:
    cache = Case("kivi", {"bits": 4}, lambda kind, static: 5).cache("fused")
    feed(cache, normal(1, HEADS, 64, WIDTH))
    with pytest.raises(CompressError, match="set kv_cache.method: quantspec"), cache.read_upper():
        pass
