"""Engines find their plugins, and importing these takes nothing of an engine."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(("group", "engine"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_the_entry_point_is_there(group: str, engine: str) -> None:
    text = PROJECT.read_text()
    pattern = rf'\[project\.entry-points\."{re.escape(group)}"\]\ncompress = "([\w.]+):(\w+)"'
    found = re.search(pattern, text)
    assert found is not None
    before = set(sys.modules)
    module = importlib.import_module(found[1])
    assert callable(getattr(module, found[2]))
    assert not any(name.partition(".")[0] == engine for name in set(sys.modules) - before)
    dependencies = text.partition("dependencies = [")[2].partition("]")[0]
    assert engine not in dependencies
