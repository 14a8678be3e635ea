"""Take the gradients of a loss backward through a model, one block at a time.

A forward pass keeps the hidden states in front of every block. On the way back each block is loaded once more and
computed again for each sample, and the gradient behind it becomes the one in front of it. What is wanted of a block's
gradients is up to a `BlockGradients`. A sample goes by itself, so that nothing depends on how samples are divided.

Memory holds one block with its activations of one sample. The hidden states in front of all blocks may lie in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from compress.model import blockwise, lm_head
from compress.model.blockwise import BlockArgs
from compress.model.skeleton import Skeleton
from compress.numerics import kl, products

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LOSS_SCALE = 1024.0  # a factor of what goes backward, so that float16 holds it; a power of two changes nothing else


class Loss(Protocol):
    """A loss of the model's predictions for one sample."""

    positions: int  # of a sample that are scored: the first ones

    def __call__(self, sample: int, part: slice, logits: Tensor) -> Tensor:
        """Return the sum of the loss over the positions `part`, nats; logits float32: a sample's `lm_head.outputs`."""


class BlockGradients(Protocol[T_co]):
    """What is taken of the gradients in one loaded block."""

    def pull_back(self, call: BlockArgs, hidden: Tensor, behind: Tensor) -> Tensor:
        """Return the gradient in front of the block for the one behind it, both [1, tokens, hidden] of one sample.

        hidden: what the block reads. Gradients are LOSS_SCALE times those of the sample's mean loss.
        """

    def finish(self) -> T_co:
        """Return what was taken of all samples."""


class Begun(NamedTuple):
    """Where a pass goes on that was interrupted on the way back."""

    blocks: int  # that are still to be passed: the first ones
    gradient: Tensor  # behind them [samples, tokens, hidden]


BlockChange = Callable[[int, nn.Module], None]  # of a loaded block, by its index, in place


def linear_widths(skeleton: Skeleton) -> list[dict[str, int]]:
    """Return linear -> its number of outputs, of each block."""
    widths: list[dict[str, int]] = [{} for _ in skeleton.blocks]
    for spec in skeleton.linears()[0]:
        widths[spec.block][spec.name] = spec.shape[0]
    return widths


class BackwardPass:
    """A pass of tokens [samples, seq_len] through a model and back.

    file: where hidden states may spill. change: called on every loaded block, to give it other weights in place.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        tokens: Tensor,
        loss: Loss,
        file: Path | None = None,
        device: torch.device | str = "cpu",
        change: BlockChange = lambda index, block: None,
    ) -> None:
        self.skeleton, self.tokens, self.loss, self.change = skeleton, tokens, loss, change
        self.device, self.count = torch.device(device), len(skeleton.blocks)
        # a side in front of each block, and one for the gradient
        self.stream = blockwise.HiddenStates(tokens.shape[0], file, self.count + 1)
        self.calls: blockwise.ModelArgs

    def blocks(
        self, take: Callable[[int, nn.Module], BlockGradients[T]], begun: Begun | None = None
    ) -> Generator[tuple[int, T]]:
        """Yield (index, what `take` has taken) of every block, the last first, of those of `begun` if that is given.

        Raises NumericalError if hidden states are not finite, UnsupportedModelError where blocks hand each other more
        than these.
        """
        passed = self.count if begun is None else begun.blocks
        try:
            self._go_forward(passed if begun is None else passed - 1)
            if begun is None:
                self._turn()
            else:
                self.stream.write(0, begun.gradient, self.count)
            for index in reversed(range(passed)):
                yield index, self._go_back(index, take)
        finally:
            self.skeleton.free()
            self.stream.close()

    def gradient(self) -> Tensor:
        """Return the gradient in front of the block that was yielded last, [samples, tokens, hidden]."""
        return self.stream.read(0, self.stream.samples, self.count)

    def _go_forward(self, blocks: int) -> None:
        """Fill the stream in front of the first block and behind so many blocks."""
        self.calls = blockwise.record_inputs(self.skeleton, self.tokens, 1, self.stream, self.device)
        for index in range(blocks):
            block, name = self._load(index), self.skeleton.block_prefix(index).rstrip(".")
            for sample in range(self.stream.samples):
                hidden = self.stream.read(sample, 1, index).to(self.device)
                states = blockwise.run_block(block, self.calls.alone(index, sample), hidden, name)
                self.stream.write(sample, states, index + 1)
            self.skeleton.free()

    def _turn(self) -> None:
        """Put the loss's gradient in the place of the hidden states behind the last block."""
        lm_head.load(self.skeleton, self.device)
        for sample in range(self.stream.samples):
            behind = self.stream.read(sample, 1, self.count).to(self.device)
            self.stream.write(sample, self._of_loss(behind, sample), self.count)
        self.skeleton.free()

    @torch.enable_grad()
    def _of_loss(self, hidden: Tensor, sample: int) -> Tensor:
        """Return the loss's scaled gradient behind the last block; hidden [1, tokens, hidden]."""
        hidden, positions = hidden.clone().requires_grad_(), self.loss.positions
        for part in kl.slices(positions, self.skeleton.vocab_size):
            with products.Backward():
                logits = lm_head.outputs(self.skeleton, hidden[:, part])[0]
            (self.loss(sample, part, logits) * (LOSS_SCALE / positions)).backward()
        return cast(Tensor, hidden.grad)

    def _go_back(self, index: int, take: Callable[[int, nn.Module], BlockGradients[T]]) -> T:
        """Take the gradients behind a block to those in front of it."""
        taken = take(index, self._load(index))
        for sample in range(self.stream.samples):
            hidden, behind = (self.stream.read(sample, 1, side).to(self.device) for side in (index, self.count))
            self.stream.write(sample, taken.pull_back(self.calls.alone(index, sample), hidden, behind), self.count)
        result = taken.finish()
        self.skeleton.free()
        return result

    def _load(self, index: int) -> nn.Module:
        block = self.skeleton.load_block(index, self.device)
        self.change(index, block)
        return block
