"""Scores, budgets and choices of eviction against slow float64 references, and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import plugins
from compress.errors import RecipeError
from compress.kv.evict import placing, select
from compress.kv.evict.judging import QueryMoments, linear_matrix, output_norms, turn_moments
from compress.kv.evict.placing import merge_evicted
from compress.kv.evict.select import attention_variance
from compress.kv.settings import cache_settings
from compress.runtime import kv_config

HEADS, GROUPS, TOKENS, WIDTH, SINK = 2, 3, 23, 8, 2
SCALING = 0.3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen(queries: int = TOKENS) -> select.Seen:
    keys, values = normal(HEADS, TOKENS, WIDTH), normal(HEADS, TOKENS, WIDTH, seed=1)
    mean, root = normal(HEADS * GROUPS, WIDTH, seed=2).double(), normal(HEADS * GROUPS, WIDTH, WIDTH, seed=3).double()
    moments = (mean, root @ root.mT)
    return select.Seen(keys, values, normal(HEADS * GROUPS, queries, WIDTH, seed=4), SCALING, SINK, moments)


def attention(x: select.Seen) -> list[list[list[float]]]:
    """Softmax attention [H][m][n] by loops, in float64."""
    assert x.queries is not None
    rows = []
    for head, queries in enumerate(x.queries.double()):
        keys, own = x.keys[head // GROUPS].double(), []
        for i, query in enumerate(queries):
            last = TOKENS - len(queries) + i
            weights = [math.exp(SCALING * float(query @ key)) for key in keys[: last + 1]]
            own.append([w / sum(weights) for w in weights] + [0.0] * (TOKENS - last - 1))
        rows.append(own)
    return rows


def scored(method: str, x: select.Seen, **settings: Any) -> Tensor:
    plugin = plugins.load("evict", method)
    return plugin.score(plugin.Config(**settings), x)


@pytest.mark.parametrize("queries", [5, TOKENS])
def test_snapkv(queries: int) -> None:
    window, pool, x = 5, 3, seen(queries)
    p = attention(x)
    expected = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for head in range(HEADS):
        for token in range(TOKENS - window):
            near = [t for t in range(token - pool // 2, token + pool // 2 + 1) if 0 <= t < TOKENS - window]
            of_heads = [p[head * GROUPS + g][-window:] for g in range(GROUPS)]
            expected[head, token] = sum(row[t] for rows in of_heads for row in rows for t in near)
    found = scored("snapkv", x, window=window, pool=pool)
    torch.testing.assert_close(found.double(), expected / (GROUPS * window * pool), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention(covariance: bool) -> None:
    x = seen()
    assert x.moments is not None
    expected = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for head in range(HEADS * GROUPS):
        mean, spread = x.moments[0][head], x.moments[1][head]
        weights = []
        for key in x.keys[head // GROUPS].double()[SINK:]:
            logit = SCALING * float(mean @ key)
            logit += SCALING**2 / 2 * float(key @ spread @ key) if covariance else 0.0
            weights.append(math.exp(logit))
        for token, weight in enumerate(weights, SINK):
            norm = float(x.values[head // GROUPS, token].double().norm())
            expected[head // GROUPS, token] += weight / sum(weights) / GROUPS * norm
    found = scored("expected_attention", x, covariance=covariance)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_expected_attention_is_the_expectation_over_gaussian_queries() -> None:
    mean, root = normal(WIDTH).double() * 0.3, normal(WIDTH, WIDTH, seed=1).double() * 0.3
    key = normal(WIDTH, seed=2).double()
    queries = (
        mean + torch.randn(200_000, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ root.T
    )
    sampled = float((queries @ key).mul(SCALING).exp().mean())
    stated = math.exp(SCALING * float(mean @ key) + SCALING**2 / 2 * float(key @ root @ root.T @ key))
    assert abs(sampled / stated - 1) < 0.01


def test_expected_attention_can_leave_the_norms_of_values_out() -> None:
    """CriticalKV brings what values add to the output, so that its base score is attention alone."""
    x = seen()
    plain = scored("expected_attention", x, norms=False)
    torch.testing.assert_close(plain * x.values.norm(dim=-1), scored("expected_attention", x))
    torch.testing.assert_close(plain[:, x.sink :].sum(-1), torch.ones(HEADS))


def test_d2o_and_knorm() -> None:
    x = seen()
    p = torch.tensor(attention(x), dtype=torch.float64)
    mass = p.sum(1).unflatten(0, (HEADS, GROUPS)).mean(1)
    torch.testing.assert_close(scored("d2o", x).double(), mass, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scored("knorm", x), 1 / x.keys.square().sum(-1).sqrt())
    spread = ((mass - mass.mean(1, keepdim=True)) ** 2).mean(1)
    low, high = spread.min(), spread.max()
    assert attention_variance(x.mass) == pytest.approx(float(((spread - low) / (high - low)).mean()), rel=1e-4)


@pytest.mark.parametrize("queries", [1, 7, TOKENS])
@pytest.mark.parametrize("piece", [1, 4 * HEADS * GROUPS * TOKENS, 1 << 50])
def test_attention_is_summed_in_pieces(queries: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "PROBABILITIES_PER_PIECE", piece)
    x = seen(queries)
    mass = torch.tensor(attention(x), dtype=torch.float64).sum(1).unflatten(0, (HEADS, GROUPS))
    torch.testing.assert_close(x.mass.double(), mass, atol=1e-6, rtol=1e-5)
    newest = torch.tensor(attention(x.newest(5)), dtype=torch.float64).sum(1).unflatten(0, (HEADS, GROUPS))
    torch.testing.assert_close(x.newest(5).mass.double(), newest, atol=1e-6, rtol=1e-5)


def test_moments_are_those_of_all_queries_however_they_come() -> None:
    queries, made = normal(2, 3, 40, WIDTH).double(), QueryMoments()
    counts = torch.ones(2, 40, dtype=torch.bool)
    counts[1, :7] = False  # pads
    for start, stop in ((0, 5), (5, 6), (6, 40)):
        made.add(queries[:, :, start:stop].float(), counts[:, start:stop])
    for row, first in enumerate((0, 7)):
        own = queries[row, :, first:]
        mean, covariance = made.of(row)
        torch.testing.assert_close(mean, own.mean(1), atol=1e-6, rtol=1e-6)
        expected = torch.stack([x.T.cov(correction=0) for x in own])
        torch.testing.assert_close(covariance, expected, atol=1e-6, rtol=1e-6)


def test_moments_are_turned_as_the_mean_of_turned_queries() -> None:
    """Turning by every position and averaging is the mean rotation, channels without a rotation included."""
    angles = normal(9, 3).double()
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    mean, root = normal(2, WIDTH).double(), normal(2, WIDTH, WIDTH, seed=1).double()
    found = turn_moments((mean, root @ root.mT), cos, sin)
    rotation = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for position in range(9):
        one = torch.eye(WIDTH, dtype=torch.float64)
        for j in range(3):  # channels j and j + 3 turn together, the last two do not
            c, s = cos[position, j], sin[position, j]
            one[j, j], one[j, j + 3], one[j + 3, j], one[j + 3, j + 3] = c, -s, s, c
        rotation += one / 9
    torch.testing.assert_close(found[0], torch.stack([rotation @ m for m in mean]))
    torch.testing.assert_close(found[1], torch.stack([rotation @ r @ r.T @ rotation.T for r in root]))


def test_output_norms() -> None:
    linear = torch.nn.Linear(HEADS * GROUPS * WIDTH, 10)
    values = normal(HEADS, TOKENS, WIDTH)
    weight = linear_matrix(linear, HEADS * GROUPS * WIDTH, values)
    torch.testing.assert_close(weight, linear.weight.detach().T, atol=1e-6, rtol=1e-5)
    expected = torch.zeros(HEADS, TOKENS)
    for head in range(HEADS * GROUPS):
        part = linear.weight.detach()[:, head * WIDTH : (head + 1) * WIDTH]
        expected[head // GROUPS] += (values[head // GROUPS] @ part.T).abs().sum(-1) / GROUPS
    torch.testing.assert_close(output_norms(values, weight), expected, atol=1e-4, rtol=1e-4)


def test_heads_share_their_tokens_by_score() -> None:
    """AdaKV: a fifth of a head's share is safe, the rest goes to the best of all heads."""
    scores = torch.stack((torch.arange(20.0) + 100, torch.arange(20.0)))
    assert select.head_counts(scores, 10) == [18, 2]
    assert sum(select.head_counts(normal(4, 50), 7)) == 28
    assert min(select.head_counts(normal(4, 50), 10)) >= 2


