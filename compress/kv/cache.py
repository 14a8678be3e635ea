"""Offer coded keys and values as a cache of transformers: `CodedLayer` for full attention, its own layers for the rest.

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
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

from compress import plugins
from compress.errors import CompressError, RecipeError, UnreadCacheError
from compress.kv import static as calibrated
from compress.kv.codec import Codec, Spec
from compress.kv.rope import Rope
from compress.kv.settings import KINDS, CacheSettings, Coding, Codings, Reading, cache_settings, exact, reading_layers
from compress.kv.sparse.reading import Reader, build_reader
from compress.kv.token_store import Bytes, Store

CachePath = Literal["decode", "fused"]
OLD_PATHS: dict[str, CachePath] = {"materialise": "decode", "scores": "fused"}  # names that old code uses
CODED = "full_attention"  # the type of layer that is coded


class Handle:
    """Stands for keys or values on their way through the model where the stored codes are read.

    Whatever looks into it as into a tensor raises UnreadCacheError.
    """

    def __init__(self, layer: CodedLayer, kind: str, new: Tensor) -> None:
        self.layer, self.kind, self.new = layer, kind, new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unread()

    def __getitem__(self, index: Any) -> Any:
        raise _unread()

    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        raise _unread()


def _unread() -> UnreadCacheError:
    return UnreadCacheError(
        "kv_cache: an attention function that reads tensors was given a cache that is read as codes (path='fused'); "
        "give it by name, past_key_values=..., to the whole model that compress.kv.generation.attach was given, or "
        "make it with path='decode'"
    )


class CodedLayer(CacheLayerMixin):
    """Keys and values of one layer, each in a `Store`."""

    is_sliding = False
    is_croppable = True  # see Store.crop: what was coded meanwhile stays coded
    is_compileable = False
    supports_early_init = False  # the stores are made from the first keys and values

    def __init__(self, index: int, cache: KVCache) -> None:
        super().__init__()
        self.index, self.cache = index, cache
        self.seen = 0
        self.stores: dict[str, Store] = {}
        self.turns: tuple[Tensor, Tensor] | None = None  # cos and sin of the next tokens, from compress/kv/hooks.py
        self._pending: tuple[Tensor, Tensor] | None = None  # "fused": what attention has not read yet
        self.reader: Reader | None = None  # chooses what attention reads; None: everything is read

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.stores:
            for kind, states in zip(KINDS, (key_states, value_states), strict=True):
                coding = self.cache.codings[self.index][kind]
                codec = self.cache.codec(self.index, kind, states)
                self.stores[kind] = Store(codec, coding.policy, self.cache.rope)
            self.reader = self.cache.reader(self.index, self.stores["keys"].codec.spec)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store the new tokens [B, h, n, width]; return keys and values of all tokens, or handles ("fused")."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.commit()
        if self.turns is not None:
            if self.stores["keys"].codec.rope == "pre" and len(self.cache.rope) == self.seen:
                self.cache.rope.append(*self.turns)  # the other layers' are the same
            self.turns = None
        self.seen += key_states.shape[2]
        new = (key_states, value_states)
        if self.cache.path == "fused":
            self._pending = new
            return tuple(Handle(self, kind, x) for kind, x in zip(KINDS, new, strict=True))
        if self.cache.exact_prefill:
            found = tuple(self.stores[kind].read(x) for kind, x in zip(KINDS, new, strict=True))
            self._store(new)
            return found
        self._store(new)
        return tuple(self.stores[kind].read() for kind in KINDS)

    def commit(self, queries: Tensor | None = None) -> None:
        """Store what attention was shown last; queries [B, H, n, width], of the first tokens, for codecs that ask."""
        if self._pending is not None:
            new, self._pending = self._pending, None
            self._store(new, queries)

    def _store(self, new: tuple[Tensor, Tensor], queries: Tensor | None = None) -> None:
        for kind, x in zip(KINDS, new, strict=True):
            self.stores[kind].append(x, self.cache.pads, queries)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (length, offset) of the columns of the mask: fewer tokens may be stored than were seen."""
        count = query_length if isinstance(query_length, int) else len(query_length)
        stored = self.stored
        return stored + count, self.seen - stored

    @property
    def stored(self) -> int:
        pending = 0 if self._pending is None else self._pending[0].shape[2]
        return len(self.stores["keys"]) + pending if self.stores else 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions

    def reset(self) -> None:
        for store in self.stores.values():
            store.clear()
        self.seen, self._pending, self.stores, self.is_initialized = 0, None, {}, False
        self.reader = None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        self.commit()
        count = min(-tokens_to_remove, self.seen)
        for store in self.stores.values():
            store.crop(count)
        if self.reader is not None:
            self.reader.crop(min(store.coded for store in self.stores.values()), count)
        self.seen -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(self.batch_size)[indices.cpu()] if indices.dtype == torch.bool else indices)

    @property
    def batch_size(self) -> int:
        return self.stores["keys"].batch if self.stores else -1

    def offload(self) -> None:
        raise CompressError("kv_cache: a coded cache cannot be offloaded; make it without offloading")

    prefetch = offload

    def _select(self, index: Tensor) -> None:
        self.commit()
        for store in self.stores.values():
            store.select(index)
        if self.reader is not None:
            self.reader.select(index)

    def nbytes(self) -> Bytes:
        self.commit()
        read = Bytes() if self.reader is None else self.reader.nbytes()
        return sum((store.nbytes() for store in self.stores.values()), read)


