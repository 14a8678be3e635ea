"""One budget for weights and cache: how it is divided, and that the checkpoint and its cache stay within it."""

from __future__ import annotations

import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from compress import recipe
from compress.allocate import cache_options, cache_units
from compress.allocate.cache_options import CacheOption
from compress.allocate.cache_units import CacheCosts, TensorCosts
from compress.allocate.problem import KL_ONE_AT_A_TIME, Choice, Problem, Unit, UnitEntry
from compress.allocate.solver import damages_of, solve
from compress.errors import BudgetError, RecipeError
from compress.kv import generation
from compress.runtime import hf  # noqa: F401  # registers the format
from helpers.pico import save_pico
from helpers.runs import TEXT, cli, one_line

RECIPE = """
calibration: {num_samples: 8, seq_len: 96}
quantize: {method: rtn, bits: 4, group_size: 32}
kv_cache: {method: METHOD, bits: 2, sink: 2, residual_length: 16, flush: 8}
allocate: {samples: 2, options: [{bits: 2}, {bits: 4}, {bits: 8}], cache_bits: [2, 4, 7]}
"""
CONTEXT = 250


SIZE = 529_664  # bytes of the model's tensors


def offer(seed: int) -> cache_units.CacheOffer:
    generator = torch.Generator().manual_seed(seed)
    options = tuple(CacheOption(f"bits={b}", b, {"bits": b}) for b in (2, 4))
    units = []
    for layer, kind in product(range(2), ("keys", "values")):
        damage = float(torch.rand(1, generator=generator))
        units.append(TensorCosts(layer, kind, 800, (300, 500), (1.0, 0.1), (damage, damage / 16)))
    return cache_units.CacheOffer(options, CacheCosts(tuple(units), 70, 100), 64, 2)


def by_solver(share: Problem) -> Choice:
    return solve(share, damages_of(share, "output_error")).choice


@pytest.mark.parametrize("seed", range(4))
def test_the_budget_is_divided_as_all_divisions_together_say(seed: int) -> None:
    found = offer(seed)
    generator = torch.Generator().manual_seed(seed + 10)
    weights = []
    for number in range(3):
        damage = float(torch.rand(1, generator=generator))
        entries = tuple(
            UnitEntry(f"bits={b}", 100 * b, b, {KL_ONE_AT_A_TIME: damage * 4.0 ** (2 - b)}) for b in (2, 3, 4)
        )
        weights.append(Unit(f"model.layers.{number}.a", (f"model.layers.{number}.a",), number, 800, entries))
    for room in (70 + 4 * 300 + 600, 2300, 2750, 10**6):
        nbytes, choice = cache_units.divide(found, weights, room)
        units = [*weights, *found.units]
        best = min(
            sum(unit.entries[i].damage[KL_ONE_AT_A_TIME] for unit, i in zip(units, each, strict=True))
            for each in product(*(range(len(unit.entries)) for unit in units))
            if 70 + sum(unit.entries[i].nbytes for unit, i in zip(units, each, strict=True)) <= room
        )
        assert nbytes == 70 + sum(u.entries[i].nbytes for u, i in zip(found.units, choice, strict=True))
        rest = min(
            sum(u.entries[i].damage[KL_ONE_AT_A_TIME] for u, i in zip(weights, each, strict=True))
            for each in product(range(3), repeat=3)
            if sum(u.entries[i].nbytes for u, i in zip(weights, each, strict=True)) <= room - nbytes
        )
        taken = rest + sum(u.entries[i].damage[KL_ONE_AT_A_TIME] for u, i in zip(found.units, choice, strict=True))
        assert best * (1 - 1e-9) <= taken <= 1.05 * best  # the greedy, on seven units
        for estimator, spent in (("output_error", by_solver), ("rule", cache_units.raise_bits)):
            total, other = cache_units.divide(found, weights, room, estimator)  # type: ignore[arg-type]
            share = Problem(found.units, nbytes - 70)
            assert total <= nbytes and other == spent(share)
    with pytest.raises(BudgetError, match="smallest options take .* 1.24 KiB of it the cache of 64 tokens"):
        cache_units.divide(found, weights, 70 + 4 * 300 + 599)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("model") / "llama")


def words(model: Path, folder: Path, text: str) -> list[str]:
    path = folder / "mine.yaml"
    path.write_text(text)
    measured = str(folder / "measured")
    return [str(model), "--recipe", str(path), "--calib", str(TEXT), "--measurements", measured, "--json"]


