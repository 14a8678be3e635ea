"""The `kv_cache` section of recipes: strict reading, round trips, and the same layers as compress/kv/settings.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from compress import plugins, recipe
from compress.errors import RecipeError
from compress.kv.settings import KINDS
from compress.recipe import Recipe

Make = Callable[[str], Recipe]

FULL = """
method: kivi
bits: 2
sink: 2
keys: {group_size: 64}
values: {bits: 4, residual_length: 64}
layers:
  - {match: [0, 1], bits: 8}
  - {match: "2-3", values: {method: fp8}}
  - {match: -1, keys: {bits: 3}, values: {group_size: 16}}
skip_layers: [4]
other_layers: exact
exact_prefill: false
"""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def load(text: str, name: str = "r") -> Recipe:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return recipe.load(str(path))

    return load


def section(text: str) -> str:
    return "kv_cache:\n" + "\n".join(f"  {line}" for line in text.strip().splitlines()) + "\n"


def test_settings_of_all_layers(make: Make) -> None:
    loaded = make(section(FULL)).kv_cache
    assert loaded is not None
    settings = loaded.by_layer(8)
    assert (loaded.exact_prefill, loaded.other_layers) == (False, "exact")
    found = [[(c.method, getattr(c.config, "bits", None)) for c in layer.values()] for layer in settings]
    two, eight = [("kivi", 2), ("kivi", 4)], [("kivi", 8), ("kivi", 8)]
    mixed, last = [("kivi", 2), ("fp8", None)], [("kivi", 3), ("kivi", 4)]
    assert found == [eight, eight, mixed, mixed, [("identity", None)] * 2, two, two, last]
    assert settings[7]["values"].config.group_size == 16
    assert settings[5]["keys"].config.group_size == 64
    assert [settings[2][kind].policy.residual_length for kind in KINDS] == [128, 64]
    assert {c.policy.sink for index in (0, 2, 7) for c in settings[index].values()} == {2}


def test_what_is_written_out_gives_the_same(make: Make) -> None:
    loaded = make(section(FULL))
    assert make(recipe.dump(loaded)) == loaded
    assert "axis: null" in recipe.dump(loaded)  # every default
    kv = loaded.kv_cache
    again = make(section("keys: {method: kivi, bits: 4}\nvalues: {method: fp8}")).kv_cache
    assert kv is not None and again is not None
    assert (again.keys.method, again.values.method) == ("kivi", "fp8")
    assert recipe.fingerprint(loaded) != recipe.fingerprint(make(section(FULL.replace("bits: 8", "bits: 7"))))


@pytest.mark.parametrize("name", plugins.names("kv"))
def test_every_codec_round_trips(make: Make, name: str) -> None:
    loaded = make(section(f"method: {name}"))
    assert loaded.kv_cache is not None
    assert loaded.kv_cache.keys.config == plugins.load("kv", name).Config()
    assert make(recipe.dump(loaded)) == loaded
    assert loaded.kv_cache.needs() == plugins.load("kv", name).NEEDS


def test_codecs_that_only_some_layers_have_count(make: Make) -> None:
    calibrated = next((name for name in plugins.names("kv") if plugins.load("kv", name).NEEDS), None)
    if calibrated is None:
        pytest.skip("no codec is calibrated")
    loaded = make(section(f"method: fp8\nlayers:\n  - {{match: 1, values: {{method: {calibrated}}}}}"))
    assert loaded.kv_cache is not None
    assert loaded.kv_cache.needs() == plugins.load("kv", calibrated).NEEDS


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("bits: 4", 2, "kv_cache: bits needs a method"),
        ("sink: 4", 1, "keys have no method"),
        ("method: kivvi", 2, "unknown .*'kivvi'.*did you mean 'kivi'"),
        ("method: kivi\nbit: 4", 3, "unknown key 'bit'; known: .*bits"),
        ("method: kivi\nbits: 9", 3, "bits 9 is not between 1 and 8"),
        ("method: kivi\nbits: '4'", 3, "bits must be an integer, found the text '4'"),
        ("method: kivi\nkeys: 4", 3, "kv_cache.keys must be keys with values"),
        ("method: kivi\nkeys: {sink: 0}", 1, "sink must be the same"),
        ("method: kivi\nsink: -1", 3, "sink and residual_length are 0 or more"),
        ("method: kivi\nlayers: [{bits: 8}]", 3, "needs match"),
        ("method: kivi\nlayers: [{match: [], bits: 8}]", 3, "match is an empty list"),
        ("method: kivi\nlayers: [{match: first, bits: 8}]", 3, "'first' is no layer number"),
        ("method: kivi\nlayers: [{match: 0, bts: 8}]", 3, "unknown key 'bts'"),
        ("method: kivi\nlayers: [{match: 0, bits: 8}, {match: [1, 0], bits: 3}]", 1, "matches 0 in two entries"),
        ("method: kivi\nlayers: {0: {bits: 8}}", 3, "layers must be a list"),
        ("method: kivi\nother_layers: skip", 3, 'other_layers must be one of "error", "exact"'),
        ("method: kivi\nexact_prefill: 1", 3, "exact_prefill must be true or false"),
    ],
)
def test_errors_say_what_and_where(make: Make, text: str, line: int, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"line {line}: .*{message}"):
        make(section(text))


def test_layers_that_a_model_does_not_have(make: Make) -> None:
    loaded = make(section("method: kivi\nlayers: [{match: 8, bits: 3}]")).kv_cache
    assert loaded is not None
    with pytest.raises(RecipeError, match="there is no layer 8, the model has 8"):
        loaded.by_layer(8)


def test_a_recipe_without_weights(make: Make) -> None:
    loaded = make("ignore: []\n" + section("method: kivi"))
    assert not loaded.packs and loaded.scheme_for("model.layers.0.mlp.up_proj") is None
    assert "quantize" not in recipe.dump(loaded)
    assert make("quantize: {method: rtn}").packs
    with pytest.raises(RecipeError, match="quantize is missing"):
        make("description: nothing")
    with pytest.raises(RecipeError, match="rules needs quantize"):
        make("rules: [{match: '*', bits: 3}]\n" + section("method: kivi"))


def test_overrides(make: Make, tmp_path: Path) -> None:
    make(section("method: kivi\nbits: 2"), "kv")
    path = str(tmp_path / "kv.yaml")
    changed = recipe.load(path, ["kv_cache.bits=3", "kv_cache.values.residual_length=64"]).kv_cache
    assert changed is not None
    assert (changed.keys.config.bits, changed.values.policy.residual_length) == (3, 64)
    with pytest.raises(RecipeError, match=r"--set kv_cache.bits=x: kv_cache \(kivi\): bits must be an integer"):
        recipe.load(path, ["kv_cache.bits=x"])


def test_built_in_recipes_with_a_cache() -> None:
    found = {name: recipe.load(name) for name in recipe.names() if recipe.load(name).kv_cache is not None}
    wanted = {"kv8": ("kivi", 8), "kv4": ("kivi", 4), "kv3": ("pca", 3.125), "kv2": ("pca", 2.125)}
    wanted |= {"w4kv4": ("kivi", 4), "w4kv2": ("pca", 2.125), "pca4": ("pca", 4.125), "kivi2": ("kivi", 2)}
    wanted |= {"kvquant3": ("kvquant", 3), "gear4": ("gear", 4), "squat2": ("squat", 2), "rotatekv2": ("rotatekv", 2)}
    wanted |= {"zipkv": ("lloyd", 4), "kv1": ("commvq", 1.0), "kv1.5": ("pca", 1.5)}
    assert wanted.keys() <= found.keys()
    for name, (method, bits) in wanted.items():
        cache = found[name].kv_cache
        assert cache is not None and found[name].packs == name.startswith("w4")
        settings = cache.by_layer(4)
        assert {c.method for layer in settings for c in layer.values()} == {method}
        assert {getattr(c.config, "bits", None) for layer in settings for c in layer.values()} == {bits}
        assert dataclasses.asdict(settings[0]["keys"].policy)["residual_length"] == 128
