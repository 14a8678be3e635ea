"""Attend to chosen tokens only: the layer of a cache whose attention reads a part of the stored tokens.

Where one token is read and the codec keeps a row for each token, the rows of the chosen tokens are gathered, and only
these are read. A row is copied whole, as it is stored; KIVI's keys bring the scales and minima of their groups along.
Gathered rows are blocks like any other: compiled readers take them where there are some. Several queries at once, and
codecs whose tokens share rows, read everything under a mask: the same numbers, no traffic saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress import plugins
from compress.errors import CompressError, RecipeError
from compress.kernels import contract, dispatch
from compress.kv import static as calibrated
from compress.kv.codec import Block, Codec
from compress.kv.codecs import fp8, identity, kivi, lloyd
from compress.kv.layer import CodedLayer, KVCache, Logits
from compress.kv.settings import reading_layers
from compress.kv.sparse.reader import QueryPiece, Reader, TokenChoice, group_queries
from compress.kv.token_store import Bytes, Store

DECODERS: Sequence[Callable[..., Any]] = (
    kivi.ByToken.decode,
    kivi.ByChannel.decode,
    lloyd.Lloyd.decode,
    identity.Identity.decode,
    fp8.Fp8.decode,
)


class ReadingLayer(CodedLayer):
    """A `CodedLayer` whose attention reads chosen tokens."""

    def __init__(self, index: int, cache: KVCache) -> None:
        super().__init__(index, cache)
        self.reader: Reader | None = None  # chooses what attention reads; None: everything is read

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the stores, and the reader. RecipeError where attention reads no codes, and for tensors of others."""
        super().lazy_initialization(key_states, value_states)
        if self.reader is not None or not reading_layers(self.cache.codings[self.index : self.index + 1]):
            return
        if self.cache.path != "fused":
            raise RecipeError(
                "kv_cache.read: only attention that reads stored codes can choose tokens; use path='fused'"
            )
        self.reader = self.make_reader()

    def make_reader(self) -> Reader:
        """Return what chooses tokens, new; RecipeError for calibrated tensors that are not those of the layer."""
        reading, spec = self.cache.reading, replace(self.stores["keys"].codec.spec, kind="read")
        assert reading is not None, "it chose this class of layers"
        static = calibrated.of_checked(reading, self.cache.static, spec)
        reader: Reader = plugins.load("read", reading.method).build(reading.config, spec, static)
        return reader

    def reset(self) -> None:
        super().reset()
        self.reader = None

    def crop(self, tokens_to_remove: int) -> None:
        before = self.seen
        super().crop(tokens_to_remove)
        if self.reader is not None:
            self.reader.crop(min(store.coded for store in self.stores.values()), before - self.seen)

    def _select(self, index: Tensor) -> None:
        super()._select(index)
        if self.reader is not None:
            self.reader.select(index)

    def nbytes(self) -> Bytes:
        return super().nbytes() + (Bytes() if self.reader is None else self.reader.nbytes())

    @property
    def chooses(self) -> bool:
        return self.reader is not None

    def watch(self, query: Tensor, scaling: float) -> None:
        if self.reader is not None:
            self.reader.watch(group_queries(query, self.reader.spec.heads, scaling))

    def candidates(self) -> int:
        """Return how many tokens may be chosen or left: those that keys and values hold coded, in whole units."""
        if self.reader is None or not self.stores:
            return 0
        stores = self.stores.values()
        unit = math.lcm(self.reader.unit, *(store.codec.granularity for store in stores))
        return min(store.coded for store in stores) // unit * unit

    def read_chosen(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        logits: Logits,
        start: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        reader = self.reader
        assert reader is not None
        if mask is not None and mask.shape[1] != 1:
            raise CompressError("kv_cache.read: attention with a mask for each head cannot choose tokens; remove read")
        stores, count = self.stores, self.candidates()
        first = stores["keys"].sink.length if stores else 0
        q = group_queries(query, reader.spec.heads, logits.scaling)
        allowed = None if mask is None else _allowed_tokens(mask)[..., first : first + count]
        piece = QueryPiece(self, q, count, None if allowed is None or bool(allowed.all()) else allowed, start)
        if not count:
            reader.watch(q)
            return None, mask
        choice = reader.choose(piece)
        pickers = [picker(store.codec) for store in stores.values()]
        picks = choice is not None or reader.drops_values
        if picks and query.shape[2] == 1 and all(pickers) and (mask is None or mask.dtype == torch.bool):
            return attend(reader, piece, choice, pickers, new, mask, logits.softcap).to(query.dtype), mask
        if reader.tally is not None:
            reader.tally.read(piece, choice, ("keys",) if reader.drops_values else ("keys", "values"))
        if choice is None:
            return None, mask
        tokens = len(stores["keys"]) + (0 if new is None else new[0].shape[2])
        return None, _mask_out(mask, choice, piece, (first, tokens))

    def forget_values(self, p: Tensor, count: int) -> None:
        reader = self.reader
        if reader is None or not reader.drops_values:
            return
        first, number = self.stores["keys"].sink.length if self.stores else 0, self.candidates()
        if not number:
            return
        candidates = p[..., first : first + number].unflatten(2, (-1, count))
        is_read = reader.reads_values(candidates)
        if reader.tally is not None:
            places = torch.arange(number, device=p.device).expand_as(is_read)
            reader.tally.read(QueryPiece(self, candidates, number, None, 0), TokenChoice(places, is_read), ("values",))
        candidates.masked_fill_(~is_read[:, :, None], 0)


def _allowed_tokens(mask: Tensor) -> Tensor:
    """mask [B or 1, 1, n, tokens] -> bool [B or 1, n, tokens]."""
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2


def _mask_out(mask: Tensor | None, choice: TokenChoice, piece: QueryPiece, ends: tuple[int, int]) -> Tensor:
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


def picker(codec: Codec) -> Codec | None:
    """Return what reads gathered rows of a codec: itself, or of KIVI's keys one whose groups are single tokens.

    None where tokens share rows, or are not known to stand alone.
    """
    if type(codec).decode not in DECODERS or codec.rope == "pre":
        return None
    if not isinstance(codec, kivi.ByChannel):
        return codec
    single = copy.copy(codec)
    single.granularity = single.group = 1
    single.layout = codec.layout._replace(group=1)
    return single


def gather(store: Store, places: Tensor) -> Block:
    """Return the rows of coded tokens, places int64 [B, h, k], and the state of the sequences."""
    if store.fetch is not None:
        return {**store.state, **store.fetch(places)}
    rows = {
        name: take(store.fields[name].view(), places // field.tokens if field.tokens > 1 else places)
        for name, field in store.codec.fields.items()
    }
    return {**store.state, **rows}


def take(x: Tensor, places: Tensor) -> Tensor:
    """x [B, h, n, ...] with contiguous rows, places int64 [B, h, k] -> [B, h, k, ...]."""
    batch, heads, count = x.shape[:3]
    row, inner = x.stride(2), x[0, 0, 0].numel()
    if batch * heads == 1 or (x.stride(0) % row == 0 and x.stride(1) % row == 0 and row == inner):
        last = (batch - 1) * x.stride(0) + (heads - 1) * x.stride(1) + count * row
        flat = x.as_strided((last // row, inner), (row, 1))
        ends = (
            torch.arange(batch, device=x.device)[:, None] * (x.stride(0) // row)
            + torch.arange(heads, device=x.device) * (x.stride(1) // row)
        )[..., None]
        return flat.index_select(0, (places + ends).flatten()).view(*places.shape, *x.shape[3:])
    index = places.reshape(*places.shape, *[1] * (x.dim() - 3)).expand(*places.shape, *x.shape[3:])
    return x.gather(2, index)


def attend(
    reader: Reader,
    piece: QueryPiece,
    choice: TokenChoice | None,
    pickers: Sequence[Codec | None],
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attend to the sinks, chosen candidates (None: all) and all later tokens -> [B, 1, H, value width] float32.

    pickers: of keys and values; mask: bool [B or 1, 1, 1, tokens] in storage order.
    """
    if reader.tally is not None:
        reader.tally.read(piece, choice, ("keys",))
    q, stores = piece.rows, (piece.layer.stores["keys"], piece.layer.stores["values"])
    (sink_keys, later_keys), (sink_values, later_values) = (
        _exact_tokens(store, piece.count, q, None if new is None else new[i]) for i, store in enumerate(stores)
    )
    chosen = _key_scores(stores[0], pickers[0], q, choice, piece.count)
    scores = torch.cat((q @ sink_keys.mT, chosen, q @ later_keys.mT), -1)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    sizes = [sink_keys.shape[2], chosen.shape[3], later_keys.shape[2]]
    seen = _seen_tokens(piece, choice, mask, sizes)
    if seen is not None:
        scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
    before, inner, after = scores.softmax(-1).split(sizes, -1)
    mixed = before @ sink_values + after @ later_values + _mix_values(reader, piece, pickers[1], choice, inner)
    return mixed.flatten(1, 2)[:, None]


def _exact_tokens(store: Store, count: int, q: Tensor, new: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sinks, and all tokens behind the candidates, with those of `new`: [B, h, tokens, width] float32."""
    none = q.new_empty(*q.shape[:2], 0, store.codec.spec.width)
    sinks = store.sink.view().float() if store.sink.length else none
    later = [] if store.coded == count else [store.codec.dense(store._block(count, store.coded, 0)).float()]
    later += [store.tail.view().float()] if store.tail.length else []
    later += [] if new is None else [new.float()]
    return sinks, torch.cat([none, *later], 2)


def _key_scores(store: Store, picked: Codec | None, q: Tensor, choice: TokenChoice | None, count: int) -> Tensor:
    """Return the products of q [B, h, m, width] with the keys of the chosen candidates, [B, h, m, chosen]."""
    assert picked is not None
    if choice is None:
        whole = q.new_empty(*q.shape[:3], len(store))
        store.scores(q, whole)
        return whole[..., store.sink.length : store.sink.length + count]
    places = choice.places[:, :, 0]
    block = gather(store, places)
    if isinstance(picked, lloyd.Lloyd):
        out = q.new_empty(*q.shape[:3], places.shape[-1])
        picked.write_scores(picked.query(q, store.state), block, out)
        return out
    return q @ decode_gathered(picked, block, places).mT


def _seen_tokens(piece: QueryPiece, choice: TokenChoice | None, mask: Tensor | None, sizes: list[int]) -> Tensor | None:
    """Return which of the sinks, chosen and later tokens count, bool [B, h or 1, 1, tokens]; None: all."""
    valid = None if choice is None else choice.valid
    if mask is None and valid is None:
        return None
    batch = piece.q.shape[0]
    if mask is None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=piece.q.device)
        before = inner = after = mask
    else:
        before, inner, after = mask.split([sizes[0], piece.count, mask.shape[-1] - sizes[0] - piece.count], -1)
    if choice is not None:
        inner = torch.ones_like(choice.places, dtype=torch.bool) if valid is None else valid
    heads = inner.shape[1]
    masks = (before, inner, after)
    return torch.cat(
        [mask_part.expand(batch, heads, 1, size) for mask_part, size in zip(masks, sizes, strict=True)], -1
    )


def _mix_values(
    reader: Reader, piece: QueryPiece, picked: Codec | None, choice: TokenChoice | None, p: Tensor
) -> Tensor:
    """Return the sum of the values of the chosen candidates, weighted by p [B, h, m, chosen]: [B, h, m, width]."""
    store = piece.layer.stores["values"]
    assert picked is not None
    if reader.drops_values:
        p, choice = _narrow(p, reader.reads_values(p[:, :, :, None])[:, :, 0])
    if reader.tally is not None:
        reader.tally.read(piece, choice, ("values",))
    if choice is None:
        whole = p.new_zeros(*p.shape[:3], len(store))
        whole[..., store.sink.length : store.sink.length + p.shape[-1]] = p
        return store.mix(whole)
    places = choice.places[:, :, 0]
    block = gather(store, places)
    if isinstance(picked, kivi.ByToken | lloyd.Lloyd):
        return picked.output(picked.mix(p, block), p.sum(-1, keepdim=True), store.state)
    return p @ decode_gathered(picked, block, places)


def _narrow(p: Tensor, is_read: Tensor) -> tuple[Tensor, TokenChoice]:
    """Return the weights and the places of tokens that are read, bool [B, h, count]; others fill up with weight 0."""
    counts = is_read.sum(-1, keepdim=True)
    size = max(int(counts.max()), 1)
    places = is_read.float().topk(size, -1).indices
    valid = torch.arange(size, device=p.device) < counts
    chosen = p.gather(3, places[:, :, None].expand(-1, -1, p.shape[2], -1))
    return chosen * valid[:, :, None], TokenChoice(places[:, :, None], valid[:, :, None])


def decode_gathered(picked: Codec, block: Block, places: Tensor) -> Tensor:
    """Decode gathered rows to [B, h, k, width] float32, by compiled code where there is some."""
    if isinstance(picked, kivi.PackedInts):
        out = torch.empty(*places.shape, picked.spec.width, device=places.device)
        kernel = dispatch.kv(out.device, "decode") if picked.codes.padded_channels == picked.spec.width else None
        if kernel is not None and out.numel() > contract.SMALL and kernel.supports(picked.layout, picked.by_token):
            kernel.decode(*picked.stored_tensors(block), picked.layout, picked.by_token, out)
            return out
    return picked.dense(block).float()


def reader_units(layer: CodedLayer) -> list[int]:
    """Return the tokens by which what a layer chooses by grows at once; none for a layer that reads everything."""
    return [layer.reader.unit] if isinstance(layer, ReadingLayer) and layer.reader is not None else []


def let_choose(layer: CodedLayer, query: Tensor) -> None:
    """Let a layer choose what the last token reads, so that it keeps what it chooses by; query [1, H, n, width]."""
    if isinstance(layer, ReadingLayer) and layer.reader is not None:
        layer.watch(query, 1.0)
        if candidates := layer.candidates():
            grouped = group_queries(query[:, :, -1:], layer.reader.spec.heads, 1.0)
            layer.reader.choose(QueryPiece(layer, grouped, candidates, None, 0))
