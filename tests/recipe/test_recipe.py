"""Recipes: what loads, which scheme a linear gets, built-in recipes, and the way back to YAML."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress import plugins, recipe
from compress.errors import RecipeError
from compress.recipe import CalibrationConfig, Recipe, Rule, blocks, sources
from compress.types import Scheme
from helpers.fake_methods import Make, maker, settings


@pytest.fixture(name="make")
def _make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    return maker(monkeypatch, tmp_path)


NO_NUMBERS = ("name", "description")  # sections that decide nothing
FULL = """# goal: a test
name: full
description: every key
calibration:
  num_samples: 16
  seq_len: 64
quantize:
  method: alpha
  bits: 5
  damp: 1e-3
  act_order: true
  order: 1
  limit: 2
  dims: [1, 2]
rules:
  - match: "*.down_proj"
    bits: 8
  - match: "*.experts.*"
    method: beta
    rounds: 2
  - match: "*.0.*"
    keep: true
  - match: "*.up_proj"
    damp: 0.5
ignore: ["*.shared_head", "a?"]
"""


def test_a_full_recipe(make: Make) -> None:
    loaded = make(FULL)
    assert (loaded.name, loaded.description) == ("full", "every key")
    assert loaded.calibration == CalibrationConfig(16, 64)
    above = {"bits": 5, "damp": 0.001, "act_order": True, "order": 1, "limit": 2.0, "dims": (1, 2)}
    assert settings(loaded.quantize) == ("alpha", above)
    assert isinstance(loaded.quantize.config.limit, float)
    refined, other, kept, last = loaded.rules
    assert refined.scheme and settings(refined.scheme) == ("alpha", {**above, "bits": 8})
    assert other.scheme and settings(other.scheme) == ("beta", {"rounds": 2})
    assert kept == Rule(("*.0.*",), None)
    assert last.scheme and settings(last.scheme) == ("alpha", {**above, "damp": 0.5})
    assert loaded.ignore == ("*.shared_head", "a?")


def test_the_smallest_recipe_has_all_defaults(make: Make) -> None:
    loaded = make("quantize: {method: alpha}")
    assert (loaded.name, loaded.description, loaded.rules, loaded.ignore) == ("my", "", (), ())
    assert loaded.calibration == CalibrationConfig(num_samples="auto", seq_len="auto", tokens="auto")
    assert settings(loaded.quantize) == ("alpha", {})


def test_a_rule_that_names_a_method_starts_from_its_defaults(make: Make) -> None:
    loaded = make("quantize: {method: alpha, bits: 2}\nrules: [{match: a, method: alpha, damp: 0.5}]")
    assert loaded.rules[0].scheme and settings(loaded.rules[0].scheme) == ("alpha", {"damp": 0.5})


def test_scheme_for_takes_ignore_then_the_first_rule_then_the_default(make: Make) -> None:
    loaded = make(FULL)
    cases = {
        "model.layers.1.mlp.down_proj": loaded.rules[0].scheme,
        "model.layers.0.mlp.down_proj": loaded.rules[0].scheme,  # before the rule that keeps *.0.*
        "model.layers.0.mlp.experts.3.up_proj": loaded.rules[1].scheme,
        "model.layers.0.mlp.up_proj": None,
        "model.layers.1.mlp.up_proj": loaded.rules[3].scheme,
        "model.layers.1.mlp.Up_proj": loaded.quantize,  # case counts
        "model.layers.1.mlp.up_proj_2": loaded.quantize,  # the whole name must match
        "model.experts.1.shared_head": None,
        "a1": None,
    }
    assert {name: loaded.scheme_for(name) for name in cases} == cases


def random_recipe(seed: int) -> Recipe:
    """Values of every type, awkward text included."""
    rng = random.Random(seed)
    words = [
        "",
        "x",
        "null",
        "4",
        "1e-3",
        "on",
        "*.a",
        "a: b # c",
        "- d",
        "'\"",
        "two\nlines",
        "é☃",
        " padded ",
        "y" * 200,
    ]

    def scheme() -> Any:
        if rng.random() < 0.3:
            return Scheme(
                "beta", plugins.load("quant", "beta").Config(bits=rng.randint(2, 8), rounds=rng.randint(-3, 99))
            )
        config = plugins.load("quant", "alpha").Config(
            bits=rng.randint(2, 8),
            damp=rng.choice([0.0, 1.0, -2.5, 1e-7, 1e22, rng.random(), rng.random() * 1e-12]),
            act_order=rng.random() < 0.5,
            order=rng.choice(["auto", "off", 1]),
            seed=rng.choice([None, 0, -7, 2**53]),
            limit=rng.choice([None, 3.0, 1e-5]),
            label=rng.choice(words),
            dims=tuple(range(rng.randint(0, 3))),
        )
        return Scheme("alpha", config, rng.random() < 0.5)

    return Recipe(
        name=rng.choice(words),
        description=rng.choice(words),
        calibration=CalibrationConfig(rng.randint(1, 9999), rng.randint(1, 9999), rng.random()),
        quantize=scheme(),
        rules=tuple(
            Rule((rng.choice(words),), rng.choice([None, scheme()]), seed % 2 == 0) for _ in range(rng.randint(0, 4))
        ),
        ignore=tuple(rng.choice(words) for _ in range(rng.randint(0, 3))),
    )


@pytest.mark.parametrize("seed", range(60))
def test_dump_loads_back_equal(make: Make, seed: int) -> None:
    original = random_recipe(seed)
    again = make(recipe.dump(original))
    assert again == original
    assert recipe.dump(again) == recipe.dump(original)
    assert recipe.fingerprint(again) == recipe.fingerprint(original)


def test_dump_writes_every_default(make: Make) -> None:
    content = recipe.dump(make("quantize: {method: beta}\nrules: [{match: a, bits: 8}]"))
    assert content == (
        "name: my\ndescription: ''\ncalibration:\n  num_samples: auto\n  seq_len: auto\n  target_correction: 0.0\n"
        "  importance: none\n  importance_min: 0.005\n  rolled: 1\n  bos: auto\ntransform: []\n"
        "quantize:\n  method: beta\n  incoherence: false\n  activations: null\n  lowrank: null\n"
        "  bits: 3\n  group_size: 64\n  rounds: 1\n"
        "rules:\n- match: a\n  method: beta\n  incoherence: false\n  activations: null\n  lowrank: null\n"
        "  bits: 8\n  group_size: 64\n  rounds: 1\n"
        "ignore: []\n"
    )


def test_fingerprint_depends_on_everything_but_name_and_description(make: Make) -> None:
    base = recipe.fingerprint(make(FULL))
    same = [make(FULL, "name=x"), make(FULL, "description=x"), make(FULL, "quantize.group_size=128")]
    assert {recipe.fingerprint(r) for r in same} == {base}
    others = ["bits=3", "method=beta", "calibration.seq_len=32", "ignore=[a]", "rules=[]", "rules.0.match=z"]
    others.append("incoherence=true")
    prints = {recipe.fingerprint(make(FULL, o)) for o in others}
    swapped = make("quantize: {method: beta}\nrules: [{match: a, bits: 8}, {match: b, keep: true}]")
    other = make("quantize: {method: beta}\nrules: [{match: b, keep: true}, {match: a, bits: 8}]")
    assert len(prints | {base}) == len(others) + 1
    assert recipe.fingerprint(swapped) != recipe.fingerprint(other)
    assert len(base) == 64


def test_what_samples_begin_with_leaves_older_fingerprints_as_they_were(make: Make) -> None:
    """A study that an older version began goes on: its cells are found by the fingerprints of their recipes."""
    plain = make("quantize: {method: beta}")
    content = {key: part for key, part in yaml.safe_load(recipe.dump(plain)).items() if key not in NO_NUMBERS}
    assert content["calibration"].pop("bos") == "auto"
    older = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert recipe.fingerprint(plain) == recipe.fingerprint(make("quantize: {method: beta}", "calibration.bos=auto"))
    assert recipe.fingerprint(plain) == older
    others = {recipe.fingerprint(make("quantize: {method: beta}", f"calibration.bos={x}")) for x in ("never", "always")}
    assert len(others | {older}) == 3


# The first digits of fingerprints, as versions wrote them whose methods had keys that were taken away since.
OLDER_FINGERPRINTS = {
    "int4": "565fc6b31838071a",
    "quarot4bit": "381cec9e386f22f0",
    "e8p2bit": "c2e7a1b316399bd7",
    "gptvq2bit": "b855833e2c16a7f0",
    "glvq2bit": "540bc8b7d72f86d5",
    "vptq2bit": "3a98ce722f12ee29",
    "lord20": "6e648d8baa4126ea",
    "lq-lora2.75": "e9cbc312eeb020bb",
    "clover50": "8a889d371be7ee3e",
}


# The calibration text that those versions took of a recipe that said nothing of it.
FORMER_TEXT = ["calibration.num_samples=128", "calibration.seq_len=2048"]


def test_keys_that_were_taken_away_leave_older_fingerprints_as_they_were() -> None:
    """That of the recipe that now rounds two-sided, without that; all with the calibration text that they had."""
    loaded = {}
    for name in OLDER_FINGERPRINTS:
        former = FORMER_TEXT if recipe.load(name).calibration.num_samples == "auto" else []
        loaded[name] = recipe.load(name, former + ["two_sided=false"] * (name == "int4"))
    assert {name: recipe.fingerprint(each)[:16] for name, each in loaded.items()} == OLDER_FINGERPRINTS


def test_keys_that_moved_to_another_method_rename_nothing_at_their_former_defaults(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """As recipes hold them that earlier versions wrote into checkpoints, with every default."""
    blocks.say_renamed.cache_clear()  # it speaks once a process
    text = "quantize: {method: beta}\ntransform: [{method: rotate, %s}]"
    (step,) = make(text % "seeds: 1, search_samples: 8, learn: 0").transform
    assert (step.method, capsys.readouterr().err) == ("rotate", "")
    (step,) = make(text % "seeds: 1, search_samples: 8, learn: 2").transform
    assert (step.method, step.config.learn) == ("spin", 2)
    assert capsys.readouterr().err == "method 'rotate' of the recipe is called 'spin' now\n"


@pytest.mark.parametrize("name", ["rotate", "spin"])
def test_keys_that_went_or_moved_leave_older_fingerprints_as_they_were(name: str, tmp_path: Path) -> None:
    """As above; e8p had `candidates`, and rotate had `seeds`, `search_samples` and `learn`, which spin has now."""
    (path := tmp_path / "mine.yaml").write_text(
        f"transform: [{{method: {name}}}]\nquantize: {{method: e8p}}\nrules: [{{match: a, method: lord}}]\n"
    )
    loaded = recipe.load(str(path))
    content = {key: part for key, part in yaml.safe_load(recipe.dump(loaded)).items() if key not in NO_NUMBERS}
    del content["calibration"]["bos"]
    content["transform"][0] |= {"method": "rotate", "seeds": 1, "search_samples": 8, "learn": 0}
    content["quantize"]["candidates"], content["rules"][0]["alpha"] = 2, 0.5
    assert recipe.fingerprint(loaded) == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    learned = recipe.load(str(path), ["transform.0.method=spin", "transform.0.learn=3"])
    assert recipe.fingerprint(learned) != recipe.fingerprint(loaded)


def test_other_shares_of_a_target_correction_are_other_runs(make: Make) -> None:
    shares = ("0", "0.5", "1", "1.0")
    prints = {recipe.fingerprint(make(FULL, f"calibration.target_correction={share}")) for share in shares}
    assert len(prints) == 3


@pytest.fixture
def built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the built-in recipes."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "alpha4.yaml").write_text("# goal\ndescription: four bits\nquantize: {method: alpha}\n")
    (folder / "beta3.yaml").write_text("quantize: {method: beta}\n")
    monkeypatch.setattr(sources, "files", {"compress.recipes": folder}.__getitem__)
    maker(monkeypatch, tmp_path)
    return folder


def test_built_in_recipes(built_in: Path) -> None:
    assert recipe.names() == ["alpha4", "beta3"]
    assert recipe.text("alpha4").startswith("# goal\n")
    assert [recipe.load(name).description for name in recipe.names()] == ["four bits", ""]
    assert recipe.load("beta3", ["bits=2"]).quantize.config.bits == 2
    assert recipe.load("alpha4").name == "alpha4"


def test_a_bare_name_is_the_built_in_recipe(built_in: Path, tmp_path: Path) -> None:
    """A file of this name is meant by its path; names that are not built in are files."""
    (tmp_path / "beta3").mkdir()
    for name in ("alpha4", "other"):
        (tmp_path / name).write_text("quantize: {method: beta}")
    assert recipe.load("beta3").quantize.method == "beta"
    assert recipe.load("alpha4").quantize.method == "alpha"
    for name in ("./alpha4", str(tmp_path / "alpha4"), "other"):
        assert recipe.load(name).quantize.method == "beta"
    assert recipe.ambiguous("alpha4") == "alpha4 is the built-in recipe; the file of this name is ./alpha4"
    assert [recipe.ambiguous(name) for name in ("./alpha4", "other", "beta3")] == [None] * 3


@pytest.mark.parametrize("name", ["alpha", "alpha4.yaml", "ALPHA4"])
def test_an_unknown_recipe_names_those_that_are_close(built_in: Path, name: str) -> None:
    known = f"unknown recipe '{name}'; did you mean alpha4? `compress recipes --all` lists them"
    with pytest.raises(RecipeError) as caught:
        recipe.load(name)
    assert str(caught.value) == f"there is no such file, and {known}"
    with pytest.raises(RecipeError) as caught:
        recipe.text(name)
    assert str(caught.value) == known


@pytest.mark.parametrize("name", ["../alpha4", "__init__", ""])
def test_names_do_not_leave_the_folder(built_in: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="unknown recipe"):
        recipe.text(name)


def test_an_error_in_a_built_in_recipe_names_its_file(built_in: Path) -> None:
    (built_in / "beta3.yaml").write_text("quantize: {method: beta, bits: 9}\n")
    with pytest.raises(RecipeError, match=r"^beta3\.yaml, line 1: quantize \(beta\): bits 9"):
        recipe.load("beta3")


def test_every_built_in_recipe_loads_and_round_trips(make: Make) -> None:
    for name in recipe.names():
        loaded = recipe.load(name)
        assert loaded.name == name
        assert loaded.description != ""
        assert make(recipe.dump(loaded)) == loaded


@pytest.mark.parametrize("name", plugins.names("quant"))
def test_every_method_round_trips(make: Make, name: str) -> None:
    loaded = make(f"quantize: {{method: {name}}}")
    assert loaded.quantize.config == plugins.load("quant", name).Config()
    assert make(recipe.dump(loaded)) == loaded


def test_listing_recipes_imports_neither_torch_nor_transformers() -> None:
    code = """if True:
        import sys
        sys.modules.update(torch=None, transformers=None)  # an import would fail
        from compress import recipe
        for name in recipe.names():
            recipe.text(name)
        print("done")
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "done\n", run.stderr


