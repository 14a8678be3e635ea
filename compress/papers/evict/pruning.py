"""Hold what the layers of a cache know of a prompt that loses tokens on its way through them (lazyllm.py).

Where tokens are dropped behind a layer, a `Revival` may keep their hidden states. In a later step of one token that
layer scores all that it caches. Those that stay and wait there join the new token and go through the layers behind,
which cache them from then on; at the next layer that drops tokens they go on, or are left there. A token is computed
once in each layer at most. One sequence, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.kv.evict.placing import align_rows

Turns = tuple[Tensor, Tensor]  # cos and sin [1, n, rotary width]


class Revival:
    """What the layers of one cache know of dropped tokens."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything, before a prompt."""
        self.left: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> hidden states [1, p, hidden], columns int64 [p]
        self.turns: Turns | None = None  # of the whole prompt
        self.positions: Tensor | None = None  # int64 [1, tokens] of the whole prompt
        self.is_stepping = False
        self.columns: Tensor | None = None  # int64 [r]: of tokens on their way in this step, beside the new one
        self._coming: tuple[int, Tensor, Tensor, Tensor] | None = None  # layer, who goes on, and rows that join them

    def step(self, tokens: int) -> None:
        """Begin a step of so many new tokens."""
        self.is_stepping, self.columns, self._coming = tokens == 1 and bool(self.left), None, None

    @property
    def count(self) -> int:
        """Return how many tokens go through the layers beside the new one."""
        return 0 if self.columns is None else len(self.columns)

    def leave(self, layer: int, hidden: Tensor, columns: Tensor) -> None:
        """Keep hidden states [1, p, hidden] of tokens that are dropped behind a layer."""
        if layer in self.left:
            before, known = self.left[layer]
            hidden, columns = torch.cat((before, hidden), 1), torch.cat((known, columns))
        self.left[layer] = hidden, columns

    def choose(self, layer: int, chosen: Tensor) -> None:
        """Let the tokens of these columns int64 go on behind a layer, of those that wait there or are on their way."""
        if self.columns is None:
            self.columns = chosen.new_empty(0)
        goes = torch.isin(self.columns, chosen)
        hidden, columns = self.left.get(layer, (None, chosen.new_empty(0)))
        joins = torch.isin(columns, chosen)
        if hidden is not None and bool(joins.any()):
            self.left[layer] = hidden[:, ~joins], columns[~joins]
        elif bool(goes.all()):
            return  # nobody comes, nobody leaves
        waiting = torch.empty(0) if hidden is None else hidden[:, joins]
        self._coming = layer, goes, waiting, columns[joins]

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the rows for the next block from those of the last one [1, r + 1, hidden], the new token last."""
        if self._coming is None or self.columns is None:
            return hidden
        layer, goes, waiting, columns = self._coming
        self._coming = None
        rows, new = hidden[:, :-1], hidden[:, -1:]
        if not bool(goes.all()):
            self.leave(layer, rows[:, ~goes], self.columns[~goes])
        self.columns = torch.cat((columns, self.columns[goes]))
        parts = [rows[:, goes], new]
        return torch.cat([waiting.to(hidden.dtype), *parts] if len(columns) else parts, 1)

    def with_new(self, whole: Tensor | None, new: Any) -> Any:
        """Return rows [1, r + 1, ...] of the tokens on their way and the new one, from those of the prompt."""
        if whole is None or self.columns is None or not isinstance(new, Tensor):
            return new
        return torch.cat((whole[:1, self.columns], new[:1]), 1)

    def mask(self, stored: Tensor, column: int, like: Any) -> Tensor:
        """Return the mask [1, 1, r + 1, stored + r + 1] of a layer that stores these columns int64 [stored].

        like: the model's own; where that is added, this is, too.
        """
        assert self.columns is not None
        queries = torch.cat((self.columns, self.columns.new_tensor([column])))
        is_seen = (torch.cat((stored, queries)) <= queries[:, None])[None, None]
        if isinstance(like, Tensor) and like.dtype != torch.bool:
            return torch.zeros_like(is_seen, dtype=like.dtype).masked_fill_(~is_seen, torch.finfo(like.dtype).min)
        return is_seen

    @property
    def nbytes(self) -> int:
        """Return the bytes of all that is kept between steps."""
        tensors = [x for both in self.left.values() for x in both]
        tensors += [*(self.turns or ()), *([] if self.positions is None else [self.positions])]
        return sum(x.numel() * x.element_size() for x in tensors)


@dataclass
class PromptPruning:
    """What the layers of one cache know of the prompt while it goes through them."""

    stays: dict[int, float]  # layer -> fraction of the prompt that stays behind it
    tokens: int = 0  # columns of the prompt, pads included
    columns: Tensor | None = None  # int64 [B, m]: of the tokens that are left; None: all
    pads: Tensor | None = None  # int64 [B]: first of these columns that are filled up
    moves: Tensor | None = None  # int64 [B, m]: places of these among the tokens of the layer that dropped some
    joins: Tensor | None = None  # int64 [B, n]: of each token of that layer the place that its hidden state joins;
    # None: each its own
    turns: tuple[Tensor, Tensor] | None = None  # cos and sin [B or 1, tokens, rotary width] of the whole prompt
    positions: Tensor | None = None  # int64 [B or 1, tokens]
    sliced: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # arguments of blocks: as given, of what is left
    revival: Revival | None = None  # where dropped tokens may come back
    blocks: list[nn.Module] = field(default_factory=list)  # of the decoder, found before the prompt

    def begin(self, tokens: int) -> None:
        """Begin with a prompt of so many columns."""
        self.forget()
        self.tokens = tokens
        if self.revival is not None:
            self.revival.begin()

    def forget(self) -> None:
        """Free what later passes do not need."""
        self.columns, self.pads, self.moves, self.joins, self.turns, self.positions = (None,) * 6
        self.sliced.clear()

    def drop(self, chosen: list[Tensor], device: torch.device) -> None:
        """Leave these tokens of each row, places int64 in token order."""
        index, pads = align_rows([[row] for row in chosen])
        self.moves, self.pads = index[:, 0].to(device), pads[:, 0].to(device)
        before = torch.arange(self.tokens, device=device)[None] if self.columns is None else self.columns
        self.columns = before.expand(len(self.moves), -1).gather(1, self.moves)
        self.sliced.clear()
