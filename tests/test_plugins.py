"""Finding plugins by file name, and the contract that every real one keeps."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compress import plugins, recipe
from compress.cli.app import app
from compress.errors import RecipeError
from compress.recipe.blocks import RULE_KEYS
from helpers.fake_methods import BETA, install

ALL = [(kind, name) for kind in plugins.KINDS for name in plugins.names(kind)]
Add = Callable[[str, str], None]
METHODS = plugins.names("quant")


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Add:
    """add(name, source): a file that compress/quant appears to contain."""
    return lambda name, source: install(monkeypatch, tmp_path, **{name: source})


def test_names_are_the_files_that_define_the_contract(add: Add) -> None:
    before = plugins.names("quant")
    add("zz_method", BETA)
    add("zz_shared", "class Config: pass\n")
    add("zz_reexport", "from compress.quant.zz_method import Config, quantize\n")
    add("_zz_private", BETA)
    add("zz_nested", "def f():\n    class Config: pass\n    def quantize(): pass\n")
    papers = [name for name in before if plugins.is_paper("quant", name)]
    assert plugins.names("quant") == [*before[: -len(papers)], "zz_method", *papers]


def test_listing_runs_nothing(add: Add) -> None:
    add("zz_method", BETA + "raise RuntimeError\n")
    assert plugins.describe("quant", "zz_method") == "A method for tests."
    with pytest.raises(RuntimeError):
        plugins.load("quant", "zz_method")


def test_describe_without_a_docstring(add: Add) -> None:
    add("zz_method", "class Config: pass\ndef quantize(): pass\n")
    assert plugins.describe("quant", "zz_method") == ""


def test_load_returns_the_module(add: Add) -> None:
    add("zz_method", BETA)
    assert plugins.load("quant", "zz_method") is sys.modules["compress.quant.zz_method"]


def test_sources_are_parsed_once_for_many_loads(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add("zz_method", BETA)
    real, parsed = ast.parse, []
    monkeypatch.setattr(plugins.ast, "parse", lambda text, path: parsed.append(path) or real(text, path))
    for _ in range(50):
        plugins.load("quant", "zz_method")
        plugins.describe("quant", "zz_method")
        plugins.names("quant")
    assert len(parsed) == len(set(parsed)) and sum("zz_method" in path for path in parsed) == 1


def test_a_plugin_that_is_replaced_is_loaded_anew(add: Add) -> None:
    add("zz_method", BETA)
    assert plugins.load("quant", "zz_method").Config().rounds == 1
    add("zz_method", BETA.replace("rounds: int = 1", "rounds: int = 100"))
    assert plugins.load("quant", "zz_method").Config().rounds == 100


def test_load_names_what_is_missing(add: Add) -> None:
    add("zz_method", BETA.replace("NEEDS", "other").replace("plan_params", "plan"))
    with pytest.raises(TypeError, match=r"zz_method\.py does not define NEEDS, plan_params, which every quant"):
        plugins.load("quant", "zz_method")


@pytest.mark.parametrize("name", ["zz_methods", "ZZ_Method", "zzmethod"])
def test_unknown_name_lists_the_known_and_the_closest(add: Add, name: str) -> None:
    add("zz_method", BETA)
    for call in (plugins.load, plugins.describe):
        with pytest.raises(RecipeError, match=f"unknown quant plugin '{name}'; known: .*; did you mean 'zz_method'"):
            call("quant", name)


@pytest.mark.parametrize("name", ["feedback", "__init__", "", "../errors", "os.path"])
def test_other_files_are_no_plugins(name: str) -> None:
    with pytest.raises(RecipeError, match="unknown quant plugin"):
        plugins.load("quant", name)


def test_unknown_without_a_close_match() -> None:
    assert plugins.unknown("key", "x", ["method", "bits"]) == "unknown key 'x'; known: method, bits"
    assert plugins.unknown("key", "x", []) == "unknown key 'x'; known: none"


def test_listing_imports_no_torch() -> None:
    code = """if True:
        import sys
        sys.modules["torch"] = None  # an import would fail
        from compress import plugins
        listed = [plugins.describe(kind, name) for kind in plugins.KINDS for name in plugins.names(kind)]
        print(len(listed))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, str(len(ALL))), run.stderr


