"""Sum statistics weighed by attention in one pass through a block, which finds the weights of each batch on the way.

Inputs that are read before the block's last attention wait until its probabilities are known. Sums and weights have the
bits of two passes, the first of which only weighs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.calib import token_importance
from compress.calib.stats import PassEnd
from compress.errors import UnsupportedModelError

WEIGHED = "the attention that tokens receive"  # among the keys of a PassEnd


class Sum(Protocol):
    """What takes the inputs of a linear."""

    def add(self, inputs: Tensor, chunk: int, weights: Tensor | None = None) -> None:
        """Add inputs as `HessianSum.add` does."""


Collect = Callable[[Tensor, Mapping[str, Any]], AbstractContextManager[None]]


class WeighedPass:
    """A pass through a block that weighs each batch by attention, and collects with what it finds.

    calls: how often the block calls its attention; minimum: as of `token_importance.weights`. `failed`: the sums are
    worth nothing, since that is not how often, or its attention cannot be seen. `calls` is then what was found.
    """

    def __init__(self, block: nn.Module, where: str, calls: int, minimum: float) -> None:
        self.block, self.where, self.expected, self.minimum = block, where, calls, minimum
        self.calls, self.failed = 0, False
        self.scores: list[Tensor] = []  # [samples, seq_len] float32 on the CPU, of each batch
        self.waiting: list[Callable[[], None]] | None = None  # what is to be summed; None: the weights are known
        self.weights = torch.empty(0)

    @contextmanager
    def watch(
        self,
        shape: tuple[int, int],
        device: torch.device,
        sums: Mapping[str, Sum],
        pass_end: PassEnd | None,
        collect: Collect,
    ) -> Iterator[None]:
        """While active, weigh and collect a batch of samples and tokens.

        collect: given weights, which are filled once they are known, and sums.
        """
        self.weights, self.waiting = torch.zeros(shape, device=device), []

        def weigh(masses: list[Tensor]) -> None:
            self.scores.append(token_importance.received_in_all(masses, self.where, shape))
            self.weights.copy_(token_importance.of_batch(self.scores[-1], self.minimum))
            held, self.waiting = self.waiting or [], None
            for add in held:
                add()
            if pass_end is not None:
                pass_end.see(WEIGHED)

        masses = list[Tensor]()
        try:
            with (
                token_importance.watched(self.block, self.where, self.expected, weigh, is_shared=True) as masses,
                collect(self.weights, {key: _Waiting(self, total) for key, total in sums.items()}),
            ):
                yield
        except UnsupportedModelError:
            self.failed = True
        finally:
            self.calls = max(self.calls, len(masses))
            self.failed |= len(masses) != self.expected
            self.waiting = None


class _Waiting:
    """Hand inputs on to a sum once their weights are known."""

    def __init__(self, weighed: WeighedPass, total: Sum) -> None:
        self.weighed, self.total = weighed, total

    def add(self, inputs: Tensor, chunk: int, weights: Tensor | None = None) -> None:
        """Add inputs as `HessianSum.add` does, now or later."""
        if weights is None or self.weighed.waiting is None:
            self.total.add(inputs, chunk, weights)
        elif weights is self.weighed.weights:
            kept = inputs.clone()  # the rest of the block may write over them
            self.weighed.waiting.append(lambda: self.total.add(kept, chunk, weights))
        else:  # those of an expert were chosen before they were known
            self.weighed.failed = True
