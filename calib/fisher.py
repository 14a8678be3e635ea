"""Take the Fisher diagonal of the model's loss, as a weight for each row and column of a linear (LQ-LoRA).

F[i, j] is the mean over sequences of the squared gradient of a sequence's loss (batch 1). Kept of it are the roots of
its means over rows and over columns, as in LQ-LoRA (arXiv 2311.12023): the weighted problem then still has an exact
solution (compress/lowrank/correct.py). A row or column that hardly any gradient reaches weighs at least SMALLEST of the
heaviest one, so that nothing is left without a measure.

The gradients are those of the original model on the first `samples` calibration samples: a forward and a backward pass
over the whole model, block by block (compress/allocate/kl_shares.py), before the first block is rounded. The paper
takes 10000 sequences of 1024 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from compress.errors import NumericalError
from compress.model import blockwise, lm_head
from compress.model.skeleton import Skeleton
from compress.numerics import checks, kl
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


LOSS_SCALE = 1024.0  # a factor of what goes backward, so that float16 holds it; a power of two changes nothing else


class Loss(Protocol):
    """A loss of the model's predictions for one sample."""

    positions: int  # of a sample that are scored: the first ones

    def __call__(self, sample: int, part: slice, logits: Tensor) -> Tensor:
        """Return the sum of the loss over the positions `part`, nats; logits [positions, vocabulary] float32."""


class NextToken:
    """The cross entropy of the next token of tokens [samples, seq_len] (`Loss`)."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.positions = tokens, tokens.shape[1] - 1

    def __call__(self, sample: int, part: slice, logits: Tensor) -> Tensor:
        """Return the sum over the positions `part`."""
        following = self.tokens[sample, 1:][part].to(logits.device)
        return nn.functional.cross_entropy(logits, following, reduction="sum")


BlockChange = Callable[[int, nn.Module], None]  # of a loaded block, by its index, in place


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
    change: BlockChange | None = None,
) -> Iterator[tuple[int, dict[str, Gradient]]]:
    """Yield (index, linear -> gradient) of every block, the last first, over tokens [samples, seq_len].

    loss: None for that of the next token. change: called on every loaded block, to give it other weights in place.

    Memory: a block with its activations of one sample and two float32 copies of its linears, and the hidden states in
    front of all blocks, in `file` if one is given. Raises NumericalError if anything is not finite.
    """
    device, count, loss = torch.device(device), len(skeleton.blocks), loss or NextToken(tokens)
    names: list[list[str]] = [[] for _ in range(count)]
    for spec in skeleton.linears()[0]:
        names[spec.block].append(spec.name)
    stream = blockwise.HiddenStates(
        tokens.shape[0], file, count + 1
    )  # a side in front of each block; the last goes backward
    try:
        calls = blockwise.record_inputs(skeleton, tokens, 1, stream, device)
        for index in range(count):
            block, name = (
                _load_differentiated(skeleton, index, device, change),
                skeleton.block_prefix(index).rstrip("."),
            )
            for sample in range(stream.samples):
                hidden = stream.read(sample, 1, index).to(device)
                stream.write(sample, blockwise.run_block(block, calls[index][1], hidden, name), index + 1)
            skeleton.free()
        lm_head.load(skeleton, device)
        for sample in range(stream.samples):
            behind = stream.read(sample, 1, count).to(device)
            stream.write(sample, _behind(skeleton, behind, loss, sample), count)
        skeleton.free()
        for index in reversed(range(count)):
            block = _load_differentiated(skeleton, index, device, change)
            of_block = _backward(skeleton, index, names[index], (block, calls[index][1]), stream)
            skeleton.free()
            yield index, of_block
    finally:
        skeleton.free()
        stream.close()


def _load_differentiated(skeleton: Skeleton, index: int, device: torch.device, change: BlockChange | None) -> nn.Module:
    """Return a block with the weights that are differentiated by."""
    block = skeleton.load_block(index, device)
    if change is not None:
        change(index, block)
    return block


@torch.enable_grad()
def _behind(skeleton: Skeleton, hidden: Tensor, loss: Loss, sample: int) -> Tensor:
    """Return the loss's scaled gradient behind the last block; hidden [1, tokens, hidden]."""
    hidden = hidden.clone().requires_grad_()
    for part in kl.slices(loss.positions, skeleton.vocab_size):
        logits = lm_head.logits(skeleton, hidden[:, part])[0]
        (loss(sample, part, logits) * (LOSS_SCALE / loss.positions)).backward()
    return cast(Tensor, hidden.grad)


def _backward(
    skeleton: Skeleton,
    index: int,
    names: list[str],
    loaded: tuple[nn.Module, blockwise.BlockArgs],
    stream: blockwise.HiddenStates,
) -> dict[str, Gradient]:
    """Take the gradients behind a block to those in front of it, and sum up those of its weights."""
    block, call = loaded
    weights = [skeleton.linear(block, name).weight.requires_grad_() for name in names]
    sums_of = [Gradient(*(torch.zeros_like(w, dtype=torch.float32) for _ in range(2))) for w in weights]
    side = len(skeleton.blocks)
    for sample in range(stream.samples):
        hidden, behind = (stream.read(sample, 1, at).to(weights[0].device) for at in (index, side))
        front, *mine = blockwise.pull_back(block, call, hidden, behind, weights)
        stream.write(sample, cast(Tensor, front), side)
        for sums, gradient in zip(sums_of, mine, strict=True):
            if gradient is not None:  # else an expert that no token went to
                gradient = gradient.float() / LOSS_SCALE
                sums.total.add_(gradient)
                sums.squares.addcmul_(gradient, gradient)
    for name, sums in zip(names, sums_of, strict=True):
        if not torch.isfinite(sums.squares).all():
            raise NumericalError(f"the gradient of {name} is not finite; {checks.advice(skeleton.dtype)}")
    return dict(zip(names, sums_of, strict=True))
