"""Gather the stored rows of chosen tokens and attend to them: one query token, codecs with a row for each token.

A row is copied whole, as it is stored; KIVI's keys bring the scales and minima of their groups along. Gathered rows are
blocks like any other: compiled readers take them where there are some.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.kernels import dispatch, kv_contract
from compress.kv.codec import Block, Codec
from compress.kv.codecs import fp8, identity, kivi, lloyd
from compress.kv.token_store import Store

if TYPE_CHECKING:
    from compress.kv.sparse.reading import Choice, Piece

DECODERS: Sequence[Callable[..., Any]] = (
    kivi.ByToken.decode,
    kivi.ByChannel.decode,
    lloyd.Lloyd.decode,
    identity.Identity.decode,
    fp8.Fp8.decode,
)


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
    single.layout = kv_contract.PlanarCodes(codec.bits, codec.codes.padded, 1)
    return single


def gather(store: Store, places: Tensor) -> Block:
    """Return the rows of coded tokens, places int64 [B, h, k], and the state of the sequences."""
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
    piece: Piece,
    choice: Choice | None,
    ways: Sequence[Codec | None],
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attend to the sinks, chosen candidates (None: all) and all later tokens -> [B, 1, H, value width] float32.

    ways: the pickers of keys and values; mask: bool [B or 1, 1, 1, tokens] in storage order.
    """
    reader = piece.layer.reader
    if reader is not None and reader.tally is not None:
        reader.tally.read(piece, choice, ("keys",))
    q, stores = piece.rows, (piece.layer.stores["keys"], piece.layer.stores["values"])
    (sink_keys, later_keys), (sink_values, later_values) = (
        _exact(store, piece.count, q, None if new is None else new[i]) for i, store in enumerate(stores)
    )
    chosen = _scores(stores[0], ways[0], q, choice, piece.count)
    scores = torch.cat((q @ sink_keys.mT, chosen, q @ later_keys.mT), -1)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    sizes = [sink_keys.shape[2], chosen.shape[3], later_keys.shape[2]]
    seen = _seen(piece, choice, mask, sizes)
    if seen is not None:
        scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
    before, inner, after = scores.softmax(-1).split(sizes, -1)
    mixed = before @ sink_values + after @ later_values + _mixed(piece, stores[1], ways[1], choice, inner)
    return mixed.flatten(1, 2)[:, None]


def _exact(store: Store, count: int, q: Tensor, new: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sinks, and all tokens behind the candidates, with those of `new`: [B, h, tokens, width] float32."""
    none = q.new_empty(*q.shape[:2], 0, store.codec.spec.width)
    sinks = store.sink.view().float() if store.sink.length else none
    later = [] if store.coded == count else [store.codec.dense(store._block(count, store.coded, 0)).float()]
    later += [store.tail.view().float()] if store.tail.length else []
    later += [] if new is None else [new.float()]
    return sinks, torch.cat([none, *later], 2)


def _scores(store: Store, way: Codec | None, q: Tensor, choice: Choice | None, count: int) -> Tensor:
    """Return the products of q [B, h, m, width] with the keys of the chosen candidates, [B, h, m, chosen]."""
    assert way is not None
    if choice is None:
        whole = q.new_empty(*q.shape[:3], len(store))
        store.scores(q, whole)
        return whole[..., store.sink.length : store.sink.length + count]
    places = choice.places[:, :, 0]
    block = gather(store, places)
    if isinstance(way, lloyd.Lloyd):
        out = q.new_empty(*q.shape[:3], places.shape[-1])
        way.write_scores(way.query(q, store.state), block, out)
        return out
    return q @ _decoded(way, block, places).mT


def _seen(piece: Piece, choice: Choice | None, mask: Tensor | None, sizes: list[int]) -> Tensor | None:
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
    parts = (before, inner, after)
    return torch.cat([part.expand(batch, heads, 1, size) for part, size in zip(parts, sizes, strict=True)], -1)


def _mixed(piece: Piece, store: Store, way: Codec | None, choice: Choice | None, p: Tensor) -> Tensor:
    """Return the sum of the values of the chosen candidates, weighted by p [B, h, m, chosen]: [B, h, m, width]."""
    reader = piece.layer.reader
    assert reader is not None and way is not None
    if reader.drops_values:
        p, choice = _narrowed(p, reader.kept(p[:, :, :, None])[:, :, 0])
    if reader.tally is not None:
        reader.tally.read(piece, choice, ("values",))
    if choice is None:
        whole = p.new_zeros(*p.shape[:3], len(store))
        whole[..., store.sink.length : store.sink.length + p.shape[-1]] = p
        return store.mix(whole)
    places = choice.places[:, :, 0]
    block = gather(store, places)
    if isinstance(way, kivi.ByToken | lloyd.Lloyd):
        return way.output(way.mix(p, block), p.sum(-1, keepdim=True), store.state)
    return p @ _decoded(way, block, places)


def _narrowed(p: Tensor, kept: Tensor) -> tuple[Tensor, Choice]:
    """Return the weights and the places of tokens that are kept, bool [B, h, count]; others fill up with weight 0."""
    from compress.kv.sparse.reading import Choice

    counts = kept.sum(-1, keepdim=True)
    size = max(int(counts.max()), 1)
    places = kept.float().topk(size, -1).indices
    valid = torch.arange(size, device=p.device) < counts
    chosen = p.gather(3, places[:, :, None].expand(-1, -1, p.shape[2], -1))
    return chosen * valid[:, :, None], Choice(places[:, :, None], valid[:, :, None])


def _decoded(way: Codec, block: Block, places: Tensor) -> Tensor:
    """Decode gathered rows to [B, h, k, width] float32, by compiled code where there is some."""
    if isinstance(way, kivi.Packed):
        out = torch.empty(*places.shape, way.spec.width, device=places.device)
        kernel = dispatch.kv(out.device, "decode") if way.codes.padded == way.spec.width else None
        if kernel is not None and out.numel() > kv_contract.SMALL and kernel.supports(way.layout, way.by_token):
            kernel.decode(*way.stored(block), way.layout, way.by_token, out)
            return out
    return way.dense(block).float()
