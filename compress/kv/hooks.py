"""Tell a cache of left padding and of the rotary embedding of each token, which `update` is not given.

`attach(model)` adds hooks that look for a `KVCache` among the arguments of each forward pass, and do nothing where
there is none. generate and plain calls of the model both pass through them. They also check that the cache is the one
that was read and written (handed.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compress.kv import handed
from compress.kv.cache import CodedLayer
from compress.kv.evict import blocks, queries
from compress.kv.evict.layer import Call, EvictingLayer
from compress.kv.handed import cache_of
from compress.kv.rope import sources

_MARK = "_compress_kv_hooks"


def attach(model: nn.Module) -> None:
    """Add the hooks to a model; again does no harm."""
    if hasattr(model, _MARK):
        return
    handles = [model.register_forward_pre_hook(_padding, with_kwargs=True)]
    makers = sources(model)

    def rotation(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        _rotation(module, kwargs, makers)
        return _eviction(module, args, kwargs, makers)

    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            handles.append(module.register_forward_pre_hook(rotation, with_kwargs=True))
    handles += queries.attach(model, cache_of) + blocks.attach(model, cache_of) + handed.attach(model)
    setattr(model, _MARK, handles)


def detach(model: nn.Module) -> None:
    for handle in getattr(model, _MARK, ()):
        handle.remove()
    if hasattr(model, _MARK):
        delattr(model, _MARK)


def _padding(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Count the leading zeros of the attention mask [B, tokens] of a first chunk."""
    cache, mask = cache_of(kwargs), kwargs.get("attention_mask")
    if cache is None or cache.get_seq_length() or not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    pads = (mask.cumsum(-1) == 0).sum(-1)
    cache.pads = pads if bool(pads.any()) else None


def _rotation(module: nn.Module, kwargs: dict[str, Any], makers: list[nn.Module]) -> None:
    """Pass on cos and sin of the new tokens, for the layer that is about to store them, and their positions."""
    cache, turns = cache_of(kwargs), kwargs.get("position_embeddings")
    index = module.layer_idx
    if cache is None or not isinstance(turns, tuple) or not isinstance(index, int) or index >= len(cache.layers):
        return
    layer, positions = cache.layers[index], kwargs.get("position_ids")
    if isinstance(layer, CodedLayer):
        layer.turns = turns
        if isinstance(positions, Tensor) and positions.dim() == 2 and len(cache.rope) == layer.seen:
            cache.rope.announce(positions, makers)


def _eviction(module: nn.Module, args: Any, kwargs: dict[str, Any], makers: list[nn.Module]) -> Any:
    """Tell a layer that evicts of a forward pass; return its arguments with a mask of its own."""
    cache, index = cache_of(kwargs), module.layer_idx
    layer = cache.layers[index] if cache is not None and isinstance(index, int) and index < len(cache.layers) else None
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(layer, EvictingLayer) or not isinstance(hidden, Tensor):
        return None
    turns, positions = kwargs.get("position_embeddings"), kwargs.get("position_ids")
    call = Call(
        module,
        turns if isinstance(turns, tuple) else None,
        positions if isinstance(positions, Tensor) else None,
        makers,
    )
    setattr(module, queries.LAYER, layer)
    return args, {**kwargs, "attention_mask": layer.before(call, kwargs.get("attention_mask"), hidden.shape[1])}