def taken(out: Path) -> tuple[int, int]:
    """Bytes of the checkpoint's tensors and of its cache after CONTEXT tokens of generation."""
    stored = 0
    for file in out.glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored += sum(t.numel() * t.element_size() for t in (tensors.get_tensor(k) for k in list(tensors.keys())))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.randint(0, 250, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    made = generation.fresh(loaded)
    for start in range(0, CONTEXT, 8):
        loaded(tokens[:, start : start + 8], past_key_values=made, use_cache=True)
    held = made.nbytes()
    return stored, held.total + held.static


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kivi, group_size: 8", "pca, unit: 4"])
def test_weights_and_cache_stay_within_the_target(method: str, model: Path, tmp_path: Path) -> None:
    asked = words(model, tmp_path, RECIPE.replace("METHOD", method))
    kinds: list[Any] = []
    target = 900_000  # more than enough: everything at its largest
    for less in (0, 15_000, 25_000):
        out, target = tmp_path / str(less), target - less
        result = cli("quantize", *asked, "--target", f"{target}B", "--context", str(CONTEXT), "--out", str(out))
        assert result.code == 0, result.err
        facts = json.loads(result.out)["allocation"]
        stored, held = taken(out)
        assert facts["cache"]["nbytes"] == held and facts["nbytes"] == stored + held
        assert target - 10_000 < facts["nbytes"] <= target or not less
        target = facts["nbytes"]
        kinds.append((facts["bpw"], held))
        assert set(facts["cache"]["layers"]) == {"0", "1"}
    assert kinds[0][0] > 8 and kinds[0] > kinds[1] > kinds[2]
    assert len({bpw for bpw, _ in kinds}) > 1 and len({held for _, held in kinds}) > 1  # both give way


@pytest.mark.slow
def test_a_recipe_of_the_cache_alone(model: Path, tmp_path: Path) -> None:
    text = RECIPE.replace("METHOD", "kivi, group_size: 8").replace("quantize:", "#")
    text = text.replace("{samples: 2, options: [{bits: 2}, {bits: 4}, {bits: 8}], ", "{context: 250, ")
    asked = words(model, tmp_path, text)
    plain = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert not (plain - SIZE) // 4000  # a header
    target = SIZE + 40000
    planned = cli("plan", *asked, "--target", f"{target}B", "--out", str(tmp_path / "out"))
    said = json.loads(planned.out)
    assert said["measured"] is False and not (tmp_path / "measured").exists()
    result = cli(*shlex.split(said["command"])[1:], "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    stored, held = taken(tmp_path / "out")
    assert stored == SIZE and stored + held <= target
    assert report["allocation"]["cache"]["nbytes"] == held
    for estimator in ("output_error", "rule"):
        said = cli("plan", *asked, "--target", f"{target}B", "--set", f"allocate.cache_estimator={estimator}")
        assert said.code == 0 and json.loads(said.out)["cache"]["nbytes"] <= held
    loaded = recipe.load(str(tmp_path / "out" / "recipe.yaml"))
    assert loaded.allocate is None and loaded.kv_cache is not None and loaded.kv_cache.layers
    result = cli("quantize", *asked, "--target", f"{SIZE + 20000}B", "--out", str(tmp_path / "small"))
    assert result.code == 1 and "raise the target, shorten the context" in one_line(result)
    for options in (("--measure", *asked[:-3], "--json"), (*asked, "--target", f"{target}B")):
        result = cli("allocate", *options)
        assert result.code == 1 and "leaves the weights as they are" in one_line(result)
    none = ("--set", "kv_cache.skip_layers=[0,1]")
    result = cli("plan", *asked, "--target", f"{target}B", *none)
    assert result.code == 1 and "leaves no layer to code" in one_line(result)
    result = cli("quantize", *asked, "--target", f"{target}B", "--max-memory", "100MiB")
    assert result.code == 1 and "--max-memory" in one_line(result)
    result = cli("plan", *asked, "--target", f"{target}B", "--set", "allocate.context=300")
    assert result.code == 1 and "a context of 300 tokens, but the model has 256" in one_line(result)


def test_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("METHOD", "kivi, group_size: 8"))
    for overrides, message in (
        (["allocate.context=0"], "context 0 is not positive"),
        (["allocate.context=9", "allocate.target=4bpw"], "a target with a context is a size"),
    ):
        with pytest.raises(RecipeError, match=message):
            recipe.load(str(path), overrides)
    with pytest.raises(RecipeError, match="context needs kv_cache"):
        recipe.load("int4", ["allocate.context=9"])
    cache = recipe.load(str(path)).kv_cache
    assert cache is not None
    with pytest.raises(RecipeError, match="9 bits"):
        cache_options.options(cache, (2, 9))
    fp8 = recipe.load("kv8", ["kv_cache={method: fp8}"]).kv_cache
    assert fp8 is not None
    for wanted in ((2,), (2, 2)):
        with pytest.raises(RecipeError, match="not two or more different numbers"):
            cache_options.options(cache, wanted)
    with pytest.raises(RecipeError, match="fp8 has no bits to choose"):
        cache_options.options(fp8, ())
    cache_only = tmp_path / "only.yaml"
    cache_only.write_text("kv_cache: {method: kivi}\nallocate: {context: 9, options: [{bits: 2}, {bits: 3}]}")
    with pytest.raises(RecipeError, match="options are for weights"):
        recipe.load(str(cache_only))
