"""Show drafts one call of generate: the model, the cache, the tokens so far, and how tokens are chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.speculate.passes import Passes
from compress.speculate.statistics import Statistics
from compress.speculate.timings import Timings

ROOM = 256  # tokens that are made room for at once


class Session:
    """One sequence that is being written. `tokens` are all tokens so far; all but the newest are in the cache."""

    def __init__(
        self,
        passes: Passes,
        ids: Tensor,
        processors: Any,
        is_sampling: bool,
        generator: torch.Generator | None,
    ) -> None:
        """ids: int64 [1, tokens], the prompt. processors: of transformers. generator: None for torch's own."""
        self.passes, self.processors, self.is_sampling, self.generator = passes, processors, is_sampling, generator
        self.model, self.cache = passes.model, passes.cache
        self.stop_tokens: Collection[int] = ()  # behind which nothing is drafted
        self.tokens: list[int] = ids[0].tolist()
        self.timings, self.statistics = Timings(), Statistics()
        self.threshold = 0.0  # drafts stop where the product of their largest probabilities is below it
        self._ids = torch.empty(1, len(self.tokens) + ROOM, dtype=torch.int64, device=ids.device)
        self._ids[:, : len(self.tokens)] = ids

    @property
    def ids(self) -> Tensor:
        """The tokens so far, int64 [1, tokens]."""
        return self._ids[:, : len(self.tokens)]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens that the target has accepted or chosen."""
        self._write(tokens)
        self.tokens += tokens

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Run a pass of tokens that follow the cache, which they are added to; return logits [tokens, vocab].

        The first of the tokens is the newest of `self.tokens` if nothing was drafted.
        """
        return self.passes.forward(tokens)

    def forward_hidden(self, tokens: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run a pass like `forward`; return the hidden states, too: of embeddings and blocks, [tokens, width] each."""
        return self.passes.forward_hidden(tokens)

    def crop(self, count: int) -> None:
        """Take the last `count` tokens out of the cache."""
        self.passes.crop(count)

    def prefix(self, drafted: Sequence[int]) -> Tensor:
        """Return the tokens so far with drafted ones behind them, int64 [1, tokens + drafted]; valid until the next."""
        self._write(drafted)
        return self._ids[:, : len(self.tokens) + len(drafted)]

    def scores(self, logits: Tensor, drafted: Sequence[int]) -> Tensor:
        """Return the logits float32 [vocab] of the token behind the drafted ones as the processors change them."""
        if not self.processors:
            return logits
        scores: Tensor = self.processors(self.prefix(drafted), logits.clone().unsqueeze(0))
        return scores[0]

    def law(self, logits: Tensor, drafted: Sequence[int]) -> Tensor:
        """Return the probabilities float32 [vocab] of the token behind the drafted ones, after all processors."""
        return self.scores(logits, drafted).softmax(-1)

    def choose(self, logits: Tensor, drafted: Sequence[int]) -> tuple[int, Tensor | None]:
        """Return the next token by logits [vocab], and the law that it was drawn from, None if the likeliest is taken.

        drafted: the tokens between `self.tokens` and it.
        """
        if not self.is_sampling:
            return int(self.scores(logits, drafted).argmax()), None
        law = self.law(logits, drafted)
        return self.draw(law), law

    def draw(self, weights: Tensor) -> int:
        """Return a token drawn by weights [vocab] that need not sum to one; NumericalError where they have no sum."""
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = float(cumulative[-1])
        if not 0 < total < math.inf:
            raise NumericalError(
                "the probabilities of a token are not finite, or all 0; the model's weights are "
                "damaged or overflow, or a processor of generate forbids every token"
            )
        chosen = torch.searchsorted(cumulative, self.uniform() * total, right=True)
        return min(int(chosen), self.last_possible(weights))

    def uniform(self) -> float:
        """Return a random number in [0, 1)."""
        device = "cpu" if self.generator is None else self.generator.device
        return torch.rand((), dtype=torch.float64, generator=self.generator, device=device).item()

    @staticmethod
    def last_possible(weights: Tensor) -> int:
        """Return the last token that has a weight: where rounding would lead beyond it."""
        return int(weights.nonzero()[-1]) if not weights[-1] else len(weights) - 1

    def _write(self, tokens: Sequence[int]) -> None:
        begin, end = len(self.tokens), len(self.tokens) + len(tokens)
        if end > self._ids.shape[1]:
            self._ids = torch.cat([self._ids, self._ids.new_empty(1, end + ROOM - self._ids.shape[1])], 1)
        if tokens:
            self._ids[0, begin:end] = torch.tensor(tokens, dtype=torch.int64)
