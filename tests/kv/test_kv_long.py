"""Long generation with every codec: bytes on the stated line, what was coded stays, each token is coded once.

Two thousand tokens go through a cache one by one, without a model; a model of one layer confirms a few hundred.
"""

from __future__ import annotations

from collections import Counter
from functools import cache as once
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import plugins
from compress.evaluate.reader import Reader
from compress.kv import attention, hooks
from compress.kv.buffer import Buffer
from compress.kv.cache import make_cache
from compress.kv.codec import Codec
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import KINDS
from compress.kv.token_store import Bytes, Store
from helpers.kv_cases import CASES, HEADS, POLICY, QUERIES, WIDTH, Case, normal
from helpers.pico import build

TOKENS, PROMPT, EARLY = 2000, 100, 228
EXACT = POLICY["sink"] + POLICY["residual_length"]
LENGTHS = tuple(EXACT + 64 * groups for groups in (10, 20, 30))  # where nothing waits to be coded
Q, K, V = (normal(1, heads, TOKENS + 1, WIDTH, seed=i) for i, heads in enumerate((QUERIES, HEADS, HEADS)))
ANGLE = torch.arange(TOKENS + 1)[:, None] * 10000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)).repeat(2)
COS, SIN = ANGLE.cos()[None], ANGLE.sin()[None]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def show(layer: CodedLayer, start: int, stop: int) -> Any:
    """What `update` gives for these tokens."""
    layer.turns = COS[:, start:stop], SIN[:, start:stop]
    return layer.update(K[:, :, start:stop], V[:, :, start:stop])


def feed(layer: CodedLayer, start: int, stop: int) -> None:
    show(layer, start, stop)
    layer.commit(Q[:, :, start:stop])


def outputs(cache: KVCache) -> dict[str, Tensor]:
    """Attention of the token after the last, by path."""
    layer = cache.layers[0]
    stores, last = [layer.stores[kind] for kind in KINDS], slice(TOKENS, TOKENS + 1)
    found = {}
    if all(store.codec.reconstructs for store in stores):
        keys, values = (store.read(x[:, :, last]) for store, x in zip(stores, (K, V), strict=True))
        keys, values = (x.repeat_interleave(QUERIES // HEADS, 1).double() for x in (keys, values))
        found["decode"] = ((Q[:, :, last].double() @ keys.mT / 4).softmax(-1) @ values).transpose(1, 2)
    module = SimpleNamespace(num_key_value_groups=QUERIES // HEADS, is_causal=True)
    handles = show(layer, TOKENS, TOKENS + 1)
    found["fused"] = attention.attention(module, Q[:, :, last], *handles, None, scaling=0.25)[0].double()
    return found


def test_no_codec_is_missing() -> None:
    assert {case.method for case in CASES} == set(plugins.names("kv"))


class Run:
    """A cache that was shown TOKENS tokens, all after PROMPT one by one; what it held on the way, and what it cost."""

    def __init__(self, case: Case) -> None:
        self.cache, self.encoded, self.moved = case.cache("fused"), Counter[str](), 0
        layer = self.layer = self.cache.layers[0]
        layer.lazy_initialization(K, V)
        for kind, store in layer.stores.items():
            self._watch(kind, store.codec)
        feed(layer, 0, PROMPT)
        self.sizes: dict[int, Bytes] = {}
        for token in range(PROMPT, TOKENS):
            feed(layer, token, token + 1)
            if token + 1 in LENGTHS:
                self.sizes[token + 1] = self.cache.nbytes()
            if token + 1 == EARLY:
                self.early = {kind: _snapshot(store) for kind, store in layer.stores.items()}

    def _watch(self, kind: str, codec: Codec) -> None:
        encode = codec.encode

        def counted(x: Tensor, state: Any) -> dict[str, Tensor]:
            self.encoded[kind] += x.shape[2]
            return encode(x, state)

        codec.encode = counted  # type: ignore[method-assign]

    @property
    def buffers(self) -> list[Buffer]:
        stores = self.layer.stores.values()
        rope = self.cache.rope
        return [rope._rows, rope._positions, *(b for store in stores for b in (*store.fields.values(), store.tail))]


def _snapshot(store: Store) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of the fields, and what the sink and the coded tokens read as."""
    rows = {name: buffer.view().clone() for name, buffer in store.fields.items()}
    return rows, store.read()[:, :, : store.sink.length + store.coded]


@once
def run(case: Case) -> Run:
    """With a count of the rows that its buffers moved."""
    make_room, moved = Buffer._make_room, []

    def watched(self: Buffer, count: int) -> None:
        moved.append(self.length)
        make_room(self, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "_make_room", watched)
        found = Run(case)
    found.moved = sum(moved)
    return found


@every_case
def test_memory_grows_as_stated(case: Case) -> None:
    made, row = run(case), WIDTH * 4  # cos and sin of a token, half of the columns
    slope = HEADS * WIDTH * sum(case.kind_bits(kind) for kind in KINDS) / 8 + (row if case.is_before_rope else 0)
    first, *later = LENGTHS
    for length in later:
        grown = made.sizes[length].total - made.sizes[first].total
        assert grown / (length - first) == pytest.approx(slope, rel=0.01)
    for buffer in made.buffers:  # an eighth and sixteen rows of room to grow; the tail is a window that moves inside it
        if buffer.length:
            most = max(buffer.length, PROMPT)
            assert buffer.allocated_nbytes <= (1.125 * most + 16) * buffer.nbytes / buffer.length


@every_case
def test_what_is_coded_stays(case: Case) -> None:
    """To the bit, and no token is coded twice, nor moved more than a few times."""
    made = run(case)
    for kind, store in made.layer.stores.items():
        assert made.encoded[kind] == store.coded > TOKENS - EXACT - 64
        rows, read = made.early[kind]
        for name, data in rows.items():
            assert torch.equal(store.fields[name].view(0, data.shape[2]), data)
        assert torch.equal(store.read()[:, :, : read.shape[2]], read)
    assert made.moved < 10 * TOKENS * len(made.buffers)


@every_case
def test_outputs_are_those_of_one_prefill(case: Case) -> None:
    made, again = run(case), case.cache("fused")
    feed(again.layers[0], 0, PROMPT)
    feed(again.layers[0], PROMPT, TOKENS)
    assert again.nbytes()[:-1] == made.cache.nbytes()[:-1]
    found, expected = outputs(made.cache), outputs(again)
    for path in found:
        torch.testing.assert_close(found[path], expected[path], atol=1e-3, rtol=0)
        torch.testing.assert_close(found[path], found["fused"], atol=1e-3, rtol=0)


@every_case
@pytest.mark.slow
def test_a_model_reads_tokens_one_by_one_as_in_chunks(case: Case) -> None:
    model = build("llama", {"num_hidden_layers": 1}).double()  # or some rounding goes the other way
    hooks.attach(model)
    attention.register()
    count, first = 210, EXACT + 128  # from there on chunks end where tokens are coded
    ids = torch.randint(0, 250, (1, count), generator=torch.Generator().manual_seed(0))
    for path in case.paths:
        model.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
        caches = [make_cache(model.config, case.recipe, case.static(), path) for _ in range(2)]
        chunks = [(0, first), *((i, min(i + 32, count)) for i in range(first, count, 32))]
        single = [(0, first), *((i, i + 1) for i in range(first, count))]
        one, other = (
            torch.cat(list(Reader(model).through(ids, spans, cache)), 1)
            for cache, spans in zip(caches, (single, chunks), strict=True)
        )
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)
        assert caches[0].nbytes()[:-1] == caches[1].nbytes()[:-1]
        assert caches[0].nbytes().codes > 0
