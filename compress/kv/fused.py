"""Decode attention on a GPU in one kernel, for the layouts that compress/kernels/triton/kv_attention.py reads.

    output = attend(layer, query, new, mask, scaling)       None: the other way, see compress/kv/attention.py

That is one new token for each sequence, min-max integers of either grouping and rotated Lloyd-Max codes with a 16-bit
norm (keys: after the rotary embedding), in bfloat16 or float16. Only codes that both keys and values have are read by
the kernel; tokens that just one of them holds coded, at most the difference of their `residual_length` and groups, are
decoded and join the exact tail.

`CacheReads` says how a cache is read, on any device: whether attention reads its codes, and whether compiled code does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels import contract, dispatch
from compress.kernels.contract import Attended, CodedHeads, HeadLayout, Query
from compress.kv.codec import Codec
from compress.kv.codecs import kivi, lloyd
from compress.kv.layer import CachePath, CodedLayer, KVCache
from compress.kv.settings import EXACT, KINDS, Codings
from compress.kv.token_store import Store

TYPES = (torch.bfloat16, torch.float16)  # keys and values are rounded to float16
PROBE_TOKENS = 4096  # it is found out what compiled code would read with so much past


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
    keys, values = (layout(store.reader) for store in stores)
    if keys is None or values is None or not min(store.coded for store in stores):
        return None
    batch, heads = query.shape[0], stores[0].reader.spec.heads
    groups = query.shape[1] // heads
    if not (kernel.supports(keys, values, groups) and kernel.has_room(batch * heads, keys, values, groups)):
        return None
    return _attend(kernel, (keys, values), stores, query[:, :, 0], new, mask, scaling)


def kernel_for(device: torch.device, dtype: torch.dtype) -> Any:
    """Return the kernel of decode attention for queries of a device and type, None if there is none."""
    return dispatch.kv(device, "attention") if dtype in TYPES else None


def layout(codec: Codec) -> HeadLayout | None:
    """Return the layout of what a codec stores, as the kernel takes it; None if it cannot read that."""
    if isinstance(codec, kivi.PackedInts):
        base = kivi.ByToken if codec.by_token else kivi.ByChannel
        if (
            type(codec).decode is not base.decode
            or codec.layout.lower
            or codec.codes.padded_channels != codec.spec.width
        ):
            return None
        return HeadLayout(codec.bits, codec.spec.width, "token" if codec.by_token else "channel", codec.group)
    if type(codec) is not lloyd.Lloyd or codec.rope == "pre" or codec.levels.norms.bits != 16:
        return None
    if codec.codes.padded_channels != codec.spec.width:
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
    unit = math.lcm(*(store.reader.granularity for store in stores))
    count = min(store.coded for store in stores) // unit * unit
    coded = [_coded_heads(*pair, count) for pair in zip(layouts, stores, strict=True)]
    empty = [q.new_empty(q.shape[0], x.reader.spec.heads, 0, x.reader.spec.width) for x in stores]
    sinks = [x.sink.view() if x.sink.length else none for x, none in zip(stores, empty, strict=True)]
    tails = [_tail(x, count, none) for x, none in zip(stores, empty, strict=True)]
    exact = [(sinks[0], sinks[1]), (tails[0], tails[1]), (empty[0], empty[1]) if new is None else new]
    seen = None if mask is None else mask[:, 0, 0].expand(q.shape[0], -1)
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        attended = kernel.attend(_query(stores[0], q), coded[0], coded[1], exact, scaling, seen)
    return _output(stores[1], attended, q.dtype)[:, None]


def _coded_heads(layout: HeadLayout, store: Store, count: int) -> CodedHeads:
    """The first `count` coded tokens."""
    codec = store.reader
    assert isinstance(codec, kivi.PackedInts | lloyd.Lloyd)
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
        for name, field in store.reader.fields.items()
    }
    return torch.cat((store.reader.dense({**store.state, **rows}).to(none.dtype), tail), 2)


def _query(keys: Store, q: Tensor) -> Query:
    """With what the codes are multiplied with, where they are in a basis of their own."""
    codec = keys.reader
    if not isinstance(codec, lloyd.Lloyd):
        return Query(q)
    turned = codec.query(q.float().unflatten(1, (codec.spec.heads, -1)), keys.state).flatten(1, 2)
    bias = turned[..., -1].contiguous() if "mean" in keys.state else None
    return Query(q, turned[..., :-1].contiguous(), bias)


def _output(values: Store, attended: Attended, dtype: torch.dtype) -> Tensor:
    """[B, H, width]"""
    if attended.exact is None or attended.mass is None:
        return attended.out
    by_head = (values.reader.spec.heads, -1)
    mass = attended.mass.unflatten(1, by_head)[..., None]
    back = values.reader.output(attended.out.unflatten(1, by_head), mass, values.state)
    return (back.flatten(1, 2) + attended.exact).to(dtype)


@dataclass(frozen=True)
class CacheReads:
    """How a cache is read in a decode step with much past."""

    path: CachePath
    compiled: Mapping[str, float]  # keys, values -> share of the layers that code them whose codes compiled code reads

    @property
    def text(self) -> str:
        """Return this in words."""
        how = "fused attention" if self.path == "fused" else "decoded before attention"
        if not self.compiled:
            return f"{how}, nothing coded"
        by = {kind: _by(share) for kind, share in self.compiled.items()}
        if len(set(by.values())) == 1:
            return f"{how}, {next(iter(by.values()))}"
        return f"{how}, " + ", ".join(f"{kind}: {name}" for kind, name in by.items())


def _by(share: float) -> str:
    if share in (0, 1):
        return "compiled code" if share else "PyTorch"
    return f"compiled code in {share:.0%} of layers, else PyTorch"


def reads_of_cache(cache: KVCache, device: torch.device) -> CacheReads:
    """Return how a cache is read that a token or more has gone through."""
    return reads_of_codecs(cache.codecs.values(), cache.codings, cache.path, device)


def reads_of_codecs(codecs: Iterable[Codec], codings: Codings, path: CachePath, device: torch.device) -> CacheReads:
    """Return how a cache with these codecs is read; codings: those of the model's layers."""
    coded = [codec for codec in codecs if codings[codec.spec.layer][codec.spec.kind].method != EXACT]
    compiled = {}
    for kind in KINDS:
        is_compiled = [_is_compiled(codec, path, device) for codec in coded if codec.spec.kind == kind]
        if is_compiled:
            compiled[kind] = sum(is_compiled) / len(is_compiled)
    return CacheReads(path, compiled)


def reads_of_model(model: Any) -> CacheReads | None:
    """Return how the cache is read that `generate` of a model has just used; None without a compressed one."""
    use = getattr(model, "kv_cache", None)
    if use is None:
        return None
    codings = use.settings.by_layer(max((spec.layers for spec in use.codecs), default=1))
    return reads_of_codecs(use.codecs.values(), codings, use.path, model.device)


def _is_compiled(codec: Codec, path: CachePath, device: torch.device) -> bool:
    """Return whether compiled code reads what a codec has stored of a long past."""
    spec = codec.spec
    if path == "decode":
        count = max(PROBE_TOKENS, contract.SMALL // max(1, spec.heads * spec.width) + 1)
        out = torch.empty(1, spec.heads, count, spec.width, dtype=spec.dtype, device=device)
        return codec.write_at_once(out) > codec.block
    if device.type == "cuda" and kernel_for(device, spec.dtype) is not None and layout(codec) is not None:
        return True
    rows = torch.empty(1, spec.heads, spec.queries, spec.width, dtype=torch.float32, device=device)
    return codec.at_once(rows) > codec.block
