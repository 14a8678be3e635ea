"""Fused attention, which reads what is stored, against decode-then-attend, in plain float64 attention."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from compress import plugins
from compress.errors import CompressError, RecipeError
from compress.kernels import contract
from compress.kv import attention
from compress.kv.cache import make_cache
from compress.kv.codec import Block, Codec, Field
from compress.kv.codecs import kivi
from compress.kv.layer import KVCache
from compress.kv.token_store import Store

KIVI = {"method": "kivi", "bits": 4, "group_size": 16, "sink": 3, "residual_length": 20, "flush": 1}
WIDTH = 64


def cache(path: Any, recipe: Mapping[str, Any], heads: int = 4, kv_heads: int = 2) -> KVCache:
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * WIDTH
    )
    return make_cache(config, recipe, path=path)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None = None) -> Tensor:
    """[B, H, n, width] and all keys and values, in float64; the mask is bool or None, which is causal."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.mT * 0.1
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def run(
    made: KVCache, chunks: list[tuple[Tensor, Tensor, Tensor]], mask: Tensor | None = None, **kwargs: Any
) -> list[Tensor]:
    """The outputs of each chunk of q, k, v; the mask is for the last one."""
    module = SimpleNamespace(num_key_value_groups=chunks[0][0].shape[1] // chunks[0][1].shape[1], is_causal=True)
    found = []
    for i, (q, k, v) in enumerate(chunks):
        keys, values = made.layers[0].update(k, v)
        own = mask if i == len(chunks) - 1 else None
        if isinstance(keys, Tensor):  # decode-then-attend
            found.append(plain(q, keys, values, own, kwargs.get("softcap")))
        else:
            found.append(attention.attention(module, q, keys, values, own, scaling=0.1, **kwargs)[0])
    return found


def chunks(
    sizes: list[int], batch: int = 2, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor, Tensor]]:
    made = []
    for i, n in enumerate(sizes):
        q, k, v = (
            normal(batch, h, n, WIDTH, seed=3 * i + j, dtype=dtype) for j, h in enumerate((heads, kv_heads, kv_heads))
        )
        made.append((3 * q, k, v))
    return made


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("method", ["identity", "fp8", "kivi"])
@pytest.mark.parametrize("exact", [True, False])
def test_both_paths_agree(heads: tuple[int, int], method: str, exact: bool) -> None:
    recipe = {**KIVI, "method": method} if method == "kivi" else {"method": method, "residual_length": 20}
    recipe["exact_prefill"] = exact
    data = chunks([70, 1, 1, 30, 1], 2, *heads)
    a, b = (run(cache(path, recipe, *heads), data) for path in ("decode", "fused"))
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(other.double(), one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compiled_reading_agrees_in_bfloat16(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SMALL", 0)
    data = chunks([300, 1, 1], 1, dtype=torch.bfloat16)
    a, b = (run(cache(path, {**KIVI, "bits": bits}), data) for path in ("decode", "fused"))
    for one, other in zip(a, b, strict=True):
        assert (other.double() - one).norm() / one.norm() < 2.0**-7  # decoded keys and outputs are rounded to 2^-9
        torch.testing.assert_close(other.double(), one, atol=1e-3 + 2.0**-8 * float(one.abs().max()), rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compiled_reading_is_close_in_float32(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = chunks([300, 1, 1], 1)
    expected = run(cache("decode", {**KIVI, "bits": bits}), data)
    monkeypatch.setattr(contract, "SMALL", 0)
    for one, other in zip(expected, run(cache("fused", {**KIVI, "bits": bits}), data), strict=True):
        torch.testing.assert_close(other.double(), one, atol=3e-4, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["bool", "additive", "by head"])
def test_masks(kind: str, softcap: float | None) -> None:
    data = chunks([50, 6])
    allowed = torch.rand(2, 4 if kind == "by head" else 1, 6, 56, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed[..., 0] = True
    expected = run(cache("decode", KIVI), data, allowed, softcap=softcap)[-1]
    mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -1e30) if kind == "additive" else allowed
    found = run(cache("fused", KIVI), data, mask, softcap=softcap)[-1]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_long_queries_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = chunks([80, 33])
    expected = run(cache("fused", KIVI), data)
    monkeypatch.setattr(attention, "SCORES", 2 * 4 * 113 * 5)
    for one, other in zip(expected, run(cache("fused", KIVI), data), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_left_padding_in_storage_order() -> None:
    data = chunks([50, 1, 3])
    pads = torch.tensor([0, 9])
    made = {path: cache(path, KIVI) for path in ("decode", "fused")}
    mask = torch.ones(2, 1, 3, 54, dtype=torch.bool).tril(51)
    mask[1, ..., :9] = False
    for one in made.values():
        one.pads = pads
    a, b = (run(one, data, mask)[-1] for one in made.values())
    assert made["fused"].layers[0].stores["keys"].columns is not None
    torch.testing.assert_close(b.double(), a, atol=1e-5, rtol=0)
    made["fused"].reorder_cache(torch.tensor([1, 0]))
    assert made["fused"].pads.tolist() == [9, 0]


def test_nothing_is_decoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    decode = kivi.ByToken.decode

    def watched(self: Codec, block: Block) -> Tensor:
        sizes.append(block["scales"].shape[2])
        return decode(self, block)

    monkeypatch.setattr(kivi.ByToken, "decode", watched)
    monkeypatch.setattr(Store, "read", None)
    run(cache("fused", KIVI), chunks([2000, 1, 20], 1))
    assert sizes
    assert max(sizes) <= 512


def test_values_of_another_width() -> None:
    data = [(q, k, v[..., :48]) for q, k, v in chunks([40, 1, 5])]
    a, b = (run(cache(path, KIVI), data) for path in ("decode", "fused"))
    for one, other in zip(a, b, strict=True):
        assert other.shape[-1] == 48
        torch.testing.assert_close(other.double(), one, atol=1e-5, rtol=0)


class Asking(Codec):
    """Score-only, and made from the queries: exact keys in the basis of their second moment."""

    needs_queries, reconstructs = True, False
    fields = {"turned": Field("codes")}

    def begin(self, x: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        assert queries is not None
        moment = queries.float().mT @ queries.float()
        return {"basis": torch.linalg.eigh(moment.unflatten(1, (x.shape[1], -1)).sum(2))[1]}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        return {"turned": x @ state["basis"]}

    def query(self, q: Tensor, state: Block) -> Tensor:
        return q @ state["basis"]

    def scores(self, query: Tensor, block: Block) -> Tensor:
        return query @ block["turned"].mT


def test_codecs_that_only_score_or_need_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(Config=kivi.Config, build=lambda config, spec, static: Asking(spec))
    values = plugins.load("kv", "identity")
    monkeypatch.setattr(plugins, "load", lambda kind, name: plugin if name == "kivi" else values)
    recipe = {**KIVI, "values": {"method": "identity"}}
    data = chunks([50, 1, 1, 4])
    exact = run(cache("decode", {"method": "identity"}), data)
    for one, other in zip(exact, run(cache("fused", recipe), data), strict=True):
        torch.testing.assert_close(other.double(), one, atol=1e-5, rtol=0)
    with pytest.raises(RecipeError, match="layer 0, keys: this codec needs the queries; use make_cache.*fused"):
        run(cache("decode", recipe), data)


def test_what_is_refused() -> None:
    x = normal(1, 2, 1, WIDTH)
    with pytest.raises(CompressError, match="sink logits"):
        attention.attention(SimpleNamespace(), x, x, x, None, s_aux=torch.zeros(2))
