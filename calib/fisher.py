"""Take the Fisher diagonal of the model's loss, as a weight for each row and column of a linear (LQ-LoRA).

F[i, j] is the mean over sequences of the squared gradient of a sequence's loss (batch 1). Kept of it are the roots of
its means over rows and over columns, as in LQ-LoRA (arXiv 2311.12023): the weighted problem then still has an exact
solution (compress/lowrank/correct.py). A row or column that hardly any gradient reaches weighs at least SMALLEST of the
heaviest one, so that nothing is left without a measure.

The gradients are those of the original model on the first `samples` calibration samples: a forward and a backward pass
over the whole model, block by block (calib/backward_pass.py), before the first block is rounded. The paper
takes 10000 sequences of 1024 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from compress.calib.backward_pass import LOSS_SCALE, BackwardPass, BlockChange, Loss, linear_widths
from compress.errors import NumericalError
from compress.model import architectures, blockwise
from compress.model.blockwise import BlockArgs
from compress.model.skeleton import Skeleton
from compress.numerics import checks
from compress.types import Fisher

SMALLEST = 1e-3  # weight of a row or column against the heaviest one
SAMPLES = 64  # calibration samples at most


def weights(
    skeleton: Skeleton, tokens: Tensor, names: Set[str], file: Path | None = None, device: torch.device | str = "cpu"
) -> dict[str, Fisher]:
    """Return linear -> its weights for `names`; tokens [samples, seq_len]; `file`: where hidden states may spill."""
    by_linear = {}
    for _, block in gradients(skeleton, tokens[:SAMPLES], file, device):
        by_linear.update({name: reduce_squares(gradient.squares) for name, gradient in block.items() if name in names})
    return by_linear


def reduce_squares(squares: Tensor) -> Fisher:
    """Reduce squared gradients [out, in] to weights of rows and columns; all ones if there is no gradient."""
    sides = [squares.double().mean(axis).sqrt() for axis in (1, 0)]
    if not sides[0].max() > 0:
        return Fisher(*(torch.ones_like(side).float() for side in sides))
    rows, columns = (side.clamp(min=SMALLEST * side.max().item()) for side in sides)
    return Fisher((rows / rows.mean()).float(), (columns / columns.mean()).float())


class NextToken:
    """The cross entropy of the next token of tokens [samples, seq_len] (`Loss`)."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.positions = tokens, tokens.shape[1] - 1

    def __call__(self, sample: int, part: slice, logits: Tensor) -> Tensor:
        """Return the sum over the positions `part`."""
        following = self.tokens[sample, 1:][part].to(logits.device)
        return nn.functional.cross_entropy(logits, following, reduction="sum")


class Gradient(NamedTuple):
    """Sums of a weight [out, in], float32. The loss of a sequence is the mean over its scored positions, in nats."""

    total: Tensor  # sum over sequences of the loss's gradient
    squares: Tensor  # sum over sequences of its square: the Fisher diagonal, batch 1


def gradients(
    skeleton: Skeleton,
    tokens: Tensor,
    file: Path | None = None,
    device: torch.device | str = "cpu",
    loss: Loss | None = None,
    change: BlockChange = lambda index, block: None,
) -> Iterator[tuple[int, dict[str, Gradient]]]:
    """Yield (index, linear -> gradient) of every block, the last first, over tokens [samples, seq_len].

    loss: None for that of the next token. change: called on every loaded block, to give it other weights in place.

    Memory: a block with its activations of one sample and two float32 copies of its linears, and the hidden states in
    front of all blocks, in `file` if one is given. Raises NumericalError if anything is not finite, and
    UnsupportedModelError for a model without a next token.
    """
    if loss is None:
        architectures.check_task(skeleton.config, architectures.LANGUAGE)
    names = linear_widths(skeleton)
    passing = BackwardPass(skeleton, tokens, loss or NextToken(tokens), file, device, change)

    def take(index: int, block: nn.Module) -> _WeightGradients:
        weights = {name: skeleton.linear(block, name).weight.requires_grad_() for name in names[index]}
        return _WeightGradients(block, weights, checks.advice(skeleton.dtype))

    yield from passing.blocks(take)


class _WeightGradients:
    """The gradients of a block's linears (`BlockGradients`); advice: on what to do if they are not finite."""

    def __init__(self, block: nn.Module, weights: dict[str, Tensor], advice: str) -> None:
        self.block, self.weights, self.advice = block, weights, advice
        self.sums = {
            name: Gradient(*(torch.zeros_like(weight, dtype=torch.float32) for _ in range(2)))
            for name, weight in weights.items()
        }

    def pull_back(self, call: BlockArgs, hidden: Tensor, behind: Tensor) -> Tensor:
        """Add the gradients of one sample."""
        front, *own = blockwise.pull_back(self.block, call, hidden, behind, list(self.weights.values()))
        for sums, gradient in zip(self.sums.values(), own, strict=True):
            if gradient is not None:  # else an expert that no token went to
                gradient = gradient.float() / LOSS_SCALE
                sums.total.add_(gradient)
                sums.squares.addcmul_(gradient, gradient)
        return cast(Tensor, front)

    def finish(self) -> dict[str, Gradient]:
        """Return linear -> its gradient."""
        for name, sums in self.sums.items():
            if not torch.isfinite(sums.squares).all():
                raise NumericalError(f"the gradient of {name} is not finite; {self.advice}")
        return self.sums
