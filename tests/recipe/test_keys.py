"""Every key of every plugin is one that somebody uses: a recipe, a page of docs, or a benchmark names it."""

from __future__ import annotations

import ast
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


# Where a word stands as a key: `key: value`, `key=value` (also behind dots), or `key` and `key: value` in backticks.
AS_A_KEY = re.compile(r"(?<![\w-])(\w+): |^[ -]*(\w+):$|\b(\w+)=|`(?:[\w./-]+\.)?(\w+)(?:[:= ][^`\n]*)?`", re.MULTILINE)
# Sections of a recipe that set nothing.
DESCRIPTIVE_SECTIONS = re.compile(r"^(?:about|measured|description):.*?(?=^\w|\Z)", re.MULTILINE | re.DOTALL)


def code(path: Path) -> str:
    """What a recipe sets, the blocks and words in backticks of a page, the strings of a program and its arguments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return DESCRIPTIVE_SECTIONS.sub("", text)
    if path.suffix == ".md":
        blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
        return "\n".join([*blocks, *re.findall(r"`[^`]+`", re.sub(r"(?ms)^```.*?^```", "", text))])
    nodes = list(ast.walk(ast.parse(text)))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*strings, *(f"{node.arg}=" for node in nodes if isinstance(node, ast.keyword))])


def named_keys(text: str) -> frozenset[str]:
    """The words of a text that stand as keys."""
    return frozenset(word for groups in AS_A_KEY.findall(text) for word in groups if word)


@cache
def keys_in_use() -> frozenset[str]:
    """The keys that recipes, pages, benchmarks and README.md name."""
    files = [ROOT / "README.md", *(path for folder, pattern in USES for path in (ROOT / folder).rglob(pattern))]
    return frozenset().union(*(named_keys(code(path)) for path in files))


def unused() -> list[str]:
    names = [f"{kind}/{name}" for kind in plugins.SETTABLE for name in plugins.names(kind)]
    return [f"{name}.{key.name}" for name in names for key in keys.settings(name) if key.name not in keys_in_use()]


def test_every_key_is_used() -> None:
    listed = yaml.safe_load(UNUSED.read_text(encoding="utf-8")) or []
    now = set(unused())
    assert now <= set(listed), "no recipe, page or benchmark names these: use them, or remove the option"
    assert set(listed) <= now, f"these are used now, or gone; take them off {UNUSED.name}"


def test_a_word_of_a_sentence_is_no_key() -> None:
    assert named_keys("each damp weight, `rate: 0.1` or tune.0.steps=3\n  bits: 2\nlist:\n") == {
        "rate",
        "steps",
        "bits",
        "list",
    }
