"""Train dense weights of a block that was changed, so that it gives what the original block gives.

The loss is that of compress/tune/blockwise.py: the squared error of what the block gives for what reaches it behind the
changed blocks before it, against what the original model gives behind the original block, token by token over the size
of that token. One batch in `HELD_OUT` is not trained on; the best state on these is kept, with all numbers rounded to
the type in which they are stored, and the start if none is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.tune.descend import descend, is_checked
from compress.tune.held_block import HeldBlock, relative
from compress.tune.portions import Batches
from compress.tune.trained import Trained

HELD_OUT = 8  # batches
CHECKS = 4  # times that the held-out error is measured


class Healed(NamedTuple):
    """Trained parameters of a block, and its error on batches that were held out, before and after."""

    parameters: dict[str, Tensor]  # path in the block -> values in the type that is stored
    before: float
    after: float


@torch.no_grad()
def train(
    block: nn.Module, names: Sequence[str], batches: Batches, count: int, steps: int, rate: float, tokens: int
) -> Healed:
    """Train these parameters of a block, which stays as it is.

    batches: `count` at every call, of hidden states, other arguments and what the block should give. rate: of AdamW, in
    units of the root mean square of each tensor. tokens: of a step, about. Raises NumericalError for a loss that is not
    finite.
    """
    held = HeldBlock(block, [], batches, count, HELD_OUT, tokens)
    trained = {name: Trained(held.model.get_parameter(name)) for name in names}
    stream = held.portions.endless()

    def rounded() -> dict[str, Tensor]:
        return {name: each.value().to(held.own_type(name)) for name, each in trained.items()}

    def error() -> float:
        return held.error({name: value.float() for name, value in rounded().items()})

    before = best = error()

    def loss(step: int) -> float:
        hidden, call, target = next(stream)
        with torch.enable_grad():
            now = {name: each.value() for name, each in trained.items()}
            found = relative(held.run(now, hidden, call), target.float()).mean()
            found.backward()
        return found.item()

    def check(step: int) -> None:
        nonlocal best
        if not is_checked(step, steps, CHECKS):
            return
        if (now := error()) < best:
            best = now
            for each in trained.values():
                each.keep()

    descend([each.moved for each in trained.values()], steps, rate, loss, check)
    for each in trained.values():
        each.restore()
    return Healed(rounded(), before, best)
