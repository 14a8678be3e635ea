"""Find the cheaper versions of a weight, its levels, that its stored tensors contain.

A level is named by its nominal bits: weights that are stored in 4 + 4 bits have the levels 4 and 8, the last of which
is the whole weight. What is stored for a level is part of what is stored for the whole, under the same names, so that
a level is read, multiplied and written without the rest. Transforms around the matrix, quantized inputs, unread inputs
and a low-rank part are the same at all levels.

A format says what levels it has by `levels(params)` and `at_level(params, level)`; a format without the latter has
none. Where the whole weight is read without what is stored of other levels, `whole(params)` says how.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from compress import formats
from compress.types import PackedWeight, Stored


def levels(stored: Stored) -> tuple[int, ...]:
    """Return the levels of a weight, rising, the whole weight last; () where there is none but the whole."""
    format: Any = formats.get(stored.format)
    return cast("tuple[int, ...]", format.levels(stored.params)) if hasattr(format, "at_level") else ()


def at_level(stored: Stored, level: int | None) -> Stored:
    """Return how a weight is stored at a level: at the largest that is not above it, at the lowest if all are.

    A weight without levels stays as it is, and None is the whole: what is read of it, where further parts are not.
    """
    known = levels(stored)
    if not known:
        return stored
    format: Any = formats.get(stored.format)
    if level is None or level >= known[-1]:
        chosen = format.whole(stored.params) if hasattr(format, "whole") else None
    else:
        chosen = format.at_level(stored.params, max((each for each in known if each <= level), default=known[0]))
    return stored if chosen is None else dataclasses.replace(stored, format=chosen[0], params=chosen[1])


def view(weight: PackedWeight, level: int | None) -> PackedWeight:
    """Return a weight at a level; it shares the stored tensors."""
    stored = at_level(weight.stored, level)
    if stored is weight.stored:
        return weight
    names = formats.specs(stored, weight.shape)
    return PackedWeight(stored, {name: weight.tensors[name] for name in names}, weight.shape)
