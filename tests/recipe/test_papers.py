"""recipes/papers holds the recipes of papers, and recipes are found by name in both folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress import plugins, recipe

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {"quantize": "quant", "rules": "quant", "towers": "quant", "embeddings": "quant", "head": "quant"}
SECTIONS |= {"transform": "transform", "tune": "tune", "allocate": "allocate", "kv_cache": "kv"}
INNER = {"options": "quant", "tables": "quant", "cache_options": "kv", "evict": "evict", "read": "read"}


def named(data: Any, kind: str) -> Iterator[tuple[str, str]]:
    """(kind, name) of the plugins that a section names, those of its inner sections among them."""
    if isinstance(data, list):
        for item in data:
            yield from named(item, kind)
    if isinstance(data, dict):
        for key, value in data.items():
            if key in ("method", "codes") and isinstance(value, str):
                yield ("codes" if key == "codes" else kind), value
            yield from named(value, INNER.get(key, kind))


def test_recipes_that_name_a_plugin_of_papers_lie_in_papers() -> None:
    wrong = []
    for name in recipe.names():
        data = recipe.data(name)
        used = {plugin for section, kind in SECTIONS.items() for plugin in named(data.get(section), kind)}
        papers = sorted(f"{kind}/{plugin}" for kind, plugin in used if plugins.is_paper(kind, plugin))
        assert used, name
        wrong += [f"recipes/{name}.yaml names {each}" for each in papers if not recipe.is_paper(name)]
    assert wrong == [], "move these to recipes/papers:\n" + "\n".join(wrong)


def test_recipes_of_papers_are_found_by_name() -> None:
    names = recipe.names()
    papers = [name for name in names if recipe.is_paper(name)]
    assert papers == sorted(path.stem for path in (ROOT / "recipes" / "papers").glob("*.yaml"))
    assert {"glvq2bit", "lord20", "zipkv"} <= set(papers) and names[-len(papers) :] == papers
    assert len(set(names)) == len(names)
    assert recipe.load("glvq2bit").quantize.method == "glvq" and not recipe.is_paper("int4")
