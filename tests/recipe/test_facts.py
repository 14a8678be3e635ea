"""What a recipe states about itself is checked, shown as it is written, and decides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress import recipe
from compress.errors import RecipeError
from compress.recipe import catalogue, facts
from compress.recipe.yaml import compose, mapping

PLAIN = "quantize: {method: rtn, bits: 4}\n"
STATED = """about:
  goal: Four bits.
  papers: ["2210.17323"]
measured:
  - {model: a, date: 2026-11-23, tokens: 65408, bpw: 4.1250, kl: 5e-05, perplexity: 47.60}
"""


def load(folder: Path, text: str) -> recipe.Recipe:
    (folder / "my.yaml").write_text(text, encoding="utf-8")
    return recipe.load(str(folder / "my.yaml"))


def test_facts_decide_nothing(tmp_path: Path) -> None:
    stated, plain = load(tmp_path, STATED + PLAIN), load(tmp_path, PLAIN)
    assert stated == plain and recipe.dump(stated) == recipe.dump(plain)
    assert recipe.fingerprint(stated) == recipe.fingerprint(plain)
    assert load(tmp_path, "# Goal: as older recipes say it.\n# Not measured.\n" + PLAIN) == plain


def test_figures_keep_their_digits() -> None:
    sections = mapping(compose(STATED, "my.yaml"), "the recipe")
    (run,) = facts.measurements(sections)
    assert (run.date, run.bpw, run.kl, run.perplexity) == ("2026-11-23", "4.1250", "5e-05", "47.60")
    assert run.se == run.notes == ""
    assert facts.about(sections) == facts.About("Four bits.", "", ("2210.17323",))
    assert facts.about({}) == facts.About() and facts.measurements({}) == ()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("about: {gaol: x}", "about: unknown key 'gaol'; known: goal, method, papers, notes; did you mean 'goal'?"),
        ("about: {papers: 2210.17323}", "papers must be a list"),
        ("measured: {model: a}", "measured must be a list"),
        ("measured: [{model: a}]", "a measurement needs date"),
        ("measured: [{model: a, date: today}]", "date must be year-month-day"),
        ("measured: [{model: a, date: [1]}]", "date must be year-month-day"),
        ("measured: [{model: a, date: 2026-11-23, kl: little}]", "kl must be a finite number"),
        ("measured: [{model: a, date: 2026-11-23, kll: 1}]", "a measurement: unknown key 'kll'"),
    ],
)
def test_wrong_facts_are_refused(section: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, f"{section}\n{PLAIN}")
    assert message in str(caught.value) and "my.yaml, line 1" in str(caught.value)


def test_every_built_in_recipe_states_its_goal_its_method_and_its_papers() -> None:
    for entry in catalogue.entries():
        assert entry.about.goal and entry.about.method, entry.name
        assert all(paper in entry.about.method for paper in entry.about.papers), entry.name
        assert not recipe.text(entry.name).startswith("#"), f"{entry.name}: facts stand in about and measured"
        for run in entry.measured:
            assert run.tokens and (run.kl or run.perplexity), entry.name
