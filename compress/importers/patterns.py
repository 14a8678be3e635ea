"""Match names by regular expressions that a checkpoint brings along, which may be made to run for ever."""

from __future__ import annotations

import re

SIMPLE = re.compile(r"[\w.\\^$|()\[\]\-*+?!:=,]{1,200}")
REPEATS = 4  # stars and pluses of a pattern, at most: a search takes at most length ** REPEATS steps


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
