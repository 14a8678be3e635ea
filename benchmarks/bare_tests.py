"""Run the tests with the mark `gpu` where pytest is not installed, and say of each whether it ran.

A stand-in for pytest (without_pytest/) gives their files marks, parameters and fixtures without arguments. A test that
needs more, `monkeypatch` or `tmp_path`, is skipped by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpu_child import SkippedError

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "without_pytest"
TESTS = HERE.parent / "tests"


def files() -> list[Path]:
    """Return the test files that have tests for a GPU."""
    return sorted(path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8"))


def collected() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name and a function of every such test, at every choice of its parameters."""
    sys.path.insert(0, str(STAND_IN))
    for path in files():
        sys.path.insert(0, str(path.parent))
        module = importlib.import_module(path.stem)
        for name, function in vars(module).items():
            marks = getattr(function, "marks", [])
            if name.startswith("test_") and any(kind == "gpu" for kind, *_ in marks):
                for words, values in _choices(marks):
                    yield f"{path.stem}::{name}[{words}]", functools.partial(_call, module, function, values)


def _choices(marks: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every choice of parameters, in words and by name."""
    lists = []
    for names, values in (arguments[:2] for kind, arguments, _ in marks if kind == "parametrize"):
        keys = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
        lists.append([dict(zip(keys, v if len(keys) > 1 else [v], strict=True)) for v in values])
    for chosen in itertools.product(*lists):
        by_name = {key: value for part in chosen for key, value in part.items()}
        yield ", ".join(f"{key}={value}" for key, value in by_name.items()), by_name


def _call(module: Any, function: Any, values: dict[str, Any]) -> None:
    for kind, arguments, settings in function.marks:
        if kind == "skipif" and arguments[0]:
            raise SkippedError(settings.get("reason", "skipif"))
    if missing := [name for name in inspect.signature(function).parameters if name not in values]:
        raise SkippedError(f"needs pytest, for {', '.join(missing)}")
    with ExitStack() as stack:
        for fixture in vars(module).values():
            if getattr(fixture, "autouse", False):
                if inspect.signature(fixture).parameters:
                    raise SkippedError(f"needs pytest, for the fixture {fixture.__name__}")
                stack.enter_context(contextmanager(fixture)())
        function(**values)
