"""Damage a JSON value in every place: what is read back of a file is mutated with it, and must be refused in one line.

for where, damaged in mutations(value):
    ...
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

OTHERS = (None, True, -7, 2.5, float("nan"), "x", "x\x1b[31m\n", [], [None], {}, {"a": None})
GONE = "gone"


def mutations(value: Any, seed: int = 0, most: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield where, and the value with one inner value replaced by one of OTHERS or removed; `most`: drawn of all."""
    cases = [(path, other) for path in _paths(value) for other in (*OTHERS, GONE)]
    if most is not None and len(cases) > most:
        cases = random.Random(seed).sample(cases, most)
    for path, other in cases:
        damaged = copy.deepcopy(value)
        inner = damaged
        for key in path[:-1]:
            inner = inner[key]
        if other is GONE:
            del inner[path[-1]]
        else:
            inner[path[-1]] = other
        yield f"{'.'.join(map(str, path))} = {other!r}", damaged


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to every inner value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(inner))
