"""Predict what comparing variants of a model takes, and split the memory that is left for what makes it faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from compress import process_memory
from compress.errors import BudgetError
from compress.model.skeleton import Skeleton
from compress.numerics import kl

LOGITS = 4  # times the logits that are made at a time: themselves, logarithms, what is compared
NORMS = 12  # times the hidden states: residual stream, normed and rotated
DECODING = 3  # times a float32 weight that decoding one takes: itself, codes, scales


class ComparisonSizes(NamedTuple):
    """Bytes of what comparing variants of a model takes at a time."""

    whole: int  # all weights
    block: int  # the largest block
    rest: int  # all outside the blocks
    loading: int  # what the largest of these takes beside its weights while it is loaded
    passing: int  # one sample on its way through a block, one weight of which is decoded
    comparing: int  # the logits that are compared at a time, with the original's predictions for a sample; a table that
    # is decoded

    @property
    def least(self) -> int:
        """Return the bytes with one block loaded at a time."""
        return max(self.block + max(self.loading, self.passing), self.rest + max(self.loading, self.comparing))

    @property
    def all_loaded(self) -> int:
        """Return the bytes with everything loaded."""
        return self.whole + max(self.loading, self.passing, self.comparing)


def sizes(skeleton: Skeleton, seq_len: int, top_k: int, item: int, table: int = 0) -> ComparisonSizes:
    """Return the sizes for samples of seq_len tokens and `item` bytes a weight.

    table: weights of the largest table outside of the blocks that has variants.
    """
    whole = {id(p): p.numel() * item for p in skeleton.model.parameters()}
    blocks = [sum(p.numel() for p in block.parameters()) * item for block in skeleton.blocks]
    prefix = f"{skeleton.blocks_name}."
    loading: dict[str, int] = {}  # number of a block, or "" -> bytes as they are stored
    for name, sources in skeleton.sources.items():
        group = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        loading[group] = loading.get(group, 0) + sum(x.nbytes for x in sources if x.dtype.itemsize != item)
    stored_rest = loading.pop("", 0)
    stored_block = max(loading.values(), default=0)
    config = skeleton.config.get_text_config()
    token = max(map(_widest, skeleton.blocks)) + NORMS * config.hidden_size
    largest = max((p.numel() for block in skeleton.blocks for p in block.parameters()), default=0)
    positions = min(seq_len, kl.rows_at_a_time(config.vocab_size))
    return ComparisonSizes(
        whole=sum(whole.values()),
        block=max(blocks),
        rest=sum(whole.values()) - sum(blocks),
        loading=max(stored_rest, stored_block),
        passing=item * seq_len * token + DECODING * item * largest,
        comparing=LOGITS * 4 * positions * config.vocab_size
        + seq_len * min(top_k, config.vocab_size) * 16
        + DECODING * item * table,
    )


def _widest(block: nn.Module) -> int:
    """Return the most numbers that the linears of one module of a block read and write for a token."""
    widths = [0]
    for module in block.modules():
        linears = [child for child in module.children() if isinstance(child, nn.Linear)]
        experts = [sum(p.shape[1:]) for p in module.parameters(recurse=False) if p.dim() == 3]
        widths.append(sum(x.in_features + x.out_features for x in linears) + 3 * sum(experts))
    return max(widths)


@dataclass(frozen=True)
class MemorySplit:
    """Memory of one process, in bytes."""

    keeps: bool  # all blocks and the head stay loaded
    decoded: int  # changed weights that are kept for the next node, or call
    states: int  # hidden states in memory; what does not fit is in a file; half as much again for the embedded text

    @classmethod
    def within(cls, needed: ComparisonSizes, allowed: int) -> MemorySplit:
        """Keep everything where that leaves as much again for the rest; else set the least aside first.

        Raises BudgetError if that is more than what is allowed.
        """
        if needed.least > allowed:
            raise BudgetError(
                f"comparing variants of the model takes at least {process_memory.show(needed.least)} beside the "
                f"program, more than the {process_memory.show(allowed)} there are; raise --max-memory, or use shorter "
                "calibration samples"
            )
        keeps = needed.all_loaded + needed.whole <= allowed
        rest = allowed - (needed.all_loaded if keeps else needed.least)
        return cls(keeps, rest // 2, rest // 3)
