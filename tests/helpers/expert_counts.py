"""Count the pairs of token and expert that the experts of a model drop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import nn

from compress.runtime import experts
from compress.runtime.experts import Experts


@dataclass
class Pairs:
    """Counts of the pairs that the router has chosen, and of those dropped."""

    routed: int = 0
    dropped: int = 0

    @property
    def share(self) -> float:
        """The share of the pairs that were dropped."""
        return self.dropped / self.routed


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[str, Pairs]]:
    """Count the pairs of every `Experts` module while active: name -> pairs."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    pairs = {name: Pairs() for name in modules}
    running: list[Pairs] = []
    prune = experts.prune

    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        running[:] = [pairs[name] for name, each in modules.items() if each is module]
        running[0].routed += inputs[1].numel()

    def count(hidden: Any, index: Any, weights: Any, pruning: Any, number: int) -> Any:
        kept = prune(hidden, index, weights, pruning, number)
        running[0].dropped += int(((index < number) & (kept[0] >= number)).sum())
        return kept

    handles = [module.register_forward_pre_hook(begin) for module in modules.values()]
    try:
        with mock.patch.object(experts, "prune", count):
            yield pairs
    finally:
        for handle in handles:
            handle.remove()
