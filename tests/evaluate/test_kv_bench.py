"""The protocol of kv bench: chunks against single tokens, exact caches, equal bytes, recall, and the command lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from compress.cli.app import app
from compress.errors import CalibrationError, RecipeError
from compress.evaluate import cache as bench
from compress.evaluate import cache_candidates, cache_layers, cache_scores, cache_speed, intervals
from compress.evaluate.cache_speed import MeasuredCacheBytes
from compress.evaluate.reader import Candidate, Execution, Reader
from compress.kv.cache import make_cache
from compress.kv.settings import cache_settings
from helpers.kv_cases import ready, windows
from helpers.pico import build
from helpers.runs import TEXT

KIVI = {"method": "kivi", "bits": 2, "group_size": 16, "residual_length": 32, "flush": 16, "sink": 4}
IDENTITY = {"method": "identity", "residual_length": 32, "flush": 16}
ALONE = {"method": "per_token", "bits": 4, "sink": 0, "residual_length": 0, "flush": 1, "exact_prefill": False}
YAML = "description: d\nkv_cache: {method: kivi, bits: %d, group_size: 16, residual_length: 32, flush: 16}\n"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return ready(build("llama"))


def candidate_of(name: str, recipe: dict[str, Any], path: Any = "decode", extra: int = 0) -> Candidate:
    return Candidate(name, cache_settings(recipe), {}, path, extra)


def silent(done: int) -> None:
    pass


@pytest.mark.parametrize("path", ["decode", "fused"])
def test_chunks_read_what_single_tokens_would(model: PreTrainedModel, path: Any) -> None:
    candidate = candidate_of("", KIVI, path)
    chunks = cache_scores.spans([candidate.codings(model.config)], 100)
    assert chunks[:3] == [(0, 36), (36, 52), (52, 68)] and chunks[-1][1] == 100
    tokens = windows(1, 100)
    found = torch.cat(list(Reader(model, candidate).through(tokens, chunks)), 1)
    single = [(i, i + 1) for i in range(100)]
    expected = torch.cat(list(Reader(model, candidate).through(tokens, single)), 1)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    exact = torch.cat(list(Reader(model).through(tokens, chunks)), 1)
    assert (found - exact).abs().amax() > 100 * (found - expected).abs().amax()


@pytest.mark.parametrize("path", ["decode", "fused"])
def test_tokens_coded_alone_are_read_alike_in_any_chunks(model: PreTrainedModel, path: Any) -> None:
    candidate, plain = candidate_of("", ALONE, path), candidate_of("", ALONE | {"exact_prefill": True}, path)
    assert cache_scores.chunks_of(model.config, [candidate], 600) == [(0, 256), (256, 512), (512, 600)]
    assert cache_scores.chunks_of(model.config, [candidate, plain], 3) == [(0, 1), (1, 2), (2, 3)]
    tokens = windows(1, 60)
    whole, single = (
        torch.cat(list(Reader(model, candidate).through(tokens, spans)), 1)
        for spans in ([(0, 60)], [(i, i + 1) for i in range(60)])
    )
    torch.testing.assert_close(whole, single, rtol=2e-4, atol=2e-4)
    exact = torch.cat(list(Reader(model).through(tokens, [(0, 60)])), 1)
    assert (whole - exact)[:, 0].abs().amax() > 100 * (whole - single).abs().amax()  # the first token, too, is coded


def test_spans_fit_all_candidates() -> None:
    settings = [cache_settings({**KIVI, "residual_length": r}).by_layer(2) for r in (32, 80)]
    assert cache_scores.spans(settings, 100) == [(0, 36), (36, 52), (52, 68), (68, 84), (84, 100)]
    short = cache_settings({**KIVI, "residual_length": 0}).by_layer(2)
    assert cache_scores.spans([short], 8)[1:] == [(i, i + 1) for i in range(4, 8)]
    skipped = cache_settings({**KIVI, "skip_layers": [0]}).by_layer(2)
    assert cache_scores.spans([skipped], 100) == cache_scores.spans(settings[:1], 100)


def test_an_exact_cache_changes_nothing(model: PreTrainedModel) -> None:
    candidates = [candidate_of("exact", IDENTITY), candidate_of("coded", KIVI)]
    positions = cache_scores.compare(model, windows(), candidates, 2, silent)
    assert positions.shape == (2, 4, 3, 199)
    with torch.no_grad():
        whole = model(windows()).logits[:, :-1].double().log_softmax(-1)
    nll = -whole.gather(-1, windows()[:, 1:, None])[..., 0]
    torch.testing.assert_close(positions[0, 1], nll, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(positions[0, 0], positions[0, 1], rtol=1e-5, atol=1e-5)
    assert positions[0, 2].abs().max() < 1e-5
    assert positions[1, 2, :, 60:].mean() > 1e-3
    assert positions[1, 2, :, :36].abs().max() < 1e-5  # nothing is coded yet
    errors = cache_layers.output_errors(model, windows(), [lambda c=c: c.cache(model.config) for c in candidates])
    assert errors[0].p95.max() < 1e-9 and errors[1].p50.min() > 1e-4
    parts = [
        cache_layers.output_errors(model, windows(), [lambda k=k: replace(candidates[1], only=k).cache(model.config)])
        for k in ("keys", "values")
    ]
    assert all(part[0].mean.max() < errors[1].mean.sum() and part[0].mean.min() > 1e-5 for part in parts)
    scored = cache_layers.output_errors(model, windows(), [lambda: candidate_of("", KIVI, "fused").cache(model.config)])
    torch.testing.assert_close(scored[0].mean, errors[1].mean, rtol=1e-3, atol=0)


def test_recall_is_of_what_lies_outside_of_the_exact_tokens(model: PreTrainedModel) -> None:
    candidates = [candidate_of("exact", IDENTITY), candidate_of("coded", KIVI)]
    assert cache_scores.recall(model, windows(4, 256), candidates, 2, silent) is None  # 4 x 32 + 100 exact + 32
    short = {"residual_length": 16, "flush": 4, "sink": 4}
    candidates = [
        candidate_of("exact", {"method": "identity", **short}),
        candidate_of("coded", {**KIVI, **short}),
    ]
    found = cache_scores.recall(model, windows(4, 256), candidates, 2, silent)
    assert found is not None and (found.samples, found.tokens) == (2, 2 * 24)
    if found.gain > 0:
        assert found.kept[0] == pytest.approx(1, abs=1e-3) and abs(found.kept[1] - 1) > 1e-3


def test_bytes_are_those_of_the_formula(model: PreTrainedModel) -> None:
    tokens = windows(1, 200)
    found, longer = cache_speed.sizes(
        model,
        tokens,
        [candidate_of("", KIVI), candidate_of("", KIVI, "fused", 48)],
        silent,
    )
    exact, coded = 2 * 2 * 32 * 4, 2 * 2 * 32 * (2 + 2) / 8  # bytes a token: 2 layers, 2 kinds, 2 heads of 16
    count = (200 - 36) // 16 * 16
    assert found.bytes_per_token == (count * coded + (200 - count) * exact) / 200
    assert found.exact_per_token == exact and found.static == 0
    assert longer.bytes_per_token == ((count - 48) * coded + (200 - count + 48) * exact) / 200
    half = (100 - 36) // 16 * 16
    assert found.slope == pytest.approx(((count - half) * coded + (100 - count + half) * exact) / 100)
    made = make_cache(model.config, KIVI)
    model(tokens, past_key_values=made)
    assert made.nbytes().total == 200 * found.bytes_per_token


def test_no_more_than_the_context_becomes_exact(model: PreTrainedModel) -> None:
    found = [candidate_of("kv4", {"method": "kivi", "bits": 4, "residual_length": 32, "group_size": 32})] * 2
    size = MeasuredCacheBytes(100.0, 64, 50.0, 100.0, 4.0, {}, 0)
    far = [replace(size, bytes_per_token=1e6), size]
    assert [candidate.extra for candidate in bench._lengthen(model, found, far, 64)] == [64]
    assert bench._lengthen(model, found, [far[0], replace(size, slope=100.0)], 64) == []  # all is exact already


def test_speed_of_both_paths(model: PreTrainedModel) -> None:
    (found,) = cache_speed.speeds(model, windows(1, 64), [candidate_of("", KIVI)], silent)
    assert None not in vars(found).values() and min(vars(found).values()) > 0


def test_contexts_and_intervals() -> None:
    assert bench.default_contexts(None) == (512, 2048, 8192)
    assert bench.default_contexts(2048) == (512, 1024, 2048)
    assert bench.default_contexts(100_000) == (512, 2048, 8192)
    differences = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = intervals.interval(differences) or (0, 0)
    mean, error = float(differences.mean()), float(differences.std()) / 20
    assert low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)
    assert intervals.interval(differences[:1]) is None


@pytest.fixture
def recipes(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    def write(bits: int) -> str:
        path = tmp_path / f"kv{bits}.yaml"
        path.write_text(YAML % bits)
        return str(path)

    yield write


def lines(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout if result.exit_code == 0 else result.stderr


def test_the_command(pico_dir: Callable[..., Path], recipes: Callable[[int], str]) -> None:
    directory = str(pico_dir("llama"))
    kv = ["--kv", recipes(2), "--kv", recipes(8)]
    options = ["--text", str(TEXT), "--context", "128", "--max-tokens", "400", "--device", "cpu"]
    code, out = lines("kv", "bench", directory, *kv, *options, "--json")
    assert code == 0, out
    rows = json.loads(out)["rows"]
    assert [(row["recipe"], row["extra"]) for row in rows] == [("kv2", 0), ("kv8", 0), ("kv2", 16)]
    two, large, longer = rows
    assert two["tokens"] == 3 * 63 and two["speed"]["decoded_rate"] > 0 and longer["speed"] is None
    assert two["kl"] > longer["kl"] > 0 and two["kl"] > large["kl"] > 0
    step = 16 * (2 * 2 * 32 * 4 - 2 * 2 * 32 * 4 / 8) / 128  # of exact tokens, bytes a token
    target = large["size"]["bytes_per_token"]
    assert target - step < longer["size"]["bytes_per_token"] <= target
    options[5] = "256"
    code, out = lines("kv", "bench", directory, *kv[:2], *options, "--no-speed")
    assert code == 0 and "128 tokens: 126 scored" in out and "kv2" in out


def test_eval_and_generate_through_a_cache(pico_dir: Callable[..., Path], recipes: Callable[[int], str]) -> None:
    directory = str(pico_dir("llama"))
    text = ["--text", str(TEXT), "--seq-len", "100", "--max-tokens", "300", "--device", "cpu", "--json"]
    coded = json.loads(lines("eval", directory, "--kv", recipes(2), *text)[1])
    plain = json.loads(lines("eval", directory, *text)[1])
    assert coded["kl_mean"] > 1e-5 and coded["base_perplexity"] == pytest.approx(plain["perplexity"], rel=1e-4)
    words = ["--prompt", "a" * 70, "--max-new-tokens", "4", "--device", "cpu"]
    assert lines("generate", directory, "--kv", recipes(8), *words) == lines("generate", directory, *words)


def test_generate_with_a_cache_that_is_read_fused_only(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """It is tried on the model before `generate` of the model knows of it."""
    cache = tmp_path / "all.yaml"
    cache.write_text("kv_cache: {method: identity, sink: 1, residual_length: 4, read: {method: tidal, keep: 1.0}}")
    words = ["--prompt", "a" * 70, "--max-new-tokens", "4", "--device", "cpu", "--json"]
    found, plain = (
        json.loads(lines("generate", str(pico_dir("llama")), *kv, *words)[1]) for kv in (["--kv", str(cache)], [])
    )
    assert found["text"] == plain["text"] and found["cache"]["path"] == "fused"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv", "int4"], "recipe 'int4' has no kv_cache; those that have are .*kv4"),
        (["--kv", "own"], "stores no cache of its own; name a recipe"),
        (["--kv", "zipkv", "--context", "300"], "windows of 300 tokens cannot be scored; 2 to 256 can"),
        (["--kv", "rotatekv2", "--set", "group_size=128"], "recipe rotatekv2, group_size=128: .*does not divide"),
        (
            ["--kv", "kv4", "--kv", "kivi2", "--set", "values.group_size=7"],
            "recipe kv4, values.group_size=7: .*7 does not",
        ),
    ],
)
def test_errors_are_one_line(pico_dir: Callable[..., Path], words: list[str], message: str) -> None:
    code, err = lines("kv", "bench", str(pico_dir("llama")), *words, "--text", str(TEXT), "--max-tokens", "600")
    assert code == 1 and err.count("\n") == 1
    with pytest.raises(RecipeError, match=message):
        raise RecipeError(err)


def test_recipes_that_do_not_fit_are_left_out_unless_they_are_named(
    pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is calibrated; with a line for each that says why."""
    directory = pico_dir("llama")
    said: list[str] = []
    real = cache_candidates.calibrate
    monkeypatch.setattr(cache_candidates, "calibrate", lambda *a, **k: said.append("calibrated") or real(*a, **k))
    monkeypatch.setattr(cache_candidates, "CALIBRATION", (4, 64))
    recipes = {
        "fits": cache_settings({"method": "kvquant", "residual_length": 32}),
        "does not": cache_settings({"method": "rotatekv", "group_size": 128}),
    }
    execution = Execution("float32", "cpu")
    asked = bench.BenchRequest(recipes, TEXT, str(TEXT), (128,), 400, speed=False)
    with pytest.raises(RecipeError, match="recipe does not: kv_cache: layer 0, keys: group_size 128 does not divide"):
        bench.bench(directory, asked, execution)
    assert not said
    found = bench.bench(directory, replace(asked, left_out=said.append), execution)
    assert {row.recipe for row in found.rows} == {"fits"} and said[1:] == ["calibrated"]
    assert said[0].startswith("does not is left out: kv_cache: layer 0, keys: group_size 128 does not divide")
    asked = replace(asked, recipes={"does not": recipes["does not"]}, left_out=said.append)
    with pytest.raises(RecipeError, match="no cache recipe fits this model; the lines above say why"):
        bench.bench(directory, asked, execution)


