"""Choose the tokens that attention reads: what all methods share.

Candidates are the tokens that both keys and values hold coded, in whole units. A method gives each a score and `top`
takes the best of them: ceil(keep x candidates) for each query, where padding and tokens that the query may not see do
not count, so that a row of a batch reads what it reads alone. With keep = 1 nothing is chosen, and attention is dense.

A method subclasses `Reader`; compress/kv/sparse/layer.py attends to what it chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kv.codec import Spec
from compress.kv.layer import CodedLayer
from compress.kv.token_store import Bytes, Store

MAX_ROUNDING = 1e-6  # tokens: keep x candidates may be so much above a whole number
TOKENS_PER_DECODE = 512


class TokenChoice(NamedTuple):
    """The tokens that queries read of the candidates, counted from the first coded token."""

    places: Tensor  # int64 [B, h, n, k], each at most once in a row
    valid: Tensor | None = None  # bool, of the same shape or with one head; None: all. The others are not read


@dataclass(frozen=True)
class QueryPiece:
    """Queries of one attention call, and the tokens that they choose from."""

    layer: CodedLayer
    q: Tensor  # [B, h, query heads of a KV head, n, width] float32, scaled
    count: int  # candidates
    allowed: Tensor | None  # bool [B or 1, n, count]: the candidates that a query may see; None: all
    start: int  # of these queries in the forward pass

    @property
    def rows(self) -> Tensor:
        """The queries as rows of one product, [B, h, query heads x n, width]."""
        return self.q.flatten(2, 3)

    def mean_softmax(self, scores: Tensor) -> Tensor:
        """Scores [B, h, query heads x n, m] float32 of tokens or blocks -> [B, h, n, m]: the mean over query heads of
        the softmax, 0 where a query may not see a token.
        """
        scores = scores.unflatten(2, self.q.shape[2:4])
        if self.allowed is not None and scores.shape[-1] == self.count:
            scores = scores.masked_fill(~self.allowed[:, None, None], -torch.inf)
        return scores.softmax(-1).nan_to_num_(0).mean(2)


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

    def read(self, piece: QueryPiece, choice: TokenChoice | None, kinds: tuple[str, ...]) -> None:
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


def _numbers(choice: TokenChoice) -> int:
    """Return how many tokens are chosen, summed over queries and heads."""
    return choice.places.numel() if choice.valid is None else int(choice.valid.expand_as(choice.places).sum())


def _all(store: Store, count: int) -> int:
    """Return the bytes of the rows of `count` tokens, all heads."""
    rows = {name: store.fields[name].view() for name in store.codec.fields}
    return sum(
        x.shape[0] * x.shape[1] * (count // field.tokens if field.tokens else 0) * _row(store, name)
        for (name, field), x in zip(store.codec.fields.items(), rows.values(), strict=True)
    )


def _rows(store: Store, choice: TokenChoice) -> int:
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


class Reader:
    """Base of all methods of reading: the reader of one layer, with what it keeps of the sequences."""

    unit = 1  # candidates are a multiple of it
    drops_values = False  # `reads_values` says whose values are read

    def __init__(self, config: Any, spec: Spec) -> None:
        self.config, self.spec = config, spec
        self.tally: Tally | None = None  # set: what is read is counted

    def watch(self, q: Tensor) -> None:
        """See queries [B, h, query heads, n, width] float32, scaled, that read everything."""

    def choose(self, piece: QueryPiece) -> TokenChoice | None:
        """Choose among piece.count > 0 candidates; None: all are read."""
        return None

    def reads_values(self, p: Tensor) -> Tensor:
        """Of probabilities of candidates, [B, h, query heads, n, count]: whose values are read, bool [B, h, n, count].

        Asked only where `drops_values`; else all values whose keys are read are read, too.
        """
        raise NotImplementedError

    def crop(self, coded: int, removed: int) -> None:
        """Forget the newest tokens: `coded` coded ones stay, `removed` tokens were forgotten."""

    def select(self, index: Tensor) -> None:
        """Take rows of the batch by index, int64 [n]; a row may come more than once."""

    def kept_tensors(self) -> list[Tensor]:
        """Return the tensors that it keeps of the sequences, as far as they are in use."""
        return []

    def static(self) -> list[Tensor]:
        """Return its calibrated tensors."""
        return []

    def nbytes(self) -> Bytes:
        """Return the bytes of what it keeps, as `extras`, and of its calibrated tensors."""
        groups = self.kept_tensors(), self.static()
        kept, static = (sum(x.numel() * x.element_size() for x in group) for group in groups)
        return Bytes(extras=kept, static=static, allocated=kept)


def check_keep(keep: float) -> None:
    """Raise ValueError unless `keep` is a fraction of tokens."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep {keep:g} is not above 0 and at most 1")


def top(scores: Tensor, piece: QueryPiece, keep: float | Tensor) -> TokenChoice | None:
    """Choose the tokens with the highest scores [B, h, n, count]; keep: their share, a number or [B, n].

    None where that is all of them.
    """
    count = piece.count
    if piece.allowed is None and not isinstance(keep, Tensor):
        budget = math.ceil(keep * count - MAX_ROUNDING)
        return None if budget >= count else TokenChoice(scores.topk(budget, -1, sorted=False).indices)
    budgets = budget_of(piece, keep, scores)
    if piece.allowed is not None:
        scores = scores.masked_fill(~piece.allowed[:, None], -torch.inf)
    return best(scores, budgets)


def best(scores: Tensor, budgets: Tensor) -> TokenChoice | None:
    """Choose the highest of scores [B, h, n, m], budgets int64 [B or 1, n] of them; None where that is all."""
    most = int(budgets.max())
    if int(budgets.min()) >= scores.shape[-1]:
        return None
    places = scores.topk(max(most, 1), -1).indices
    rank = torch.arange(places.shape[-1], device=places.device)
    return TokenChoice(places, (rank < budgets[:, None, :, None]).expand(places.shape[0], 1, -1, -1))


def budget_of(piece: QueryPiece, keep: float | Tensor, like: Tensor) -> Tensor:
    """Return how many tokens each query reads, int64 [B or 1, n]."""
    if piece.allowed is None:
        seen = torch.full((1, piece.q.shape[3]), piece.count, device=like.device, dtype=torch.float64)
    else:
        seen = piece.allowed.sum(-1, dtype=torch.float64)
    share = keep.double() if isinstance(keep, Tensor) else keep
    return (seen * share - MAX_ROUNDING).ceil().clamp(min=0).minimum(seen).long()


def decode_tokens(store: Store, start: int, stop: int) -> Tensor:
    """Decode coded tokens, counted from the first one, as attention reads them: [B, h, stop - start, width].

    start and stop are multiples of the codec's granularity.
    """
    if not any(field.tokens == 0 for field in store.codec.fields.values()):
        return store.codec.dense(store._block(start, stop, 0)).float()
    parts = [
        store.codec.dense(block)[:, :, max(start - tokens.start, 0) : stop - tokens.start]
        for tokens, block in store.blocks(TOKENS_PER_DECODE)
        if tokens.start < stop and tokens.stop > start
    ]
    return torch.cat(parts, 2).float()


def group_queries(query: Tensor, heads: int, scaling: float) -> Tensor:
    """query [B, H, n, width] -> [B, h, query heads of a KV head, n, width] float32, scaled."""
    return (query.float() * scaling).unflatten(1, (heads, -1))
