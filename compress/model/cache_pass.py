"""See, by forward passes on the meta device, what the layers of a model give their cache and who reads it there.

A configuration does not say this for all models: heads may differ between layers, layers may share what they cache, and
some models cache latents from which attention makes keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from compress.errors import CompressError
from compress.kv import generation, hooks, rope
from compress.kv.cache import layer_types, query_heads
from compress.kv.states import StateCodes, is_matrix
from compress.kv.static import head_shape
from compress.model import blockwise, graph, meta_pass

LATENTS = "what it caches is not what its attention reads"
OWN_ATTENTION = "its attention is not called through the interface of transformers"
SINKS = "its attention has sink logits or position biases"


@dataclass(frozen=True)
class CachedHeads:
    """What one layer gives its cache."""

    keys: tuple[int, int]  # heads, channels of a head
    values: tuple[int, int]
    rotary: int  # channels of the rotary embedding that the layer is given; 0: none
    unwatched: str = ""  # why keys and values cannot be watched where attention reads them; "": they can


@dataclass(frozen=True)
class CachedLayers:
    """What all layers give their cache."""

    by_layer: dict[int, CachedHeads]  # without layers that cache no keys and values of their own
    queries: int  # query heads of the model
    is_fused: bool = True  # attention may read stored codes in the place of keys and values
    is_half_split: bool = True  # the rotary embedding turns channel j with channel j + rotary / 2
    is_sliceable: bool = True  # tokens may be dropped between its layers
    own_cache: str = ""  # the class of cache without which the model does not generate; "": it takes others
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)  # [1, heads, ..., rows, columns] of recurrences

    @property
    def widest(self) -> int:
        """Return the most channels of keys, values and queries that a layer has."""
        queries = (self.queries * heads.keys[1] for heads in self.by_layer.values())
        sums = (h.keys[0] * h.keys[1] + h.values[0] * h.values[1] for h in self.by_layer.values())
        return max((a + b for a, b in zip(queries, sums, strict=True)), default=0)

    @property
    def state_nbytes(self) -> tuple[int, int]:
        """Return the bytes of the states of a sequence, coded and in float32."""
        states = [torch.empty(shape, device="meta") for shape in self.states.values()]
        return sum(StateCodes(x).nbytes for x in states), sum(x.nbytes for x in states)


@dataclass
class _Seen:
    """What a forward pass has shown, by layer."""

    cached: dict[int, tuple[torch.Size, torch.Size]] = field(default_factory=dict)  # [B, h, n, width]
    attended: list[tuple[torch.Size, torch.Size, bool]] = field(default_factory=list)  # and whether it has sinks
    rotary: dict[int, int] = field(default_factory=dict)
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)


class _Recorder(DynamicCache):
    """A cache that notes what it is given and returns what `gives` makes of it."""

    def __init__(self, config: PretrainedConfig, seen: _Seen, gives: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__(config=config)
        self.seen, self.gives = seen, gives

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen.cached[layer_idx] = key_states.shape, value_states.shape
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states if self.gives is None else tuple(map(self.gives, states))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if is_matrix(recurrent_states):
            self.seen.states[layer_idx] = tuple(recurrent_states.shape)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


class _Opaque:
    """Stands for keys or values that nothing but our attention may look into."""

    def __init__(self, states: Tensor) -> None:
        self.states = states


def cached_layers(config: PretrainedConfig) -> CachedLayers:
    """Return what the layers of a causal language model of this configuration give their cache.

    A model whose forward pass needs data is taken at the word of its configuration.
    """
    try:
        model = meta_pass.without_experts(config, torch.float32)
        seen, is_watched = _pass(model)
    except meta_pass.NEEDS_DATA:
        return replace(cached_by_config(config), own_cache=_own_cache(model))
    attended = {shapes[:2] for shapes in seen.attended}
    has_sinks = any(sinks for *_, sinks in seen.attended)
    by_layer = {}
    for layer, (keys, values) in seen.cached.items():
        reason = SINKS if has_sinks else LATENTS if attended else OWN_ATTENTION
        is_read = is_watched and not has_sinks and (keys, values) in attended
        shapes = (keys[1], keys[3]), (values[1], values[3])
        by_layer[layer] = CachedHeads(*shapes, seen.rotary.get(layer, 0), "" if is_read else reason)
    facts = _is_fused(model, seen), _is_half_split(model), hooks.decoder_blocks(model) is not None
    return CachedLayers(by_layer, query_heads(config), *facts, states=seen.states)


def _own_cache(model: PreTrainedModel) -> str:
    """Return the class of cache that the model makes where it refuses a plain one, "" where it makes a plain one."""
    try:
        made = model(input_ids=_probe(), use_cache=True).past_key_values
    except meta_pass.NEEDS_DATA:
        return ""
    return "" if made is None or type(made) is DynamicCache else type(made).__name__


def cached_by_config(config: PretrainedConfig) -> CachedLayers:
    """Return what a configuration says of the cache of its layers."""
    if not query_heads(config):
        return CachedLayers({}, 0)
    queries, heads, width = head_shape(config)
    same = CachedHeads((heads, width), (heads, width), width)
    return CachedLayers(dict.fromkeys(range(len(layer_types(config))), same), queries)


def _pass(model: PreTrainedModel) -> tuple[_Seen, bool]:
    """Return what a forward pass shows, and whether attention could be watched in it."""
    seen = _Seen()
    try:
        with graph.watch_attention(model.config, _watcher(seen)):
            _run(model, _Recorder(model.config, seen), seen)
        return seen, True
    except meta_pass.NEEDS_DATA:  # of a model that makes no mask where its attention is not its own
        seen = _Seen()
        _run(model, _Recorder(model.config, seen), seen)
        return seen, False


def _is_fused(model: PreTrainedModel, expected: _Seen) -> bool:
    """Return whether keys and values reach attention without anybody looking into them."""
    if not generation.can_read_codes(model):
        return False
    seen = _Seen()
    try:
        with graph.watch_attention(model.config, _watcher(seen)):
            _run(model, _Recorder(model.config, seen, _Opaque), seen)
    except meta_pass.NEEDS_DATA:
        return False
    return seen.cached == expected.cached and seen.attended == expected.attended


def _watcher(seen: _Seen) -> Callable[..., Any]:
    """Return an attention function that notes the shapes of what it is given."""

    def attend(module: nn.Module, query: Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = (x.states if isinstance(x, _Opaque) else x for x in (key, value))
        has_sinks = any(kwargs.get(name) is not None for name in ("s_aux", "position_bias"))
        seen.attended.append((keys.shape, values.shape, has_sinks))
        shape = query.transpose(1, 2).shape[:-1] + values.shape[-1:]
        return torch.empty(shape, dtype=query.dtype, device=query.device), None

    return attend


def _run(model: PreTrainedModel, cache: DynamicCache, seen: _Seen) -> None:
    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        turns = kwargs.get("position_embeddings")
        if isinstance(turns, tuple):
            seen.rotary[module.layer_idx] = turns[0].shape[-1]  # type: ignore[index]

    modules = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    with blockwise.attached([module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]):
        model(input_ids=_probe(), use_cache=True, **{hooks.cache_argument(model): cache})


def _probe() -> Tensor:
    return torch.zeros(1, meta_pass.PROBE_TOKENS, dtype=torch.long, device="meta")


def _is_half_split(model: PreTrainedModel) -> bool:
    """Return whether rows of the model's rotary embeddings have two equal halves."""
    for source in rope.sources(model):
        try:
            made = type(source)(source.config)
            rope.check(made(torch.zeros(1, device="cpu"), torch.arange(4, device="cpu")[None])[0])
        except CompressError:
            return False
        except meta_pass.NEEDS_DATA:
            continue  # not made from a configuration alone
    return True
