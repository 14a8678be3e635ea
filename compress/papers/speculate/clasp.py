"""Drafts without blocks that dynamic programming chooses anew while a text is written (CLaSp, arXiv 2505.24196).

The hidden states h_i of the last accepted token behind each block i are known from the pass that checked it. Let g(i,
j) be a state behind block i with j blocks passed over. It is f_i(g(i - 1, j)) or g(i - 1, j - 1), whichever has the
larger cosine to h_i; f_i is the block, whose attention reads the cache and the state itself. All j are rows of one call
of each block, so that the choice costs about one check. From g(L, M) backwards one reads which M blocks are passed
over. One state for each (i, j) is a heuristic, as in the paper: the best way to (i, j) need not begin with the best
ways before.

Where we differ: the first block and the last always run, since hidden states behind the last are only known behind the
final norm; the choice is made each `interval` tokens instead of after each check (each new set also needs a program of
its own, compress/runtime/step). When to stop drafting is the loop's matter (compress/speculate/length.py).

It does not: choose attentions and MLPs apart, or work on caches with sliding windows or codes.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from compress.errors import RecipeError
from compress.runtime import zeros
from compress.runtime.bodies import blocks_of, bodies
from compress.runtime.bypass import KINDS, Sublayer
from compress.speculate.drafting import Reduction, Verified
from compress.speculate.session import Session
from compress.speculate.skipping import Skip, even_set, inner_sublayers

PART = "skip"


@dataclass(frozen=True)
class Config:
    """How many blocks are passed over, and how often they are chosen anew."""

    share: float = 0.4  # of the blocks between the first and the last
    interval: int = 32  # tokens between two choices

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share {self.share} is not between 0 and 1")
        if self.interval < 1:
            raise ValueError(f"interval {self.interval} is not positive")


class Clasp(Skip):
    """The model without the blocks that mattered least to the last token that was asked about."""

    def __init__(self, config: Config, model: Any) -> None:
        self.known = inner_sublayers(model)
        self.count = round(config.share * len(self.known) / len(KINDS))
        if not 0 < self.count < len(self.known) // len(KINDS):
            raise RecipeError(
                f"clasp: share {config.share} of {len(self.known) // len(KINDS)} inner blocks is none, or all"
            )
        self.interval, self._next = config.interval, 0
        self.wants_hidden = True
        super().__init__(even_set(self.known, len(KINDS) * self.count))

    def begin(self, session: Session) -> None:
        """Choose with the first check."""
        cache = session.cache
        if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise RecipeError("clasp: it reads plain caches without sliding windows only; use skip=swift")
        self._next = len(session.tokens)

    def observe(self, session: Session, verified: Verified) -> None:
        """Choose anew if it is time."""
        if verified.hidden is not None and len(session.tokens) >= self._next:
            states = torch.stack([each[verified.accepted] for each in verified.hidden[:-1]])
            self.sublayers = choose(session.model, session.cache, states, self.count)
            self._next = len(session.tokens) + self.interval
        self.wants_hidden = len(session.tokens) + 1 >= self._next


@torch.no_grad()
def choose(model: nn.Module, cache: Any, states: Tensor, count: int) -> frozenset[Sublayer]:
    """Return the sublayers of `count` blocks to pass over, neither the first nor the last.

    states: [blocks, hidden] of the cache's last token: its embedding, then behind each block but the last.
    """
    body: Any = next(bodies(model))
    blocks = blocks_of(body)
    assert blocks is not None
    seen, rows = cache.get_seq_length(), count + 1
    table = _Table(states, rows)
    mask = torch.full((rows, seen + rows), torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
    mask[:, : seen - 1] = 0  # the tokens before; each row stands for the last one, and sees itself
    mask[:, seen:].fill_diagonal_(0)
    positions = torch.full((1, rows), seen - 1, dtype=torch.int64, device=states.device)
    with ExitStack() as stack:
        for number, block in enumerate(blocks[:-1]):
            stack.callback(block.register_forward_pre_hook(table.enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(table.leave(number)).remove)
        embedded = states[0].expand(1, rows, -1).contiguous()
        arguments = {"position_ids": positions, "attention_mask": mask[None, None], "past_key_values": cache}
        try:
            body(inputs_embeds=embedded, use_cache=True, **arguments)
        finally:
            cache.crop(seen - cache.get_seq_length())
    return frozenset((block, kind) for block in table.way(count) for kind in KINDS)


class _Table:
    """The states g(i, j) of one i after the other, and where each came from."""

    def __init__(self, states: Tensor, rows: int) -> None:
        self.states = states
        self.current = states[0].expand(rows, -1).clone()  # g(i, j), [rows, hidden]; rows j > i are not reached yet
        self.reached = torch.arange(rows, device=states.device) == 0
        self.skips: list[Tensor] = []  # whether g(i, j) is g(i - 1, j - 1), by block, bool [rows]

    def enter(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give a block the states of the table in the place of those behind the block before it."""
        given = self.current[None]
        return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

    def leave(self, number: int) -> Any:
        """Return a hook that takes what a block makes of the states."""

        def choose(block: nn.Module, args: Any, output: Any) -> None:
            run = zeros.first_and_others(output)[0][0]
            passed, wanted = self.current.roll(1, 0), self.states[number + 1]
            may_pass = self.reached.roll(1) if number else torch.zeros_like(self.reached)
            may_pass[0] = False
            scores = [torch.cosine_similarity(each.float(), wanted.float()[None], dim=-1) for each in (run, passed)]
            skips = may_pass & (~self.reached | (scores[1] > scores[0]))
            self.current = torch.where(skips[:, None], passed, run)
            self.reached = self.reached | may_pass
            self.skips.append(skips)

        return choose

    def way(self, count: int) -> list[int]:
        """Return the blocks that are passed over on the way to g(last, count)."""
        blocks = list[int]()
        for number in range(len(self.skips) - 1, -1, -1):
            if self.skips[number][count]:
                blocks.append(number)
                count -= 1
        return blocks


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a model with too few blocks."""
    return Clasp(config, session.model)
