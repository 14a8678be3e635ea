"""Group sizes that are not given: the largest that fits the heads, up to the default; given ones are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress import plugins, recipe
from compress.errors import RecipeError
from compress.kv.codec import Spec, group_of
from compress.kv.settings import KINDS, cache_settings

FOUND = {  # method, width -> group of the values (of a token of three heads: rotatekv)
    ("kivi", 64): 32,
    ("kivi", 80): 20,
    ("kivi", 48): 24,
    ("kivi", 40): 20,
    ("gear", 80): 40,
    ("gear", 128): 64,
    ("squat", 40): 20,
    ("rotatekv", 64): 96,
    ("rotatekv", 80): 120,
    ("rotatekv", 128): 128,
}


def codec(method: str, kind: Any, width: int, **settings: Any) -> Any:
    module = plugins.load("kv", method)
    spec, static = Spec(kind, 0, 1, 3, width, 2), {}
    if module.NEEDS and method != "squat":
        static = {"order": torch.arange(3 * width, dtype=torch.int16)}
    if method == "squat" and kind == "keys":
        shape, dtype = module.specs(module.Config(), spec)["compensation"]
        static = {"compensation": torch.zeros(shape, dtype=dtype)}
    return module.build(module.Config(**settings), spec, static)


@pytest.mark.parametrize("size", range(1, 200))
def test_the_largest_divisor_up_to_the_default(size: int) -> None:
    found = group_of("auto", 32, size)
    divisors = [n for n in range(2, 33) if size % n == 0]
    assert found == (divisors[-1] if divisors else size) and group_of(48, 32, size) == 48


@pytest.mark.parametrize(("method", "width"), FOUND)
def test_codecs_choose_their_groups(method: str, width: int) -> None:
    for kind in KINDS:
        made = codec(method, kind, width)
        x = torch.randn(2, 3, 256, width, generator=torch.Generator().manual_seed(0))
        rows = made.encode(x, {**made.begin(x, None), "cos": torch.ones(1, 256, 8), "sin": torch.zeros(1, 256, 8)})
        assert made.decode(rows).shape == x.shape
    inner = getattr(made, "base", made)
    assert inner.group == FOUND[method, width]


@pytest.mark.parametrize("method", ["kivi", "gear", "squat"])
def test_what_is_given_is_kept(method: str) -> None:
    assert getattr(made := codec(method, "values", 64, group_size=16), "base", made).group == 16
    with pytest.raises(RecipeError, match="group_size 32 does not divide the head's 80 channels; set .* or to auto"):
        codec(method, "values", 80, group_size=32)


@pytest.mark.parametrize("name", ["kv4", "kv8", "kivi2", "squat2", "gear4", "rotatekv2", "w4kv4", "w4a4kv4"])
def test_recipes_leave_the_choice_to_the_heads(name: str) -> None:
    settings = recipe.load(name).kv_cache
    assert settings is not None
    for kind in KINDS:
        assert settings.of(kind).config.group_size == "auto"
        assert cache_settings(settings.plain()).of(kind) == settings.of(kind)
