"""Check the settings that several ways of tuning have, with one line for each mistake."""

from __future__ import annotations


def check_descent(steps: int, rate: float) -> None:
    """Raise ValueError for a training that cannot be: at least one step, and a rate between 0 and 1."""
    if steps < 1:
        raise ValueError(f"steps {steps} is less than 1")
    check_rate("rate", rate)


def check_rate(name: str, rate: float) -> None:
    """Raise ValueError for a rate that is not between 0 and 1."""
    if not 0 < rate < 1:
        raise ValueError(f"{name} {rate} is not between 0 and 1")


def check_codes_rate(codes_rate: float) -> None:
    """Raise ValueError for a distance of codes, in steps of the grid, that is not between 0 and 16."""
    if not 0 < codes_rate <= 16:
        raise ValueError(f"codes_rate {codes_rate} is not between 0 and 16")


def check_held_out(held_out: int) -> None:
    """Raise ValueError where all batches or samples would be held out."""
    if held_out < 2:
        raise ValueError(f"held_out {held_out} is less than 2: nothing would be trained on")
