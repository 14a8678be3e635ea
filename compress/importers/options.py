"""Check the values of another tool's options. A value without a meaning is refused, not passed over.

An importer declares them as `OPTIONS`: the name of an option -> the values that it may have, in which a type stands for
all values of this type. An option may be absent. Other options than those are not looked at.

Names are matched by regular expressions that a checkpoint brings along, which may be made to run for ever: `matches`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from compress.errors import shown
from compress.importers.source import CheckpointSource
from compress.storage.checkpoint import CONFIG

Options: TypeAlias = Mapping[str, tuple[Any, ...]]
FLAG, NUMBER, TEXT, NAMES = (bool, None), (int, float, None), (str, None), (list, None)
PLAIN_MODULES: Options = dict.fromkeys(("modules_to_not_convert", "ignored_layers", "ignore"), NAMES)
SIMPLE = re.compile(r"[\w.\\^$|()\[\]\-*+?!:=,]{1,200}")
REPEATS = 4  # stars and pluses of a pattern, at most: a search takes at most length ** REPEATS steps


def check(
    source: CheckpointSource, options: Options, given: Mapping[str, Any], section: str = "quantization_config"
) -> None:
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


def matches(pattern: str, name: str, start: int = 0) -> bool:
    """Return whether a regular expression matches a name from the place `start` on; ^ is the start of the whole name.

    Raises ValueError for what is none, and for repeated groups and many repeats, which can take endless time.
    """
    if not SIMPLE.fullmatch(pattern) or re.search(r"\)[*+]", pattern) or len(re.findall(r"[*+]", pattern)) > REPEATS:
        raise ValueError("is too involved; name the modules instead")
    try:
        return re.compile(pattern).match(name, start) is not None
    except re.error as error:
        raise ValueError(f"is no regular expression ({error})") from error


def has_match(pattern: str, name: str) -> bool:
    """Return whether a regular expression matches anywhere in a name. Raises ValueError as `matches` does."""
    return any(matches(pattern, name, start) for start in range(max(1, len(name))))
