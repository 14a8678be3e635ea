"""Overrides of a recipe, key=value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress import recipe
from compress.errors import RecipeError
from compress.recipe import CalibrationConfig, Recipe, Rule
from helpers.fake_methods import Make, maker, message, settings


@pytest.fixture(name="make")
def _make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    return maker(monkeypatch, tmp_path)


TURNED = [True, True, False, None]  # a rule inherits it, but not one that names a method


def _rules(recipe: Recipe) -> list[Any]:
    return [rule.scheme for rule in recipe.rules]


BASE = """quantize:
  method: alpha
  bits: 5
  damp: 0.5
rules:
  - match: a
    bits: 8
    damp: 0.1
  - match: b
    method: alpha
    damp: 0.2
  - match: c
    keep: true
"""


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("bits=3", lambda r: r.quantize.config.bits, 3),
        ("quantize.bits=3", lambda r: r.quantize.config.bits, 3),
        (" bits = 3", lambda r: r.quantize.config.bits, 3),
        ("damp=1e-4", lambda r: r.quantize.config.damp, 1e-4),
        ("damp=0.25", lambda r: r.rules[0].scheme.config.damp, 0.1),  # the rule's own setting stays
        ("group_size=64", lambda r: r.rules[0].scheme.config.group_size, 64),  # inherited by the rule
        ("label=a=b", lambda r: r.quantize.config.label, "a=b"),
        ("calibration.num_samples=16", lambda r: r.calibration, CalibrationConfig(16, "auto")),
        ("calibration={seq_len: 8}", lambda r: r.calibration, CalibrationConfig("auto", 8)),
        ('ignore=["*.head", b]', lambda r: r.ignore, ("*.head", "b")),
        ("rules=[]", lambda r: r.rules, ()),
        ("rules=null", lambda r: r.rules, ()),
        ("rules=~", lambda r: r.rules, ()),
        ("rules.0.bits=2", lambda r: r.rules[0].scheme.config.bits, 2),
        ("rules.2.match=d", lambda r: r.rules[2], Rule(("d",), None)),
        ("rules.0={match: x, keep: true}", lambda r: r.rules[0], Rule(("x",), None)),
        ("name=n", lambda r: r.name, "n"),
        ("incoherence=true", lambda r: [r.quantize.incoherence, *(s and s.incoherence for s in _rules(r))], TURNED),
        ("rules.0.incoherence=true", lambda r: [s and s.incoherence for s in _rules(r)], [True, False, None]),
    ],
)
def test_overrides(make: Make, override: str, read: Callable[[Recipe], Any], expected: Any) -> None:
    assert read(make(BASE)) != expected or override == "damp=0.25"
    assert read(make(BASE, override)) == expected


def test_later_overrides_win_and_the_file_stays(make: Make, tmp_path: Path) -> None:
    assert make(BASE, "bits=3", "quantize.bits=2").quantize.config.bits == 2
    assert (tmp_path / "my.yaml").read_text() == BASE


def test_an_override_does_not_reach_what_an_alias_shares(make: Make) -> None:
    content = "quantize: {method: alpha}\nrules:\n- &a {match: a, bits: 3}\n- *a\n"
    first, second = make(content, "rules.0.bits=2").rules
    assert first.scheme and second.scheme
    assert (first.scheme.config.bits, second.scheme.config.bits) == (2, 3)
    content = "quantize: {method: alpha, dims: &d [1, 2]}\nrules: [{match: a, dims: *d}]\n"
    loaded = make(content, "quantize.dims.0=9")
    assert loaded.rules[0].scheme
    assert (loaded.quantize.config.dims, loaded.rules[0].scheme.config.dims) == ((9, 2), (1, 2))


@pytest.mark.parametrize("order", [1, -1])
def test_a_new_method_keeps_the_settings_that_it_has(make: Make, order: int) -> None:
    loaded = make(BASE, *["method=beta", "rounds=4"][::order])
    assert settings(loaded.quantize) == ("beta", {"bits": 5, "rounds": 4})
    inheriting, own, kept = loaded.rules
    assert inheriting.scheme and settings(inheriting.scheme) == ("beta", {"bits": 8, "rounds": 4})
    assert own.scheme and settings(own.scheme) == ("alpha", {"damp": 0.2})
    assert kept.scheme is None


def test_a_new_method_of_a_rule(make: Make) -> None:
    loaded = make(BASE, "rules.0.method=beta")
    assert loaded.rules[0].scheme and settings(loaded.rules[0].scheme) == ("beta", {"bits": 8})
    assert settings(loaded.quantize) == ("alpha", {"bits": 5, "damp": 0.5})


def test_a_section_is_taken_away_and_may_come_back() -> None:
    assert recipe.load("int4").embeddings and not recipe.load("int4", ["embeddings=null"]).embeddings
    back = recipe.load("int4", ["embeddings=null", "embeddings.bits=6"])
    assert back.embeddings and settings(back.embeddings)[1]["bits"] == 6
    assert recipe.load("w4kv4", ["kv_cache=null"]).kv_cache is None


def test_a_new_method_that_cannot_round_two_sided_goes_without() -> None:
    assert recipe.load("int4").quantize.two_sided and not recipe.load("int4", ["method=rtn"]).quantize.two_sided
    with pytest.raises(RecipeError, match="rtn cannot round two-sided"):
        recipe.load("int4", ["method=rtn", "two_sided=true"])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("method", ["method=beta", "quantize.method=beta"])
@pytest.mark.parametrize("setting", ["damp=0.1", "quantize.damp=0.1"])
def test_settings_given_with_a_new_method_must_be_its_own(make: Make, order: int, method: str, setting: str) -> None:
    text = message(make, BASE, *[method, setting][::order])
    assert text.startswith(f"--set {setting}: ")
    assert "unknown key 'damp'; known: method, incoherence, activations, lowrank, two_sided, " in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("bits", "expected key=value"),
        ("=3", "expected key=value"),
        ("a..b=3", "expected key=value"),
        ("bits=9", "quantize (alpha): bits 9 is not one of 2..8"),
        ("bits=", "bits must be an integer, found nothing"),
        ("rules=", "rules must be a list, found nothing"),
        ("bits=true", "bits must be an integer, found true (bool)"),
        ("bits=[", "not valid YAML: while parsing a flow node"),
        ("bitz=3", "unknown key 'bitz'; known: method, incoherence, activations, lowrank, two_sided, "),
        ("bitz=3", "; did you mean 'bits'?"),
        ("ignor=[]", "; did you mean 'ignore'?"),
        ("num_samples=3", "; did you mean 'calibration.num_samples'?"),
        ("ignore=[*.head]", "put a pattern that begins with * in quotes"),
        ("foo.bar=3", "the recipe: unknown key 'foo'"),
        ('quantize="null"', "quantize must be keys with values, found the text 'null'"),
        ("quantize=3", "quantize must be keys with values, found 3 (int)"),
        ("quantize={bits: 3}", "quantize needs a method"),
        ("quantize={[a]: 3}", "a key of quantize must be a word, found a list"),
        ("quantize.bits.x=3", "there is no 'x' in 5 (int)"),
        ("quantize.method=gama", "unknown quant plugin 'gama'"),
        ("rules.3.bits=3", "there is no '3' in a list of 3, counted from 0"),
        ("rules.-1.bits=3", "there is no '-1' in a list of 3"),
        ("rules.first.bits=3", "there is no 'first' in a list of 3"),
        ("rules.2.bits=3", "the rule for 'c' keeps the weight; remove keep or ['bits']"),
        ("ignore=&a [*a]", "an alias inside of what it stands for; write it out"),
        ("calibration.seq_len=0", "calibration: seq_len 0 is not positive"),
    ],
)
def test_errors_of_overrides(make: Make, override: str, expected: str) -> None:
    text = message(make, BASE, override)
    assert text.startswith(f"--set {override}: ")
    assert expected in text


def test_an_error_of_the_file_is_reported_before_overrides(make: Make) -> None:
    assert message(make, "quantize: {method: alpha, bits: 9}", "bits=4").startswith("my.yaml, line 1: ")
