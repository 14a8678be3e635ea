"""Narrower keys: which pairs are kept, against a slow reference, and what attention then reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv.codec import Codec, Spec
from compress.kv.codecs import kivi
from compress.papers.codecs import key_pairs
from helpers.kv_cases import refusal

HEADS, QUERIES, WIDTH, TOKENS = 2, 4, 12, 40


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples() -> dict[str, Tensor]:
    sizes = normal(WIDTH, seed=7).exp()
    return {"keys": normal(TOKENS, HEADS, WIDTH) * sizes, "queries": normal(TOKENS, QUERIES, WIDTH, seed=1) * sizes}


def spec(kind: Any = "keys", width: int = WIDTH) -> Spec:
    return Spec(kind, 0, 1, HEADS, width, QUERIES // HEADS)


def codec(**settings: Any) -> Codec:
    config = key_pairs.Config(**settings)
    return key_pairs.build(config, spec(), key_pairs.calibrate(config, spec(), samples()))


def test_weights_are_the_mean_squares_of_what_pairs_add_to_scores() -> None:
    found = samples()
    got = key_pairs.weights(found["keys"], found["queries"])
    keys, queries = found["keys"].double(), found["queries"].double()
    for head in range(HEADS):
        for pair in range(WIDTH // 2):
            total = 0.0
            for query in range(2 * head, 2 * head + 2):
                q = torch.complex(queries[:, query, pair], queries[:, query, pair + WIDTH // 2])
                k = torch.complex(keys[:, head, pair], keys[:, head, pair + WIDTH // 2])
                for angle in torch.arange(8) * torch.pi / 4:  # turned by all angles alike
                    turned = torch.polar(torch.ones((), dtype=torch.float64), angle.double())
                    total += (q.conj()[:, None] * k * turned).real.square().mean().item() / 8
            assert got[head, pair].item() == pytest.approx(2 * total, rel=1e-6)


def test_positions_change_no_choice() -> None:
    """Pairs that are turned, at every token by another angle, weigh the same."""
    found = samples()
    angles = normal(TOKENS, 1, WIDTH // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    before = key_pairs.weights(found["keys"], found["queries"])
    torch.testing.assert_close(key_pairs.weights(turned(found["keys"]), turned(found["queries"])), before)


@pytest.mark.parametrize("keep", [0.5, 0.75, 0.01])
def test_attention_reads_the_heaviest_pairs(keep: float) -> None:
    made, x, q = codec(keep=keep), normal(1, HEADS, 5, WIDTH, seed=4), normal(1, HEADS, 3, WIDTH, seed=5)
    heaviest = key_pairs.weights(**samples()).argsort(1, descending=True)[:, : max(1, round(keep * WIDTH / 2))]
    expected = torch.zeros_like(x)
    for head in range(HEADS):
        for pair in heaviest[head].tolist():
            for channel in (pair, pair + WIDTH // 2):
                expected[:, head, :, channel] = x[:, head, :, channel]
    rows = made.encode(x, {})
    assert sum(t.numel() for t in rows.values()) == 5 * HEADS * 2 * heaviest.shape[1]
    assert torch.equal(made.decode(rows), expected)
    torch.testing.assert_close(made.scores(made.query(q, {}), rows), q @ expected.mT)


def test_all_pairs_are_the_keys_themselves() -> None:
    made, x = codec(keep=1.0), normal(1, HEADS, 5, WIDTH, seed=4)
    assert torch.equal(made.decode(made.encode(x, {})), x)


def test_what_is_kept_may_be_coded() -> None:
    """The codes of the kept channels are those of the inner codec, and values are stored by it whole."""
    settings = {"keep": 0.5, "codes": "kivi", "bits": 3, "group_size": 8}
    made, x = codec(**settings), normal(1, HEADS, 16, WIDTH, seed=4)
    kept = made.static["kept"].long()
    taken = x.gather(-1, kept[None, :, None].expand(1, HEADS, 16, -1))
    inner = kivi.build(kivi.Config(3, 8), spec(width=kept.shape[1]), {})
    rows, expected = made.encode(x, {}), inner.encode(taken, {})
    assert rows.keys() == expected.keys() and all(torch.equal(rows[name], expected[name]) for name in rows)
    config = key_pairs.Config(**(settings | {"group_size": 4}))
    whole = key_pairs.build(config, spec("values"), key_pairs.calibrate(config, spec("values"), samples()))
    assert isinstance(whole, kivi.ByToken)


def test_bad_settings_are_one_clear_line() -> None:
    with pytest.raises(ValueError, match="keep 0 is not above 0"):
        key_pairs.Config(keep=0)
    kept = torch.tensor([[0, 0, 6, 7, 1, 2], [0, 1, 2, 6, 7, 8]], dtype=torch.int16)
    assert "kept holds 0 twice" in refusal("key_pairs", spec(), {"kept": kept}, keep=0.5)
    with pytest.raises(RecipeError, match="heads of 11 channels have no pairs"):
        key_pairs.check_heads(key_pairs.Config(), spec(width=11))
