"""Attend to the codes that a `CodedLayer` stores, without ever decoding its keys or values as a whole.

    register()
    model.set_attn_implementation(NAME)
    model.generate(**inputs, past_key_values=make_cache(model.config, recipe, path="fused"))

Scores of all stored tokens, block by block, then one float32 softmax, then the weighted sum of the values, block by
block. Query heads that share a KV head are rows of one product. Long queries (a chunk of a prompt that follows another)
go through in pieces whose scores fit in SCORES numbers. Layers whose cache is transformers' own, and first chunks, are
left to scaled_dot_product_attention.

The name is registered for masks too, as those of "sdpa"; without, transformers would pass no mask at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from compress.errors import CompressError
from compress.kv import fused
from compress.kv.layer import CodedLayer, Handle, Logits

NAME = "compress_kv"
SCORES = 1 << 24  # float32 scores held at a time


def register() -> None:
    """Make `set_attn_implementation(NAME)` possible; again does no harm."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor | Handle,
    value: Tensor | Handle,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, n, width], mask [B, 1 or H, n, tokens] bool or additive, or None -> [B, n, H, value width]."""
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise CompressError(f"attention {NAME!r} has no sink logits or position biases; use sdpa and path='decode'")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = Logits(scaling, kwargs.get("softcap"))
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        if logits.softcap is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return _attend(None, query, (key, value), attention_mask, logits), None
    assert isinstance(key, Handle) and isinstance(value, Handle)
    layer, new = key.layer, (key.new, value.new)
    is_first = layer.seen == key.new.shape[2]
    if not layer.cache.exact_prefill:
        layer.commit(query)
        output = _attend(layer, query, None, attention_mask, logits)
    elif is_first and (read := layer.read_prompt(query, new, attention_mask, logits)) is not None:
        output = read
    elif is_first and logits.softcap is None:
        output, _ = sdpa_attention_forward(module, query, *new, attention_mask, scaling=scaling, **kwargs)
        layer.watch(query, scaling)
    else:
        output = _attend(layer, query, new, attention_mask, logits)
    layer.commit(query)
    return output, None


def _attend(
    layer: CodedLayer | None,
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    logits: Logits,
) -> Tensor:
    """Attend to what is stored and to `new` (keys, values [B, h, n, width]), in pieces -> [B, n, H, width]."""
    stored = len(layer.stores["keys"]) if layer is not None and layer.stores else 0
    tokens = stored + (0 if new is None else new[0].shape[2])
    count = query.shape[2]
    step = max(1, SCORES // (query.shape[0] * query.shape[1] * tokens))
    if mask is None and count > 1:
        mask = torch.ones(count, tokens, dtype=torch.bool, device=query.device).tril(tokens - count)[None, None]
    if mask is not None:
        mask = _in_order(layer, mask[..., :tokens])
    chooses = layer is not None and layer.chooses
    if count == 1 and logits.softcap is None and not chooses:
        output = fused.attend(layer, query, new, mask, logits.scaling)
        if output is not None:
            return output
    pieces = []
    for start in range(0, count, step):
        queries, chosen = query[:, :, start : start + step], None
        piece_mask = None if mask is None else mask[:, :, start : start + step]
        if layer is not None and chooses:
            chosen, piece_mask = layer.read_chosen(queries, new, piece_mask, logits, start)
        pieces.append(_piece(layer, queries, new, piece_mask, logits) if chosen is None else chosen)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _piece(
    layer: CodedLayer | None,
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    logits: Logits,
) -> Tensor:
    scaling, softcap = logits
    keys, values = (None, None) if layer is None else (layer.stores["keys"], layer.stores["values"])
    stored = 0 if keys is None else len(keys)
    batch, heads, count, width = query.shape
    kv_heads = new[0].shape[1] if new is not None else keys.codec.spec.heads  # type: ignore[union-attr]
    q = (query.float() * scaling).reshape(batch, kv_heads, -1, width)  # B, h, query heads and tokens, width
    scores = q.new_empty(*q.shape[:3], stored + (0 if new is None else new[0].shape[2]))
    if keys is not None and stored:
        keys.scores(q, scores[..., :stored])
    if new is not None:
        scores[..., stored:] = q @ new[0].float().transpose(-1, -2)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        _mask(scores.view(batch, kv_heads, -1, count, scores.shape[-1]), mask)
    p = scores.softmax(-1)
    if layer is not None:
        layer.forget_values(p, count)
    mixed = None
    if values is not None and stored:
        mixed = values.mix(p[..., :stored])
    if new is not None:
        last = p[..., stored:] @ new[1].float()
        mixed = last if mixed is None else mixed + last
    assert mixed is not None
    return mixed.view(batch, heads, count, -1).transpose(1, 2).to(query.dtype).contiguous()


def _mask(scores: Tensor, mask: Tensor) -> None:
    """scores [B, h, query heads, n, tokens], mask [B or 1, 1 or H, n, tokens]; in place."""
    if mask.shape[1] == 1:
        mask = mask[:, :, None]
    else:
        mask = mask.unflatten(1, scores.shape[1:3])
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    else:
        scores.add_(mask)


def _in_order(layer: CodedLayer | None, mask: Tensor) -> Tensor:
    """Return the columns of the mask in storage order, which differs where left padding is known."""
    columns = layer.stores["keys"].columns if layer is not None and layer.stores else None
    if columns is None:
        return mask
    first = columns[:, None, None].expand(-1, *mask.shape[1:3], -1)
    head = mask.expand(len(columns), -1, -1, -1)
    return torch.cat((head.gather(3, first), head[..., columns.shape[1] :]), 3)
