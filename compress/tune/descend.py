"""Train parameters by AdamW: against any loss, or so that a block gives what it gave before it was changed.

The rate rises over WARM_UP_STEPS and falls along a cosine to FINAL_RATE_SHARE of itself; gradients are cut at the
norm MAX_GRADIENT_NORM.
The moments of AdamW are kept in float32 or in 8 bits (compress/tune/adamw8bit.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from compress.errors import NumericalError
from compress.model.blockwise import BlockArgs, BlockInputs
from compress.tune.adamw8bit import AdamW8bit, States

FINAL_RATE_SHARE = 0.05
WARM_UP_STEPS = 10
MAX_GRADIENT_NORM = 1.0

Output = Callable[[Tensor, BlockArgs], Tensor]  # hidden states and the block's other arguments -> what the block gives


def descend(
    parameters: Sequence[nn.Parameter],
    steps: int,
    rate: float,
    loss: Callable[[int], float],
    behind: Callable[[int], bool | None] = lambda step: None,
    states: States = "32bit",
) -> None:
    """Take `steps` steps; loss(step) leaves gradients behind. Raise NumericalError where the loss is not finite.

    behind: called behind each step; the step was the last one if it returns true, and the rates of those before are as
    if all had been taken. states: of the optimizer; in 8 bits they take a quarter of the memory
    (`adamw8bit.state_nbytes`) and a step takes longer.
    """
    is_small = states == "8bit"
    optimizer = AdamW8bit(parameters, rate) if is_small else torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    for step in range(steps):
        warmth = min(1.0, (step + 1) / WARM_UP_STEPS)
        cosine = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * warmth * cosine
        optimizer.zero_grad()
        value = loss(step)
        if not math.isfinite(value):
            what = f"the loss in training is {value} at step {step + 1}"
            raise NumericalError(f"{what}; lower its rate: train_rate of low-rank parts, rate of tune")
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        optimizer.step()
        if behind(step):
            return


def is_checked(step: int, steps: int, checks: int) -> bool:
    """Return whether the held-out error is measured behind a step: about `checks` times, and behind the last one."""
    return (step + 1) % max(1, steps // checks) == 0 or step + 1 >= steps


def match(
    parameters: Sequence[nn.Parameter], steps: int, rate: float, target: Output, output: Output, batches: BlockInputs
) -> None:
    """Train the parameters of `output` so that it gives what `target` does: the relative mean squared error falls.

    A step takes one batch, and the first follows the last.
    """

    def endless() -> Iterator[tuple[Tensor, BlockArgs]]:
        while True:
            yield from batches()

    stream = endless()

    def loss(step: int) -> float:
        hidden, call = next(stream)
        with torch.no_grad():
            expected = target(hidden, call).float()
        with torch.enable_grad():
            error = (output(hidden, call).float() - expected).square().mean() / expected.square().mean()
            error.backward()
        return error.item()

    descend(parameters, steps, rate, loss)


@torch.no_grad()
def relative_error(target: Output, output: Output, batches: BlockInputs) -> float:
    """Return the squared error of what `output` gives over the square of what `target` gives, of all batches."""
    error = size = 0.0
    for hidden, call in batches():
        expected, states = target(hidden, call).float(), output(hidden, call).float()
        error += (states - expected).square().sum(dtype=torch.float64).item()
        size += expected.square().sum(dtype=torch.float64).item()
    return error / size


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
