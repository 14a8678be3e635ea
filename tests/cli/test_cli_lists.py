"""`compress recipes`, `compress methods` and `compress --version`: every list is whole and agrees with what runs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import yaml

from compress import plugins, recipe
from compress.cli import lists
from compress.recipe import catalogue, keys
from compress.version import __version__
from helpers.runs import cli, one_line

SCREEN_LINES = 64
# Recipes that train for long, of which no quality is claimed; the list only shrinks.
UNMEASURED = {"bitnet1.58"}


def succeeded(*words: str) -> str:
    """What a command prints; nothing goes to stderr."""
    result = cli(*words)
    assert (result.code, result.err) == (0, ""), result
    return result.out


def lines_at_100_columns(text: str, rows: int) -> int:
    """Lines of a screen: a row of the table has one line on a terminal, other lines are wrapped."""
    return rows + sum(math.ceil(len(line) / 100) for line in text.splitlines()[rows:])


def test_recipes() -> None:
    listed = json.loads(succeeded("recipes", "--json"))
    assert list(dict.fromkeys(row["purpose"] for row in listed.values())) == list(catalogue.PURPOSES)
    assert sorted(listed) == sorted(recipe.names())
    for name, row in listed.items():
        assert row["description"] == recipe.load(name).description
    core = [name for name, row in listed.items() if not row["is_paper"]]
    for words, names in ((("recipes",), core), (("recipes", "--all"), list(listed))):
        head, *lines = succeeded(*words).splitlines()
        assert head.split(maxsplit=4) == ["recipe", "purpose", "bits", "cost", "what it is"]
        rows = {line.split()[0]: line for line in lines[: len(names)]}
        assert list(rows) == names
        assert lines[len(names)].startswith(
            "Where to start: trellis4bit for 4 bits, int4 for engines that read integers, vq2bit for 2 bits"
        )
        assert ("compress recipes --all" in lines[-1]) == (names == core)
        for name in names:
            row = listed[name]
            assert row["description"] in rows[name] and row["cost"] in rows[name]
            assert catalogue.PURPOSES[row["purpose"]] in rows[name]
            assert row["calibration"] == (row["cost"] != "data-free")
    costs = {"int8": "data-free", "kv4": "data-free", "int4": "one pass", "kv2": "one pass", "w8a8-smooth": "one pass"}
    costs |= {"mixed3bit": "search", "evo3bit": "search", "layerwise-zd": "one pass", "int2-lrec": "training"}
    assert {name: listed[name]["cost"] for name in costs} == costs
    bits = {"int4": 4.125, "kv2": 2.266, "kv4": 5, "mixed2bit": 2.248, "lord20": 12.75}
    assert {name: listed[name]["bits"] for name in bits} == bits
    assert {name for name, row in listed.items() if not row["measured"]} - UNMEASURED == set()


@pytest.mark.parametrize("what", ["recipes", "methods"])
def test_the_core_fits_one_screen(what: str) -> None:
    listed = json.loads(succeeded(what, "--json"))
    is_paper = keys.is_paper if what == "methods" else recipe.is_paper
    rows = 1 + sum(not is_paper(name) for name in listed)
    assert lines_at_100_columns(succeeded(what), rows) <= SCREEN_LINES


def test_rows_are_cut_at_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("COLUMNS", "20")
    lists._print_lines(("a", "b"), [("long", "x" * 14), ("one", "y" * 15)])
    assert stream.getvalue() == f"a     b\nlong  {'x' * 14}\none   {'y' * 13}…\n"


def test_the_cost_of_a_recipe_is_what_its_settings_ask_for() -> None:
    """The catalogue reads sources; this loads the recipes and asks what the run asks."""
    for entry in catalogue.entries():
        loaded = recipe.load(entry.name)
        schemes = [loaded.quantize, *(rule.scheme for rule in loaded.rules)]
        schemes += loaded.allocate.options if loaded.allocate is not None else ()
        packed = [scheme for scheme in schemes if scheme is not None and scheme.method != "keep"]
        reads = ["hessian" in plugins.load("quant", scheme.method).NEEDS for scheme in packed]
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
    described = json.loads(succeeded("methods", "--json"))
    kinds = {
        f"{kind}/{name}": plugins.is_paper(kind, name) for kind in plugins.SETTABLE for name in plugins.names(kind)
    }
    assert list(described) == [*kinds, *(f"recipe/{section}" for section in keys.SECTIONS)]
    assert {"quant/rtn", "quant/gptq", "formats/int", "formats/dense"} <= described.keys()
    assert all(described.values())
    core = {name: text for name, text in described.items() if not kinds.get(name)}
    for words, expected in ((("methods",), core), (("methods", "--all"), described)):
        lines = succeeded(*words).splitlines()[1 : 1 + len(expected)]
        assert {line.split()[0]: line.split(maxsplit=1)[1] for line in lines} == expected
    assert [json.loads(succeeded("methods", name, "--json"))["is_paper"] for name in ("gptq", "glvq")] == [False, True]


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
    silent = [f"{full}: {key.name}" for full in keys.all_names() for key in keys.settings(full) if not key.text]
    assert silent == [], "write what these are in a comment behind the field:\n" + "\n".join(silent)


def test_defaults_and_names_are_those_of_the_class() -> None:
    for kind in plugins.SETTABLE:
        for name in plugins.names(kind):
            cls = getattr(plugins.load(kind, name), plugins.KINDS[kind][0])
            listed = keys.settings(f"{kind}/{name}")
            assert [key.name for key in listed] == [field.name for field in dataclasses.fields(cls)]
            for key, field in zip(listed, dataclasses.fields(cls), strict=True):
                assert (key.default is None) == (field.default is dataclasses.MISSING)
                if isinstance(field.default, bool | int | float | str | None):
                    assert yaml.safe_load(str(key.default)) in (field.default, str(field.default)), (name, key)


def test_the_version() -> None:
    assert succeeded("--version") == f"compress {__version__}\n"
