"""Attend to chosen tokens only: what all methods of reading share.

    reader = layer.reader                         # of one layer of one cache, made by a method's `build`
    found, mask = read(layer, query, ...)         # the output; or None, and the mask that leaves the chosen tokens

Candidates are the tokens that both keys and values hold coded, in whole units. A method gives each a score and `top`
takes the best of them: ceil(keep x candidates) for each query, where padding and tokens that the query may not see do
not count, so that a row of a batch reads what it reads alone. With keep = 1 nothing is chosen, and attention is dense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from compress import plugins
from compress.errors import CompressError, RecipeError
from compress.kv import static as calibrated
from compress.kv.codec import Spec
from compress.kv.settings import Reading
from compress.kv.sparse import picking
from compress.kv.sparse.tally import Tally
from compress.kv.token_store import Bytes, Store

if TYPE_CHECKING:
    from compress.kv.cache import CodedLayer

ROUNDING = 1e-6  # tokens by which keep x candidates may be above a whole number
STEP = 512  # tokens that are decoded at a time


class Choice(NamedTuple):
    """The tokens that queries read of the candidates, counted from the first coded token."""

    places: Tensor  # int64 [B, h, n, k], each at most once in a row
    valid: Tensor | None = None  # bool, of the same shape or with one head; None: all. The others are not read


@dataclass(frozen=True)
class Piece:
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

    def shared(self, scores: Tensor) -> Tensor:
        """Scores [B, h, query heads x n, m] float32 of tokens or blocks -> [B, h, n, m]: the mean over query heads of
        the softmax, 0 where a query may not see a token.
        """
        scores = scores.unflatten(2, self.q.shape[2:4])
        if self.allowed is not None and scores.shape[-1] == self.count:
            scores = scores.masked_fill(~self.allowed[:, None, None], -torch.inf)
        return scores.softmax(-1).nan_to_num_(0).mean(2)


class Reader:
    """Base of all methods of reading: the reader of one layer, with what it keeps of the sequences."""

    unit = 1  # candidates are a multiple of it
    drops_values = False  # `kept` says whose values are read

    def __init__(self, config: Any, spec: Spec) -> None:
        self.config, self.spec = config, spec
        self.tally: Tally | None = None  # set: what is read is counted

    def watch(self, q: Tensor) -> None:
        """See queries [B, h, query heads, n, width] float32, scaled, that read everything."""

    def choose(self, piece: Piece) -> Choice | None:
        """Choose among piece.count > 0 candidates; None: all are read."""
        return None

    def kept(self, p: Tensor) -> Tensor:
        """Of probabilities of candidates, [B, h, query heads, n, count]: whose values are read, bool [B, h, n, count].

        Asked only where `drops_values`; else all values whose keys are read are read, too.
        """
        raise NotImplementedError

    def crop(self, coded: int, removed: int) -> None:
        """Forget the newest tokens: `coded` coded ones stay, `removed` tokens were forgotten."""

    def select(self, index: Tensor) -> None:
        """Take rows of the batch by index, int64 [n]; a row may come more than once."""

    def held(self) -> list[Tensor]:
        """Return the tensors that it keeps of the sequences, as far as they are in use."""
        return []

    def static(self) -> list[Tensor]:
        """Return its calibrated tensors."""
        return []

    def nbytes(self) -> Bytes:
        """Return the bytes of what it keeps, as `extras`, and of its calibrated tensors."""
        held, static = (sum(x.numel() * x.element_size() for x in each) for each in (self.held(), self.static()))
        return Bytes(extras=held, static=static, allocated=held)


def check_keep(keep: float) -> None:
    """Raise ValueError unless `keep` is a fraction of tokens."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep {keep:g} is not above 0 and at most 1")


def top(scores: Tensor, piece: Piece, keep: float | Tensor) -> Choice | None:
    """Choose the tokens with the highest scores [B, h, n, count]; keep: their share, a number or [B, n].

    None where that is all of them.
    """
    count = piece.count
    if piece.allowed is None and not isinstance(keep, Tensor):
        budget = math.ceil(keep * count - ROUNDING)
        return None if budget >= count else Choice(scores.topk(budget, -1, sorted=False).indices)
    budgets = budget_of(piece, keep, scores)
    if piece.allowed is not None:
        scores = scores.masked_fill(~piece.allowed[:, None], -torch.inf)
    return best(scores, budgets)


def best(scores: Tensor, budgets: Tensor) -> Choice | None:
    """Choose the highest of scores [B, h, n, m], budgets int64 [B or 1, n] of them; None where that is all."""
    most = int(budgets.max())
    if int(budgets.min()) >= scores.shape[-1]:
        return None
    places = scores.topk(max(most, 1), -1).indices
    rank = torch.arange(places.shape[-1], device=places.device)
    return Choice(places, (rank < budgets[:, None, :, None]).expand(places.shape[0], 1, -1, -1))


def budget_of(piece: Piece, keep: float | Tensor, like: Tensor) -> Tensor:
    """Return how many tokens each query reads, int64 [B or 1, n]."""
    if piece.allowed is None:
        seen = torch.full((1, piece.q.shape[3]), piece.count, device=like.device, dtype=torch.float64)
    else:
        seen = piece.allowed.sum(-1, dtype=torch.float64)
    share = keep.double() if isinstance(keep, Tensor) else keep
    return (seen * share - ROUNDING).ceil().clamp(min=0).minimum(seen).long()


