"""Say which values an option of another tool may have. A value without a meaning is refused, not passed over.

An importer declares them as `OPTIONS`: the name of an option -> the values that it may have, in which a type stands for
all values of this type. An option may be absent. Other options than those are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from compress.errors import shown
from compress.importers.source import Source
from compress.storage.checkpoint import CONFIG

Options: TypeAlias = Mapping[str, tuple[Any, ...]]

FLAG, NUMBER, TEXT, NAMES = (bool, None), (int, float, None), (str, None), (list, None)
MODULES: Options = dict.fromkeys(("modules_to_not_convert", "ignored_layers", "ignore"), NAMES)  # that stay plain


def check(source: Source, options: Options, given: Mapping[str, Any], section: str = "quantization_config") -> None:
    """Raise CheckpointError for a value in a section of the configuration that its option cannot have."""
    for key, allowed in options.items():
        if key in given and not is_allowed(given[key], allowed):
            raise source.error(
                f"{CONFIG}: {section} has {key} {shown(given[key])}, which has no meaning here; what can be: "
                f"{', '.join(map(_word, allowed))}; download it again, or give the original checkpoint"
            )


def is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether an option with these values may have this one; True is no integer."""
    return any(type(value) is each if isinstance(each, type) else _is_same(value, each) for each in allowed)


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _word(value: Any) -> str:
    if isinstance(value, type):
        names = {bool: "true or false", int: "an integer", float: "a number", str: "a text", list: "a list"}
        return names.get(value, "a table")
    return "null" if value is None else shown(value)