def test_incoherence_is_what_suits_the_method_unless_it_is_said(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.load("quant", "beta"), "INCOHERENCE", True)

    def asked(content: str, *overrides: str) -> list[bool]:
        loaded = make(content, *overrides)
        return [s.incoherence for s in (loaded.quantize, *(rule.scheme for rule in loaded.rules)) if s is not None]

    rules = "rules: [{match: a, bits: 8}, {match: b, method: beta}, {match: c, method: alpha}, {match: d, keep: true}]"
    assert asked(f"quantize: {{method: alpha}}\n{rules}") == [False, False, True, False]
    assert asked(f"quantize: {{method: beta}}\n{rules}") == [True, True, True, False]
    assert asked(f"quantize: {{method: beta, incoherence: false}}\n{rules}") == [False, False, True, False]
    own = "rules: [{match: a, incoherence: false}]"
    assert asked(f"quantize: {{method: alpha, incoherence: true}}\n{own}") == [True, False]
    assert asked("quantize: {method: alpha}", "method=beta") == [True]
    assert asked("quantize: {method: alpha, incoherence: 32}") == [32]
    with pytest.raises(RecipeError, match="incoherence 1 is neither true, false nor a block of inputs"):
        asked("quantize: {method: alpha, incoherence: 1}")
    with pytest.raises(RecipeError, match="out_scales and in_vector are those of a rotated basis"):
        asked("quantize: {method: alpha, incoherence: 32, out_scales: rms}")
    assert asked("quantize: {method: alpha, incoherence: false}", "method=beta") == [False]  # the file says so


def test_the_old_name_of_target_correction(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    quantize = "quantize: {method: beta}"
    new = make(f"calibration:\n  target_correction: 0.25\n{quantize}")
    assert capsys.readouterr().err == ""
    assert make(f"calibration:\n  asymmetric: 0.25\n{quantize}") == new
    message = "calibration.asymmetric is now called target_correction"
    assert capsys.readouterr().err == f"compress: my.yaml, line 2: {message}\n"
    both = f"calibration:\n  target_correction: 0.25\n{quantize}", "calibration.asymmetric=0.5"
    assert make(*both).calibration.target_correction == 0.5
    assert capsys.readouterr().err == f"compress: --set calibration.asymmetric=0.5: {message}\n"
    with pytest.raises(RecipeError, match=r"line 3: calibration has 'target_correction' twice"):
        make(f"calibration:\n  target_correction: 0.25\n  asymmetric: 0.5\n{quantize}")