def decoded(store: Store, start: int, stop: int) -> Tensor:
    """Decode coded tokens, counted from the first one, as attention reads them: [B, h, stop - start, width].

    start and stop are multiples of the codec's granularity.
    """
    if not any(field.tokens == 0 for field in store.codec.fields.values()):
        return store.codec.dense(store._block(start, stop, 0)).float()
    parts = [
        store.codec.dense(block)[:, :, max(start - tokens.start, 0) : stop - tokens.start]
        for tokens, block in store.blocks(STEP)
        if tokens.start < stop and tokens.stop > start
    ]
    return torch.cat(parts, 2).float()


def candidates(layer: CodedLayer) -> int:
    """Return how many tokens may be chosen or left: those that keys and values hold coded, in whole units."""
    if layer.reader is None or not layer.stores:
        return 0
    stores = layer.stores.values()
    unit = math.lcm(layer.reader.unit, *(store.codec.granularity for store in stores))
    return min(store.coded for store in stores) // unit * unit


def read(
    layer: CodedLayer,
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    logits: tuple[float, float | None],
    start: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Attend to chosen tokens: query [B, H, n, width] from the query `start` of the pass on, mask in storage order.

    Return ([B, n, H, width], mask), or (None, mask) for the caller to read everything under that mask.
    Raises CompressError for a mask of its own for each head.
    """
    reader = layer.reader
    assert reader is not None
    if mask is not None and mask.shape[1] != 1:
        raise CompressError("kv_cache.read: attention with a mask for each head cannot choose tokens; remove read")
    stores, count = layer.stores, candidates(layer)
    first = stores["keys"].sink.length if stores else 0
    q = grouped(query, reader.spec.heads, logits[0])
    allowed = None if mask is None else _allowed(mask)[..., first : first + count]
    piece = Piece(layer, q, count, None if allowed is None or bool(allowed.all()) else allowed, start)
    if not count:
        reader.watch(q)
        return None, mask
    choice = reader.choose(piece)
    ways = [picking.picker(store.codec) for store in stores.values()]
    picks = choice is not None or reader.drops_values
    if picks and query.shape[2] == 1 and all(ways) and (mask is None or mask.dtype == torch.bool):
        return picking.attend(piece, choice, ways, new, mask, logits[1]).to(query.dtype), mask
    if reader.tally is not None:
        kinds = ("keys",) if reader.drops_values else ("keys", "values")
        reader.tally.read(piece, choice, kinds)
    if choice is None:
        return None, mask
    tokens = len(stores["keys"]) + (0 if new is None else new[0].shape[2])
    return None, _masked(mask, choice, piece, (first, tokens))


def forget_values(layer: CodedLayer, p: Tensor, count: int) -> None:
    """Set probabilities [B, h, query heads x count, tokens] to 0, in place, where the method reads no value."""
    reader = layer.reader
    if reader is None or not reader.drops_values:
        return
    first, number = layer.stores["keys"].sink.length if layer.stores else 0, candidates(layer)
    if number:
        own = p[..., first : first + number].unflatten(2, (-1, count))
        kept = reader.kept(own)
        if reader.tally is not None:
            places = torch.arange(number, device=p.device).expand_as(kept)
            reader.tally.read(Piece(layer, own, number, None, 0), Choice(places, kept), ("values",))
        own.masked_fill_(~kept[:, :, None], 0)


def grouped(query: Tensor, heads: int, scaling: float) -> Tensor:
    """query [B, H, n, width] -> [B, h, query heads of a KV head, n, width] float32, scaled."""
    return (query.float() * scaling).unflatten(1, (heads, -1))


def _allowed(mask: Tensor) -> Tensor:
    """mask [B or 1, 1, n, tokens] -> bool [B or 1, n, tokens]."""
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2


def _masked(mask: Tensor | None, choice: Choice, piece: Piece, ends: tuple[int, int]) -> Tensor:
    """Return the mask [B, H, n, tokens] without the candidates that were not chosen; ends: sinks, and all tokens."""
    batch, heads, groups, n, _ = piece.q.shape
    chosen = torch.zeros(batch, heads, n, piece.count, dtype=torch.bool, device=piece.q.device)
    valid = torch.ones_like(choice.places, dtype=torch.bool) if choice.valid is None else choice.valid
    chosen.scatter_(3, choice.places, valid.expand_as(choice.places))
    whole = chosen.new_ones(batch, heads, n, ends[1])
    whole[..., ends[0] : ends[0] + piece.count] = chosen
    whole = whole.repeat_interleave(groups, 1)
    if mask is None:
        return whole
    if mask.dtype == torch.bool:
        return whole & mask
    return mask.expand_as(whole).masked_fill(~whole, torch.finfo(mask.dtype).min)


def build_reader(reading: Reading, spec: Spec, static: Mapping[str, Tensor], is_fused: bool) -> Reader:
    """Build what chooses the tokens that a layer reads; spec: of its keys; static: tensors of all layers.

    Raises RecipeError where attention reads no codes, and for calibrated tensors that are not those of the layer.
    """
    if not is_fused:
        raise RecipeError("kv_cache.read: only attention that reads stored codes can choose tokens; use path='fused'")
    spec = replace(spec, kind="read")
    own = calibrated.of_checked(reading, static, spec)
    built: Reader = plugins.load("read", reading.method).build(reading.config, spec, own)
    return built
