"""Recommendations: sizes are those that a run writes, losses those of a study, and nothing is named that is too big."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compress import api, recipe
from compress.cli.app import app
from compress.cli.options import recipes_with_cache
from compress.errors import OutputError
from compress.kv.settings import cache_settings
from compress.run.job import Job
from compress.study import losses, recommend
from compress.study.recommend import BEST, SMALLEST, TRADE, RecipeChoice, Wanted
from helpers.runs import RTN, TEXT, cli, job, one_line, stored_tensors


def choice(name: str, nbytes: int, kl: float) -> RecipeChoice:
    return RecipeChoice(name, None, nbytes, False, 0, kl, None)


def row(name: str, nbytes: int, kl: float, bpw: float | None = 4.0, cache: float | None = None) -> dict[str, Any]:
    shared = {"bytes_per_token": cache, "exact_bytes_per_token": 100} if cache else None
    texts = [{"text": "held", "kl_mean": kl, "kl_se": kl / 10, "tokens": 1000}]
    return {
        **{"name": name, "overrides": [], "nbytes": nbytes, "bpw": bpw, "texts": texts},
        **{"cache": shared, "is_cache_only": bpw is None},
    }


def study(path: Path, *cells: dict[str, Any], **more: Any) -> Path:
    found = {
        **{"version": 1, "model": "studied", "settings": {"texts": ["held"], "window": 8}, "cells": list(cells)},
        **{"original": {"parameters": 1000}, "fingerprint": "f"},
        **more,
    }
    path.write_text(json.dumps(found))
    return path


CELLS = (
    row("int8", 800, 0.0001, 8.0),
    row("int4", 400, 0.01),
    row("int4-round", 410, 0.02),
    row("kv4", 1600, 0.002, None, 30.0),
)


def test_the_three_are_as_defined() -> None:
    rng = random.Random(0)
    for _ in range(200):
        found = [choice(f"c{i}", rng.randrange(1, 100), 10 ** rng.uniform(-4, 0.5)) for i in range(12)]
        limit = rng.randrange(1, 100)
        fitting = [each for each in found if each.total <= limit]
        three = recommend.three(found, limit)
        assert bool(three) == bool(fitting)
        if not fitting:
            continue
        assert three[BEST].kl == min(each.kl for each in fitting)
        sensible = [each for each in fitting if each.kl <= recommend.SENSIBLE] or [three[BEST]]
        assert three[SMALLEST].total == min(each.total for each in sensible)
        assert three[SMALLEST].total <= three[TRADE].total <= three[BEST].total


def test_the_best_trade_lies_below_the_line() -> None:
    found = [choice("a", 10, 0.1), choice("b", 20, 0.002), choice("c", 40, 0.001), choice("d", 30, 0.0019)]
    assert recommend.three(found, 99)[TRADE].recipe == "b"
    assert {each.recipe for each in recommend.three(found[:1], 99).values()} == {"a"}


def test_a_study_is_read_as_far_as_it_is_of_recipes_as_they_are(tmp_path: Path) -> None:
    changed = {**row("int3", 1, 0.1), "overrides": ["bits=3"]}
    again = {**row("int4", 400, 0.005), "overrides": ["calibration.num_samples=8"]}
    known = losses.read(study(tmp_path / "s.json", *CELLS, changed, again, row("no-such", 1, 0.1)))
    assert set(known.losses) == {"int8", "int4", "int4-round"} and set(known.caches) == {"kv4"}
    assert known.losses["int4"].kl == 0.005 and known.caches["kv4"].cache_share == 0.3
    assert {loss.recipe for loss in known.frontier} == {"int8", "int4"}
    with pytest.raises(OutputError, match="is no study"):
        losses.read(study(tmp_path / "t.json", {"name": "int4"}))
    with pytest.raises(OutputError, match="cannot be read"):
        losses.read(tmp_path / "none.json")


def test_what_is_shipped_can_be_read() -> None:
    for known in losses.read_shipped():
        assert known.losses and known.parameters > 0 and known.frontier


def test_recipes_of_a_study_come_onto_the_page_of_a_checkpoint(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """They are kept for later pages; a study that is none is refused before anything is written."""
    packed = tmp_path / "packed"
    api.quantize(job(pico_dir("llama"), RTN, packed))
    broken = study(tmp_path / "broken.json", {**CELLS[0], "texts": [{"text": "held", "kl_mean": "x", "tokens": 1}]})
    assert "is no study" in one_line(cli("inspect", str(packed), "--page", "--study", str(broken)))
    assert not (packed / "scores.json").exists()
    good = study(tmp_path / "s.json", *CELLS)
    for options in (["--study", str(good)], []):
        assert cli("inspect", str(packed), "--page", *options).code == 0
        page = (packed / "report.html").read_text(encoding="utf-8")
        assert "Among other recipes" in page and "Beaten by no other: int4, int8" in page and "kv4" not in page
        assert "this checkpoint was not scored on held" in page


def test_ranks_agree_as_spearman_says(tmp_path: Path) -> None:
    from scipy.stats import spearmanr

    rng = random.Random(3)
    names = recipe.names()[:12]
    values = [[rng.random() for _ in names] for _ in range(2)]
    known = [
        losses.read(study(tmp_path / f"{i}.json", *(row(n, 1, v) for n, v in zip(names, each, strict=True))))
        for i, each in enumerate(values)
    ]
    found = losses.rank_agreement(*known)
    assert found is not None and found[1] == 12 and found[0] == pytest.approx(float(spearmanr(*values).statistic))
    assert losses.rank_agreement(known[0], dataclasses.replace(known[1], losses={})) is None


def test_the_nearest_model_is_taken(tmp_path: Path) -> None:
    known = losses.read(study(tmp_path / "s.json", *CELLS))
    large = dataclasses.replace(known, parameters=10**9, fingerprint="g")
    assert losses.nearest([known, large], 5 * 10**8, "x") is large
    assert losses.nearest([known, large], 5 * 10**8, "f") is known


def test_sizes_are_what_is_written(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = pico_dir("llama")
    known = losses.read(study(tmp_path / "s.json", *CELLS))
    job = Job(str(model), recipe.load("int8"), tmp_path / "out", calib=str(TEXT))
    found, left_out = recommend.choices(Wanted(job, 1 << 30, 256), known)
    assert {(each.recipe, each.cache) for each in found} == {(w, c) for w in ("int8", "int4") for c in (None, "kv4")}
    assert not left_out
    exact = next(each for each in found if each.recipe == "int8" and each.cache is None)
    assert api.quantize(job)["nbytes"]["total"] == exact.nbytes
    assert exact.cache_nbytes == 2 * 2 * 16 * 2 * 4 * 256  # layers, heads, width, keys and values, float32, tokens
    both = next(each for each in found if each.recipe == "int4" and each.cache == "kv4")
    assert both.kl == pytest.approx(0.012) and both.cache_nbytes < exact.cache_nbytes
    words = recommend.command(Wanted(job, 1), both)
    made = recipe.load(words[words.index("--recipe") + 1], [words[words.index("--set") + 1]])
    assert made.kv_cache == recipe.load("kv4").kv_cache
    own = tmp_path / "mixed.yaml"
    own.write_text("quantize: {method: gptq, bits: 3}\nallocate: {target: 3.125bpw, options: [{bits: 3}, {bits: 4}]}\n")
    mixed = dataclasses.replace(job, recipe=recipe.load(str(own)), out=tmp_path / "x")
    bound, is_bound, _ = recommend.size(mixed)
    tensors = stored_tensors(model)
    linears = sum(tensor.numel() for name, tensor in tensors.items() if "_proj" in name)
    rest = sum(tensor.nbytes for name, tensor in tensors.items() if "_proj" not in name)
    assert is_bound and bound == rest + math.ceil(3.125 * linears / 8)


def test_the_cache_of_a_command_is_short_and_means_the_same() -> None:
    for name in recipes_with_cache():
        said = recommend.shortest(name)
        assert cache_settings(said) == recipe.load(name).kv_cache
        written = recipe.data(name)["kv_cache"]
        assert said.items() <= written.items()  # nothing but what the recipe itself says
    assert recommend.shortest("kv4") == {"method": "kivi", "bits": 4}


@pytest.mark.parametrize("fits", ["100MiB", "1KiB"])
def test_the_command_line_says_what_fits(pico_dir: Callable[..., Path], tmp_path: Path, fits: str) -> None:
    path = study(tmp_path / "s.json", *CELLS)
    words = [
        "recommend",
        str(pico_dir("llama")),
        "--fits",
        fits,
        "--study",
        str(path),
        "--no-timing",
        "--context",
        "64",
    ]
    done = CliRunner().invoke(app, words)
    assert "losses were measured on studied, scored on held" in done.stdout
    if fits == "1KiB":
        assert done.exit_code == 1 and "nothing fits 1.00 KiB" in done.stdout and "the smallest is int4" in done.stdout
    else:
        assert done.exit_code == 0 and "best quality: int8" in done.stdout
        assert "compress quantize" in done.stdout and "of cache at 64 tokens" in done.stdout


def test_a_context_beyond_the_models_positions_is_said(
    pico_dir: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = losses.read(study(tmp_path / "s.json", *CELLS))
    job = Job(str(pico_dir("llama")), recipe.load("int8"), tmp_path / "out", calib=str(TEXT))
    said = "a context of 257 tokens is longer than the 256 positions that the model is made for"
    for context, times in ((256, 0), (257, 1)):
        recommend.choices(Wanted(job, 1 << 30, context), known)
        assert [record.message for record in caplog.records].count(said) == times
