"""Train with AdamW whose two moments take one byte each (8-bit optimizers by block-wise quantization).

Dettmers, Lewis, Shleifer and Zettlemoyer 2022 (arXiv 2110.02861): between two steps a moment is kept as one byte for
each number, an index into 256 levels, and one float32 for each block of 256 numbers, its largest magnitude. A step
decodes the moments, does what AdamW does in float32, and codes them again. The levels are the dynamic data type: seven
powers of ten, each cut into even steps, twice as many in each as in the power below, so that large numbers are coded
to about 1% and small ones down to 1e-7 of the largest. The first moment has signed levels, the second has none below
0 and twice as many above. Tensors under `SMALLEST` numbers keep float32 moments, as the authors advise.

Differences: a second moment above 0 is never coded as 0, but at least as the lowest level above it. The update is a
quotient by its root, so that a moment that is lost makes the next update up to 1 / sqrt(1 - beta2) = 32 times too long
(the zero point problem of Li et al. 2023, arXiv 2309.01507). Not done: the paper's stable embedding layer; moments of
less than 8 bits; the fusion into one kernel, so that a step takes four times as long as one of torch on a CPU (0.03
against 0.007 us for a number).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

States = Literal["32bit", "8bit"]

BLOCK = 256  # numbers that share a scale
SMALLEST = 4096  # numbers of a tensor with 8-bit moments
CHUNK = 1 << 18  # numbers that are decoded at a time; a multiple of BLOCK
POWERS_OF_TEN = range(-6, 1)


@functools.cache
def levels(is_signed: bool) -> Tensor:
    """Return the dynamic data type: 256 levels in [-1, 1], in [0, 1] if not signed, ascending, float32 on the CPU.

    Of a power of ten from 0.1 to 1 the levels are the middles of even steps; 0 and 1 are levels, too.
    """
    positive = []
    for number, power in enumerate(POWERS_OF_TEN):
        edges = torch.linspace(0.1, 1, 2 ** (number + (not is_signed)) + 1)
        positive.append(10.0**power * ((edges[:-1] + edges[1:]) / 2))
    above = torch.cat(positive)
    return torch.cat([*([-above] if is_signed else []), above, torch.tensor([0.0, 1.0])]).sort().values


class _CodeSearch(NamedTuple):
    """What finds the nearest level: for the upper 16 bits of a float32 the code of the least number that begins so.

    No two of the bounds between levels begin alike, so that one comparison tells this code from the next.
    """

    codes: Tensor  # [65536] int32
    bounds: Tensor  # [65536] float32: above it the next code is nearer; infinite where there is none


@functools.cache
def _search(is_signed: bool, device: torch.device) -> _CodeSearch:
    table = levels(is_signed)
    middles = (table[:-1] + table[1:]) / 2
    starts = torch.arange(1 << 16)
    is_negative = starts >= 1 << 15  # of these the least number is the one with all other bits set
    least = ((starts << 16) + torch.where(is_negative, 0xFFFF, 0)).to(torch.int32).view(torch.float32)
    codes = torch.bucketize(least, middles)
    numbers = (middles.view(torch.int32) >> 16) & 0xFFFF
    assert numbers.unique().numel() == numbers.numel()
    bounds = torch.full((1 << 16,), torch.inf).index_put((numbers.long(),), middles)
    return _CodeSearch(codes.to(device, torch.int32), bounds.to(device))


class CodedState(NamedTuple):
    """A tensor in 8 bits."""

    codes: Tensor  # [numel] uint8: indices of levels
    scales: Tensor  # [blocks] float32: the largest magnitude in each block of 256 numbers


def encode(values: Tensor, is_signed: bool) -> CodedState:
    """Code values [numel], float32, each as the nearest level times the scale of its block.

    What is not signed must not be negative, and is coded as 0 only if it is 0.
    """
    numel, search = values.numel(), _search(is_signed, values.device)
    blocks = torch.nn.functional.pad(values, (0, -numel % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    starts = (relative.view(torch.int32) >> 16) & 0xFFFF
    codes = search.codes[starts] + (relative > search.bounds[starts])
    if not is_signed:
        codes = torch.maximum(codes, (blocks > 0).int())
    return CodedState(codes.view(-1)[:numel].to(torch.uint8), scales)


def decode(coded: CodedState, is_signed: bool) -> Tensor:
    """Return the values [numel], float32."""
    numel, table = coded.codes.numel(), levels(is_signed).to(coded.codes.device)
    values = torch.nn.functional.pad(table[coded.codes.int()], (0, -numel % BLOCK)).view(-1, BLOCK)
    return (values * coded.scales[:, None]).view(-1)[:numel]


def state_nbytes(numel: int, states: States) -> int:
    """Return the bytes that the two moments of a tensor of `numel` numbers take between steps."""
    if states == "32bit" or numel < SMALLEST:
        return 2 * 4 * numel
    return 2 * (numel + 4 * math.ceil(numel / BLOCK))


def step_nbytes(numel: int, states: States) -> int:
    """Return the bytes that a step takes for a moment beside the moments; numel: of the largest tensor."""
    if states == "32bit" or numel < SMALLEST:
        return 4 * numel
    return 96 * min(numel, CHUNK)  # measured: decoded moments, a denominator, and what coding takes


def saved_nbytes(numel: int, states: States) -> int:
    """Return the bytes that tuning `numel` numbers takes less than with 32-bit states, a step included."""
    return (
        state_nbytes(numel, "32bit")
        - state_nbytes(numel, states)
        - (step_nbytes(CHUNK, states) if states == "8bit" else 0)
    )


class AdamW8bit(torch.optim.Optimizer):
    """AdamW without weight decay, the moments of large tensors in 8 bits; parameters float32."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """Take settings as torch.optim.AdamW does."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step along the gradients; return the loss if `closure`, which measures it, is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict() gave; codes stay bytes."""
        super().load_state_dict(state_dict)  # gives all tensors the type of the parameters
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, kept in state_dict["state"].items():
            device = parameters[number].device
            self.state[parameters[number]] = {
                name: value.to(device, copy=True) if isinstance(value, Tensor) else value
                for name, value in kept.items()
            }

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, **_zeros(parameter))
        state["step"] += 1
        flat, gradient = parameter.view(-1), parameter.grad.reshape(-1)  # type: ignore[union-attr]
        if "first" in state:
            _update(flat, gradient, state["first"], state["second"], state["step"], group)
            return
        for start in range(0, flat.numel(), CHUNK):
            part, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
            held = [
                CodedState(state[f"{name}_codes"][part], state[f"{name}_scales"][blocks])
                for name in ("first", "second")
            ]
            moments = [decode(held[0], is_signed=True), decode(held[1], is_signed=False)]
            _update(flat[part], gradient[part], moments[0], moments[1], state["step"], group)
            for coded, moment, is_signed in zip(held, moments, (True, False), strict=True):
                new = encode(moment, is_signed)
                coded.codes.copy_(new.codes)
                coded.scales.copy_(new.scales)


def _zeros(parameter: Tensor) -> dict[str, Tensor]:
    """Return moments of 0: [numel] float32 for a small tensor, otherwise codes and scales."""
    numel, device = parameter.numel(), parameter.device
    if numel < SMALLEST:
        return {name: torch.zeros(numel, device=device) for name in ("first", "second")}
    made = {}
    for name, is_signed in (("first", True), ("second", False)):
        zero = int((levels(is_signed) == 0).nonzero())
        made[f"{name}_codes"] = torch.full((numel,), zero, dtype=torch.uint8, device=device)
        made[f"{name}_scales"] = torch.zeros(math.ceil(numel / BLOCK), device=device)
    return made


def _update(values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, group: dict[str, Any]) -> None:
    """Do one step of Adam in place: all tensors [numel]; as torch.optim.AdamW, operation by operation."""
    beta1, beta2 = group["betas"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = math.sqrt(1 - beta2**step)
    denominator = (second.sqrt() / root).add_(group["eps"])
    values.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))
