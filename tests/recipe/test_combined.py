"""Recipes made of others: `A+B`, `extends`, files of --set, and which of them wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from compress import recipe
from compress.errors import RecipeError
from compress.recipe import Recipe, sources


def without_words(loaded: Recipe) -> Recipe:
    return dataclasses.replace(loaded, name="", description="")


def extending(folder: Path, content: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return str(path)


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe.load(name, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_recipe_of_weights_beside_one_of_a_cache() -> None:
    weights, cache, both = map(recipe.load, ("vq2bit", "kv2", "vq2bit+kv2"))
    assert (both.name, both.description) == ("vq2bit+kv2", "vq2bit and kv2")
    assert without_words(both) == without_words(dataclasses.replace(weights, kv_cache=cache.kv_cache))
    assert without_words(recipe.load("kv2+vq2bit")) == without_words(both)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vq2bit+int4", "vq2bit+int4: vq2bit and int4 both have calibration, quantize; put a recipe of weights"),
        ("w4kv4+kv2", "w4kv4 and kv2 both have kv_cache"),
        ("int4+kv22", "unknown recipe 'kv22'; did you mean kv2"),
        ("int4+", "unknown recipe ''"),
    ],
)
def test_what_cannot_stand_side_by_side(name: str, says: str) -> None:
    assert says in refused(name)


@pytest.mark.parametrize(("name", "parts"), [("w4a4kv4", "quarot4bit+kv4"), ("w4kv4", "kv4"), ("w4kv2", "kv2")])
def test_built_in_combinations_say_what_they_are_made_of(name: str, parts: str) -> None:
    assert f"extends: {parts}\n" in recipe.text(name)
    assert recipe.load(name).kv_cache == recipe.load(parts.rpartition("+")[2]).kv_cache


def test_a_file_over_a_recipe(tmp_path: Path) -> None:
    base = recipe.load("int4")
    loaded = recipe.load(
        extending(tmp_path, "extends: int4\nquantize: {bits: 3}\nrules: [{match: '*.v_proj', bits: 8}]")
    )
    assert (loaded.name, loaded.description) == ("mine", "")
    expected = dataclasses.replace(base.quantize, config=dataclasses.replace(base.quantize.config, bits=3))
    assert loaded.quantize == expected and loaded.embeddings == base.embeddings and len(loaded.rules) == 1
    again = recipe.load(extending(tmp_path, recipe.dump(loaded), "resolved.yaml"))
    assert again == loaded  # what a checkpoint keeps needs no other file


@pytest.mark.parametrize(
    ("content", "key", "expected"),
    [
        ("extends: int4\nembeddings: null", "embeddings", None),
        ("extends: w4kv4\nkv_cache: null", "kv_cache", None),
        ("extends: int4\nquantize: {method: rtn, bits: 5}", "quantize", recipe.load("int8", ["bits=5"]).quantize),
        ("extends: quarot4bit\ntransform: []", "transform", ()),
    ],
)
def test_what_a_file_takes_away(tmp_path: Path, content: str, key: str, expected: object) -> None:
    loaded = getattr(recipe.load(extending(tmp_path, content)), key)
    if key == "quantize":
        assert (loaded.method, loaded.config.bits, loaded.two_sided) == ("rtn", 5, False)
    else:
        assert loaded == expected


def test_paths_start_from_the_file_that_names_them(tmp_path: Path) -> None:
    extending(tmp_path, "extends: sub/next.yaml", "first.yaml")
    extending(tmp_path / "sub", "extends: ../last.yaml+kv4", "next.yaml")
    extending(tmp_path, "extends: int4\naccept: {kl: 0.1, text: held.txt}", "last.yaml")
    loaded = recipe.load(str(tmp_path / "first.yaml"))
    assert loaded.quantize == recipe.load("int4").quantize and loaded.kv_cache == recipe.load("kv4").kv_cache
    assert loaded.accept is not None and Path(loaded.accept.text or "").resolve() == tmp_path / "held.txt"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("extends: mine.yaml", "line 1: extends 'mine.yaml': "),
        ("extends: nowhere", "line 1: extends 'nowhere': there is no such file, and unknown recipe 'nowhere'"),
        ("extends: [int4]", "line 1: extends must be text, found a list"),
        ("extends: int4\nquantise: {bits: 3}", "line 2: the recipe: unknown key 'quantise'"),
        ("extends: int4\nquantize: {bits: 3, bits: 4}", "line 2: a block has 'bits' twice"),
        ("extends: int4\nquantize: {wits: 3}", "line 2: quantize (gptq): unknown key 'wits'"),
    ],
)
def test_what_cannot_be_extended(tmp_path: Path, content: str, says: str) -> None:
    message = refused(extending(tmp_path, content))
    assert says in message
    if content == "extends: mine.yaml":
        assert message.endswith("extends itself: mine.yaml -> mine.yaml")


def test_a_chain_has_an_end(tmp_path: Path) -> None:
    for index in range(sources.MAX_CHAIN + 1):
        extending(tmp_path, f"extends: r{index + 1}.yaml", f"r{index}.yaml")
    assert f"more than {sources.MAX_CHAIN} recipes" in refused(str(tmp_path / "r0.yaml")) or "r17" in refused(
        str(tmp_path / "r0.yaml")
    )


def test_files_of_set_lie_below_keys(tmp_path: Path) -> None:
    three = extending(tmp_path, "quantize: {bits: 3, group_size: 64}", "three.yaml")
    two = extending(tmp_path, "quantize: {bits: 2}", "two.yaml")
    assert recipe.load("int4", [three, two]).quantize.config.bits == 2
    loaded = recipe.load("int4", ["bits=5", three, two]).quantize.config
    assert (loaded.bits, loaded.group_size) == (5, 64)
    assert "--set no.yaml: there is no such file" in refused("int4", "no.yaml")
    assert "wrong.yaml, line 1: quantize (gptq): unknown key 'wits'" in refused(
        "int4", extending(tmp_path, "quantize: {wits: 2}", "wrong.yaml")
    )


@pytest.mark.parametrize(
    ("accept", "says"),
    [
        ("{}", "accept needs kl"),
        ("{text: x}", "accept needs kl"),
        ("{kl: -1}", "accept: kl -1.0 is not positive"),
        ("{task: {recall: 0.5}}", "accept: 0.5 of the task recall is no share of answers that may be lost"),
        ("{kl: 0.1, bits: 3}", "accept: unknown key 'bits'"),
    ],
)
def test_wrong_acceptance(accept: str, says: str) -> None:
    assert says in refused("int4", f"accept={accept}")


def test_acceptance_decides_no_number() -> None:
    plain, strict = recipe.load("int4"), recipe.load("int4", ["accept={kl: 0.1, task: {recall: -0.02}}"])
    assert recipe.fingerprint(plain) == recipe.fingerprint(strict) and "accept" in recipe.dump(strict)
