"""A model of a few tokens whose law is a table, with a cache that can be cropped, for loops that write text.

target = TableModel(table)                  # logits [vocab, vocab, vocab]: of the next token, by the last two
session = session_of(target, prompt, ...)   # what drafts and the loop are given
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.speculate.session import Session
from compress.speculate.stopping import Stopping


class Criteria(list[Any]):
    """The most tokens of a text, beside other criteria."""

    def __init__(self, max_length: int, others: Sequence[Any] = ()) -> None:
        super().__init__(others)
        self.max_length = max_length


class TableModel:
    """Takes the place of the passes of a model: the cache is the list of its tokens."""

    model = cache = None

    def __init__(self, table: Tensor, cached: Sequence[int]) -> None:
        self.table, self.cached, self.rows = table, list(cached), list[int]()

    def forward(self, tokens: Sequence[int]) -> Tensor:
        self.rows.append(len(tokens))
        logits = []
        for token in tokens:
            self.cached.append(token)
            logits.append(self.table[self.cached[-2], self.cached[-1]])
        return torch.stack(logits)

    def crop(self, count: int) -> None:
        assert 0 <= count <= len(self.cached)
        del self.cached[len(self.cached) - count :]

    end_round = crop


def session_of(
    table: Tensor, prompt: Sequence[int], processors: Any = None, is_sampling: bool = True, seed: int = 0
) -> Session:
    """A session behind a prompt of two tokens or more, whose cache holds the prompt."""
    generator = torch.Generator().manual_seed(seed)
    passes: Any = TableModel(table, prompt)
    return Session(passes, torch.tensor([list(prompt)]), processors, is_sampling, generator)


def stopping(max_length: int, others: Sequence[Any] = ()) -> Stopping:
    return Stopping(Criteria(max_length, others))


def exact_law(
    table: Tensor, prompt: Sequence[int], count: int, processors: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Probabilities float64 [vocab, ...] of the `count` tokens behind a prompt, by all their combinations."""
    vocab = len(table)
    law = torch.zeros((vocab,) * count, dtype=torch.float64)
    for tokens in torch.cartesian_prod(*[torch.arange(vocab)] * count).view(-1, count).tolist():
        text, chance = list(prompt), 1.0
        for token in tokens:
            scores = processors(torch.tensor([text]), table[text[-2], text[-1]].clone()[None])[0]
            chance *= float(scores.double().softmax(-1)[token])
            text.append(token)
        law[tuple(tokens)] = chance
    return law
