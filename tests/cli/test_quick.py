"""`--quick`: what it stands for in a recipe, and what it leaves to `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.cli.run_options import RunOptions
from compress.recipe.schema import Recipe

MODEL = str(Path(__file__).parents[1] / "models" / "books-8m")


def recipe(name: str, *overrides: str, quick: bool = True) -> Recipe:
    """The recipe of a job."""
    return RunOptions(model=MODEL, recipe=name, overrides=list(overrides), quick=quick).job(writes=None).recipe


@pytest.mark.parametrize("name", ["int4", "trellis4bit"])
def test_little_text_and_one_sided_rounding(name: str) -> None:
    quick, whole = recipe(name), recipe(name, quick=False)
    assert (quick.calibration.num_samples, quick.calibration.seq_len) == (8, 512)
    assert whole.quantize.two_sided and not quick.quantize.two_sided
    assert whole.calibration.num_samples == "auto"


def test_what_is_set_is_left() -> None:
    quick = recipe("int4", "two_sided=true", "calibration.num_samples=3")
    assert quick.quantize.two_sided and quick.calibration.num_samples == 3
    assert quick.calibration.gradient_tokens == 2048


@pytest.mark.parametrize("name", ["int8", "kv4"])
def test_recipes_that_are_never_two_sided(name: str) -> None:
    assert recipe(name).quantize == recipe(name, quick=False).quantize
