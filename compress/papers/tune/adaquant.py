"""Tune each linear of a quantized block so that it gives what it gave, one linear at a time (AdaQuant).

AdaQuant (Hubara et al. 2020, arXiv 2006.10518) trains a layer by Adam on the mean squared error of its output. Weights
(a real number behind each code, which no interval confines, as AdaRound's is), scales, zero points and the bias move
together, and gradients pass straight through the rounding:

    minimize  sum over tokens of | Q(W + V) x + b' - (W x_full + b) |^2

It is calibrated sequentially, as the paper does where there is text enough: `x` is what the linear reads behind the
quantized blocks and the linears of its own block that are tuned already, `x_full` what it reads in the block with
full-precision weights (`target_inputs: quantized`: x, too, so that no linear makes up for another). How a packed weight
is trained is left to compress/tune/codes: `straight_through` for the format `int`, `fixed` for others, whose codes
stay and whose scales, codebooks or low-rank factors move.

What is trained is kept for a linear if its own squared error falls on held-out batches, with all numbers as they are
stored, and the error of the block's output does not rise. A block is left no worse than it was found.

Differences: the squared error is a quadratic form of the weight, so that instead of 50 to 100 cached samples, of which
a step takes some, the sums of x x^T and of (x_full - x) x^T over the whole calibration text are kept, and each step has
the gradient of all of it. Rates are relative, and fall along a cosine. Zero points begin at whole numbers and travel as
far as the numbers behind codes, so that they stay what they are where `codes_rate` is less than 0.5. `x_full` is taken
in front of the block behind the quantized ones before it, not behind full-precision ones. Linears that are given tokens
by a router have `x_full` = x, since it sends them others when weights change. Norms and the means of outputs are left
to other methods (`norm_tweaking`, `bias_correction`), the choice of bits to the allocator `adaquant`. Not done: scales
of inputs, biases for linears that have none, activation functions inside the loss.

GPTQ minimizes the same error with `x_full` = x (or as target correction has it), and lowers it further. Relative
squared errors of the output of the query projection in the third block of tests/models/books-8m, 48 samples of 512
tokens, measured on other text, groups of 64, asymmetric, from codes that are nearest between the least and the largest
weight:

                                                                         4 bits    2 bits
    round-to-nearest                                                     0.00209   0.0511
    this file, 200 steps                                                 0.00123   0.0285
    rates and 1000 steps of the paper, minibatches of 512 tokens         0.00166   0.0233
    GPTQ with sweeps                                                     0.00063   0.0118

More steps are not better at 4 bits: the paper's have 0.00142 after 100. The output of that block, rounded to nearest
with 2 bits and searched scales, has 0.0217 before and 0.0051 behind it (0.0064 with `target_inputs: quantized`), and
0.0045 behind `blockwise` with `straight_through` in as many steps and CPU seconds. From the codes of GPTQ, 0.0044, no
linear gets better. So this is for codes of plain rounding, and not in the core; from those of GPTQ it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from compress import formats
from compress.model.block_calls import BlockArgs
from compress.model.blockwise import attached
from compress.tune.codes import fixed, straight_through
from compress.tune.descend import check_codes_rate, check_descent, check_held_out, descend, is_checked
from compress.tune.held_block import MAX_HELD_OUT_BATCHES, Batch, Batches, BlockSizes, HeldBlock
from compress.tune.trained import Rates, Trained, TrainedWeight
from compress.types import PackedWeight

SCOPE = "block"
CHECKS = 8  # times that the held-out error of a linear is measured
MASTERS = 24  # bytes of a trained number: how far it is, its gradient, two moments, the best so far, what it is now
GRAM_SHARE = (
    4  # numbers of a sum of x x^T for each weight of a block, at most: an MLP 8 times as wide as the model has 3.2
)


@dataclass(frozen=True)
class Config:
    """Settings of AdaQuant."""

    steps: int = 200  # [steps] for each linear
    rate: float = 0.002  # of Adam: of scales in units of their root mean square, of biases in that of outputs
    codes_rate: float = 0.3  # [steps of the grid] that a number behind an integer code travels, at most
    start: Literal["codes", "weights"] = "weights"  # where these numbers begin in the cell of their code
    target_inputs: Literal["full", "quantized"] = "full"  # what the full-precision linear reads
    held_out: int = 8  # [batches] of which one is not trained on

    def __post_init__(self) -> None:
        check_descent(self.steps, self.rate)
        check_codes_rate(self.codes_rate)
        check_held_out(self.held_out)


def workspace(config: Config, sizes: BlockSizes) -> int:
    """Return the bytes that tuning takes beside the block.

    The largest linear is taken to be no larger than the block.
    """
    copies = 4 + 4 + 4 + 4  # the block quantized and not, a weight as it was, and its share of `Sums.cross`
    trained = MASTERS + straight_through.BYTES
    passes = (
        2 + 2
    ) * sizes.states + 2 * MAX_HELD_OUT_BATCHES * sizes.hidden  # two, what they leave, and what is held out
    return sizes.numel * (copies + trained + 4 * GRAM_SHARE) + passes


class Inputs(NamedTuple):
    """What a linear reads in one batch, float32."""

    quantized: Tensor  # [tokens, in]
    full: Tensor  # [tokens, in], in the block with full-precision weights


class InputMoments:
    """The sums of x and of x x^T over tokens, x being what one or more linears read."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.gram = torch.zeros(columns, columns, device=device)
        self.total = torch.zeros(columns, device=device)
        self.count = 0

    def add(self, inputs: Inputs) -> None:
        """Add the tokens of a batch."""
        x = inputs.quantized
        self.gram.addmm_(x.T, x)
        self.total += x.sum(0)
        self.count += len(x)


