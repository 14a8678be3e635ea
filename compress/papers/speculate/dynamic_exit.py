"""Drafts of the first blocks alone, as many as what is accepted asks for (DEL, arXiv 2504.05598).

The hidden states of each check show what every exit would have written: norm and head of the model, applied behind that
block. Their agreement with the target's choices, newest first, is an estimate of the acceptance of each exit. The exit
with the largest expected speed-up drafts, with c = blocks that run over all, and the best length for it.

Where we differ: the paper is for checkpoints that were trained to exit early (LayerSkip, arXiv 2404.16710), and lets
the check run the remaining blocks only; here the check is an ordinary pass, so that it also serves other drafts. Only
each `spacing`-th block is an exit, and each `period`-th check is looked at, since the head of a small model is a large
part of a step. Length and confidence are the loop's matter (compress/speculate/length.py).

On checkpoints without such training early exits are accepted seldom (docs/results); sets of sublayers are then better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import RecipeError, UnsupportedModelError
from compress.runtime.bodies import blocks_of, bodies
from compress.runtime.bypass import early_exit, sublayers_of
from compress.speculate.cost import best_length
from compress.speculate.drafting import Reduction, Verified
from compress.speculate.session import Session
from compress.speculate.skipping import Skip

PART = "skip"
PRIOR_TOKENS = 4.0  # weight of the prior: an exit behind k of L blocks is accepted with probability k / L


@dataclass(frozen=True)
class Config:
    """Which exits there are, and how long what was accepted counts."""

    spacing: int = 2  # blocks between two exits
    period: int = 4  # checks between two that are looked at
    memory: float = 0.95  # weight of what was counted, after each further token

    def __post_init__(self) -> None:
        if self.spacing < 1 or self.period < 1:
            raise ValueError(f"spacing {self.spacing} or period {self.period} is not positive")
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory {self.memory} is not above 0 and up to 1")


class DynamicExit(Skip):
    """The first blocks of a model."""

    def __init__(self, config: Config, model: Any) -> None:
        self.config, self.body = config, next(bodies(model))
        blocks = blocks_of(self.body)
        assert blocks is not None
        self.blocks = len(blocks)
        self.exits = list(range(config.spacing, self.blocks, config.spacing))
        if not self.exits:
            raise RecipeError(f"dynamic_exit: {self.blocks} blocks have no exit at spacing {config.spacing}; lower it")
        self.hits = torch.tensor([PRIOR_TOKENS * each / self.blocks for each in self.exits], dtype=torch.float64)
        self.tries = torch.full_like(self.hits, PRIOR_TOKENS)
        self._norm, self._checks, self.wants_hidden = _final_norm(self.body), 0, True
        self._sets = [early_exit(model, each) for each in self.exits]
        super().__init__(self._sets[self.best])

    @property
    def best(self) -> int:
        """Return which exit has the largest expected speed-up."""
        shares = (self.hits / self.tries).tolist()
        gains = [best_length(share, each / self.blocks)[1] for share, each in zip(shares, self.exits, strict=True)]
        most = max(gains)
        return gains.index(most) if most > 1 else len(gains) - 1

    def observe(self, session: Session, verified: Verified) -> None:
        """Take note of what each exit would have written."""
        if verified.hidden is not None:
            rows = verified.accepted + 1  # those behind a rejected token are of another text
            states = torch.stack([verified.hidden[each][:rows] for each in self.exits])
            written = exit_tokens(session.model, self._norm, states)
            for row, token in enumerate(verified.logits[:rows].argmax(-1).tolist()):
                self.hits = self.config.memory * self.hits + (written[:, row] == token).double().cpu()
                self.tries = self.config.memory * self.tries + 1
            self.sublayers = self._sets[self.best]
        self._checks += 1
        self.wants_hidden = self._checks % self.config.period == 0


@torch.no_grad()
def exit_tokens(model: Any, norm: nn.Module | None, states: Tensor) -> Tensor:
    """Return the likeliest tokens of states [exits, rows, hidden] behind some blocks, int64 [exits, rows]."""
    states = states if norm is None else norm(states)
    tokens: Tensor = model.get_output_embeddings()(states).argmax(-1)
    return tokens


def _final_norm(body: nn.Module) -> nn.Module | None:
    """Return the module without children that runs behind the blocks; None if there is none."""
    behind = list(body.children())
    places = [i for i, each in enumerate(behind) if isinstance(each, nn.ModuleList)]
    norms = [each for each in behind[places[-1] + 1 :] if any(True for _ in each.parameters())]
    return norms[0] if norms else None


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a model with too few blocks."""
    if not sublayers_of(session.model) or session.model.get_output_embeddings() is None:
        raise UnsupportedModelError("dynamic_exit: the model has no head")
    return DynamicExit(config, session.model)
