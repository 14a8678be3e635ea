"""Count the tokens and bytes that reading takes, for measurements; nothing is counted unless a `Tally` is set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.kv.token_store import Store

if TYPE_CHECKING:
    from compress.kv.sparse.reading import Choice, Piece


@dataclass
class Tally:
    """What queries have read of the past, summed over sequences, KV heads and queries.

    Sinks, the tail and whatever is always read count; tokens of the same forward pass do not. Bytes are those of one
    query at a time, also where several queries were computed under a mask.
    """

    keys: float = 0  # tokens whose keys were read
    values: float = 0  # tokens whose values were read
    stored: float = 0  # tokens that dense attention would have read
    nbytes: float = 0  # of stored rows that were read
    extra: float = 0  # bytes that the method read of what it keeps itself: label channels, means of blocks
    dense: float = 0  # bytes that dense attention would have read

    def read(self, piece: Piece, choice: Choice | None, kinds: tuple[str, ...]) -> None:
        """Count keys, values or both of the queries of a piece; None: all candidates are read."""
        batch, heads, _, n, _ = piece.q.shape
        queries = batch * heads * n
        for kind in kinds:
            store = piece.layer.stores[kind]
            rest = queries * (len(store) - piece.count)
            chosen = queries * piece.count if choice is None else _numbers(choice)
            setattr(self, kind, getattr(self, kind) + rest + chosen)
            total = store.nbytes().total - store.nbytes().state
            self.dense += n * total
            self.nbytes += (
                n * total if choice is None else n * (total - _all(store, piece.count)) + _rows(store, choice)
            )
        if "keys" in kinds:
            self.stored += queries * len(piece.layer.stores["keys"])


def _numbers(choice: Choice) -> int:
    """Return how many tokens are chosen, summed over queries and heads."""
    return choice.places.numel() if choice.valid is None else int(choice.valid.expand_as(choice.places).sum())


def _all(store: Store, count: int) -> int:
    """Return the bytes of the rows of `count` tokens, all heads."""
    rows = {name: store.fields[name].view() for name in store.codec.fields}
    return sum(
        x.shape[0] * x.shape[1] * (count // field.tokens if field.tokens else 0) * _row(store, name)
        for (name, field), x in zip(store.codec.fields.items(), rows.values(), strict=True)
    )


def _rows(store: Store, choice: Choice) -> int:
    """Return the bytes of the rows of chosen tokens; a row that several of a head's tokens share counts once."""
    places, total = choice.places, 0
    if choice.valid is not None:
        places = places.masked_fill(~choice.valid.expand_as(places), -1)
    for name, field in store.codec.fields.items():
        index = torch.div(places, max(field.tokens, 1), rounding_mode="floor")
        if store.fields[name].view().shape[1] == 1:  # a row for all heads
            index = index.transpose(1, 2).flatten(2)
        ordered = index.sort(-1).values
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
        total += int((is_new & (ordered >= 0)).sum()) * _row(store, name) if field.tokens else 0
    return total


def _row(store: Store, name: str) -> int:
    """Return the bytes of one row of a head."""
    view = store.fields[name].view()
    return view[0, 0, 0].numel() * view.element_size()