def test_critical_takes_half_by_score_and_half_by_what_it_adds() -> None:
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3, 2]])
    norms = torch.tensor([[0.0, 0, 0, 0, 0, 10, 20, 1]])
    second = select.critical(scores, norms, [4])
    assert select.best(second, [4])[0].tolist() == [0, 1, 5, 6]
    assert select.best(scores, [4])[0].tolist() == [0, 1, 2, 3]


def test_ties_go_to_earlier_tokens_and_protected_ones_stay() -> None:
    scores = select.protect(torch.zeros(1, 10), 2, 3)
    assert select.best(scores, [7])[0].tolist() == [0, 1, 2, 3, 7, 8, 9]


def test_budgets_of_layers() -> None:
    shares = select.pyramid(30)
    assert sum(shares) == pytest.approx(30) and shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(1 / 20)
    uneven = select.by_variance([0.1, 0.5, 0.9])
    assert sum(uneven) == pytest.approx(3) and uneven == sorted(uneven, reverse=True)
    for keep in (0.2, 0.5, 0.8):
        for whole in (set[int](), {0, 1, 29}):
            found = select.fractions(keep, shares, whole)
            assert sum(found) / 30 == pytest.approx(keep) and max(found) <= 1
            assert not whole or [found[i] for i in sorted(whole)] == [1, 1, 1]
    assert select.fractions(0.5, [1.0, 1.0], {0, 1}) == [0.5, 0.5]  # there is not enough for whole layers
    assert [select.count(n, 0.3, 2) for n in (1, 5, 10, 100)] == [1, 2, 3, 30]


