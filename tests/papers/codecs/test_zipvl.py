"""Two tiers of tokens: which they are, what they cost, that order and reading are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from compress.errors import RecipeError
from compress.kv import attention
from compress.kv.cache import make_cache
from compress.kv.codec import Spec, rotate
from compress.kv.rope import Rope
from compress.kv.settings import Policy
from compress.kv.token_store import Store
from compress.papers.codecs import zipvl

WIDTH = 64


def codec(kind: Any = "values", **settings: Any) -> zipvl.Tiers:
    made = zipvl.build(zipvl.Config(**settings), Spec(kind, 0, 1, 2, WIDTH, 2), {})
    assert isinstance(made, zipvl.Tiers)
    return made


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def turns(tokens: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    return torch.cat((angle, angle), -1).cos()[None], torch.cat((angle, angle), -1).sin()[None]


@pytest.mark.parametrize("important", [0.25, 0.5])
def test_the_tiers_have_their_errors(important: float) -> None:
    x = normal(2, 2, 640, WIDTH)
    x /= x.norm(dim=-1, keepdim=True) / torch.rand(2, 2, 640, 1, generator=torch.Generator().manual_seed(1))
    made = codec(important=important)
    error = (made.decode(made.encode(x, {})) - x).square().sum(-1) / x.square().sum(-1)
    length = x.norm(dim=-1).unflatten(-1, (-1, 64))
    is_high = (length >= length.sort(-1, descending=True)[0][..., round(64 * important) - 1, None]).flatten(-2)
    assert float(error[is_high].mean()) == pytest.approx(0.0088, rel=0.08)  # a little below that of Gaussian levels
    assert float(error[~is_high].mean()) == pytest.approx(0.112, rel=0.08)


def test_the_tiers_have_the_errors_of_gaussian_levels_where_heads_are_wide() -> None:
    x = normal(1, 2, 256, 512)
    x *= torch.rand(1, 2, 256, 1, generator=torch.Generator().manual_seed(1))
    made = zipvl.build(zipvl.Config(), Spec("values", 0, 1, 2, 512, 2), {})
    error = (made.decode(made.encode(x, {})) - x).square().sum(-1) / x.square().sum(-1)
    length = x.norm(dim=-1).unflatten(-1, (-1, zipvl.SPAN))
    is_high = (length >= length.sort(-1, descending=True)[0][..., 15, None]).flatten(-2)
    assert float(error[is_high].mean()) == pytest.approx(0.0095, rel=0.03)
    assert float(error[~is_high].mean()) == pytest.approx(0.1175, rel=0.03)


def test_probes_choose_the_keys_that_they_look_at() -> None:
    x, (cos, sin) = normal(1, 2, 128, WIDTH) * 0.1, turns(128)
    queries = normal(1, 4, 40, WIDTH, seed=1)
    x[0, 0, 5], x[0, 1, 100] = queries[0, 1, -1], queries[0, 2, -3]  # of the KV heads' own query heads
    made = codec("keys", judge="probes")
    state = made.begin(x, queries)
    assert state["probes"].shape == (1, 2, 2 * zipvl.PROBES, WIDTH)
    mass = made.importance(rotate(x, cos, -sin), {**state, "cos": cos, "sin": sin}).flatten(2)
    probes = queries[:, :, 8:].view(1, 2, 2, 32, WIDTH).double()
    scores = torch.einsum("bhgpd,bhnd->bhgpn", probes, x.double()) / 8
    expected = scores.unflatten(-1, (2, 64)).softmax(-1).sum((2, 3)).flatten(2)
    torch.testing.assert_close(mass.double(), expected, atol=1e-4, rtol=0)
    assert mass[0, 0].argmax() == 5
    assert mass[0, 1].argmax() == 100


@pytest.mark.parametrize(("kind", "norm_bits"), [("keys", 16), ("values", 8)])
def test_the_same_however_the_text_is_cut(kind: Any, norm_bits: int) -> None:
    x, (cos, sin), found = normal(2, 2, 300, WIDTH), turns(300), []
    for cut in ([300], [70, 1, 1, 228]):
        rows = Rope()
        rows.append(cos, sin)
        store = Store(codec(kind, judge="length", norm_bits=norm_bits), Policy(4, 40, 32), rows)
        for part in x.split(cut, 2):
            store.append(part)
        found.append(store.read())
        held = store.nbytes()
        bits = 0.25 * 4 + 0.75 * 2 + (norm_bits + 1) / WIDTH
        assert held.codes + held.scales + held.extras == pytest.approx(2 * 2 * 256 * WIDTH * bits / 8, rel=0.01)
    assert torch.equal(*found)


@pytest.mark.parametrize("bits", [(4, 2), (3, 1), (4, 4)])
def test_reading_without_decoding(bits: tuple[int, int]) -> None:
    x, p = normal(2, 2, 128, WIDTH), normal(2, 2, 3, 128, seed=1).softmax(-1)
    made = codec(high=bits[0], low=bits[1])
    block = made.encode(x, {})
    found = made.output(made.mix(p, block), p.sum(-1, keepdim=True), {})
    torch.testing.assert_close(found, p @ made.decode(block), atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_in_attention(heads: tuple[int, int]) -> None:
    """Path B, where queries are seen, stays near the exact output, and gives what its own keys and values give."""
    queries, kv = heads
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=queries, num_key_value_heads=kv, hidden_size=queries * WIDTH
    )
    recipe = {"method": "zipvl", "high": 8, "low": 6, "judge": "probes", "residual_length": 16}
    own = make_cache(config, recipe, path="fused")
    own.rope.append(*turns(211))
    q, k, v = (normal(2, h, 211, WIDTH, seed=i) for i, h in enumerate((queries, kv, kv)))
    module = SimpleNamespace(num_key_value_groups=queries // kv, is_causal=True)
    for part in ([0, 210], [210, 211]):
        here = slice(*part)
        keys, values = own.layers[0].update(k[:, :, here], v[:, :, here])
        found = attention.attention(module, q[:, :, here], keys, values, None, scaling=0.125)[0]
    assert own.layers[0].stores["keys"].coded == 128
    whole = [store.read().repeat_interleave(queries // kv, 1) for store in own.layers[0].stores.values()]
    last = q[:, :, -1:]
    expected = ((last @ whole[0].mT / 8).softmax(-1) @ whole[1]).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    own.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(own.layers[0].stores["values"].read()[0], whole[1][1, :: queries // kv])
    with pytest.raises(RecipeError, match="needs the queries"):
        make_cache(config, recipe).layers[0].update(k, v)


def test_settings() -> None:
    with pytest.raises(ValueError, match="low 5 and high 4"):
        zipvl.Config(low=5)
    with pytest.raises(ValueError, match=r"important 0\.001"):
        zipvl.Config(important=0.001)


def test_many_tokens_with_norms_of_16_bits() -> None:
    """More codes than compiled code for other layouts asks for, which cannot read two tiers."""
    x = normal(1, 2, 1024, WIDTH)
    made, p = codec(norm_bits=16), normal(1, 2, 2, 1024, seed=1).softmax(-1)
    rows = made.encode(x, {})
    found = made.output(made.mix(p, rows), p.sum(-1, keepdim=True), {})
    torch.testing.assert_close(found, p @ made.decode(rows), atol=1e-5, rtol=0)
