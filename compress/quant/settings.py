"""Check the settings of methods and transforms."""

from __future__ import annotations

from collections.abc import Sequence


def check(config: object, *counts: str, least: int = 0, **choices: Sequence[int | str]) -> None:
    """Raise ValueError unless settings `counts` are at least `least`, and the others among their choices or range."""
    for key in counts:
        value = getattr(config, key)
        if value < least:
            raise ValueError(f"{key} {value} is {f'less than {least}' if least else 'negative'}")
    for key, allowed in choices.items():
        value = getattr(config, key)
        if value not in allowed:
            span = f"{allowed[0]}..{allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
            raise ValueError(f"{key} {value!r} is not one of {span}")


def check_damp(damp: float) -> None:
    """Raise ValueError unless damp, the fraction of the mean diagonal added to a Hessian, is in [0, 1)."""
    if not 0 <= damp < 1:
        raise ValueError(f"damp {damp} is not in [0, 1)")
