"""Every key of every plugin is one that somebody uses: a recipe, a page of docs, or a benchmark names it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

from compress import plugins
from compress.recipe import keys

ROOT = Path(__file__).resolve().parents[2]
# Keys that nothing names yet. This list only shrinks.
UNUSED = Path(__file__).with_name("unused_keys.yaml")
USES = (("recipes", "*.yaml"), ("docs", "*.md"), ("benchmarks", "*.py"), ("benchmarks", "*.md"))


@cache
def words() -> frozenset[str]:
    """The identifiers in recipes, pages and benchmarks, and in README.md."""
    files = [ROOT / "README.md", *(path for folder, pattern in USES for path in (ROOT / folder).rglob(pattern))]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


def unused() -> list[str]:
    names = [f"{kind}/{name}" for kind in plugins.SETTABLE for name in plugins.names(kind)]
    return [f"{name}.{key.name}" for name in names for key in keys.settings(name) if key.name not in words()]


def test_every_key_is_used() -> None:
    listed = yaml.safe_load(UNUSED.read_text(encoding="utf-8")) or []
    now = set(unused())
    assert now <= set(listed), "no recipe, page or benchmark names these: use them, or remove the option"
    assert set(listed) <= now, f"these are used now, or gone; take them off {UNUSED.name}"
