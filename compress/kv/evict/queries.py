"""Show the queries to a cache that evicts, where its keys and values are read as tensors (path="decode").

While a forward pass holds such a cache, the model's attention function is one that calls the model's own and then hands
the queries to the layer. With path="fused" attention is ours anyway (compress/kv/attention.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from compress.errors import CompressError
from compress.kv.layer import KVCache, Logits

NAME = "compress_kv_queries_"  # and the name of the model's own attention
LAYER_ATTRIBUTE = "_compress_kv_layer"  # attention modules hold the cache layer of this forward pass


def attach(model: nn.Module, cache_of: Callable[[dict[str, Any]], KVCache | None]) -> list[Any]:
    """Add hooks to a model and return their handles; cache_of finds a cache among the arguments of a forward pass."""
    before: list[str | None] = []
    modules = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]

    def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache, attention_name = cache_of(kwargs), getattr(getattr(module, "config", None), "_attn_implementation", None)
        is_watched = cache is not None and cache.path == "decode" and evicts(cache)
        if not is_watched or attention_name is None or attention_name.startswith(NAME):
            before.append(None)
            return
        before.append(attention_name)
        module.config._attn_implementation = register_watched(attention_name)

    def leave(module: Any, args: Any, output: Any) -> None:
        attention_name = before.pop() if before else None
        if attention_name is not None:
            module.config._attn_implementation = attention_name
        for each in modules:
            vars(each).pop(LAYER_ATTRIBUTE, None)

    entered = model.register_forward_pre_hook(enter, with_kwargs=True)
    return [entered, model.register_forward_hook(leave, always_call=True)]


def evicts(cache: KVCache) -> bool:
    """Return whether layers of a cache evict tokens."""
    return any(hasattr(layer, "eviction") for layer in cache.layers)


def register_watched(own: str) -> str:
    """Return the name of the attention function that calls the one named `own` and shows its queries."""
    name = NAME + own
    AttentionInterface.register(name, partial(_attention, own))
    if own in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


def _attention(own: str, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attend as the model does; query [B, H, n, width]."""
    if own in ALL_ATTENTION_FUNCTIONS:
        attend = ALL_ATTENTION_FUNCTIONS[own]
    else:
        attend = getattr(sys.modules[type(module).__module__], f"{own}_attention_forward", None)
    if attend is None:
        raise CompressError(f"kv_cache.evict: attention {own!r} of this model cannot be watched; use sdpa")
    layer, read = vars(module).pop(LAYER_ATTRIBUTE, None), None
    has_more = kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None  # than scores and a mask
    if layer is not None and len(args) > 2 and not has_more:
        logits = Logits(kwargs.get("scaling") or query.shape[-1] ** -0.5, kwargs.get("softcap"))
        read = layer.read_prompt(query, (args[0], args[1]), args[2], logits)
    output = attend(module, query, *args, **kwargs) if read is None else (read, None)
    if layer is not None:
        layer.commit(query)
    return output
