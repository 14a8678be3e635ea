"""Match names by regular expressions that a checkpoint brings along, which may be made to run for ever."""

from __future__ import annotations

import re

SIMPLE = re.compile(r"[\w.\\^$|()\[\]\-*+?!:=,]{1,200}")
REPEATS = 4  # stars and pluses of a pattern, at most: a search takes at most length ** REPEATS steps


def matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression matches the start of a name.

    Raises ValueError for what is none, and for repeated groups and many repeats, which can take endless time.
    """
    if not SIMPLE.fullmatch(pattern) or re.search(r"\)[*+]", pattern) or len(re.findall(r"[*+]", pattern)) > REPEATS:
        raise ValueError("is too involved; name the modules instead")
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"is no regular expression ({error})") from error
