"""What estimators take is counted as it is computed, and the best that fits is chosen, kept and told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from compress import recipe
from compress.allocate import cost, decide, forecast, joint_kl, metrics, prepare_options, session, variants
from compress.allocate.joint_kl import TokenSeconds
from compress.allocate.prepare_options import Options
from compress.allocate.problem import BEST_FIRST
from compress.allocate.quantize_options import QuantizingTime
from compress.errors import BudgetError
from compress.progress import duration, parse_duration, silent
from compress.run.job import Job
from helpers.pico import save_pico
from helpers.runs import TEXT

RECIPE = """
calibration: {num_samples: 32, seq_len: 24}
quantize: {method: rtn, bits: 4, group_size: 32}
allocate:
  method: knapsack
  target: 7bpw
  samples: 32
  options: [{bits: 2}, {bits: 5}, {keep: true}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("model") / "llama")


def asked(model: Path, folder: Path, *overrides: str, budget: float | None = None) -> Job:
    path = folder / "mine.yaml"
    path.write_text(RECIPE)
    return Job(str(model), recipe.load(str(path), overrides), folder / "out", calib=str(TEXT), budget=budget)


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    return prepare_options.options(asked(model, tmp_path_factory.mktemp("recipe")))


@pytest.mark.parametrize("estimator", ["kl_one_at_a_time", "noise"])
def test_passes_are_counted_as_they_are_computed(estimator: str, model: Path, tmp_path: Path) -> None:
    overrides = ("allocate.samples=2", f"allocate.estimator={estimator}")
    with session.open_measurements(asked(model, tmp_path, *overrides), silent) as store:
        metrics.table(store, frozenset({estimator}))
        forwards = store.read_unfinished(estimator)["forwards"]
        counted = cost.count_passes(store.opened, estimator, 2).block_tokens / len(store.skeleton.blocks)
    assert counted == pytest.approx(forwards)


def test_cheaper_estimators_take_less(opened: Options) -> None:
    known = TokenSeconds(1e-3, 1e-3)
    seconds = [known.seconds(cost.count_passes(opened, name, 32)) for name in BEST_FIRST]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == 0
    two = [known.seconds(cost.count_passes(opened, name, 32), processes=2) for name in BEST_FIRST]
    assert two == [each / 2 for each in seconds]


