"""Turn the hidden states behind the last block into logits.

The model's own forward pass makes the logits, with every block replaced by one that gives the hidden states, so that
whatever a family does to them (scaling, caps, a last projection) is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.model import architectures
from compress.model.block_calls import UNFIT_ERRORS, WIDTHS, standing_in
from compress.model.blockwise import attached
from compress.model.inputs import arguments
from compress.model.skeleton import Edits, Skeleton

ROWS_PER_EDIT = 4096  # so many rows of the output head are edited at a time


@contextmanager
def edited_by(skeleton: Skeleton, edits: Edits | None) -> Iterator[None]:
    """While active, change what is loaded by these edits alone."""
    before, skeleton.edits = skeleton.edits, edits
    try:
        yield
    finally:
        skeleton.edits = before


@contextmanager
def logits_of(skeleton: Skeleton, device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """Load all outside the blocks, as stored; yield hidden [1, tokens, hidden] -> float32 logits [tokens, vocabulary].

    The hidden states are those behind the last block. Frees all that is loaded at the end.
    """
    try:
        with edited_by(skeleton, None):
            load(skeleton, device)
        yield lambda hidden: logits(skeleton, hidden)[0]
    finally:
        skeleton.free()


@torch.no_grad()
def load(skeleton: Skeleton, device: torch.device) -> None:
    """Load all outside the blocks, edited as the skeleton says."""
    skeleton.load_rest(device, with_head=True)
    head = skeleton.model.get_output_embeddings()
    if skeleton.edits is not None and head is not None:
        change = skeleton.edits.head()
        for rows in head.weight.data.split(ROWS_PER_EDIT):
            rows.copy_(change(rows))


def logits(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    """Return float32 logits [batch, tokens, vocabulary] of hidden [batch, tokens, hidden] behind the last block.

    All outside the blocks must be loaded.
    """
    return _behind(
        skeleton, hidden, lambda tokens: skeleton.model(**arguments(skeleton.model, tokens), use_cache=False).logits
    ).float()


def outputs(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    """Return what `logits` does; where its states are what is used, those: float32 [batch, tokens, hidden].

    All outside the blocks must be loaded.
    """
    if not architectures.gives_states(skeleton.config):
        return logits(skeleton, hidden)
    return _behind(skeleton, hidden, lambda tokens: skeleton.read(tokens, use_cache=False)[0]).float()


class _HeadReachedError(Exception):
    """The head has been called: its product is not needed."""


def inputs(skeleton: Skeleton, head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return what the head reads [batch, tokens, in_features] behind hidden states of the last block.

    hidden: [batch, tokens, hidden]. All outside the blocks but the head must be loaded.
    """

    def read(tokens: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _HeadReachedError

        with attached([head.register_forward_pre_hook(note)]), suppress(_HeadReachedError):
            skeleton.model(**arguments(skeleton.model, tokens), use_cache=False)
        return seen[0]

    return _behind(skeleton, hidden, read)


def _behind(skeleton: Skeleton, hidden: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what run(tokens) gives of the same batch and tokens while every block gives `hidden`."""
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    for width in WIDTHS:
        try:
            with standing_in(skeleton.blocks, lambda *args, **kwargs: hidden, width):
                states = run(tokens)
        except UNFIT_ERRORS:  # the first of a batch was taken for the first of a tuple
            continue
        if states.shape[:2] == hidden.shape[:2]:
            return states
    raise UnsupportedModelError("the model makes no logits of the hidden states behind its last block")
