"""Check a recipe's cache against a model, and count its bytes, before any weight is read.

Bytes a token are those at a stated context. Keys and values drawn at random fill the stores of one layer of each kind,
at two lengths a whole flush of all codecs apart, and the line through these is carried on to the context. What is
calibrated counts once for a model, whatever the number of sequences; divided by the tokens of one sequence it is part
of the bytes a token. Layers that stay as transformers has them are left out. A layer that evicts is filled with the
tokens that stay at that context (compress/kv/evict/select.py), and with what it remembers of their places. States of
recurrences do not grow with the text: they are counted apart.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from compress import plugins
from compress.calib.kv import GRADIENTS, SINKS
from compress.errors import RecipeError
from compress.kv import cache as caches
from compress.kv import layer as layers
from compress.kv.codec import Spec
from compress.kv.evict import select
from compress.kv.evict import settings as eviction
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import EXACT, KINDS, CacheSettings, Coding, Codings, reading_layers
from compress.kv.sparse.layer import let_choose, reader_units
from compress.kv.token_store import Bytes, Store
from compress.model.architectures import max_positions
from compress.model.cache_pass import CachedHeads, CachedLayers, cached_layers
from compress.numerics import kl
from compress.run import memory_plan
from compress.run.memory_plan import CacheSizes

SAMPLES_PER_BATCH = 4  # a forward pass of the calibration has no more
CALIBRATION_TOKENS = 16384  # no more: a layer's keys, values and queries of all of them are in memory
MOST_QUERIES = 512  # [tokens] whose queries a layer is shown at once to choose by: more than any keeps
CONTEXT = 8192  # tokens, or as many as the model has positions


def check(config: Any, settings: CacheSettings) -> Codings:
    """Return the codings of the layers of a model of this configuration; RecipeError where the settings do not fit.

    No weight is read: it is known before any work whether generation can use the cache.
    """
    if getattr(config.get_text_config(), "cross_attention_layers", None):
        raise RecipeError(
            "kv_cache: layers of this model attend to images, whose cache its own code reads; remove kv_cache"
        )
    types = caches.layer_types(config)
    if caches.CODED not in types and not _is_states_alone(settings):
        raise RecipeError(caches.no_layer(types))
    if getattr(config.get_text_config(), "use_cache", True) is False:
        raise RecipeError(
            "kv_cache: the model's configuration says use_cache: false, so that generation keeps no cache; set it to "
            "true in config.json, or remove kv_cache"
        )
    cached = cached_layers(config)
    if cached.own_cache:
        raise RecipeError(
            f"kv_cache: this model takes no cache but one of its own class, {cached.own_cache}; remove kv_cache"
        )
    if not cached.by_layer and not _is_states_alone(settings):
        raise RecipeError(caches.no_layer())
    if settings.states is not None and not cached.states:
        raise RecipeError("kv_cache.states: no layer of this model keeps the state of a recurrence; remove states")
    _check_model(config, settings, cached)
    codings = caches.coded_layers(config, settings)
    for index, layer in enumerate(codings):
        heads = cached.by_layer.get(index)
        for kind, coding in layer.items():
            if heads is not None and coding.method != EXACT:
                shape = heads.keys if kind == "keys" else heads.values
                queries = max(1, cached.queries // shape[0])
                spec = Spec(kind, index, len(codings), *shape, queries)  # type: ignore[arg-type]
                is_before_rope = _check_coding(coding, spec, heads, cached)
                _check_eviction(settings, coding, spec, heads, is_before_rope)
    return codings


def _is_states_alone(settings: CacheSettings) -> bool:
    """Return whether nothing is coded but states."""
    return settings.states is not None and {settings.keys.method, settings.values.method} == {EXACT}


def _check_model(config: Any, settings: CacheSettings, cached: CachedLayers) -> None:
    """Raise RecipeError where the model does not allow what the settings ask of all layers."""
    caches.make_cache(config, settings)  # for its errors
    if settings.evict is not None and settings.evict.prunes and not cached.is_sliceable:
        raise RecipeError(layers.UNSLICED)
    if settings.read is not None and not cached.is_fused:
        raise RecipeError(
            "kv_cache.read: only attention that reads stored codes can choose tokens, and the attention of this model "
            "cannot be replaced; remove read"
        )


def left_exact(config: Any, settings: CacheSettings) -> str:
    """Return a note on the layers whose type is not coded, "" where there is none."""
    types, coded, whole = caches.layer_types(config), set[int](), set[int]()
    if settings.states is not None:
        cached = cached_layers(config)
        coded, whole = {*cached.states}, {*cached.states} - {*cached.by_layer}
    counts = Counter(t for index, t in enumerate(types) if t not in (caches.CODED, "dummy") and index not in whole)
    exact = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
    others = f"the cache of {sum(counts.values())} of {len(types)} layers ({exact}) stays as it is"
    if not coded:
        return f"{others}; the others' is coded" if counts else ""
    states = f"the states of {len(coded)} of {len(types)} layers are coded"
    return f"{states}; {others}" if counts else states


def _check_eviction(
    settings: CacheSettings, coding: Coding, spec: Spec, heads: CachedHeads, is_before_rope: bool
) -> None:
    """Raise RecipeError where tokens of a layer cannot be evicted as the settings ask."""
    if settings.evict is None or settings.evict.exempts(spec.layer):
        return
    reason = eviction.refusal(settings.evict, coding, spec.kind, is_before_rope)
    if heads.unwatched:
        reason = f"tokens cannot be evicted from this model, because {heads.unwatched}; remove kv_cache.evict"
    if reason is not None:
        raise RecipeError(f"{spec.where}: {reason}")


def _check_coding(coding: Coding, spec: Spec, heads: CachedHeads, cached: CachedLayers) -> bool:
    """Return whether the keys of a layer are stored before RoPE; RecipeError unless it can be stored like this."""
    plugin = plugins.load("kv", coding.method)
    is_before_rope = spec.kind == "keys" and "keys_pre" in plugin.NEEDS
    if not plugin.NEEDS:
        is_before_rope = layers.build(coding, spec, {}).rope == "pre"
    elif heads.unwatched:
        raise RecipeError(
            f"{spec.where}: {coding.method} cannot be calibrated on this model, because {heads.unwatched}; choose a "
            "method that is not calibrated, such as kivi"
        )
    elif hasattr(plugin, "check_heads"):
        plugin.check_heads(coding.config, spec)
    if is_before_rope and not (heads.rotary and cached.is_half_split):
        raise RecipeError(
            f"{spec.where}: {coding.method} stores keys before the rotary embedding, but this model has none of the "
            "half-split form; choose another method, such as kivi, or rope: post where the method has it"
        )
    if caches.needs_queries(coding, spec.kind) and not cached.is_fused:
        raise RecipeError(caches.no_queries(spec.where, coding))
    return is_before_rope


def samples(seq_len: int) -> int:
    """Return how many samples of so many tokens a cache is calibrated on, at most."""
    return max(1, CALIBRATION_TOKENS // seq_len)


def sample_nbytes(config: Any, settings: CacheSettings, tokens: int) -> tuple[int, int]:
    """Return the bytes of the samples of one layer, float32, on so many tokens, and those that learning takes beside.

    Learning begins with joining the samples of each name.
    """
    cached, held, learning = cached_layers(config), 0, 0
    for index, kinds in enumerate(caches.coded_layers(config, settings)):
        modules = [plugins.load("kv", coding.method) for coding in kinds.values()]
        modules += [] if settings.read is None else [plugins.load("read", settings.read.method)]
        needed = frozenset[str]().union(*(module.NEEDS for module in modules))
        heads = cached.by_layer.get(index)
        if not needed or heads is None:
            continue
        channels = {"keys": math.prod(heads.keys), "values": math.prod(heads.values)}
        channels["keys_pre"], channels["queries"] = channels["keys"], cached.queries * heads.keys[1]
        channels |= dict.fromkeys(("queries_pre", "queries_scaled", "gradients_output"), channels["queries"])
        channels |= {"gradients": channels["keys"] + channels["values"], **dict.fromkeys(SINKS, 0)}
        channels |= {"gradients_rotated": channels["gradients"], "attended": heads.keys[0], "projections": 0}
        work = max(module.WORK for module in modules if module.NEEDS)
        held = max(held, 4 * sum(channels[name] for name in needed | {*KINDS}))
        learning = max(learning, 4 * max(channels.values()), work * max(channels[x] for x in needed - GRADIENTS))
    return held * min(tokens, CALIBRATION_TOKENS), learning * min(tokens, CALIBRATION_TOKENS)


def calibration_sizes(config: Any, settings: CacheSettings, tokens: int, blocks: int, item: int) -> CacheSizes:
    """Return the bytes that calibrating the cache of a model holds; item: bytes of a number of its hidden states."""
    hidden = config.get_text_config().hidden_size * item
    is_backward = bool(GRADIENTS & settings.needs())
    sides = blocks + 2 if is_backward else 1
    logits = memory_plan.LOGITS_FACTOR * kl.LOGITS_NBYTES if is_backward else 0
    states = sides * min(tokens, CALIBRATION_TOKENS) * hidden
    samples_nbytes, learning_nbytes = sample_nbytes(config, settings, tokens)
    return CacheSizes(samples_nbytes, learning_nbytes, states, logits, SAMPLES_PER_BATCH)


@dataclass(frozen=True)
class CacheBytes:
    """The bytes of one sequence's coded layers."""

    context: int  # [tokens]
    bytes_per_token: float  # static included
    exact_bytes_per_token: float  # of the uncompressed cache
    static: int  # bytes of calibrated tensors, once for a model
    states: int = 0  # bytes of the states of a sequence, whatever its length, where they are coded
    exact_states: int = 0  # of these as the model computes them, in float32

    def plain(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return asdict(self)


class CodedLayers:
    """The coded layers of a model, filled with any number of tokens of one sequence to count their bytes."""

    def __init__(
        self,
        config: Any,
        settings: CacheSettings,
        static: Mapping[str, Tensor],
        dtype: torch.dtype,
        devices: int = 1,
    ) -> None:
        """static: what the codecs were calibrated to. devices: those that share the KV heads of each layer."""
        self.config, self.settings, self.static, self.dtype, self.devices = config, settings, static, dtype, devices
        self.cached = cached_layers(config)
        self.heads = self.cached.by_layer
        if settings.needs() and not static:
            self.static = _stand_ins(config, settings, self.cached)
        layers = self._cache().layers
        self.coded = [i for i, layer in enumerate(layers) if isinstance(layer, CodedLayer) and i in self.heads]

    def _cache(self) -> KVCache:
        return caches.make_cache(self.config, replace(self.settings, evict=None), self.static, "fused")

    def _digest(self, index: int) -> str:
        """Return what tells the calibrated tensors of a layer from those of others, whose rows may have other sizes."""
        start, digest = f"layers.{index}.", hashlib.blake2b()
        for name in sorted(name for name in self.static if name.startswith(start)):
            tensor = self.static[name].cpu().contiguous()
            digest.update(f"{name.removeprefix(start)} {tensor.shape} {tensor.dtype}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def exact_token_nbytes(self) -> int:
        """Bytes of a token in these layers where they are not coded."""
        shapes = [shape for index in self.coded for shape in (self.heads[index].keys, self.heads[index].values)]
        return sum(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    @torch.no_grad()
    def nbytes(self, context: int, at_most: bool = False) -> Bytes:
        """Return the bytes at a context, on each device; at_most: the most while a sequence grows to it."""
        stored = _stored_tokens(self.config, self.settings, context)
        codings, evicts = self._cache().codings, self.settings.evict is not None
        reads = self.settings.read is not None  # layers that choose what they read may do so from a certain one on
        kinds = {i: repr((codings[i], self.heads[i], stored[i], self._digest(i), reads * i)) for i in self.coded}
        alike = Counter(kinds.values())
        total, rotary = Bytes(), 0
        for index in self.coded:
            heads = self.heads[index]
            if not (count := alike.pop(kinds[index], 0)):
                continue  # its like was measured
            one = self._cache()
            size = _layer_nbytes(one, index, heads, self.dtype, stored[index])
            if at_most:
                layer = cast(CodedLayer, one.layers[index])
                peaks = {peak for store in layer.stores.values() for peak in _peaks(store, stored[index])}
                sizes = (_layer_nbytes(self._cache(), index, heads, self.dtype, peak) for peak in peaks)
                size = max([size, *sizes], key=lambda each: each.total)
            if evicts and stored[index] < context:
                later = context - select.prompt_of(context)
                size += Bytes(state=select.places(stored[index] - later, bool(len(one.rope))))
            if len(one.rope):  # keys before the rotary embedding, whose rows and positions all layers share
                store = cast(CodedLayer, one.layers[index]).stores["keys"]
                are_rows_held = store.keeps_halves or _rotates_by_length(self.config)
                rotary = max(rotary, heads.rotary * self.dtype.itemsize * are_rows_held + 4)
            own = -(-size.total // min(self.devices, heads.keys[0]))
            total += Bytes(codes=count * own, static=count * size.static)
        return total + Bytes(state=rotary * context)


def _rotates_by_length(config: Any) -> bool:
    """Return whether rotary rows of a position depend on the length of the text, so that they are kept."""
    text = config.get_text_config()
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return "dynamic" in repr(scaling) or "longrope" in repr(scaling)


def _peaks(store: Store, tokens: int) -> list[int]:
    """Return the length before the last one, of so many tokens at most, at which exact tokens were coded."""
    first = store.policy.sink + store.policy.residual_length + store.flush
    return [tokens - (tokens - first) % store.flush - 1] if tokens >= first else []


def _stand_ins(config: Any, settings: CacheSettings, cached: CachedLayers) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and types that calibration will give, so that bytes can be counted."""
    tensors: dict[str, Tensor] = {}
    codings = caches.coded_layers(config, settings)
    readers = set(reading_layers(codings)) if settings.read is not None else set()
    for index, heads in cached.by_layer.items():
        for kind, shape in (("keys", heads.keys), ("values", heads.values), ("read", heads.keys)):
            if kind == "read" and index not in readers:
                continue
            method = settings.read if kind == "read" else codings[index][kind]
            assert method is not None, "layers read by it"
            module = plugins.load("read" if kind == "read" else "kv", method.method)
            spec = Spec(kind, index, len(codings), *shape, max(1, cached.queries // shape[0]))  # type: ignore[arg-type]
            for name, tensor in _stand_ins_of(module, method.config, spec).items():
                tensors[f"layers.{index}.{kind}.{name}"] = tensor
    return tensors


def _stand_ins_of(module: Any, config: Any, spec: Spec) -> dict[str, Tensor]:
    """Return what a method's calibration will give for the keys, the values or the reader of a layer."""
    tensors = {}
    specs, typical = getattr(module, "specs", None), getattr(module, "typical", None)
    for name, (size, dtype) in specs(config, spec).items() if specs is not None else ():
        chosen = getattr(config, name, None)  # a number that the recipe gives, on average over layers
        whole = max(1, math.floor(chosen)) if isinstance(chosen, int | float) else 1  # no more in all
        tensors[name] = _stand_in(size, dtype) * whole
    return tensors | (typical(config, spec) if typical is not None else {})


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return whole numbers of 1, unit matrices, and positive numbers in ascending order."""
    if not dtype.is_floating_point:
        return torch.ones(shape, dtype=dtype)
    is_square = len(shape) > 1 and shape[-1] == shape[-2]
    values = torch.eye(shape[-1]) if is_square else torch.linspace(0.5, 1.0, shape[-1])
    return values.to(dtype).expand(shape).contiguous()


def bytes_at_context(
    config: Any, settings: CacheSettings, static: Mapping[str, Tensor], dtype: torch.dtype, context: int | None = None
) -> CacheBytes:
    """Return the bytes of a cache of a model of this configuration; static: what its codecs were calibrated to."""
    context = context or min(CONTEXT, max_positions(config.get_text_config()) or CONTEXT)
    layers = CodedLayers(config, settings, static, dtype)
    size, states = layers.nbytes(context), layers.cached.state_nbytes if settings.states is not None else (0, 0)
    return CacheBytes(context, (size.total + size.static) / context, layers.exact_token_nbytes, size.static, *states)


def _stored_tokens(config: Any, settings: CacheSettings, context: int) -> list[int]:
    """Return how many tokens each layer of a model stores at a context."""
    later = context - select.prompt_of(context)
    return [later + kept for kept in select.by_layer(config, settings, context)]


def _layer_nbytes(cache: KVCache, index: int, heads: CachedHeads, dtype: torch.dtype, context: int) -> Bytes:
    """Return the bytes of one layer at the context, total carried on; without rotary rows."""
    layer = cache.layers[index]
    assert isinstance(layer, CodedLayer), "the caller has asked"
    generator = torch.Generator().manual_seed(0)

    def feed(tokens: int) -> None:
        states = [
            torch.randn(1, h, tokens, width, generator=generator).to(dtype) for h, width in (heads.keys, heads.values)
        ]
        if heads.rotary:
            angles = torch.rand(1, tokens, heads.rotary // 2, generator=generator).repeat(1, 1, 2)
            layer.turns = angles.cos().to(dtype), angles.sin().to(dtype)
        layer.update(*states)
        queries = cache.queries // heads.keys[0] * heads.keys[0]
        layer.commit(torch.randn(1, queries, tokens, heads.keys[1], generator=generator).to(dtype))
        let_choose(layer, torch.randn(1, queries, min(tokens, MOST_QUERIES), heads.keys[1], generator=generator))

    feed(1)
    period = math.lcm(*(store.flush for store in layer.stores.values()), *reader_units(layer))
    least = max(layer.cache.codings[index][kind].policy.residual_length for kind in KINDS)
    before = least + layer.stores["keys"].policy.sink + period
    before += (context - before) % period
    if context <= before:
        feed(context - 1)
        return layer.nbytes()
    feed(before - 1)
    first = layer.nbytes()
    feed(period)
    last = layer.nbytes()
    steps = (context - before) // period
    carried = first.total + steps * (last.total - first.total)
    return Bytes(codes=carried, static=last.static)
