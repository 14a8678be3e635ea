"""Define the layers of a compressed cache: what a layer does, and the cache that holds what its layers share.

`CodedLayer` keeps the keys and the values of one layer in a `Store` each. Its interface:

    update      take keys and values of new tokens; return those of all tokens, or handles that attention reads
    commit      store what attention was shown last, with its queries for codecs that need them
    crop        forget the newest tokens
    select      take rows of the batch by index
    nbytes      count bytes by part

Layers that forget tokens (compress/kv/evict) and layers that read a part of them (compress/kv/sparse) are subclasses.
A method names its layer in `LAYER`; compress/kv/cache.py makes layers of that class by `of_cache`. They override the
above, and what hooks and attention call:

    enter         before a forward pass of the whole model
    before        before the attention module of the layer: its mask
    read_prompt   attention of a first pass to a part of its tokens
    watch         queries that read everything
    read_chosen   attention to a part of the stored tokens
    forget_values weights of values that are not read

`Handle` stands for keys or values where the stored codes are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from compress import plugins
from compress.errors import CompressError, RecipeError, UnreadCacheError
from compress.kv import static as calibrated
from compress.kv.codec import Codec, Spec
from compress.kv.rope import Rope
from compress.kv.settings import KINDS, CacheSettings, Coding, Codings, Reading
from compress.kv.states import CodedStates, StateCodes
from compress.kv.token_store import Bytes, Store

CachePath = Literal["decode", "fused"]
MakeLayer = Callable[[int, "KVCache"], "CodedLayer"]
UNSLICED = (
    "kv_cache.evict: tokens cannot be dropped between the layers of this model, whose decoder is no list of blocks "
    "that are given hidden states and rotary rows; choose another method, such as snapkv"
)


@dataclass
class Call:
    """A forward pass of an attention module, as hooks see it."""

    module: nn.Module
    turns: tuple[Tensor, Tensor] | None  # cos and sin of its tokens
    positions: Tensor | None  # int64 [B or 1, n]
    makers: list[nn.Module]  # of rotary rows


class Logits(NamedTuple):
    """How products of queries and keys become logits."""

    scaling: float
    softcap: float | None


class Handle:
    """Stands for keys or values on their way through the model where the stored codes are read.

    Whatever looks into it as into a tensor raises UnreadCacheError.
    """

    def __init__(self, layer: CodedLayer, kind: str, new: Tensor) -> None:
        self.layer, self.kind, self.new = layer, kind, new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unread_error()

    def __getitem__(self, index: Any) -> Any:
        raise _unread_error()

    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        raise _unread_error()


def _unread_error() -> UnreadCacheError:
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
    is_told_of_passes = False  # `before` is called
    can_be_saved = True  # by compress/kv/saved
    supports_early_init = False  # the stores are made from the first keys and values

    def __init__(self, index: int, cache: KVCache) -> None:
        super().__init__()
        self.index, self.cache = index, cache
        self.seen = 0
        self.stores: dict[str, Store] = {}
        self.turns: tuple[Tensor, Tensor] | None = None  # cos and sin of the next tokens, from compress/kv/hooks.py
        self._pending: tuple[Tensor, Tensor] | None = None  # "fused": what attention has not read yet

    @classmethod
    def of_cache(cls, config: Any, settings: CacheSettings, types: Collection[str]) -> MakeLayer:
        """Return what makes a layer of a cache from its number, for a decoder of this configuration.

        types: those of the decoder's layers. RecipeError where the settings do not fit the model.
        """
        return cls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.stores:
            for kind, states in zip(KINDS, (key_states, value_states), strict=True):
                coding = self.cache.codings[self.index][kind]
                codec = self.cache.codec(self.index, kind, states)
                self.stores[kind] = Store(codec, coding.policy, self.cache.rope)
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
            states = tuple(self.stores[kind].read(x) for kind, x in zip(KINDS, new, strict=True))
            self._store(new)
            return states
        self._store(new)
        return tuple(self.stores[kind].read() for kind in KINDS)

    def commit(self, queries: Tensor | None = None) -> None:
        """Store what attention was shown last; queries [B, H, n, width], of the first tokens, for codecs that ask."""
        if self._pending is not None:
            new, self._pending = self._pending, None
            self._store(new, queries)

    def _store(self, new: tuple[Tensor, Tensor], queries: Tensor | None = None) -> None:
        for kind, x in zip(KINDS, new, strict=True):
            self.stores[kind].append(x, self.cache.pads, queries, self.cache.holds)

    def settle(self) -> None:
        """Code what was only held; see `KVCache.holds`."""
        self.commit()
        for store in self.stores.values():
            store.settle()

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (length, offset) of the columns of the mask: fewer tokens may be stored than were seen."""
        count = query_length if isinstance(query_length, int) else len(query_length)
        stored_tokens = self.stored_tokens
        return stored_tokens + count, self.seen - stored_tokens

    @property
    def stored_tokens(self) -> int:
        pending = 0 if self._pending is None else self._pending[0].shape[2]
        return len(self.stores["keys"]) + pending if self.stores else 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions

    def reset(self) -> None:
        for store in self.stores.values():
            store.clear()
        self.seen, self._pending, self.stores, self.is_initialized = 0, None, {}, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        self.commit()
        count = min(-tokens_to_remove, self.seen)
        for store in self.stores.values():
            store.crop(count)
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

    def nbytes(self) -> Bytes:
        self.commit()
        return sum((store.nbytes() for store in self.stores.values()), Bytes())

    def enter(self, model: nn.Module, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return handles of hooks for one forward pass of the model, which begins with these arguments.

        The first layer of a cache is called. CompressError for a pass that the layers cannot serve.
        """
        return []

    def before(self, call: Call, mask: Any, tokens: int) -> Any:
        """Take note of the forward pass of an attention module; return the mask for so many new tokens."""
        return mask

    def read_prompt(self, query: Tensor, new: tuple[Tensor, Tensor], mask: Any, logits: Logits) -> Tensor | None:
        """Attend in a first pass to a part of its own tokens -> [B, n, H, width]; None: to all of them, as is usual.

        query [B, H, n, width], new: keys and values [B, h, n, width], mask: the model's own.
        """
        return None

    @property
    def chooses(self) -> bool:
        """Return whether `read_chosen` may read less than everything."""
        return False

    def watch(self, query: Tensor, scaling: float) -> None:
        """See queries [B, H, n, width] that read everything."""

    def read_chosen(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        logits: Logits,
        start: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Attend to chosen tokens: query [B, H, n, width] from the query `start` of the pass on.

        mask is in storage order. Return ([B, n, H, width], mask), or (None, mask) to read everything under that mask.
        """
        return None, mask

    def forget_values(self, p: Tensor, count: int) -> None:
        """Set probabilities [B, h, query heads x count, tokens] to 0, in place, where no value is read."""


class KVCache(Cache):
    """A cache of all layers of a model."""

    def __init__(
        self, codings: Codings, exact_prefill: bool, queries: int, static: Mapping[str, Tensor], path: CachePath
    ) -> None:
        self.codings, self.exact_prefill, self.path, self.static = codings, exact_prefill, path, dict(static)
        self.queries = queries  # query heads of the model
        self.pads: Tensor | None = None  # int64 [B]: padding columns at the left of the first chunk
        self.rope = Rope()
        self.holds = False  # new tokens stay exact until `settle`, so that what is cropped was never coded
        self.reading: Reading | None = None  # which of the stored tokens attention reads; None: all
        self.states: int | None = None  # bits of states that are no keys and values; None: as transformers has them
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

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return a state, which the layer may change in place; all others are codes from here on."""
        for layer in self.layers:
            for coded in layer.coded_states.values() if isinstance(layer, CodedStates) else ():
                coded.settle()
        state: Any = super().get_recurrent_state(layer_idx, state_idx)
        return state.lend() if isinstance(state, StateCodes) else state

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.rope.crop(-tokens_to_remove)

    def settle(self) -> None:
        """Code the tokens that were held, as far as newer ones do not have to be exact."""
        for layer in self.layers:
            if isinstance(layer, CodedLayer):
                layer.settle()

    @contextmanager
    def read_upper(self) -> Iterator[None]:
        """Let attention read the upper planes alone of codecs that have planes; CompressError where none has."""
        stores = [store for layer in self.layers if isinstance(layer, CodedLayer) for store in layer.stores.values()]
        uppers = [store.codec.upper for store in stores]
        if not any(uppers):
            raise CompressError("kv_cache: nothing here is stored in planes; set kv_cache.method: quantspec")
        for store, upper in zip(stores, uppers, strict=True):
            store.reader = upper or store.codec
        try:
            yield
        finally:
            for store in stores:
                store.reader = store.codec

    def reset(self) -> None:
        super().reset()
        self.pads, self.holds = None, False
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
        total = Bytes(state=self.rope.nbytes, allocated=self.rope.allocated_nbytes)
        for layer in self.layers:
            if isinstance(layer, CodedLayer):
                total += layer.nbytes()
                continue
            tensors = exact_tensors(layer)
            nbytes = sum(x.untyped_storage().nbytes() for x in tensors)
            total += Bytes(exact=sum(x.numel() * x.element_size() for x in tensors), allocated=nbytes)
            for state in layer.coded_states.values() if isinstance(layer, CodedStates) else ():
                scales = state.parts()["scales"].nbytes
                total += Bytes(codes=state.nbytes - scales, scales=scales, allocated=state.nbytes)
        return total


def exact_tensors(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer of transformers: keys and values, states of convolutions and recurrences."""
    states = [getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states")]
    tensors = [*(getattr(layer, kind, None) for kind in KINDS), *(x for each in states for x in each.values())]
    return [x for x in tensors if isinstance(x, Tensor)]


def build(coding: Coding, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    """Build the codec of one tensor kind of one layer; `static` holds tensors of all layers, "layers.3.keys.<name>".

    Raises RecipeError for settings that do not fit the layer, and for calibrated tensors that are not theirs.
    """
    return plugins.load("kv", coding.method).build(coding.config, spec, calibrated.of_checked(coding, static, spec))


def check(codec: Codec, path: CachePath) -> None:
    """Raise RecipeError for a codec that cannot be read in this way."""
    if path == "decode" and (codec.needs_queries or not codec.reconstructs):
        why = "needs the queries" if codec.needs_queries else "has scores but no keys or values to give back"
        raise RecipeError(
            f"{codec.spec.where}: this codec {why}; use make_cache(..., path='fused') and "
            "model.set_attn_implementation(compress.kv.attention.NAME)"
        )
