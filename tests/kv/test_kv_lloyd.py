"""Lloyd-Max levels and rotated codes against known errors, a plain float64 coder, and both ways of reading them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from compress.kernels import contract
from compress.kernels.cpu import kv_levels
from compress.kv import attention, hooks
from compress.kv.cache import make_cache
from compress.kv.codec import Codec, Spec, rotate
from compress.kv.codecs import lloyd
from compress.kv.layer import KVCache
from compress.kv.rope import Rope
from compress.kv.settings import Policy
from compress.kv.token_store import Store
from helpers.pico import build as pico

GAUSSIAN = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.0095}  # relative squared error of N(0, 1)
POSITIVE = {2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1519]}


def codec(kind: Any = "keys", width: int = 64, **settings: Any) -> Codec:
    return lloyd.build(lloyd.Config(**settings), Spec(kind, 0, 1, 2, width, 2), {})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def turns(tokens: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """cos and sin [1, tokens, width] of a rotary embedding."""
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(width // 2) / (width // 2))
    return torch.cat((angle, angle), -1).cos()[None], torch.cat((angle, angle), -1).sin()[None]


def coded(made: Codec, x: Tensor) -> Tensor:
    state = made.begin(x, None)
    return made.decode({**state, **made.encode(x, state)})


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_levels(bits: int) -> None:
    table, x = lloyd.levels(bits), normal(200_000).double()
    assert len(table) == 2**bits
    assert torch.equal(table, -table.flip(0))
    if bits in POSITIVE:
        torch.testing.assert_close(table[2 ** (bits - 1) :], torch.tensor(POSITIVE[bits]), atol=0.009, rtol=0)
    assert float((table[lloyd.nearest(x, table)] - x).square().mean()) == pytest.approx(GAUSSIAN[bits], rel=0.03)


def test_levels_are_the_means_of_their_cells() -> None:
    for bits in (5, 8):
        table, x = lloyd.levels(bits).double(), torch.linspace(-9, 9, 200_001, dtype=torch.float64)
        weight, cell = (-x.square() / 2).exp(), lloyd.nearest(x, table)
        mass = torch.zeros(len(table), dtype=torch.float64).index_add_(0, cell, weight)
        means = torch.zeros(len(table), dtype=torch.float64).index_add_(0, cell, weight * x) / mass
        torch.testing.assert_close(table, means, atol=2e-2 / 2**bits, rtol=0)


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gaussian_data(bits: int, kind: str) -> None:
    x = normal(1, 2, 1024, 128) * torch.logspace(-3, 3, 1024)[:, None]
    made = codec(kind, 128, bits=bits, rope="post")
    error = float(((coded(made, x) - x).square().sum(-1) / x.square().sum(-1)).mean())
    if kind == "keys":  # levels stretched to the length of the vector
        stretched = 2 - 2 * (1 - GAUSSIAN[bits]) ** 0.5
        assert 0.92 * stretched < error < 1.01 * stretched  # channels of a vector of known length vary less
    else:  # better than a fixed scale: it fits each vector
        assert 0.85 * GAUSSIAN[bits] < error < GAUSSIAN[bits]


def test_channels_that_stand_out() -> None:
    x = normal(1, 1, 4096, 128)
    for channel, shift in {5: 12.0, 17: 15.0, 69: -9.0, 81: 8.0}.items():
        x[..., channel] += shift
    found = []
    for centre in ("first", "none"):
        made = codec("keys", 128, bits=2, rope="post", centre=centre, norm="least_squares")
        found.append(float((coded(made, x) - x).square().mean()))  # over the variance of the noise, 1
    assert found[0] == pytest.approx(0.1175 * (1 + 1 / lloyd.MEAN_TOKENS), rel=0.04)
    assert found[1] > 3 * found[0]


@pytest.mark.parametrize("norm_bits", [8, 16])
def test_codes_are_the_nearest_for_the_stored_norms(norm_bits: int) -> None:
    made = codec("values", 64, bits=3, norm_bits=norm_bits)
    assert isinstance(made, lloyd.Lloyd)
    x = normal(1, 2, 50, 64) * torch.logspace(-2, 2, 50)[:, None]
    rows = made.encode(x, {})
    found, norms = made.decode_levels(rows)
    y = made.rotate_in(x.double(), {})
    grid = norms.double()[..., None] * lloyd.levels(3).double()
    best = (y[..., None] - grid).abs().min(-1)[0]
    torch.testing.assert_close((y - found.double() * norms).abs(), best, atol=1e-6, rtol=1e-5)
    exact = (y * found).sum(-1) / found.double().square().sum(-1)
    assert ((norms[..., 0] / exact).log2().abs().mean()) < (0.05 if norm_bits == 8 else 0.02)


def test_norms_in_a_byte() -> None:
    norms, x = lloyd.Norms(8), torch.tensor([0.0, 1e-4, 0.37, 1.0, 900.0])
    found = norms.load(norms.store(x))
    assert found[0] == 0
    assert ((found[1:] / x[1:]).log2().abs() <= 1 / 16 + 1e-6).all()


def test_preserved_norms_and_zeros() -> None:
    x = normal(1, 2, 64, 64)
    x[:, :, 7] = 0
    found = coded(codec("keys", rope="post", norm="preserved"), x)
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)
    for norm in ("preserved", "least_squares"):
        for norm_bits in (8, 16):
            assert not coded(codec("values", norm=norm, norm_bits=norm_bits), x)[:, :, 7].any()


def test_the_mean_is_of_the_first_tokens_without_copies() -> None:
    x = normal(2, 2, 96, 16)
    x[1, :, :20] = x[1, :, 20:21]
    found = lloyd.first_mean(x)
    torch.testing.assert_close(found[0, :, 0], x[0, :, :32].mean(1))
    torch.testing.assert_close(found[1, :, 0], x[1, :, 20:32].mean(1))
    x[1, :, :28] = x[1, :, 28:29]
    assert not lloyd.first_mean(x)[1].any()


COMPILED = [(1, 128, 2), (2, 64, 7), (3, 64, 1), (4, 128, 1)]
PLAIN = [(3, 64, 3), (5, 64, 3), (2, 80, 3), (4, 96, 3)]


@pytest.mark.parametrize(
    ("bits", "width", "rows", "compiled"), [(*case, True) for case in COMPILED] + [(*case, False) for case in PLAIN]
)
def test_reading_without_decoding(
    bits: int, width: int, rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and not kv_levels.supports(bits, width):
        pytest.skip("no compiled functions here")
    monkeypatch.setattr(contract, "SMALL", 0 if compiled else 1 << 40)
    x, q = normal(2, 2, 150, width), normal(2, 2, rows, width, seed=1)
    p = normal(2, 2, rows, 153, seed=2).softmax(-1)[..., 2:152] * 0.5
    for kind in ("keys", "values"):
        made = codec(kind, width, bits=bits, rope="post", centre="first")
        assert made.at_once(q) > 1000 or not compiled
        state = made.begin(x, None)
        block = {**state, **made.encode(x, state)}
        dense = made.decode(block).double()
        out = torch.empty(2, 2, rows, 160)[..., 5:155]
        made.write_scores(made.query(q, state), block, out)
        close(out, q.double() @ dense.mT, 1e-4 if compiled else 1e-6)
        mixed = made.output(made.mix(p, block), p.sum(-1, keepdim=True), state)
        close(mixed, p.double() @ dense, 2e-4 if compiled else 2e-6)


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    """Relative to the largest."""
    torch.testing.assert_close(found.double(), expected, atol=relative * float(expected.abs().max()), rtol=0)


def test_kernels_do_not_overflow() -> None:
    if not kv_levels.supports(2, 512):
        pytest.skip("no compiled functions here")
    made = codec("keys", 512, bits=2, rope="post")
    block = made.encode(normal(1, 2, 160, 512), {})
    for name, words in block.items():
        block[name] = torch.full_like(words, -1 if name != "norms" else 1)  # the largest level in all channels
    q = torch.full((1, 2, 1, 512), 3.0)
    out = torch.empty(1, 2, 1, 160)
    made.write_scores(torch.cat((q, torch.zeros(1, 2, 1, 1)), -1), block, out)
    torch.testing.assert_close(out, torch.full_like(out, 3.0 * 512 * float(lloyd.levels(2)[-1])), rtol=1e-4, atol=0)


@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("bits", [2, 5])
def test_the_same_however_the_text_is_cut(rope: str, bits: int) -> None:
    x, (cos, sin) = normal(2, 2, 300, 64), turns(300)
    found = []
    for cut in ([300], [64, 32, 1, 1, 100, 102], [1] * 40 + [260]):
        rows = Rope()
        rows.append(cos, sin)
        store = Store(codec("keys", bits=bits, rope=rope, centre="first"), Policy(4, 40, 32), rows)
        for part in rotate(x, cos, sin).split(cut, 2):
            store.append(part)
        found.append(store.read())
        held = store.nbytes()
        assert held.codes + held.scales == pytest.approx(2 * 2 * 256 * 64 * (bits + 16 / 64) / 8, rel=0.01)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_both_paths_agree(heads: tuple[int, int], rope: str) -> None:
    recipe = {"method": "lloyd", "bits": 3, "rope": rope, "keys": {"centre": "first"}, "residual_length": 20}
    queries, kv = heads
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=queries, num_key_value_heads=kv, hidden_size=queries * 64
    )
    data = [[normal(2, h, n, 64, seed=n + h) for h in (queries, kv, kv)] for n in (90, 1, 3)]
    for pads in (None, torch.tensor([0, 9])):
        made = [make_cache(config, recipe, path=path) for path in ("decode", "fused")]
        for one in made:
            one.pads = pads
            one.rope.append(*turns(94))
        for i, (q, k, v) in enumerate(data):
            mask = torch.ones(2, 1, q.shape[2], (90, 91, 94)[i], dtype=torch.bool).tril((0, 90, 91)[i])
            if pads is not None:
                mask[1, ..., :9] = i == 0
            one, other = (read(cache, q, k, v, mask) for cache in made)
            torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def read(made: KVCache, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys, values = made.layers[0].update(k, v)
    groups = q.shape[1] // k.shape[1]
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    if isinstance(keys, Tensor):
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        return ((q @ keys.mT / 8).masked_fill(~mask, -1e30).softmax(-1) @ values).transpose(1, 2)
    return attention.attention(module, q, keys, values, mask, scaling=0.125)[0]


def test_generation_with_left_padding() -> None:
    """Eight bits choose the tokens that the exact cache chooses."""
    made = pico("llama", {"max_position_embeddings": 2048})
    ids = torch.randint(0, 250, (2, 90), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = made.generate(ids, **given)
    hooks.attach(made)
    cache = make_cache(made.config, {"method": "lloyd", "bits": 8, "residual_length": 8})
    assert torch.equal(made.generate(ids, past_key_values=cache, **given), expected)
    assert cache.nbytes().codes > 0


def test_settings() -> None:
    with pytest.raises(ValueError, match="bits 9 is not between 1 and 8"):
        lloyd.Config(bits=9)
    assert codec("keys").granularity == lloyd.MEAN_TOKENS
    assert codec("values").granularity == 1
    assert torch.equal(coded(codec(seed=1), normal(1, 1, 32, 64)), coded(codec(seed=1), normal(1, 1, 32, 64)))
    assert not torch.equal(coded(codec(seed=1), normal(1, 1, 32, 64)), coded(codec(), normal(1, 1, 32, 64)))
