"""Let `generate` of a model use a compressed cache that no argument names.

    attach(model, {"method": "kivi", "bits": 4})
    model.generate(**inputs)                    # a fresh cache of this recipe for each call
    model.kv_cache.path                         # how it is read: "fused", or "decode" where that is all
    detach(model)

generate asks the model for its cache in `_prepare_cache_for_generation`; the model gets one of its own. What the user
says wins: `past_key_values`, `use_cache=False` and another `cache_implementation` than the checkpoint's. Calls of the
model itself, and so training, are what they were.

Reading the stored codes ("fused") needs an attention function of ours. It is the model's only while a forward pass
holds a cache that is read this way; all other passes keep the model's own. A model that has no choice of attention, or
does more with keys than pass them on, is found by a forward pass of one token at the first call of generate; its caches
are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError, RecipeError, UnreadCacheError
from compress.kv import attention, hooks
from compress.kv.cache import make_cache, named_path, needs_queries, no_queries
from compress.kv.codec import Codec, Spec
from compress.kv.layer import UNSLICED, CachePath, KVCache
from compress.kv.settings import KINDS, CacheSettings, cache_settings

_METHOD = "_prepare_cache_for_generation"
_SWITCH = "_compress_kv_switch"


@dataclass
class Use:
    """The cache that `generate` of a model makes."""

    settings: CacheSettings
    static: Mapping[str, Tensor]
    path: CachePath
    tried: bool = False  # whether "fused" was seen to work
    codecs: dict[Spec, Codec] = field(default_factory=dict)  # of all caches: they hold nothing of a sequence


def attach(
    model: nn.Module,
    settings: CacheSettings | Mapping[str, Any],
    static: Mapping[str, Tensor] | None = None,
    path: str | None = None,
) -> None:
    """Let `generate` use caches of these settings; path None is "fused" where the model allows it.

    RecipeError for settings that the model's layers cannot use. Settings that need fused attention are tried with a
    forward pass of one token.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise RecipeError("kv_cache: a model with an encoder has caches of another kind; remove kv_cache")
    if not hasattr(model, _METHOD):
        raise RecipeError(f"kv_cache: {type(model).__name__} does not generate text; remove kv_cache")
    settings = cache_settings(settings)
    codings = make_cache(model.config, settings, static).codings  # for its errors, too
    if settings.evict is not None and settings.evict.prunes and hooks.decoder_blocks(model) is None:
        raise RecipeError(UNSLICED)
    detach(model)
    use = Use(settings, dict(static or {}), named_path(path or ("fused" if can_read_codes(model) else "decode")))
    use.tried = path is not None
    switch(model)
    hooks.attach(model)
    model.kv_cache = use  # type: ignore[assignment]
    setattr(model, _METHOD, MethodType(_prepare, model))
    asking = [(kind, layer[kind]) for layer in codings for kind in KINDS if needs_queries(layer[kind], kind)]
    if asking and not _is_fused(model, use):
        detach(model)
        raise RecipeError(no_queries(f"kv_cache: {asking[0][0]}", asking[0][1]))
    if settings.read is not None and not _is_fused(model, use):
        detach(model)
        raise RecipeError(
            "kv_cache.read: only attention that reads stored codes can choose tokens (path='fused'), which this model "
            "does not allow or was not asked for; remove read"
        )


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    use = vars(model).pop("kv_cache", None)
    if use is None:
        return
    for handle in vars(model).pop(_SWITCH):
        handle.remove()
    hooks.detach(model)
    del vars(model)[_METHOD]


def can_read_codes(model: Any) -> bool:
    """Return whether the model lets its attention be chosen and needs only scaled_dot_product_attention of it."""
    return bool(getattr(model, "_supports_sdpa", False)) and bool(model._can_set_attn_implementation())


def switch(model: nn.Module) -> None:
    """Add hooks, once, that give the model the attention that reads codes while such a cache is among the arguments."""
    if hasattr(model, _SWITCH):
        return
    attention.register()
    before: list[str | None] = []

    def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = hooks.cache_of(kwargs)
        if cache is None or cache.path != "fused":
            before.append(None)
            return
        if kwargs.get("output_attentions"):
            raise UnreadCacheError(
                "kv_cache: attention that reads stored codes gives no attention weights; ask for no output_attentions, "
                "or use attention 'eager' and compress.kv.generation.attach(..., path='decode')"
            )
        before.append(module.config._attn_implementation)
        module.config._attn_implementation = attention.NAME

    def leave(module: Any, args: Any, output: Any) -> None:
        attention_name = before.pop() if before else None
        if attention_name is not None:
            module.config._attn_implementation = attention_name

    entered = model.register_forward_pre_hook(enter, with_kwargs=True)
    setattr(model, _SWITCH, [entered, model.register_forward_hook(leave, always_call=True)])


def fresh(model: Any) -> KVCache:
    """Return a cache for one call of generate."""
    use: Use = model.kv_cache
    if not use.tried:
        use.tried = True
        if use.path == "fused" and not _works(model, use):
            use.path = "decode"
    cache = make_cache(model.config, use.settings, use.static, use.path)
    cache.codecs = use.codecs
    return cache


def check_length(config: Any, tokens: int) -> None:
    """Raise CompressError where a context is longer than the model is made for."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    factor = rope.get("factor") or 1 if isinstance(rope, dict) else 1  # scaled embeddings reach further
    if limit is not None and tokens > limit * max(1, factor):
        raise CompressError(
            f"kv_cache: a context of {tokens} tokens, but the model has {limit} positions; ask for fewer"
        )


def _prepare(model: Any, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **others: Any) -> None:
    """Replace the class's method; rest: generation mode, batch size, most tokens in the cache."""
    implementation = generation_config.cache_implementation
    is_chosen = implementation is not None and implementation != model.generation_config.cache_implementation
    name = hooks.cache_argument(model)
    has_cache = model_kwargs.get(name) is not None
    if (
        has_cache
        or is_chosen
        or generation_config.use_cache is False
        or getattr(generation_config, "is_assistant", False)
    ):
        return getattr(type(model), _METHOD)(model, generation_config, model_kwargs, *rest, **others)
    check_length(model.config, others.get("max_cache_length", rest[-1] if rest else 0))
    model_kwargs[name] = fresh(model)
    hooks.use(model, model_kwargs[name])
    return None


def _is_fused(model: Any, use: Use) -> bool:
    """Return whether the model reads stored codes; on the meta device what it allows is taken for it."""
    return use.path == "fused" and (model.device.type == "meta" or _works(model, use))


@torch.no_grad()
def _works(model: Any, use: Use) -> bool:
    """Return whether a token goes through the model with handles in place of keys and values."""
    cache = make_cache(model.config, use.settings, use.static, "fused")
    try:
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=ids, use_cache=True, **{hooks.cache_argument(model): cache})
    except (AttributeError, TypeError):  # it looks into the keys, or multiplies them itself
        return False
    return True
