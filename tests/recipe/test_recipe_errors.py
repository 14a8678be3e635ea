"""Every mistake in a recipe is one line that says where it is and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress import plugins, recipe
from compress.errors import RecipeError
from helpers.fake_methods import Make, maker, message


@pytest.fixture(name="make")
def _make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    return maker(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "line 1: a recipe must be keys with values, found nothing"),
        ("# only a comment\n", "line 1: a recipe must be keys with values, found nothing"),
        ("- a", "line 1: a recipe must be keys with values, found a list"),
        ("description: x", "line 1: quantize is missing; it needs a method, one of "),
        ("\nquantise: {}", "line 2: the recipe: unknown key 'quantise'; known: name, description, cal"),
        ("\nquantise: {}", "; did you mean 'quantize'?"),
        ("<<: {a: 1}", "line 1: the recipe: unknown key '<<'"),
        ("? [a]\n: 3", "line 1: a key of a recipe must be a word, found a list"),
        ("quantize:", "line 1: quantize must be keys with values, found nothing"),
        ("quantize: alpha", "line 1: quantize must be keys with values, found the text 'alpha'"),
        ("quantize: !!set {method}", "line 1: quantize must be keys with values, found values (set)"),
        ("quantize: !!python/name:os.system x", "found x (python/name:os.system)"),
        ("\nquantize: {bits: 3}", "line 2: quantize needs a method, one of "),
        ("quantize:\n  method: alpah", "line 2: unknown quant plugin 'alpah'; known: "),
        ("quantize:\n  method: alpah", "; did you mean 'alpha'?"),
        ("quantize:\n  method: 3", "line 2: method must be text, found 3 (int)"),
        ("quantize:\n  method: !x alpha", "line 2: method must be text, found alpha (!x)"),
    ],
)
def test_errors_at_the_top(make: Make, content: str, expected: str) -> None:
    text = message(make, content)
    assert text.startswith("my.yaml, line ")
    assert expected in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "bitz: 3",
            "quantize (alpha): unknown key 'bitz'; known: method, incoherence, activations, lowrank, two_sided, ",
        ),
        ("bitz: 3", "; did you mean 'bits'?"),
        ("match: x", "unknown key 'match'"),
        ('bits: "4"', "bits must be an integer, found the text '4'"),
        ("bits: four", "bits must be an integer, found the text 'four'"),
        ("bits: true", "bits must be an integer, found true (bool)"),
        ("bits: 4.0", "bits must be an integer, found 4.0 (float)"),
        ("bits: 010", "bits must be an integer, found 010 (int)"),
        ("bits: 1:30", "bits must be an integer, found 1:30 (int)"),
        ("bits:", "bits must be an integer, found nothing"),
        ("bits: [4]", "bits must be an integer, found a list"),
        ("bits: {a: 4}", "bits must be an integer, found keys with values"),
        ("bits: 9", "quantize (alpha): bits 9 is not one of 2..8"),
        ("act_order: 1", "act_order must be true or false, found 1 (int)"),
        ('damp: "0.1"', "damp must be a finite number, found the text '0.1'"),
        ("damp: .nan", "damp must be a finite number, found .nan (float)"),
        ("damp: 1e999", "damp must be a finite number"),
        ("damp: true", "damp must be a finite number, found true (bool)"),
        ("damp:", "damp must be a finite number, found nothing"),
        ("order: autos", 'order must be one of "auto", "off", 1, found the text \'autos\''),
        ("order: true", 'order must be one of "auto", "off", 1, found true (bool)'),
        ("order: off", 'order must be one of "auto", "off", 1, found off (bool)'),
        ('order: "1"', 'order must be one of "auto", "off", 1, found the text \'1\''),
        ("seed: 1.5", "seed must be an integer or null, found 1.5 (float)"),
        ("limit: x", "limit must be a finite number or null, found the text 'x'"),
        ("label: 2020-01-01", "label must be text, found 2020-01-01 (timestamp)"),
        ("label: null", "label must be text, found nothing"),
        ("dims: 3", "dims must be a list, found 3 (int)"),
        ("dims: !x [3]", "dims must be a list, found values (!x)"),
        ("dims: [3, x]", "dims must be an integer, found the text 'x'"),
        ("damp: 1\n  damp: 2", "quantize has 'damp' twice, first at my.yaml, line 3"),
    ],
)
def test_errors_of_a_setting(make: Make, line: str, expected: str) -> None:
    text = message(make, f"quantize:\n  method: alpha\n  {line}\n")
    assert text.startswith(f"my.yaml, line {3 + line.count(chr(10))}: ")
    assert expected in text


@pytest.mark.parametrize("content", ["name: x", "quantize: {}", "quantize: {method: x}"])
def test_errors_about_the_method_list_all_of_them(make: Make, content: str) -> None:
    assert {"alpha", "beta"} < set(plugins.names("quant"))
    assert ", ".join(plugins.names("quant")) in message(make, content)


def test_a_value_refused_without_a_field_points_at_the_block(make: Make) -> None:
    text = message(make, "name: x\nquantize:\n  method: alpha\n  bits: 8\n  group_size: 1")
    assert text == "my.yaml, line 2: quantize (alpha): 8 bits for each weight of its own"
    text = message(make, "quantize: {method: alpha, bits: 8}\nrules:\n- match: a\n- match: b\n  group_size: 1\n")
    assert text == "my.yaml, line 4: the rule for 'b' (alpha): 8 bits for each weight of its own"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("rules: {match: a}", "line 2: rules must be a list, found keys with values"),
        ("rules:", "line 2: rules must be a list, found nothing"),
        ("rules: [a]", "line 2: a rule must be keys with values, found the text 'a'"),
        ("rules:\n  - match: a\n  - bits: 8", "line 4: a rule needs match"),
        ("rules:\n  - match: a\n    match_any: b\n    bits: 8", "line 4: a rule has match or match_any, not both"),
        ("rules:\n  - match_any: []\n    bits: 8", "line 3: match_any is an empty list"),
        ("rules:\n  - match: 3", "line 3: match must be text, found 3 (int)"),
        ("rules:\n  - match: a\n    keep: false", "line 4: keep must be one of true, found false (bool)"),
        ("rules:\n  - match: a\n    keep: true\n    bits: 8", "line 5: the rule for 'a' keeps the weight; remove"),
        ("rules:\n  - match: a\n    keep: true\n    method: beta", "line 5: the rule for 'a' keeps the weight; remove"),
        (
            "rules:\n  - match: a\n    rounds: 2",
            "line 4: the rule for 'a' (alpha): unknown key 'rounds'; known: match, ",
        ),
        ("rules:\n  - match: a\n    method: beta\n    damp: 1", "line 5: the rule for 'a' (beta): unknown key 'damp'"),
        ("rules:\n  - match: a\n    method: gama", "line 4: unknown quant plugin 'gama'"),
        ("rules:\n  - match: a\n    bits: 1", "line 4: the rule for 'a' (alpha): bits 1 is not one of 2..8"),
        ("ignore: a", "line 2: ignore must be a list, found the text 'a'"),
        ("ignore:\n  - a\n  - 3", "line 4: ignore must be text, found 3 (int)"),
        ("calibration:", "line 2: calibration must be keys with values, found nothing"),
        (
            "calibration:\n  samples: 3",
            "line 3: calibration: unknown key 'samples'; known: num_samples, seq_len, target_correction, importance",
        ),
        ("calibration:\n  seq_len: 0", "line 3: calibration: seq_len 0 is not positive"),
        ("calibration:\n  num_samples: 0", "line 3: calibration: num_samples 0 is not positive"),
        ("calibration:\n  target_correction: 1.5", "line 3: calibration: target_correction 1.5 is not between 0 and 1"),
        (
            "calibration:\n  target_correction: -1e-9",
            "line 3: calibration: target_correction -1e-09 is not between",
        ),
        ("calibration:\n  target_correction: .nan", "line 3: target_correction must be a finite number, found"),
        ("calibration:\n  target_correction: true", "line 3: target_correction must be a finite number, found"),
        ("description: 3", "line 2: description must be text, found 3 (int)"),
    ],
)
def test_errors_of_the_other_blocks(make: Make, lines: str, expected: str) -> None:
    text = message(make, f"quantize: {{method: alpha}}\n{lines}\n")
    assert text.startswith(f"my.yaml, {expected}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("name: x\na: b: c", "my.yaml, line 2: not valid YAML: mapping values are not allowed here"),
        ("name: [1", "my.yaml, line 1: not valid YAML: while parsing a flow sequence expected"),
        ("name:\n\t- b", "my.yaml, line 2: not valid YAML: while scanning for the next token found character"),
        ("ignore:\n- *.head", "put a pattern that begins with * in quotes"),
        ("name: a\n---\nname: b", "my.yaml, line 2: not valid YAML: expected a single document"),
        ("name: \x07", "my.yaml: not valid YAML: unacceptable character #x0007"),
    ],
)
def test_yaml_errors_are_one_line(make: Make, content: str, expected: str) -> None:
    assert expected in message(make, content)


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*latin\.yaml: .*utf-8"):
        recipe.load(str(tmp_path / "latin.yaml"))