def test_merging() -> None:
    keys = torch.tensor([[1.0, 0], [0, 1], [2, 0.1], [-1, 0.2], [0.1, 3]])
    values = torch.arange(10.0).view(5, 2)
    kept = torch.tensor([0, 1])
    found = merge_evicted(keys, values, kept, 0)
    cosine = [float(torch.cosine_similarity(keys[a], keys[b], 0)) for a, b in ((2, 0), (4, 1))]
    # token 3 is less similar to any than the mean
    torch.testing.assert_close(
        found[0], torch.stack([(keys[0] + cosine[0] * keys[2]) / 2, (keys[1] + cosine[1] * keys[4]) / 2])
    )
    torch.testing.assert_close(found[1][0], (values[0] + cosine[0] * values[2]) / 2)
    same = merge_evicted(keys, values, kept, 1)
    torch.testing.assert_close(same[0][0], keys[0])  # a sink takes nothing
    torch.testing.assert_close(merge_evicted(keys, values, torch.arange(5), 0)[0], keys)


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_merging_is_that_of_plain_loops(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "COSINES_PER_PIECE", piece)
    keys, values = normal(60, WIDTH), normal(60, WIDTH, seed=1)
    kept = torch.randperm(60, generator=torch.Generator().manual_seed(2))[:25].sort().values
    unit = keys.double() / keys.double().norm(dim=1, keepdim=True)
    gone = [token for token in range(60) if token not in kept.tolist()]
    best = {token: max((float(unit[token] @ unit[to]), to) for to in kept[SINK:].tolist()) for token in gone}
    mean = sum(cosine for cosine, _ in best.values()) / len(best)
    for found, states in zip(merge_evicted(keys, values, kept, SINK), (keys.double(), values.double()), strict=True):
        for place, to in enumerate(kept.tolist()):
            own = [(cosine, token) for token, (cosine, chosen) in best.items() if chosen == to and cosine >= mean]
            expected = (states[to] + sum(cosine * states[token] for cosine, token in own)) / (1 + len(own))
            torch.testing.assert_close(found[place].double(), expected, atol=1e-6, rtol=1e-5)


EVICT = {"method": "snapkv", "keep": 0.5}


def test_settings_are_read_and_stored() -> None:
    section = {"method": "kivi", "bits": 4, "evict": {**EVICT, "pool": 7, "heads": "ada"}}
    settings = cache_settings(section)
    assert settings.evict is not None and settings.evict.config.pool == 7 and settings.evict.budget.heads == "ada"
    assert cache_settings(settings.plain()) == settings
    stored = kv_config.plain_section(settings, 3)
    assert kv_config.read(stored, 3).evict == settings.evict
    assert "evict" not in cache_settings({"method": "kivi"}).plain()
    d2o = cache_settings({"method": "kivi", "evict": {"method": "d2o", "tokens": 100}}).evict
    assert d2o is not None and d2o.budget.merge and d2o.budget.layers == "variance"


@pytest.mark.parametrize(
    ("evict", "message"),
    [
        (
            {"keep": 0.5},
            "has no method; set one of expected_attention, snapkv, d2o, fastv, knorm, lazyllm, mustdrop, vision, zipvl",
        ),
        ({"method": "snap"}, "unknown evict plugin 'snap'"),
        ({"method": "snapkv"}, "keep or tokens is needed"),
        ({**EVICT, "tokens": 3}, "set one of them"),
        ({**EVICT, "keep": 0}, "keep 0.0 is not a fraction"),
        ({**EVICT, "pool": 4}, "pool 4 is not an odd number"),
        ({**EVICT, "windw": 4}, "unknown key 'windw'.*did you mean 'window'"),
        ({**EVICT, "heads": "all"}, 'heads must be one of "equal", "shared", "ada"'),
        ({"method": "d2o", "keep": 0.5, "decode": True}, "decode is not possible with d2o"),
        ({**EVICT, "heads": "ada", "decode": True}, "decode is not possible with heads: ada"),
        ("half", "must be keys with values"),
    ],
)
def test_settings_that_are_refused(evict: Mapping[str, Any] | str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        cache_settings({"method": "kivi", "evict": evict})


def test_tokens_of_one_pass_must_be_exact() -> None:
    with pytest.raises(RecipeError, match="needs exact_prefill"):
        cache_settings({"method": "kivi", "exact_prefill": False, "evict": EVICT})
