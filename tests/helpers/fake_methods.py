"""Plugins that exist only in a test, as if their files lay in a package of compress."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress import recipe
from compress.errors import RecipeError
from compress.recipe import Recipe

METHOD = """'''A method for tests.

More.
'''
from dataclasses import dataclass
from typing import Literal, Optional
FORMAT, NEEDS, INCOHERENCE = "int", frozenset(), False
@dataclass(frozen=True)
class Config:
{fields}
    def __post_init__(self):
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits {{self.bits}} is not one of 2..8")
        if self.bits == 8 and self.group_size == 1:
            raise ValueError("8 bits for each weight of its own")
def plan_params(config, shape): pass
def workspace(config, shape): pass
def quantize(weight, stats, config, seed=0): pass
"""
ALPHA = METHOD.format(
    fields="""
    bits: int = 4
    group_size: int = 128
    damp: float = 0.01
    act_order: bool = False
    order: Literal["auto", "off", 1] = "auto"
    seed: int | None = None
    limit: Optional[float] = None
    label: str = ""
    dims: tuple[int, ...] = ()
"""
)
BETA = METHOD.format(
    fields="""
    bits: int = 3
    group_size: int = 64
    rounds: int = 1
"""
)

Make = Callable[..., Recipe]


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str = "compress.quant", **sources: str) -> None:
    """Lets a package appear to contain NAME.py for each NAME=source, until the test ends."""
    module = importlib.import_module(package)
    assert module.__spec__ is not None
    if str(folder) not in module.__path__:
        folders = [*module.__path__, str(folder)]
        monkeypatch.setattr(module, "__path__", folders)
        monkeypatch.setattr(module.__spec__, "submodule_search_locations", folders)
    for name, source in sources.items():
        full = f"{package}.{name}"
        monkeypatch.setitem(sys.modules, full, types.ModuleType(full))  # so that the import is undone with the test
        del sys.modules[full]
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(source)
    importlib.invalidate_caches()


def maker(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Make:
    """make(yaml, *overrides) -> the recipe of a file my.yaml in the current directory; methods: `alpha`, `beta`."""
    install(monkeypatch, folder, alpha=ALPHA, beta=BETA)
    monkeypatch.chdir(folder)

    def make(content: str, *overrides: str) -> Recipe:
        Path("my.yaml").write_text(content, encoding="utf-8")
        return recipe.load("my.yaml", overrides)

    return make


def message(make: Make, content: str, *overrides: str) -> str:
    """The error, which must be one line."""
    with pytest.raises(RecipeError) as caught:
        make(content, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def settings(scheme: Any) -> tuple[str, dict[str, Any]]:
    """Method and the settings that differ from its defaults."""
    default = dataclasses.asdict(type(scheme.config)())
    return scheme.method, {k: v for k, v in dataclasses.asdict(scheme.config).items() if v != default[k]}