@pytest.mark.slow
def test_without_names_all_recipes_that_fit_are_compared(pico_dir: Callable[..., Path]) -> None:
    words = ["--text", str(TEXT), "--calib", str(TEXT), "--context", "256", "--max-tokens", "600", "--device", "cpu"]
    quick = ["--no-speed", "--no-equal-bytes", "--json"]
    result = CliRunner().invoke(app, ["kv", "bench", str(pico_dir("llama")), *words, *quick])
    assert result.exit_code == 0, result.stderr
    of_papers = ["gear4", "kivi2", "kv1", "kvquant3", "rotatekv2", "squat2", "zipkv"]
    fitting = ["kv1.5", "kv2", "kv3", "kv4", "kv4-half", "kv8", "pca4", *of_papers]
    assert [row["recipe"] for row in json.loads(result.stdout)["rows"]] == fitting
    assert " is left out" not in result.stderr


def test_calibrated_recipes_need_a_text(
    model: PreTrainedModel, pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_candidates, "CALIBRATION", (4, 64))
    directory = pico_dir("llama")
    recipes = {"r": cache_settings({"method": "kvquant", "residual_length": 32})}
    with pytest.raises(CalibrationError, match="the cache recipe r is calibrated: give a text with --calib"):
        cache_candidates.candidates_of(model, directory, recipes, None, lambda *a: None)
    (found,) = cache_candidates.candidates_of(model, directory, recipes, str(TEXT), lambda *a: None)
    assert found.static
    execution = Execution("float32", "cpu")
    result = bench.bench(directory, bench.BenchRequest(recipes, TEXT, str(TEXT), (128,), 400, speed=False), execution)
    assert result.rows[0].size.static > 0
