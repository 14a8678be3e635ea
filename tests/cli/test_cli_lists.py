"""`compress recipes`, `compress methods` and `compress --version`: every list is whole and agrees with what runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import yaml

from compress import plugins, recipe
from compress.cli import settings
from compress.recipe import catalogue
from compress.version import __version__
from runs import cli, one_line


def succeeded(*words: str) -> str:
    """What a command prints; nothing goes to stderr."""
    result = cli(*words)
    assert (result.code, result.err) == (0, ""), result
    return result.out


def test_recipes() -> None:
    listed = json.loads(succeeded("recipes", "--json"))
    assert sorted(listed) == recipe.names()
    assert {name: row["description"] for name, row in listed.items()} == {n: recipe.describe(n) for n in recipe.names()}
    first, *lines = succeeded("recipes").splitlines()
    assert first.startswith(
        "Where to start: trellis4bit for 4 bits, int4 for engines that read integers, vq2bit for 2 bits"
    )
    assert [line for line in lines if line in catalogue.PURPOSES] == list(catalogue.PURPOSES)
    rows = {line.split()[0]: line for line in lines if line.startswith(" ")}
    assert rows.keys() - {"recipe"} == set(recipe.names())
    for name, row in listed.items():
        assert row["description"] in rows[name] and row["cost"] in rows[name] and row["purpose"] in lines
        assert row["calibration"] == (row["cost"] != "data-free")
    costs = {"int8": "data-free", "kv4": "data-free", "int4": "one pass", "kv2": "one pass", "w8a8-smooth": "one pass"}
    costs |= {"mixed3bit": "search", "evo3bit": "search", "layerwise-zd": "one pass", "int2-lrec": "training"}
    assert {name: listed[name]["cost"] for name in costs} == costs
    bits = {"int4": 4.125, "kv2": 2.266, "kv4": 5, "mixed2bit": 2.25, "lord20": 12.75}
    assert {name: listed[name]["bits"] for name in bits} == bits


def test_the_cost_of_a_recipe_is_what_its_settings_ask_for() -> None:
    """The catalogue reads sources; this loads the recipes and asks what the run asks."""
    for entry in catalogue.entries():
        loaded = recipe.load(entry.name)
        schemes = [loaded.quantize, *(rule.scheme for rule in loaded.rules)]
        schemes += loaded.allocate.options if loaded.allocate is not None else ()
        packed = [scheme for scheme in schemes if scheme is not None and scheme.method != "keep"]
        reads = [plugins.load("quant", scheme.method).NEEDS for scheme in packed]
        reads += [loaded.kv_cache.needs()] if loaded.kv_cache is not None else []
        reads += [plugins.load("transform", step.method).SCOPE == "block" for step in loaded.transform]
        assert any(reads) <= (entry.cost != "data-free"), entry.name
        assert (entry.cost == "data-free") <= (not any(reads)), entry.name


def test_a_printed_recipe_is_one_to_start_from(tmp_path: Path) -> None:
    text = succeeded("recipes", "int4")
    assert text == recipe.text("int4")
    (tmp_path / "mine.yaml").write_text(text)
    mine, built_in = recipe.load(str(tmp_path / "mine.yaml")), recipe.load("int4")
    assert recipe.fingerprint(mine) == recipe.fingerprint(built_in)
    result = cli("recipes", "int44")
    assert result.code == 1 and one_line(result).startswith("unknown recipe 'int44'; did you mean int4 or ")


def test_methods() -> None:
    found = json.loads(succeeded("methods", "--json"))
    known = {f"{kind}/{name}" for kind in plugins.SETTABLE for name in plugins.names(kind)}
    assert found.keys() == known | {f"recipe/{section}" for section in settings.SECTIONS}
    assert {"quant/rtn", "quant/gptq", "formats/int", "formats/dense"} <= found.keys() and all(found.values())
    lines = succeeded("methods").splitlines()
    assert {line.split()[0]: line.split(maxsplit=1)[1] for line in lines} == found


def test_settings_of_one_method() -> None:
    told = json.loads(succeeded("methods", "gptq", "--json"))
    assert told["name"] == "quant/gptq" and told["description"].startswith("GPTQ")
    rows = {row["name"]: row for row in told["settings"]}
    config = plugins.load("quant", "gptq").Config()
    assert [row["name"] for row in told["settings"]] == [field.name for field in dataclasses.fields(config)]
    assert (rows["damp"]["type"], rows["damp"]["default"]) == ("float", "0.01")
    assert (rows["symmetric"]["type"], rows["symmetric"]["default"]) == ("bool", "true")
    shown = succeeded("methods", "quant/gptq")
    assert shown.startswith("quant/gptq: GPTQ") and all(name in shown for name in rows)
    assert json.loads(succeeded("methods", "calibration", "--json"))["name"] == "recipe/calibration"
    for words, expected in {
        "nf": "nf is quant/nf and formats/nf",
        "gptk": "did you mean gptq",
        "x/y": "unknown",
    }.items():
        result = cli("methods", words)
        assert result.code == 1 and expected in one_line(result)


def test_every_setting_is_explained() -> None:
    silent = [f"{full}: {key.name}" for full in settings.all_names() for key in settings.settings(full) if not key.text]
    assert silent == [], "write what these are in a comment behind the field:\n" + "\n".join(silent)


def test_defaults_and_names_are_those_of_the_class() -> None:
    for kind in plugins.SETTABLE:
        for name in plugins.names(kind):
            cls = getattr(plugins.load(kind, name), plugins.KINDS[kind][0])
            listed = settings.settings(f"{kind}/{name}")
            assert [key.name for key in listed] == [field.name for field in dataclasses.fields(cls)]
            for key, field in zip(listed, dataclasses.fields(cls), strict=True):
                assert (key.default is None) == (field.default is dataclasses.MISSING)
                if isinstance(field.default, bool | int | float | str | None):
                    assert yaml.safe_load(str(key.default)) in (field.default, str(field.default)), (name, key)


def test_the_version() -> None:
    assert succeeded("--version") == f"compress {__version__}\n"
