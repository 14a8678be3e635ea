"""vLLM finds the plugin, and importing it takes nothing of vLLM."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_entry_point_is_there() -> None:
    text = PROJECT.read_text()
    found = re.search(r'\[project\.entry-points\."vllm\.general_plugins"\]\ncompress = "([\w.]+):(\w+)"', text)
    assert found is not None
    before = set(sys.modules)
    module = importlib.import_module(found[1])
    assert callable(getattr(module, found[2]))
    assert not any(name.partition(".")[0] == "vllm" for name in set(sys.modules) - before)
    dependencies = text.partition("dependencies = [")[2].partition("]")[0]
    assert "vllm" not in dependencies
