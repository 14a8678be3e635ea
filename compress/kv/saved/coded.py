"""Save and restore caches of our own codecs (kv/cache.py) without loss: every stored field, as bytes.

What a codec has stored is coded once more by the frequencies of its bytes; nothing is rounded again. Calibrated tensors
are those of a checkpoint, not of a text: the file has their sha256, and who loads it must have the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, UnsupportedModelError
from compress.kv import rope
from compress.kv.buffer import Buffer
from compress.kv.cache import make_cache, named_path
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.saved import checked, parts, plain
from compress.kv.saved.file import SavedFile, Source, hash_tensors
from compress.kv.saved.parts import SavedPart
from compress.kv.saved.states import exact
from compress.kv.settings import KINDS, cache_settings
from compress.kv.token_store import Store

CODES = "codes"  # kind of a layer
PartsByName = Iterator[tuple[str, tuple[SavedPart, Source]]]


def facts(cache: KVCache) -> dict[str, Any]:
    """Return what is to be known of the cache but its layers; settings that layers share are written once."""
    codings = [json.dumps({k: c.plain() for k, c in layer.items()}, sort_keys=True) for layer in cache.codings]
    known = sorted(set(codings))
    return {
        "codings": [json.loads(text) for text in known],
        "coding_of": [known.index(text) for text in codings],
        "exact_prefill": cache.exact_prefill,
        "path": cache.path,
        "static": hash_tensors(cache.static),
        **({} if cache.reading is None else {"read": cache.reading.plain()}),
        **({} if cache.states is None else {"states": cache.states}),
    }


def known_layers(cache: KVCache) -> list[dict[str, Any] | None]:
    """Return what is to be known of each layer, None for one that holds nothing."""
    return [layer_facts(index, layer) for index, layer in enumerate(cache.layers)]


def check_kind(index: int, layer: Any) -> None:
    """Raise UnsupportedModelError for a layer, coded or not, that cannot be saved whatever it holds."""
    if not isinstance(layer, CodedLayer):
        plain.check_kind(index, layer)
    elif not layer.can_be_saved:
        raise UnsupportedModelError(
            f"layer {index} of the cache evicts tokens, and such a cache cannot be saved; remove kv_cache.evict"
        )


def layer_facts(index: int, layer: Any) -> dict[str, Any] | None:
    """Return the facts of one layer, coded or not; None for one that holds nothing."""
    if not isinstance(layer, CodedLayer):
        return plain.layer_facts(index, layer)
    check_kind(index, layer)
    if not layer.stores:
        return None
    layer.commit()
    facts: dict[str, Any] = {"kind": CODES, "seen": layer.seen}
    for kind, store in layer.stores.items():
        spec = store.codec.spec
        facts[kind] = {
            "shape": [store.batch, spec.heads, 0, spec.width],
            "dtype": parts.NAMES[spec.dtype],
            "runs": store.runs,
            "coded": store.coded,
            "waits": store.waits,
        }
    return facts


def layer_parts(index: int, layer: Any) -> PartsByName:
    """Yield the parts of a layer."""
    if not isinstance(layer, CodedLayer):
        yield from plain.layer_parts(index, layer, None, None)[1]
        return
    for kind, store in layer.stores.items():
        for name, tensor in _store_tensors(store).items():
            yield f"{index}.{kind}.{name}", exact(tensor)


def shared_parts(cache: KVCache) -> PartsByName:
    """Yield the parts that all layers share: rotary positions or rows, and the padding of each sequence."""
    for name, tensor in cache.rope.tensors().items():
        yield f"rope.{name}", exact(tensor)
    if cache.pads is not None:
        yield "pads", exact(cache.pads)


def _store_tensors(store: Store) -> dict[str, Tensor]:
    """Return the tensors of a store by name."""
    tensors = {name: buffer.view() for name, buffer in _buffers(store).items() if buffer.length}
    tensors |= {f"state.{name}": tensor for name, tensor in store.state.items()}
    orders = {"order": store.columns, "source": store.source}
    return tensors | {name: order for name, order in orders.items() if order is not None}


def _buffers(store: Store) -> dict[str, Buffer]:
    """Return the buffers of a store by name."""
    return {"sink": store.sink, "tail": store.tail, **{f"fields.{n}": b for n, b in store.fields.items()}}


def fresh(config: Any, known: Mapping[str, Any], static: Mapping[str, Tensor] | None) -> KVCache:
    """Return an empty cache with the saved settings. Raises CheckpointError for other calibrated tensors."""
    checked.check_codings(known)
    if hash_tensors(dict(static or {})) != known["static"]:
        raise CheckpointError(
            "the cache was saved with other calibrated tensors than those given; load the checkpoint that saved it, or "
            "give its tensors as static"
        )
    settings = [cache_settings(known["codings"][number]) for number in known["coding_of"]]
    shared = {key: known.get(key) for key in ("read", "states")}
    first = cache_settings({**known["codings"][known["coding_of"][0]], **shared})
    cache = make_cache(config, first, static, named_path(known["path"]))
    if len(cache.layers) != len(settings):
        raise CheckpointError(f"a cache of {len(settings)} layers was saved, and the model's has {len(cache.layers)}")
    cache.codings = tuple({kind: each.of(kind) for kind in KINDS} for each in settings)
    cache.exact_prefill = known["exact_prefill"]
    return cache


def restore(saved: SavedFile, index: int, layer: CodedLayer, fact: Mapping[str, Any], device: torch.device) -> None:
    """Fill a layer of a fresh cache. Raises ValueError for what its codecs do not store."""
    empty = [torch.empty(*fact[k]["shape"], dtype=parts.DTYPES[fact[k]["dtype"]], device=device) for k in KINDS]
    layer.lazy_initialization(*empty)
    layer.seen = fact["seen"]
    for kind, store in layer.stores.items():
        prefix = f"{index}.{kind}."
        tensors = {n.removeprefix(prefix): saved.tensor(n).to(device) for n in saved.parts if n.startswith(prefix)}
        checked.check_rope(layer.cache.rope, store, layer.seen)
        checked.check_store(store, tensors, fact[kind], saved.parts["tokens"].shape[0], layer.seen)
        for name, buffer in _buffers(store).items():
            if name in tensors:
                buffer.append(tensors[name])
        store.state = {n.removeprefix("state."): tensor for n, tensor in tensors.items() if n.startswith("state.")}
        store.columns, store.source = tensors.get("order"), tensors.get("source")
        store.runs, store.coded, store.waits = list(fact[kind]["runs"]), fact[kind]["coded"], fact[kind]["waits"]


def restore_shared(saved: SavedFile, cache: KVCache, model: nn.Module) -> None:
    """Fill what all layers share. Raises ValueError for what is of another form."""
    device = next(model.parameters()).device
    rope_tensors = {n.removeprefix("rope."): saved.tensor(n).to(device) for n in saved.parts if n.startswith("rope.")}
    pads = saved.tensor("pads") if "pads" in saved.parts else None
    checked.check_shared(rope_tensors, pads, saved.parts["tokens"].shape)
    cache.rope.refill(rope_tensors, rope.sources(model))
    cache.pads = pads
