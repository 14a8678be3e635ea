"""Let a model read a prompt once, and fill any number of caches with what its layers saw."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SEEN = "sdpa_seen"
PART = 512  # tokens that make a codec lay out all that it keeps


class Prompt:
    """Queries, keys and values of all layers for one prompt int64 [1, n], and the exact cache it left.

    The model has the hooks of compress.kv (`reader.load_model` adds them) and attention "sdpa".
    """

    def __init__(self, model: Any, prompt: Tensor) -> None:
        from compress.kv.layer import Call
        from compress.kv.rope import sources

        self.model, self.tokens = model, prompt.shape[1]
        self.calls: list[tuple[Call, Tensor]] = []
        makers = sources(model)

        def seen(module: Any, query: Tensor, *rest: Any, **kwargs: Any) -> Any:
            self.calls.append((Call(module, self.turns, self.positions, makers), query))
            return sdpa_attention_forward(module, query, *rest, **kwargs)

        def note(module: Any, given: Any, kwargs: dict[str, Any]) -> None:
            self.turns, self.positions = kwargs["position_embeddings"], kwargs["position_ids"]

        ALL_ATTENTION_FUNCTIONS.register(SEEN, seen)
        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
        self.exact = DynamicCache(config=model.config)
        model.config._attn_implementation = SEEN
        model(prompt, past_key_values=self.exact, use_cache=True, logits_to_keep=1)
        model.config._attn_implementation = "sdpa"
        for handle in handles:
            handle.remove()
        self.held = [(layer.keys.clone(), layer.values.clone()) for layer in self.exact.layers]

    @torch.no_grad()
    def fill(self, cache: Any) -> Any:
        """Give a fresh cache of compress the prompt, as a forward pass does; return it."""
        for layer, (call, query), (keys, values) in zip(cache.layers, self.calls, self.held, strict=True):
            layer.turns = call.turns
            if hasattr(layer, "before"):
                layer.before(copy.copy(call), None, keys.shape[2])
            layer.update(keys, values)
            layer.commit(query)
        return cache

    @torch.no_grad()
    def static(self, cache: Any) -> int:
        """Return the bytes of what a cache holds once for a model in 16 bits; it is given a part of the prompt."""
        for layer, (call, query), held in zip(cache.layers, self.calls, self.held, strict=True):
            keys, values = (x[:, :, :PART].bfloat16() for x in held)
            layer.turns = call.turns[0][:, :PART].bfloat16(), call.turns[1][:, :PART].bfloat16()
            layer.update(keys, values)
            layer.commit(query[:, :, :PART].bfloat16())
        return int(cache.nbytes().static)


def nbytes_in_16_bits(cache: Any) -> float:
    """Return the bytes of a float32 cache of compress as a model in 16 bits would hold them: exact tokens take half."""
    parts = cache.nbytes()
    coded = parts.codes + parts.scales + parts.extras
    if all(coding.method == "identity" for layer in cache.codings for coding in layer.values()):
        coded //= 2
    return (parts.sink + parts.tail) / 2 + coded + parts.state + parts.exact / 2