class KVCache(Cache):
    """A cache of all layers of a model."""

    def __init__(
        self, codings: Codings, exact_prefill: bool, queries: int, static: Mapping[str, Tensor], path: CachePath
    ) -> None:
        self.codings, self.exact_prefill, self.path, self.static = codings, exact_prefill, path, dict(static)
        self.queries = queries  # query heads of the model
        self.pads: Tensor | None = None  # int64 [B]: padding columns at the left of the first chunk
        self.rope = Rope()
        self.reading: Reading | None = None  # which of the stored tokens attention reads
        self.codecs: dict[Spec, Codec] = {}  # caches of one model and one recipe may share it
        super().__init__(layers=[])

    def codec(self, index: int, kind: str, states: Tensor) -> Codec:
        """Return the codec of a layer's keys or values, made from the first of them [B, h, n, width]."""
        heads, width = states.shape[1], states.shape[-1]
        layers = len(self.codings)
        spec = Spec(kind, index, layers, heads, width, max(1, self.queries // heads), states.dtype)  # type: ignore[arg-type]
        if spec not in self.codecs:
            self.codecs[spec] = build(self.codings[index][kind], spec, self.static)
        check(self.codecs[spec], self.path)
        return self.codecs[spec]

    def reader(self, index: int, spec: Spec) -> Reader | None:
        """Return what chooses the tokens that a layer reads; RecipeError where nothing can choose."""
        if self.reading is None or not reading_layers(self.codings[index : index + 1]):
            return None
        return build_reader(self.reading, spec, self.static, self.path == "fused")

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.rope.crop(-tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.pads = None
        self.rope.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # annotated as a tensor type that has no instances
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        size = self.batch_size
        super().batch_repeat_interleave(repeats)
        self._select(torch.arange(size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        size = self.batch_size
        super().batch_select_indices(indices)
        self._select(torch.arange(size)[indices.cpu()])

    def _select(self, index: Tensor) -> None:
        self.rope.select(index)
        if self.pads is not None:
            self.pads = self.pads[index.to(self.pads.device)]

    def nbytes(self) -> Bytes:
        total = Bytes(state=self.rope.nbytes, allocated=self.rope.allocated)
        for layer in self.layers:
            if isinstance(layer, CodedLayer):
                total += layer.nbytes()
            else:
                tensors = held(layer)
                nbytes = sum(x.untyped_storage().nbytes() for x in tensors)
                total += Bytes(exact=sum(x.numel() * x.element_size() for x in tensors), allocated=nbytes)
        return total


def held(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer of transformers: keys and values, states of convolutions and recurrences."""
    states = [getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states")]
    found = [*(getattr(layer, kind, None) for kind in KINDS), *(x for each in states for x in each.values())]
    return [x for x in found if x is not None]


def build(coding: Coding, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    """Build the codec of one tensor kind of one layer; `static` holds tensors of all layers, "layers.3.keys.<name>".

    Raises RecipeError for settings that do not fit the layer, and for calibrated tensors that are not theirs.
    """
    own = calibrated.of_checked(coding, static, spec)
    return plugins.load("kv", coding.method).build(coding.config, spec, own)


def check(codec: Codec, path: CachePath) -> None:
    """Raise RecipeError for a codec that cannot be read in this way."""
    if path == "decode" and (codec.needs_queries or not codec.reconstructs):
        why = "needs the queries" if codec.needs_queries else "has scores but no keys or values to give back"
        raise RecipeError(
            f"{codec.spec.where}: this codec {why}; use make_cache(..., path='fused') and "
            "model.set_attn_implementation(compress.kv.attention.NAME)"
        )


def needs_queries(coding: Coding, kind: str) -> bool:
    """Return whether these settings of keys or values work with fused attention only."""
    asks = getattr(coding.config, "needs_queries", None)
    return asks is not None and bool(asks(kind))


def no_queries(where: str, coding: Coding) -> str:
    """Return what to say of settings that need queries on a model whose attention cannot be replaced."""
    return (
        f"{where}: {coding.method} with these settings needs the queries of attention, which cannot be replaced in "
        "this model; choose other settings, or another method such as kivi"
    )


def no_layer(types: Collection[str] = ()) -> str:
    """Return what to say of a model that has layers of these types and none that is coded."""
    others = ", ".join(sorted(set(types) - {CODED, "dummy"}))
    found = f" (they are {others})" if others else ""
    return f"kv_cache: no layer of this model has the full attention that is coded{found}; remove kv_cache"


def layer_types(config: Any) -> list[str]:
    """Return the types of the decoder's layers, as caches count them."""
    return get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]


def coded_layers(config: Any, settings: CacheSettings) -> Codings:
    """Return the codings of a model's layers, exact where a cache leaves them to transformers: those have no codec."""
    types, plain = layer_types(config), dict.fromkeys(KINDS, exact())
    codings = settings.by_layer(len(types))
    return tuple(layer if kind == CODED else plain for kind, layer in zip(types, codings, strict=True))


def named_path(path: str) -> CachePath:
    """Return how a cache is read; an old name is said to be one on stderr. RecipeError for an unknown name."""
    if path in OLD_PATHS:
        print(f"compress: path={path!r} is now called {OLD_PATHS[path]!r}", file=sys.stderr)
        return OLD_PATHS[path]
    if path not in get_args(CachePath):
        raise RecipeError(f"kv_cache: {plugins.unknown('path', path, get_args(CachePath))}")
    return cast(CachePath, path)


def evicting(decoder: Any, settings: CacheSettings, kinds: Collection[str]) -> Callable[[int, KVCache], CodedLayer]:
    """Return what makes the layers of a cache that evicts tokens, from their numbers; those to be skipped keep all.

    kinds: the types of the model's layers.
    """
    from compress.kv.evict import pruned  # whose layers are CodedLayers
    from compress.kv.evict.layer import EvictingLayer

    assert settings.evict is not None, "the caller has checked"
    if getattr(decoder, "num_kv_shared_layers", 0):
        raise RecipeError("kv_cache.evict: layers of this model share keys and values; remove evict")
    if settings.evict.prunes:
        return pruned.layers(kinds, settings.evict)
    skipped = {index % decoder.num_hidden_layers for index in settings.skip_layers}
    eviction, count = settings.evict, len(settings.evict.budget.keep_by_layer)
    if count not in (0, decoder.num_hidden_layers):
        raise RecipeError(
            f"kv_cache.evict: keep_by_layer has {count} numbers, the model {decoder.num_hidden_layers} layers; give "
            "one for each"
        )
    return lambda i, cache: EvictingLayer(i, cache, eviction, i in skipped or eviction.exempts(i))


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
    kinds, arguments = get_layer_types_and_kwargs(decoder)
    settings = cache_settings(settings)
    codings = settings.by_layer(len(kinds))
    cache = KVCache(codings, settings.exact_prefill, decoder.num_attention_heads, static or {}, named_path(path))
    make_layer = CodedLayer if settings.evict is None else evicting(decoder, settings, kinds)
    cache.reading = settings.read
    for index, (kind, own) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == CODED:
            cache.layers.append(make_layer(index, cache))
            continue
        if settings.other_layers == "error" and kind != "dummy":
            raise RecipeError(
                f"kv_cache: layer {index} is {kind}, which is not coded; set kv_cache.other_layers: exact to leave "
                "such layers as transformers has them"
            )
        cache.layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**own))
    return cache
