"""What lies behind the last block: hidden states -> logits, some positions at a time so that they stay small.

The model's own forward pass makes the logits, with every block replaced by one that gives the hidden states, so that
whatever a family does to them (scaling, caps, a last projection) is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.model.skeleton import Edits, Skeleton

LOGITS_NBYTES = 32 << 20  # of the float32 logits of one model at a time
HEAD_ROWS = 4096  # of the output head that are edited at a time


def divergence(original: Tensor, other: Tensor) -> Tensor:
    """Logits [tokens, vocabulary], both float32 -> KL(original || other) of each token, in nats."""
    log_p, log_q = original.log_softmax(-1), other.log_softmax(-1)
    return nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def token_slices(skeleton: Skeleton, tokens: int) -> list[slice]:
    """Positions 0 .. tokens, as many at a time as LOGITS_NBYTES allow."""
    step = max(1, LOGITS_NBYTES // (4 * skeleton.config.get_text_config().vocab_size))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


@contextmanager
def edited_by(skeleton: Skeleton, edits: Edits | None) -> Iterator[None]:
    """While active, what is loaded is changed by these edits alone."""
    before, skeleton.edits = skeleton.edits, edits
    try:
        yield
    finally:
        skeleton.edits = before


@contextmanager
def logits_of(skeleton: Skeleton, device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """All outside the blocks, as stored: hidden states [1, tokens, hidden] behind the last block -> float32 logits.

    They are [tokens, vocabulary]. Frees all that is loaded at the end.
    """
    try:
        with edited_by(skeleton, None):
            load(skeleton, device)
        yield partial(logits, skeleton)
    finally:
        skeleton.free()


@torch.no_grad()
def load(skeleton: Skeleton, device: torch.device) -> None:
    """Fill all outside the blocks, edited as the skeleton says."""
    skeleton.load_rest(device, with_head=True)
    head = skeleton.model.get_output_embeddings()
    if skeleton.edits is not None and head is not None:
        change = skeleton.edits.head()
        for rows in head.weight.data.split(HEAD_ROWS):
            rows.copy_(change(rows))


def logits(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    """hidden [1, tokens, hidden] behind the last block -> float32 logits [tokens, vocabulary], all loaded."""
    real = list(skeleton.blocks)
    tokens = torch.zeros(1, hidden.shape[1], dtype=torch.long, device=hidden.device)
    for as_tuple in (False, True):  # what a block returns is not written anywhere
        for i, block in enumerate(real):
            skeleton.blocks[i] = _Stand(block, hidden, as_tuple)
        try:
            found = skeleton.model(input_ids=tokens, use_cache=False).logits
        except IndexError:  # the first of a batch was taken for the first of a tuple
            continue
        finally:
            for i, block in enumerate(real):
                skeleton.blocks[i] = block
        if found.shape[:2] == hidden.shape[:2]:
            break
    return found[0].float()


class _Stand(nn.Module):
    """Takes a block's place and gives the same hidden states whatever it gets."""

    def __init__(self, real: nn.Module, hidden: Tensor, as_tuple: bool) -> None:
        super().__init__()
        self.__dict__.update(real=real, result=(hidden,) if as_tuple else hidden)  # not registered as a child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"], name)  # attention_type, layer_idx ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["result"]
