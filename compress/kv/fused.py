"""Decode attention on a GPU in one kernel, for the layouts that compress/kernels/triton/kv_attention.py reads.

    found = attend(layer, query, new, mask, scaling)        None: the other way, see compress/kv/attention.py

That is one new token for each sequence, min-max integers of either grouping and rotated Lloyd-Max codes with a 16-bit
norm (keys: after the rotary embedding), in bfloat16 or float16. Only codes that both keys and values have are read by
the kernel; tokens that just one of them holds coded, at most the difference of their `residual_length` and groups, are
decoded and join the exact tail.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels import dispatch
from compress.kernels.kv_contract import Attended, CodedHeads, HeadLayout, Query
from compress.kv.cache import CodedLayer
from compress.kv.codec import Codec
from compress.kv.codecs import kivi, lloyd
from compress.kv.token_store import Store

TYPES = (torch.bfloat16, torch.float16)  # keys and values are rounded to float16


def attend(
    layer: CodedLayer | None,
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    scaling: float,
) -> Tensor | None:
    """query [B, H, 1, width], new (keys, values) [B, h, n, width], mask bool [B or 1, 1, 1, tokens] in storage order
    -> [B, 1, H, value width], or None where the kernel cannot do it.
    """
    if layer is None or not layer.stores or query.shape[2] != 1:
        return None
    kernel = kernel_for(query.device, query.dtype)
    if kernel is None:
        return None
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return None
    stores = layer.stores["keys"], layer.stores["values"]
    keys, values = (layout(store.codec) for store in stores)
    if keys is None or values is None or not min(store.coded for store in stores):
        return None
    batch, heads = query.shape[0], stores[0].codec.spec.heads
    groups = query.shape[1] // heads
    if not (kernel.supports(keys, values, groups) and kernel.has_room(batch * heads, keys, values, groups)):
        return None
    return _attend(kernel, (keys, values), stores, query[:, :, 0], new, mask, scaling)


def kernel_for(device: torch.device, dtype: torch.dtype) -> Any:
    """Return the kernel of decode attention for queries of a device and type, None if there is none."""
    return dispatch.kv(device, "attention") if dtype in TYPES else None


def layout(codec: Codec) -> HeadLayout | None:
    """How the kernel is told about what this codec stores; None if it cannot read that."""
    if isinstance(codec, kivi.Packed):
        base = kivi.ByToken if codec.by_token else kivi.ByChannel
        if type(codec).decode is not base.decode or codec.codes.padded != codec.spec.width:
            return None
        return HeadLayout(codec.bits, codec.spec.width, "token" if codec.by_token else "channel", codec.group)
    if type(codec) is not lloyd.Lloyd or codec.rope == "pre" or codec.levels.norms.bits != 16:
        return None
    if codec.codes.padded != codec.spec.width:
        return None
    return HeadLayout(codec.codes.bits, codec.spec.width, "norm")


def _attend(
    kernel: Any,
    layouts: tuple[HeadLayout, HeadLayout],
    stores: tuple[Store, Store],
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    scaling: float,
) -> Tensor:
    """q [B, H, width]."""
    unit = math.lcm(*(store.codec.granularity for store in stores))
    count = min(store.coded for store in stores) // unit * unit
    coded = [_coded(*pair, count) for pair in zip(layouts, stores, strict=True)]
    empty = [q.new_empty(q.shape[0], x.codec.spec.heads, 0, x.codec.spec.width) for x in stores]
    sinks = [x.sink.view() if x.sink.length else none for x, none in zip(stores, empty, strict=True)]
    tails = [_tail(x, count, none) for x, none in zip(stores, empty, strict=True)]
    exact = [(sinks[0], sinks[1]), (tails[0], tails[1]), (empty[0], empty[1]) if new is None else new]
    seen = None if mask is None else mask[:, 0, 0].expand(q.shape[0], -1)
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        found = kernel.attend(_query(stores[0], q), coded[0], coded[1], exact, scaling, seen)
    return _output(stores[1], found, q.dtype)[:, None]


def _coded(layout: HeadLayout, store: Store, count: int) -> CodedHeads:
    """The first `count` coded tokens."""
    codec = store.codec
    assert isinstance(codec, kivi.Packed | lloyd.Lloyd)
    rows = {name: store.fields[name].view(0, count // field.tokens) for name, field in codec.fields.items()}
    planes = [rows[name] for name in codec.codes.fields]
    if isinstance(codec, lloyd.Lloyd):
        return CodedHeads(layout, planes, rows["norms"], None, _levels(codec.codes.bits, planes[0].device))
    return CodedHeads(layout, planes, rows["scales"], rows["minima"])


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    return lloyd.levels(bits).to(device, torch.float16)


def _tail(store: Store, count: int, none: Tensor) -> Tensor:
    """What follows the first `count` coded tokens, exact or decoded."""
    tail = store.tail.view() if store.tail.length else none
    if count == store.coded:
        return tail
    rows = {
        name: store.fields[name].view(count // field.tokens, store.coded // field.tokens)
        for name, field in store.codec.fields.items()
    }
    return torch.cat((store.codec.dense({**store.state, **rows}).to(none.dtype), tail), 2)


def _query(keys: Store, q: Tensor) -> Query:
    """With what the codes are multiplied with, where they are in a basis of their own."""
    codec = keys.codec
    if not isinstance(codec, lloyd.Lloyd):
        return Query(q)
    turned = codec.query(q.float().unflatten(1, (codec.spec.heads, -1)), keys.state).flatten(1, 2)
    bias = turned[..., -1].contiguous() if "mean" in keys.state else None
    return Query(q, turned[..., :-1].contiguous(), bias)


def _output(values: Store, found: Attended, dtype: torch.dtype) -> Tensor:
    """[B, H, width]"""
    if found.exact is None or found.mass is None:
        return found.out
    by_head = (values.codec.spec.heads, -1)
    mass = found.mass.unflatten(1, by_head)[..., None]
    back = values.codec.output(found.out.unflatten(1, by_head), mass, values.state)
    return (back.flatten(1, 2) + found.exact).to(dtype)
