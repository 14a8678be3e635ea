"""Make the cache of a model: coded layers for full attention, transformers' own layers for the rest.

    cache = make_cache(model.config, {"method": "kivi", "bits": 2})
    model.generate(**inputs, past_key_values=cache)

A cache is read in one of two ways:

    path="decode"   decode, then attend: `update` returns keys and values as tensors, which any attention function reads
    path="fused"    it returns a `Handle`, and the attention function of compress/kv/attention.py reads the stored codes

Either way tokens of one forward pass see each other as `exact_prefill` says: exactly, or as later steps will.
`make_cache` builds one cache for one call of generate; `reset` makes it new. compress/kv/hooks.py tells it about left
padding and rotary embeddings; without, pads are coded as tokens are, and codecs of keys before RoPE are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, cast, get_args

from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionLayer, get_layer_types_and_kwargs

from compress import plugins
from compress.errors import RecipeError
from compress.kv.layer import CachePath, CodedLayer, KVCache, MakeLayer
from compress.kv.settings import KINDS, CacheSettings, Coding, Codings, cache_settings, exact
from compress.kv.states import coded_layer

OLD_PATHS: dict[str, CachePath] = {"materialise": "decode", "scores": "fused"}  # names that old code uses
CODED = "full_attention"  # the type of layer that is coded


def needs_queries(coding: Coding, kind: str) -> bool:
    """Return whether these settings of keys or values work with fused attention only."""
    needs = getattr(coding.config, "needs_queries", None)
    return needs is not None and bool(needs(kind))


def no_queries(where: str, coding: Coding) -> str:
    """Return what to say of settings that need queries on a model whose attention cannot be replaced."""
    return (
        f"{where}: {coding.method} with these settings needs the queries of attention, which cannot be replaced in "
        "this model; choose other settings, or another method such as kivi"
    )


def no_layer(types: Collection[str] = ()) -> str:
    """Return what to say of a model that has layers of these types and none that is coded."""
    others = ", ".join(sorted(set(types) - {CODED, "dummy"}))
    listed = f" (they are {others})" if others else ""
    return f"kv_cache: no layer of this model has the full attention that is coded{listed}; remove kv_cache"


def layer_types(config: Any) -> list[str]:
    """Return the types of the decoder's layers, as caches count them."""
    return get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]


def query_heads(config: Any) -> int:
    """Return the number of query heads that a configuration states, 0 if it states none."""
    return getattr(config.get_text_config(decoder=True), "num_attention_heads", None) or 0


def coded_layers(config: Any, settings: CacheSettings) -> Codings:
    """Return the codings of a model's layers, exact where a cache leaves them to transformers: those have no codec."""
    types, uncoded = layer_types(config), dict.fromkeys(KINDS, exact())
    codings = settings.by_layer(len(types))
    return tuple(layer if type_ == CODED else uncoded for type_, layer in zip(types, codings, strict=True))


def named_path(path: str) -> CachePath:
    """Return how a cache is read; an old name is reported on stderr. RecipeError for an unknown name."""
    if path in OLD_PATHS:
        print(f"compress: path={path!r} is now called {OLD_PATHS[path]!r}", file=sys.stderr)
        return OLD_PATHS[path]
    if path not in get_args(CachePath):
        raise RecipeError(f"kv_cache: {plugins.unknown('path', path, get_args(CachePath))}")
    return cast(CachePath, path)


def _layer_maker(decoder: Any, settings: CacheSettings, types: Collection[str]) -> MakeLayer:
    """Return what makes the coded layers of a cache; a method that evicts or chooses tokens has layers of its own."""
    layer: type[CodedLayer] = CodedLayer
    if settings.evict is not None:
        layer = plugins.load("evict", settings.evict.method).LAYER
    elif settings.read is not None:
        layer = plugins.load("read", settings.read.method).LAYER
    return layer.of_cache(decoder, settings, types)


def make_cache(
    config: Any,
    settings: CacheSettings | Mapping[str, Any],
    static: Mapping[str, Tensor] | None = None,
    path: str = "decode",
) -> KVCache:
    """Return a fresh cache for a model of this configuration (PreTrainedConfig).

    settings: a recipe's `kv_cache`, as data or as it was read; static: its calibrated tensors, if it has any.
    """
    decoder = config.get_text_config(decoder=True)
    types, arguments = get_layer_types_and_kwargs(decoder)
    if isinstance(arguments, Mapping):  # in earlier versions of transformers: the same for all layers
        arguments = [dict(arguments)] * len(types)
    settings = cache_settings(settings)
    codings = settings.by_layer(len(types))
    cache = KVCache(codings, settings.exact_prefill, query_heads(config), static or {}, named_path(path))
    cache.reading, cache.states = settings.read, settings.states
    make_layer = _layer_maker(decoder, settings, types)
    for index, (layer_type, keywords) in enumerate(zip(types, arguments, strict=True)):
        if layer_type == CODED:
            cache.layers.append(make_layer(index, cache))
            continue
        made_by = DYNAMIC_LAYER_TYPE_MAPPING[layer_type]
        if settings.states is not None and issubclass(made_by, LinearAttentionLayer):
            made_by = coded_layer(made_by)
        elif settings.other_layers == "error" and layer_type != "dummy":
            raise RecipeError(
                f"kv_cache: layer {index} is {layer_type}, which is not coded; set kv_cache.other_layers: exact to "
                "leave such layers as transformers has them"
            )
        cache.layers.append(made_by(**keywords))
    return cache
