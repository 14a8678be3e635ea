"""Give zeros in the place of what a module returns, and in the place of what it stores in a cache.

Shared by what skips modules: those whose last linear was dropped (compress/runtime/step/skipping.py), and those that a
draft passes over (compress/runtime/bypass.py). A cache stays as it would be: positions, masks, sliding windows and
saved caches ask any layer for its tokens. So an attention that is not run stores zeros in the shape of its keys and
values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class StoredShape:
    """What an attention stores in a cache: in which layer, and heads and width of its keys and of its values."""

    layer: int
    keys: tuple[int, int]
    values: tuple[int, int]

    def append(self, cache: Any, x: Tensor) -> None:
        """Store zeros for the tokens of x [B, n, hidden]."""
        pairs = (self.keys, self.values)
        cache.update(*(x.new_zeros(x.shape[0], heads, x.shape[1], width) for heads, width in pairs), self.layer)


@dataclass(frozen=True)
class ResultShape:
    """What a module returns for x [..., hidden]: [..., width], alone or first in a tuple with others."""

    width: int
    others: int | None  # results beside the first one; None: the result is no tuple

    def zeros(self, x: Tensor) -> Any:
        """Return zeros for x, and None for each of the others."""
        y = x.new_zeros(*x.shape[:-1], self.width)
        return y if self.others is None else (y, *[None] * self.others)


def first_and_others(result: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the first of what a module returns, and what stands beside it in a tuple."""
    return (result[0], tuple(result[1:])) if isinstance(result, tuple) else (result, ())


def shape_of(result: Any) -> ResultShape:
    """Return the shape of what a module has returned."""
    first, others = first_and_others(result)
    return ResultShape(first.shape[-1], len(others) if isinstance(result, tuple) else None)


def states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states that a module is given: its first argument, or the one of that name."""
    return args[0] if args else kwargs.get("hidden_states")


def cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache that a module is given; None if there is none."""
    return next((each for each in (*args, *kwargs.values()) if hasattr(each, "get_seq_length")), None)


def evicts(cache: Any) -> bool:
    """Return whether a cache drops tokens by what passes read, so that each has to run."""
    return any(getattr(each, "is_told_of_passes", False) for each in cache.layers)


@contextmanager
def recorded_updates(cache: Any) -> Iterator[list[StoredShape]]:
    """Yield a list that gets what is stored in a cache meanwhile; empty for no cache."""
    updates = list[StoredShape]()
    if cache is None:
        yield updates
        return
    update = cache.update

    def record(keys: Tensor, values: Tensor, layer: int, *rest: Any, **more: Any) -> Any:
        heads_and_widths = ((each.shape[1], each.shape[-1]) for each in (keys, values))
        updates.append(StoredShape(layer, *heads_and_widths))
        return update(keys, values, layer, *rest, **more)

    cache.update = record
    try:
        yield updates
    finally:
        del cache.update


def let_class_ask(kind: Any, mark: str) -> None:
    """Let the forward function of a class ask each module for an attribute; those without it run as before.

    What the attribute holds has `forward(module, original, args, kwargs)`, which returns what the module returns.
    """
    original: Any = kind.forward
    if hasattr(original, mark):
        return

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        known = vars(self).get(mark)
        return original(self, *args, **kwargs) if known is None else known.forward(self, original, args, kwargs)

    setattr(forward, mark, True)
    kind.forward = forward
