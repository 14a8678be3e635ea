"""Generation settings: filters against those of transformers, distances against loops, temperatures by a search."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from compress.evaluate import sampling
from compress.evaluate import sampling_distributions as distributions
from compress.evaluate import sampling_temperature as best
from compress.evaluate.sampling_distributions import (
    SamplingSetting,
    dense,
    filtered_law,
    first_kept,
    grid,
    order,
    penalize,
)

VOCAB = 40
SETTINGS = grid((0.4, 1.0, 1.3), (0, 1, 4, 17, 99), (1.0, 0.9, 0.5), (0.0, 0.1, 1.0))


# Typical and eta sampling, alone and behind each other and a filter.
SETTINGS += grid((0.4, 1.3), (0, 9), (1.0, 0.8), (0.0,), (1.0, 0.9, 0.2), (0.0, 0.02, 0.3))


def drawn(rows: int = 12, seed: int = 0, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(rows, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tied(rows: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(-2, 2, (rows, VOCAB), generator=torch.Generator().manual_seed(seed)).double()


def as_transformers(logits: Tensor, setting: SamplingSetting) -> Tensor:
    """The probabilities that `generate` of transformers draws from."""
    chain: Any = LogitsProcessorList([TemperatureLogitsWarper(setting.temperature)])
    chain += [TopKLogitsWarper(setting.top_k)] if setting.top_k else []
    chain += [TopPLogitsWarper(setting.top_p)] if setting.top_p < 1 else []
    chain += [MinPLogitsWarper(setting.min_p)] if setting.min_p else []
    chain += [TypicalLogitsWarper(setting.typical_p)] if setting.typical_p < 1 else []
    chain += [EtaLogitsWarper(setting.eta)] if setting.eta else []
    return chain(torch.zeros(len(logits), 1, dtype=torch.long), logits).softmax(-1)


@pytest.mark.parametrize("sparse", [0.001, 1, 8])  # held in lists, or over the whole vocabulary
@pytest.mark.parametrize("make", [drawn, tied])
def test_filters_are_those_of_transformers(make: Any, sparse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "SPARSE", sparse)
    logits = make()
    for setting in SETTINGS:
        expected = as_transformers(logits, setting)
        found = dense(filtered_law(order(logits), setting), VOCAB).log_probs.exp()
        if make is tied:  # which of equally likely tokens top-p removes is left to the sorting
            found, expected = found.sort(-1).values, expected.sort(-1).values
        assert torch.equal(found > 0, expected > 0), setting
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        if setting.typical_p == 1 and not setting.eta:
            assert torch.equal((expected > 0).sum(-1), VOCAB - first_kept(order(logits).values, setting))


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.5])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """With the whole text in front, and with the part of it that counts at each position."""
    logits, text = drawn(), torch.randint(VOCAB, (12, 9), generator=torch.Generator().manual_seed(3))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.equal(penalize(logits, text, penalty), theirs(text, logits.clone()))
    window = text[0]
    seen = torch.arange(9) <= torch.arange(9)[:, None]
    found = penalize(logits[:9], window.expand(9, -1), penalty, seen)
    for i in range(9):
        assert torch.equal(found[i : i + 1], theirs(window[None, : i + 1], logits[i : i + 1].clone()))
    settings = [SamplingSetting(0.7, repetition_penalty=each) for each in (penalty, 1.0)]
    both = [logits[:9], drawn(9, 1)]
    sums = sampling.window_sums(both, settings, (0.7,), best.nodes((0.7,)), window)[0]
    for setting, row in zip(settings, sums[:-1].view(2, -1), strict=True):
        plain = SamplingSetting(0.7)
        laws = [order(penalize(each, window.expand(9, -1), setting.repetition_penalty, seen)) for each in both]
        figures = distributions.compare(laws[1], laws[0], plain, distributions.by_ratio(laws[1], laws[0])).sum(-1)
        torch.testing.assert_close(row, figures, rtol=1e-9, atol=1e-12)


def reference(p: list[float], q: list[float], q_all: list[float]) -> dict[str, float]:
    """The figures of one position by loops; q_all: the compressed model without filters at the same temperature."""
    ids = range(len(p))
    both = [i for i in ids if p[i] > 0 and q[i] > 0]
    has_p, has_q = [i for i in ids if p[i] > 0], [i for i in ids if q[i] > 0]
    on_kept = sum(q_all[i] for i in has_p)
    below = [[sum(law[:i]) for i in ids] for law in (p, q)]
    cdf = [min(below[0][i] + p[i], below[1][i] + q[i]) - max(below[0][i], below[1][i]) for i in ids]
    races = [sum(max(p[w] / p[v], q[w] / q[v]) for w in ids) for v in both]
    is_defined = len(both) == len(has_p)
    return {
        "acceptance": sum(min(p[i], q[i]) for i in ids),
        "kl_kept": sum(p[i] * math.log(p[i] / (q_all[i] / on_kept)) for i in has_p),
        "kl": sum(p[i] * math.log(p[i] / q[i]) for i in has_p) if is_defined else 0.0,
        "kl_defined": float(is_defined),
        "jaccard": len(both) / len({*has_p, *has_q}),
        "outside": sum(p[i] for i in has_p if q[i] == 0),
        "same_cdf": sum(max(0.0, cdf[i]) for i in both),
        "same_gumbel": sum(1 / race for race in races),
        "entropy": -sum(q[i] * math.log(q[i]) for i in has_q),
        "base_entropy": -sum(p[i] * math.log(p[i]) for i in has_p),
        "kept": float(len(has_q)),
        "base_kept": float(len(has_p)),
    }


@pytest.mark.parametrize("sparse", [0.001, 4])
def test_distances_against_loops(sparse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "SPARSE", sparse)
    base, model = torch.cat([drawn(4), tied(2)]), torch.cat([drawn(4) + drawn(4, 1, 0.7), tied(2, 1)])
    sorted_base, sorted_model = order(base), order(model)
    ratios = distributions.by_ratio(sorted_base, sorted_model)
    for setting in SETTINGS:
        found = distributions.compare(sorted_base, sorted_model, setting, ratios)
        laws = [
            dense(filtered_law(each, setting), VOCAB).log_probs.exp().tolist() for each in (sorted_base, sorted_model)
        ]
        plain = as_transformers(model, SamplingSetting(setting.temperature)).tolist()
        for row in range(len(base)):
            expected = reference(laws[0][row], laws[1][row], plain[row])
            values = dict(zip(distributions.NAMES, found[:, row].tolist(), strict=True))
            assert values == pytest.approx(expected, rel=1e-9, abs=1e-12), (setting, row)
            assert max(values["same_cdf"], values["same_gumbel"]) <= values["acceptance"] + 1e-12


def test_of_equally_likely_tokens_the_higher_ids_stay() -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.float64)
    found = dense(filtered_law(order(logits), SamplingSetting(0.8, top_p=0.51)), VOCAB).log_probs.isfinite()[0]
    assert found.nonzero()[:, 0].tolist() == list(range(VOCAB - int(found.sum()), VOCAB)) and int(found.sum()) == 21


def test_equal_models_agree_in_all() -> None:
    logits = order(drawn())
    for setting in SETTINGS:
        found = distributions.compare(logits, logits, setting, distributions.by_ratio(logits, logits))
        values = dict(zip(distributions.NAMES, found, strict=True))
        for name in ("acceptance", "jaccard", "kl_defined", "same_cdf", "same_gumbel"):
            torch.testing.assert_close(values[name], torch.ones(12, dtype=torch.float64), rtol=1e-12, atol=0)
        assert float(values["kl_kept"].abs().max()) < 1e-12 and float(values["outside"].max()) == 0


def test_extreme_logits_stay_finite() -> None:
    base, model = drawn(6, 0, 400.0), drawn(6, 1, 400.0)
    model[0, :5] = -1e4
    pair = order(base), order(model)
    for setting in SETTINGS:
        found = distributions.compare(*pair, setting, distributions.by_ratio(*pair))
        assert bool(torch.isfinite(found).all()), setting


def test_sums_do_not_depend_on_how_positions_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [drawn(30, 2), drawn(30, 3)]
    settings = grid((0.7, 1.0), (0, 4), (0.9,), (0.0,))
    betas = best.nodes((0.7, 1.0))
    whole = sampling.window_sums(logits, settings, (0.7, 1.0), betas)
    monkeypatch.setattr(sampling.kl, "LOGITS_NBYTES", 4 * VOCAB * sampling.COPIES * 7)  # 7 positions at a time
    for one, other in zip(whole, sampling.window_sums(logits, settings, (0.7, 1.0), betas), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    same = sum(int(a.argmax()) == int(b.argmax()) for a, b in zip(*logits, strict=True))
    assert float(whole[0][-1]) == same


def test_rows_average_over_windows() -> None:
    settings = [SamplingSetting(1.0), SamplingSetting(1.0, top_k=3)]
    count = len(distributions.NAMES)
    means = torch.rand(2 * count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row = sampling.rows(settings, means)[1]
    own = dict(zip(distributions.NAMES, means[count:], strict=True))
    assert row["filters"] == "top-k 3" and row["top_k"] == 3
    assert row["kl"] == pytest.approx(float(own["kl"].sum() / own["kl_defined"].sum()))
    gap = own["entropy"] - own["base_entropy"]
    assert row["entropy_gap"] == pytest.approx(float(gap.mean()))
    assert row["entropy_gap_se"] == pytest.approx(float(gap.std()) / math.sqrt(5))


def curves(base: Tensor, model: Tensor, temperatures: tuple[float, ...], windows: int) -> tuple[Tensor, Tensor]:
    betas = best.nodes(temperatures)
    found = best.sums(base, model, temperatures, betas)
    return found.view(len(found), windows, -1).mean(-1), betas


def found_of(
    base: Tensor, model: Tensor, temperatures: tuple[float, ...], windows: int
) -> list[best.TemperatureAdvice]:
    means, betas = curves(base, model, temperatures, windows)
    return best.recommend(means, temperatures, betas)


def divergence(base: Tensor, model: Tensor, temperature: float, other: float) -> float:
    log_p, log_q = (base / temperature).log_softmax(-1), (model / other).log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_best_temperature_against_a_search() -> None:
    from scipy.optimize import minimize_scalar

    base = drawn(60, 4, 3.0)
    model = 1.25 * base + drawn(60, 5, 0.8)
    temperatures = (0.5, 0.8, 1.0, 1.2)
    for found in found_of(base, model, temperatures, 6):
        searched = minimize_scalar(
            lambda t, T=found.temperature: divergence(base, model, T, t), bounds=(0.3, 2.0), options={"xatol": 1e-9}
        )
        assert found.best == pytest.approx(searched.x, rel=1e-4)
        assert found.kl == pytest.approx(divergence(base, model, found.temperature, found.temperature), rel=1e-9)
        assert found.kl_best == pytest.approx(searched.fun, rel=1e-6) and not found.at_limit


def test_scaled_logits_want_the_scale_back_and_noise_nothing() -> None:
    base = drawn(400, 6, 3.0)
    (scaled,) = found_of(base, 1.3 * base, (1.0,), 20)
    assert scaled.best == pytest.approx(1.3, abs=1e-6) and scaled.change
    assert scaled.kl_best == pytest.approx(0, abs=1e-6)
    (equal,) = found_of(base, base, (1.0,), 20)
    assert equal.best == pytest.approx(1.0, abs=1e-9) and not equal.at_limit
    (far,) = found_of(base, 9 * base, (1.0,), 20)
    (few,) = found_of(base, base + drawn(400, 7), (1.0,), 2)
    assert far.at_limit and far.best == pytest.approx(best.RANGE)
    assert few.low is None and few.high is None and not few.change


def test_interval_covers_the_true_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a model whose best temperature is 1.1 on all of them together."""
    monkeypatch.setattr(best, "RESAMPLINGS", 400)
    generator = torch.Generator().manual_seed(0)
    base = 2.0 * torch.randn(4000, 12, dtype=torch.float64, generator=generator)
    model = 1.1 * base + 0.6 * torch.randn(4000, 12, dtype=torch.float64, generator=generator)
    means, betas = curves(base, model, (1.0,), 1000)
    truth = best.recommend(means, (1.0,), betas)[0].best
    hits = 0
    for trial in range(150):
        chosen = torch.randint(1000, (15,), generator=generator)
        (found,) = best.recommend(means[:, chosen], (1.0,), betas, trial)
        assert found.low is not None and found.high is not None
        hits += found.low <= truth <= found.high
    assert 0.91 <= hits / 150 <= 0.99


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (SamplingSetting(0.0), "temperature 0 is not positive"),
        (SamplingSetting(1.0, -1), "top_k -1"),
        (SamplingSetting(1.0, 0, 0.0), "top_p 0"),
        (SamplingSetting(1.0, 0, 1.0, 1.5), "min_p 1.5"),
        (SamplingSetting(math.nan), "temperature nan"),
        (SamplingSetting(1.0, typical_p=0.0), "typical_p 0"),
        (SamplingSetting(1.0, eta=1.0), "eta 1"),
        (SamplingSetting(1.0, repetition_penalty=0.0), "repetition_penalty 0"),
    ],
)
def test_impossible_settings(setting: SamplingSetting, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        distributions.check(setting)