def test_the_first_plugins_are_found() -> None:
    assert {"gptq", "rtn"} <= set(METHODS)
    assert {"dense", "int"} <= set(plugins.names("formats"))


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_plugin_loads_and_says_what_it_is(kind: str, name: str) -> None:
    plugins.load(kind, name)
    line = plugins.describe(kind, name)
    assert 10 < len(line) <= 120, "the first line of the docstring is the plugin's entry in lists"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_the_contract(name: str) -> None:
    module = plugins.load("quant", name)
    config = module.Config()  # every setting has a default
    assert module.Config.__dataclass_params__.frozen
    assert isinstance(module.NEEDS, frozenset) and isinstance(module.INCOHERENCE, bool)
    assert module.FORMAT in plugins.names("formats")
    assert not {f.name for f in dataclasses.fields(config)} & set(RULE_KEYS), "keys of a recipe's rules"
    params = module.plan_params(config, (32, 256))
    assert isinstance(params, plugins.load("formats", module.FORMAT).Params)
    assert module.workspace(config, (32, 256)) > 0


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_every_format_has_frozen_params(name: str) -> None:
    params = plugins.load("formats", name).Params
    assert params.__dataclass_params__.frozen


# A new file of each kind: the source of another plugin under a name of its own, and the recipe that uses it.
ADDED = {
    "quant": ("rtn", "quantize: {method: zz_quant, bits: 3}"),
    "transform": ("smooth", "transform: [{method: zz_transform, alpha: 0.25}]\nquantize: {method: rtn}"),
    "allocate": ("uniform", "quantize: {method: rtn}\nallocate: {method: zz_allocate, target: 5bpw, fill: order}"),
    "formats": ("nf", "quantize: {method: zz_writer, bits: 3}"),
    "kv": ("kivi", "kv_cache: {method: zz_kv, bits: 3}"),
    "read": ("tidal", "kv_cache: {method: kivi, read: {method: zz_read, keep: 0.25}}"),
    "evict": ("snapkv", "kv_cache: {method: kivi, evict: {method: zz_evict, keep: 0.5, pool: 3}}"),
    "tune": ("blockwise", "quantize: {method: rtn}\ntune: {method: zz_tune, steps: 3}"),
}


@pytest.mark.parametrize("kind", plugins.SETTABLE)
def test_a_new_plugin_is_one_file(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is listed, explained and usable in a recipe, and no line of ours has changed."""
    model, text = ADDED[kind]
    package, name = plugins.PACKAGES[kind], f"zz_{kind}"
    source = Path(plugins.load(kind, model).__file__ or "").read_text()
    install(monkeypatch, tmp_path / "new", f"compress.{package}", **{name: source})
    if kind == "formats":
        writer = Path(plugins.load("quant", "nf").__file__ or "").read_text()
        writer = re.sub(r'FORMAT = "nf"', f'FORMAT = "{name}"', writer)
        install(monkeypatch, tmp_path / "writer", **{"zz_writer": writer})
    assert name in plugins.names(kind) and plugins.describe(kind, name) == plugins.describe(kind, model)
    listed = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert listed[f"{kind}/{name}"] == plugins.describe(kind, model)
    told = json.loads(CliRunner().invoke(app, ["methods", name, "--json"]).stdout)
    known = json.loads(CliRunner().invoke(app, ["methods", f"{kind}/{model}", "--json"]).stdout)
    assert told["settings"] == known["settings"] != []
    (tmp_path / "mine.yaml").write_text(text)
    loaded = recipe.load(str(tmp_path / "mine.yaml"))
    used = {
        "quant": loaded.quantize.config,
        "transform": loaded.transform[0].config if loaded.transform else None,
        "allocate": loaded.allocate.config if loaded.allocate else None,
        "formats": plugins.load("formats", plugins.constant("quant", loaded.quantize.method, "FORMAT")).Params
        if loaded.packs
        else None,
        "kv": loaded.kv_cache.keys.config if loaded.kv_cache else None,
        "read": loaded.kv_cache.read.config if loaded.kv_cache and loaded.kv_cache.read else None,
        "tune": loaded.tune[0].config if loaded.tune else None,
        "evict": loaded.kv_cache.evict.config if loaded.kv_cache and loaded.kv_cache.evict else None,
    }[kind]
    assert (used if kind == "formats" else type(used)).__module__ == f"compress.{package}.{name}"
