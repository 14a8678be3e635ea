"""As much of pytest as the files of tests with the mark `gpu` need to be imported where it is not installed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


class SkippedError(Exception):
    """A test is not run; the message says why."""


class _Marks:
    """What `pytest.mark` is: any attribute is a decorator, with arguments or without."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def mark(*arguments: Any, **settings: Any) -> Any:
            if len(arguments) == 1 and callable(arguments[0]) and not settings:
                return _marked(arguments[0], name, (), {})
            return lambda function: _marked(function, name, arguments, settings)

        return mark


mark = _Marks()


def _marked(function: Any, name: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    function.marks = [*getattr(function, "marks", []), (name, arguments, settings)]
    return function


def fixture(function: Any = None, **settings: Any) -> Any:
    """Note whether a fixture is used by all tests of its file."""
    if function is None:
        return functools.partial(fixture, **settings)
    function.autouse = settings.get("autouse", False)
    return function


def param(*values: Any, **_: Any) -> Any:
    """Return the values of a choice of parameters."""
    return values if len(values) > 1 else values[0]


def skip(reason: str, **_: Any) -> None:
    """End a test."""
    raise SkippedError(reason)


def importorskip(name: str, **_: Any) -> Any:
    """Return a module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SkippedError(f"{name} is not installed") from error
