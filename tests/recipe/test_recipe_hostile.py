"""Recipes that nobody would write: one short line, at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from compress import recipe
from compress.errors import RecipeError
from compress.recipe.sources import MAX_FILE_NBYTES
from compress.recipe.yaml import MAX_DEPTH, MAX_NODES

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
PLAIN = "quantize: {method: rtn, bits: 4}\n"


def refused(text: str | bytes, tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    started = time.process_time()
    with pytest.raises(RecipeError) as caught:
        recipe.load(str(path))
    line = str(caught.value)
    assert time.process_time() - started < 3
    assert line.isprintable() and len(line) < 600 and line.count(str(path)) == 1, line
    return line.replace(str(path), "my.yaml")


@pytest.mark.parametrize("text", ["[" * 10_000, "a: " + "{b: " * 10_000, "- " * 10_000, "? " * 10_000])
def test_deep(text: str, tmp_path: Path) -> None:
    assert refused(text, tmp_path) == f"my.yaml, line 1: nested more than {MAX_DEPTH} deep; no recipe needs that"


def test_aliases(tmp_path: Path) -> None:
    assert f"line 6: more than {MAX_NODES:,} keys and values" in refused(LAUGHS, tmp_path)
    for text in ("&a [*a]", "a: &a {b: *a}", "a: &a [[*a]]"):
        assert refused(text, tmp_path) == "my.yaml, line 1: an alias inside of what it stands for; write it out"


def test_an_alias_may_stand_for_settings(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        PLAIN + "rules: [&r {match: a, bits: 8}, {match: b, bits: &n 3}, {match: c, bits: *n}]"
    )
    rules = recipe.load(str(tmp_path / "my.yaml")).rules
    assert [rule.scheme.config.bits for rule in rules if rule.scheme] == [8, 3, 3]


def test_another_file_is_not_shown(tmp_path: Path) -> None:
    for text in (
        "root:x:0:0:secret\nsecret:x:1:1\n",
        "secret",
        "'secret'",
        "!secret secret",
        "[secret",
        "secret: [secret",
    ):
        line = refused(text, tmp_path)
        assert "secret:x" not in line and line.count("secret") <= 1, line
    assert refused("secret\nsecret", tmp_path) == (
        "my.yaml, line 1: a recipe must be keys with values, found text; give a YAML file"
    )


def test_files_that_are_no_text(tmp_path: Path) -> None:
    assert "a\x00b" not in refused("a\x00b", tmp_path)
    assert "it is not utf-8 text" in refused(b"\xff\xfe\x00", tmp_path)
    with (tmp_path / "my.yaml").open("wb") as stream:
        stream.truncate(MAX_FILE_NBYTES + 1)
    with pytest.raises(RecipeError, match=r"my\.yaml is not a recipe: it has more than 16 MiB"):
        recipe.load(str(tmp_path / "my.yaml"))


@pytest.mark.parametrize(
    "value", ["1" * 6000, "0x" + "f" * 6000, "1" + "0" * 30, "1.0e+400", ".inf", ".nan", '"\\ud800\\x1b"', "true"]
)
@pytest.mark.parametrize("key", ["bits", "group_size"])
def test_numbers_that_are_none(key: str, value: str, tmp_path: Path) -> None:
    line = refused(f"quantize: {{method: rtn, {key}: {value}}}", tmp_path)
    assert line.startswith(f"my.yaml, line 1: {key} must be an integer, found ") and len(line) < 200


def test_names_that_no_file_has() -> None:
    for name in ("x" * 5000, "a\x00b", "\ud800", "a/" * 3000):
        with pytest.raises(RecipeError, match="there is no such file, and unknown recipe '"):
            recipe.load(name)


@pytest.mark.parametrize("value", ["1" * 6000, "x" * 6000, "{" * 100])
def test_overrides_are_cut(value: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.load("int4", [f"bits={value}"])
    assert str(caught.value).startswith("--set bits=") and len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["__init__", "__class__", "stored", "transforms", "os", "..", "a.b", "settings", ""])
def test_only_plugins_are_methods(name: str) -> None:
    keys = ("quantize.method", "kv_cache.method", "allocate.method")
    for override in [*(f'{key}="{name}"' for key in keys), f'transform=[{{method: "{name}"}}]']:
        with pytest.raises(RecipeError, match="unknown .* plugin|needs a method|no method"):
            recipe.load("w4kv4", [override])


def test_layers_of_the_cache() -> None:
    for match in ("1" * 6000, f"0-{'9' * 6000}", "٣", "0x1"):
        with pytest.raises(RecipeError, match="is no layer number|must be") as caught:
            recipe.load("kv4", [f'kv_cache.layers=[{{match: "{match}", bits: 2}}]'])
        assert len(str(caught.value)) < 300
