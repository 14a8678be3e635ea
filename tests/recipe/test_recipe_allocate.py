"""The allocate section of a recipe, targets, and rules that list names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from compress import recipe
from compress.errors import RecipeError
from compress.recipe import allocation
from compress.recipe.schema import Target, option_names
from compress.types import Correction

HEAD = "quantize: {method: gptq, bits: 3}\n"


def load(text: str, tmp_path: Path, *overrides: str) -> recipe.Recipe:
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + text)
    return recipe.load(str(path), overrides)


def test_options_are_schemes_over_quantize_and_survive_dump(tmp_path: Path) -> None:
    text = """
allocate:
  method: knapsack
  target: 3.25bpw
  units: linear
  options:
    - bits: 2
    - {bits: 3, group_size: 64}
    - {method: rtn, bits: 8}
    - keep: true
"""
    loaded = load(text, tmp_path)
    assert loaded.allocate is not None
    options = loaded.allocate.options
    assert [o.method if o else None for o in options] == ["gptq", "gptq", "rtn", None]
    assert options[1] is not None and options[1].config.group_size == 64
    assert options[0] is not None and options[0].config.group_size == loaded.quantize.config.group_size
    again = tmp_path / "again.yaml"
    again.write_text(recipe.dump(loaded))
    assert recipe.load(str(again)) == loaded
    assert recipe.fingerprint(loaded) != recipe.fingerprint(load(text.replace("3.25", "3.3"), tmp_path))


def test_names_of_options_tell_what_differs(tmp_path: Path) -> None:
    loaded = load("allocate: {options: [{bits: 2}, {bits: 3}, {method: rtn, bits: 8}, {keep: true}]}", tmp_path)
    assert loaded.allocate is not None
    assert option_names(loaded.allocate.options) == ["gptq bits=2", "gptq bits=3", "rtn", "keep"]


def test_half_bits_are_options_and_whole_ones_stay_integers(tmp_path: Path) -> None:
    path = tmp_path / "half.yaml"
    path.write_text("quantize: {method: trellis}\nallocate: {options: [{bits: 2}, {bits: 2.5}, {bits: 3.0}]}\n")
    loaded = recipe.load(str(path), ("bits=1.5",))
    assert loaded.allocate is not None and loaded.quantize.config.bits == 1.5
    assert option_names(loaded.allocate.options) == ["bits=2", "bits=2.5", "bits=3"]
    again = tmp_path / "again.yaml"
    again.write_text(recipe.dump(loaded))
    assert recipe.load(str(again)) == loaded and "bits: 3\n" in again.read_text()
    whole = [load("", tmp_path, "method=trellis", f"bits={bits}") for bits in ("3", "3.0")]
    assert recipe.fingerprint(whole[0]) == recipe.fingerprint(whole[1])


def test_a_target_alone_allocates_all_bits_of_the_method(tmp_path: Path) -> None:
    loaded = load("", tmp_path, "allocate.target=3.5bpw")
    assert loaded.allocate is not None and loaded.allocate.target == Target("3.5bpw")
    assert [o.config.bits for o in loaded.allocate.options if o] == [2, 3, 4, 5, 6, 8]


def test_a_new_allocator_keeps_the_settings_that_it_has(tmp_path: Path) -> None:
    text = "allocate: {method: knapsack, estimator: weight, options: [{bits: 2}, {bits: 4}]}"
    loaded = load(text, tmp_path, "allocate.method=uniform")
    assert loaded.allocate is not None and loaded.allocate.method == "uniform"
    assert len(loaded.allocate.options) == 2


@pytest.mark.parametrize("text", ["3bpw", "2.1GiB", "800 MB", "0.05kl", "123456B", ".5bpw"])
def test_targets(text: str) -> None:
    assert Target(text).value > 0 and Target(text).unit


@pytest.mark.parametrize("text", ["3", "three", "0bpw", "-1bpw", "3bps", "1e3MB", ""])
def test_no_targets(text: str) -> None:
    with pytest.raises(ValueError, match="target"):
        Target(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allocate: {options: [{bits: 2}]}", "two or more options"),
        ("allocate: {options: [{bits: 2}, {bits: 2}]}", "all different"),
        ("allocate: {method: knapsak}", "did you mean 'knapsack'"),
        ("allocate: {target: 3}", "target must be text or null"),
        ("allocate: {target: 3x}", "neither bits a weight"),
        ("allocate: {samples: 0}", "samples 0 is not positive"),
        ("allocate: {units: heads}", "units must be one of"),
        ("allocate: {colour: red}", "unknown key 'colour'"),
        ("allocate: {options: [{bits: 2}, {keep: true, bits: 3}]}", "remove keep or"),
        ("rules: [{match: [], bits: 2}]", "empty list"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as found:
        load(text, tmp_path)
    assert "mine.yaml, line" in str(found.value) and "\n" not in str(found.value)


def test_a_rule_may_list_names_and_patterns(tmp_path: Path) -> None:
    loaded = load('rules: [{match: [a.b, "c.*"], bits: 8}]', tmp_path)
    bits = {name: loaded.scheme_for(name).config.bits for name in ("a.b", "c.d", "a.c")}  # type: ignore[union-attr]
    assert bits == {"a.b": 8, "c.d": 8, "a.c": 3}
    assert [loaded.is_open(name) for name in ("a.b", "c.d", "a.c")] == [False, False, True]
    again = tmp_path / "again.yaml"
    again.write_text(recipe.dump(loaded))
    assert recipe.load(str(again)) == loaded


def test_options_with_parts_have_short_names() -> None:
    plain = recipe.load("int2").quantize
    ranked = [dataclasses.replace(plain, lowrank=Correction(rank=rank, bits=4)) for rank in (8, 16)]
    more = dataclasses.replace(plain, config=dataclasses.replace(plain.config, bits=3))
    assert option_names((plain, ranked[0], more)) == ["bits=2", "bits=2 + lowrank", "bits=3"]
    assert option_names((plain, *ranked)) == ["gptq", "+ lowrank rank=8", "+ lowrank rank=16"]


def test_former_names_of_estimators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They mean what they meant, and each says once what it is called now."""
    allocation._tell.cache_clear()
    path = tmp_path / "mine.yaml"
    for method, key, former, name in (
        ("knapsack", "estimator", "swap", "kl_one_at_a_time"),
        ("knapsack", "scale", "swap_base", "kl_one_at_a_time_from_base"),
        ("evolve", "estimator", "swap_base", "kl_one_at_a_time_from_base"),
    ):
        path.write_text(f"quantize: {{method: rtn}}\nallocate: {{method: {method}, {key}: {former}}}")
        old = recipe.load(str(path), ["quantize.group_size=32"])  # which reads the recipe twice
        path.write_text(path.read_text().replace(f"{key}: {former}", f"{key}: {name}"))
        assert old == recipe.load(str(path), ["quantize.group_size=32"])
        assert capsys.readouterr().err == f"allocate: {key}: {former} is called {name} now\n"
    cache = recipe.load("int4", ["kv_cache={method: kivi}", "allocate={context: 9, cache_estimator: swap}"])
    assert cache.allocate is not None and cache.allocate.cache_estimator == "kl_one_at_a_time"
    assert "cache_estimator: swap is called kl_one_at_a_time now" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="estimator must be one of"):
        recipe.load("int4", ["allocate={estimator: swaps}"])