def test_heads_are_timed_by_what_compares_variants(opened: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[float] = []
    real = joint_kl.divergence
    monkeypatch.setattr(joint_kl, "divergence", lambda *given: compared.append(real(*given)) or compared[-1])
    assert cost.time_passes(opened).head > 0
    assert len(compared) == 2 and max(map(abs, compared)) < 1e-3  # once untimed; a model against itself


def test_the_best_that_fits_is_chosen(opened: Options) -> None:
    known = TokenSeconds(1e-3, 1e-3)
    every = list(cost.rank_estimators(opened, known, 32))
    assert [each.samples for each in every if each.estimator == BEST_FIRST[0]] == [32, 16, 8]
    for left in [each.seconds for each in every]:
        found, said = cost.best_estimator(opened, known, 32, left)
        assert found == next(each for each in every if each.seconds <= left)
        assert found.estimator in said and ("does not fit" in said) == (found != every[0])
    assert cost.best_estimator(opened, known, 32, 0.0)[0].seconds == 0


def test_auto_is_chosen_once_and_told(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(cost, "note", notes.append)
    job = asked(model, tmp_path, "allocate.samples=16", "calibration.num_samples=16", budget=3600.0)
    slow = TokenSeconds(10.0, 0.0)
    monkeypatch.setattr(cost, "time_passes", lambda _: slow)
    with session.open_measurements(job, silent) as store:
        first = store.opened.allocation
        kept = json.loads((store.database.folder / cost.FILE).read_text())
    assert first.config.estimator == kept["estimator"] != BEST_FIRST[0]
    assert len(notes) == 1 and f"{BEST_FIRST[0]} on 16 samples" in notes[0]
    monkeypatch.setattr(cost, "time_passes", lambda _: TokenSeconds(0.0, 0.0))  # now everything would fit
    with session.open_measurements(job, silent) as store:
        assert store.opened.allocation == first
    with session.open_measurements(dataclasses.replace(job, budget=None), silent) as store:
        assert store.opened.allocation.config.estimator == BEST_FIRST[0]
    assert len(notes) == 1  # the best one without a budget goes without saying
    few = ("allocate.samples=16", "calibration.num_samples=16")
    scaled = asked(model, tmp_path, *few, f"allocate.scale={BEST_FIRST[0]}")
    with session.open_measurements(scaled, silent) as store:  # another choice, as it must differ from the scale
        assert store.opened.allocation.config.estimator == BEST_FIRST[1]


def test_an_estimator_that_does_not_fit_is_refused_before_anything_is_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "time_passes", lambda _: TokenSeconds(1.0, 1.0))
    job = asked(model, tmp_path, "allocate.estimator=noise", budget=60.0)
    with pytest.raises(
        BudgetError, match=r"noise of the recipe takes about .* h, more than --budget 60\.0 s; raise it"
    ):
        decide.measure(job, silent)
    assert not variants.folder_of(job).exists()
    decide.measure(dataclasses.replace(asked(model, tmp_path, "allocate.estimator=weight"), budget=60.0), silent)


def test_a_plan_says_what_measuring_takes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = forecast.forecast(asked(model, tmp_path), silent)
    assert isinstance(found, forecast.Unmeasured)
    assert found.seconds > 0 and found.estimator.startswith("damages are measured by kl_one_at_a_time on 32 samples (")
    explicit = forecast.forecast(asked(model, tmp_path, "allocate.estimator=gradient"), silent)
    assert isinstance(explicit, forecast.Unmeasured) and "gradient on 32 samples" in explicit.estimator
    monkeypatch.setattr(cost, "time_quantizing", lambda _: QuantizingTime(0.0, 0.0, 2))
    short = forecast.forecast(asked(model, tmp_path, "allocate.estimator=gradient", budget=1e-6), silent)
    assert isinstance(short, forecast.Unmeasured) and short.estimator.endswith("more than --budget 0.0 s, refused")


def test_quantizing_that_does_not_fit_is_refused_with_what_would(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "time_quantizing", lambda _: QuantizingTime(60.0, 30.0, 2))
    said = (
        "quantizing at all 3 options, and once more at what is chosen, takes about 11.3 min, more than --budget "
        "5.0 min; raise it, offer fewer options, or use less calibration text: --set calibration.num_samples=8"
    )
    job = asked(model, tmp_path, budget=300.0)
    with pytest.raises(BudgetError) as refused:
        decide.measure(job, silent)
    assert str(refused.value) == said and not variants.folder_of(job).exists()
    planned = forecast.forecast(job, silent)
    assert isinstance(planned, forecast.Unmeasured) and planned.estimator == f"refused: {said}"
    with pytest.raises(BudgetError, match=r"more than --budget 4\.0 min; raise it, offer fewer options$"):
        decide.measure(dataclasses.replace(job, budget=240.0), silent)
    fits = asked(model, tmp_path, "calibration.num_samples=8", "allocate.estimator=weight", budget=300.0)
    decide.measure(fits, silent)
    monkeypatch.setattr(cost, "time_quantizing", lambda _: pytest.fail("what is quantized is not timed"))
    decide.measure(fits, silent)


def test_samples_within_a_time() -> None:
    known = QuantizingTime(10.0, 4.0, 2)
    assert [known.seconds(samples) for samples in (1, 2, 3, 8)] == [10.0, 10.0, 14.0, 22.0]
    assert [known.most_samples(seconds) for seconds in (9.0, 10.0, 14.0, 22.0, 23.0)] == [0, 2, 4, 8, 8]


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90s", "20min", "1.5 h", "3m")] == [90, 1200, 5400, 180]
    for wrong in ("20", "min", "0s", "-3s", "1d", ""):
        with pytest.raises(ValueError, match="is no duration such as"):
            parse_duration(wrong)
    assert [duration(seconds) for seconds in (90, 1200, 9000)] == ["90.0 s", "20.0 min", "2.5 h"]