class Sums:
    """What the squared error of a linear [out, in] depends on, summed over tokens.

    With D the difference of weights, d that of biases and r = W (x_full - x), the error is the sum of |D x + d - r|^2.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, moments: InputMoments) -> None:
        """weight, bias: of full precision, float32. moments: of its inputs, to which others add."""
        self.weight, self.bias, self.moments = weight, bias, moments
        self.cross = torch.zeros_like(weight)  # r x^T
        self.shift = weight.new_zeros(len(weight))  # r
        self.missing = self.size = 0.0  # of r^2, and of the squared outputs

    def add(self, inputs: Inputs) -> None:
        """Add the tokens of a batch."""
        r = residual(inputs, self.weight)
        self.cross.addmm_(r.T, inputs.quantized)
        self.shift += r.sum(0)
        self.missing += r.square().sum(dtype=torch.float64).item()
        self.size += squares(inputs, self.weight, self.bias)

    def gradient(self, weight: Tensor, bias: Tensor | None) -> tuple[float, Tensor, Tensor]:
        """Return the relative squared error with these, and its gradients by weight [out, in] and bias [out]."""
        moments, moved = self.moments, weight - self.weight
        shifted = torch.zeros_like(self.shift) if bias is None or self.bias is None else bias - self.bias
        by_weight = torch.addr(moved @ moments.gram, shifted, moments.total).sub_(self.cross)
        by_bias = moved @ moments.total + moments.count * shifted - self.shift
        error = (moved * (by_weight - self.cross)).sum(dtype=torch.float64)
        error += (shifted * (by_bias - self.shift)).sum(dtype=torch.float64)
        scale = 2 / self.size
        return (error.item() + self.missing) / self.size, by_weight.mul_(scale), by_bias.mul_(scale)


class HeldOutError:
    """The relative squared error of a linear on the tokens of held-out batches."""

    def __init__(self, weight: Tensor, bias: Tensor | None, batches: Sequence[Inputs]) -> None:
        """weight, bias: of full precision, float32."""
        self.weight, self.bias, self.batches = weight, bias, batches
        self.size = sum(squares(inputs, weight, bias) for inputs in batches)

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """Return the error with these."""
        squared = 0.0
        for inputs in self.batches:
            off = inputs.quantized @ (weight - self.weight).T - residual(inputs, self.weight)
            if bias is not None and self.bias is not None:
                off += bias - self.bias
            squared += off.square().sum(dtype=torch.float64).item()
        return squared / self.size


def residual(inputs: Inputs, weight: Tensor) -> Tensor:
    """Return W (x_full - x), [tokens, out]."""
    return (inputs.full - inputs.quantized) @ weight.T


def squares(inputs: Inputs, weight: Tensor, bias: Tensor | None) -> float:
    """Return the sum of squares of what a linear of full precision gives."""
    return nn.functional.linear(inputs.full, weight, bias).square().sum(dtype=torch.float64).item()


class TrainedLinear(NamedTuple):
    """A linear in training."""

    weight: TrainedWeight
    bias: Trained | None

    def now(self) -> tuple[Tensor, Tensor | None]:
        """Return the dense weight [out, in] and the bias [out], float32."""
        return self.weight.weight(), self.bias.value() if self.bias is not None else None


def fit(linear: TrainedLinear, sums: Sums, held: HeldOutError, config: Config) -> None:
    """Train a linear on the sums, and leave it where its held-out error was least, the start included."""
    parts = [*linear.weight.parts(), *([linear.bias] if linear.bias is not None else [])]
    best = held.error(*linear.now())

    def loss(step: int) -> float:
        with torch.enable_grad():
            weight, bias = linear.now()
        error, by_weight, by_bias = sums.gradient(weight.detach(), None if bias is None else bias.detach())
        weight.backward(by_weight)
        if bias is not None:
            bias.backward(by_bias)
        return error

    def check(step: int) -> None:
        nonlocal best
        if not is_checked(step, config.steps, CHECKS):
            return
        if (error := held.error(*linear.now())) < best:
            best = error
            for part in parts:
                part.keep()

    descend([part.moved for part in parts], config.steps, config.rate, loss, check)
    for part in parts:
        part.restore()


class TunedOutcome(NamedTuple):
    """What has come of tuning one linear."""

    before: float  # its held-out error
    after: float
    changed: float | None  # share of codes


class BlockTuning(HeldBlock):
    """One block whose linears are tuned, one after the other, when all are quantized."""

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, config: Config) -> None:
        """Take what HeldBlock takes."""
        super().__init__(block, names, batches, count, config.held_out)
        self.config = config
        self.biases: dict[str, Tensor] = {}  # that have changed, as they are stored
        self.outcomes: dict[str, TunedOutcome] = {}

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor], str]:
        """Tune the linears in the order of their calls; return all packed weights, changed biases and a note."""
        full = HeldBlock(self.block, (), self.portions.batches, self.portions.count, self.config.held_out)
        first = best = self.error({})
        for group in self.call_order(self.packed):
            held = list(self._inputs(group[0], self.portions.held_out(), full))
            weight = self.block.get_submodule(group[0]).get_parameter("weight")
            moments = InputMoments(weight.shape[1], weight.device)
            sums = {name: Sums(*self._own(name), moments) for name in group}
            for inputs in self._inputs(group[0], self.portions.others(), full):
                moments.add(inputs)
                for each in sums.values():
                    each.add(inputs)
            for name in group:
                best = self._tune(name, sums.pop(name), held, best)
        return self.packed, self.biases, self._note(first, best)

    def _own(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the weight [out, in] and the bias [out] of full precision, float32."""
        linear = self.block.get_submodule(name)
        bias = getattr(linear, "bias", None)
        return linear.get_parameter("weight").float(), None if bias is None else bias.detach().float()

    def _inputs(self, name: str, batches: Iterable[Batch], full: HeldBlock) -> Iterator[Inputs]:
        """Yield what a linear reads in each batch."""
        for hidden, call, _ in batches:
            if (read := _read(self, name, hidden, call)) is None:
                continue
            is_aligned = self.config.target_inputs == "full" and read.dim() == hidden.dim()
            expected = _read(full, name, hidden, call) if is_aligned else read
            yield Inputs(*(x.flatten(0, -2) for x in (read, read if expected is None else expected)))

    def _tune(self, name: str, sums: Sums, batches: Sequence[Inputs], before: float) -> float:
        """Tune one linear; return the held-out error of the block, which was `before`."""
        held = HeldOutError(sums.weight, sums.bias, batches)
        if not (held.size and sums.size):
            return before
        config, packed, path = self.config, self.packed[name], f"{name}.bias"
        way = straight_through if straight_through.serves(packed) else fixed
        rates = Rates(config.steps, config.rate, config.codes_rate, config.start)
        unit = (sums.size / (sums.moments.count * len(sums.weight))) ** 0.5
        bias = None if sums.bias is None else Trained(sums.bias, unit=unit)
        linear = TrainedLinear(way.Codes(packed, sums.weight, rates), bias)
        starts = (self.model.get_parameter(f"{name}.weight").clone(), sums.bias)
        first = held.error(*starts)
        fit(linear, sums, held, config)
        made, stored = linear.weight.pack(), None if bias is None else bias.value().to(self.own_type(path))
        new = formats.decode(made, torch.float32), None if stored is None else stored.float()
        last, after = held.error(*new), before
        if last < first:
            self._place(name, *new)
            if (after := self.error({})) > before:
                self._place(name, *starts)
        if not (is_better := last < first and after <= before):
            last, after = first, before
        else:
            self.packed[name] = made
            if stored is not None:
                self.biases[path] = stored
        self.outcomes[name] = TunedOutcome(first, last, linear.weight.changed_share() if is_better else 0.0)
        return after

    def _place(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        self.model.get_parameter(f"{name}.weight").copy_(weight)
        if bias is not None:
            self.model.get_parameter(f"{name}.bias").copy_(bias)

    def _note(self, first: float, last: float) -> str:
        """Return what the report should say."""
        better = {name: each for name, each in self.outcomes.items() if each.after < each.before}
        improved = [f"{name} {each.before:.3g} -> {each.after:.3g}" for name, each in better.items()]
        moved = [f"{name} {each.changed:.1%}" for name, each in better.items() if each.changed is not None]
        parts = [
            f"AdaQuant: held-out error of the block: {first:.3g} -> {last:.3g}",
            f"of the outputs of linears: {', '.join(improved) or 'none is better'}",
            *([f"codes that moved: {', '.join(moved)}"] if moved else []),
            *([f"as they were: {', '.join(same)}"] if (same := [x for x in self.packed if x not in better]) else []),
        ]
        return "; ".join(parts)


class _Reached(Exception):
    """Raised where a linear is called, since the rest of the block need not run."""


def _read(held: HeldBlock, name: str, hidden: Tensor, call: BlockArgs) -> Tensor | None:
    """Return what a linear of a block reads when it is first called, [..., in], float32; None if it is not called."""
    inputs: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])
        raise _Reached

    with attached([held.model.get_submodule(name).register_forward_pre_hook(note)]), suppress(_Reached):
        held.run({}, hidden, call)
    return inputs[0].float() if inputs else None
