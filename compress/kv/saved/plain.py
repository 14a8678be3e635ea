"""Save and restore the layers of transformers' own cache: keys and values as they are, or rounded to a grid.

A layer's first SINKS tokens are kept as they are: attention looks at them from everywhere, and their keys are unlike
all others. Keys are coded before the rotary embedding where that takes fewer bits, estimated for each layer: turns no
longer hide what tokens share. The same cos and sin turn them back and forth, so that a wrong guess costs bits, never
accuracy. Then basis.py turns the channels, where that pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from compress.errors import CheckpointError, CompressError, UnsupportedModelError
from compress.kv import rope
from compress.kv.codec import rotate, unrotate
from compress.kv.layer import exact_tensors
from compress.kv.saved import basis, parts
from compress.kv.saved.file import SavedFile, Source
from compress.kv.saved.parts import TOKENS, Part
from compress.kv.settings import KINDS

SINKS = 4  # tokens
FULL, SLIDING = "full", "sliding"
LAYERS: dict[Any, str] = {DynamicLayer: FULL, DynamicSlidingWindowLayer: SLIDING}

Given = Iterator[tuple[str, tuple[Part, Source]]]
Turns = tuple[Tensor, Tensor]  # cos and sin [1, tokens, rotary width] float32


def facts(cache: Cache) -> list[dict[str, Any] | None]:
    """Return what is to be known of each layer, None for one that holds nothing.

    Raises UnsupportedModelError for layers of other kinds than full and sliding attention.
    """
    return [layer_facts(index, layer) for index, layer in enumerate(cache.layers)]


def layer_facts(index: int, layer: Any) -> dict[str, Any] | None:
    """Return the facts of one layer of transformers."""
    if not getattr(layer, "is_initialized", False) and not exact_tensors(layer):
        return None
    check_kind(index, layer)
    return {"kind": LAYERS[type(layer)], "seen": int(layer.get_seq_length())}


def check_kind(index: int, layer: Any) -> None:
    """Raise UnsupportedModelError for a layer of transformers that cannot be saved."""
    if type(layer) not in LAYERS:
        raise UnsupportedModelError(
            f"layer {index} of the cache is a {type(layer).__name__}, which cannot be saved; layers of full and of "
            "sliding attention can"
        )


def turns(model: nn.Module, tokens: int) -> Turns | None:
    """Return cos and sin of the positions 0 to tokens - 1; None for a model without a rotary embedding that is known.

    Where modules differ between layers, those of the first module are as good as any: see above.
    """
    for source in rope.sources(model):
        device = next(model.parameters()).device
        with torch.no_grad():
            cos, sin = source(torch.empty(0, device=device), torch.arange(tokens, device=device)[None])
        cos, sin = cos.float().cpu(), sin.float().cpu()
        try:
            rope.check(cos)
        except CompressError:
            continue
        return cos, sin
    return None


def given(index: int, layer: Any, noise: float | None, both: Turns | None) -> tuple[dict[str, Any], Given]:
    """Return facts and parts of a layer with keys and values; noise: of the grid, None: without loss.

    A prompt that is no longer than the sinks is kept as it is.
    """
    if noise is None or layer.keys.shape[TOKENS] <= SINKS:
        return {}, iter([(f"{index}.{kind}", _exact(getattr(layer, kind))) for kind in KINDS])
    keys = layer.keys
    if both is not None and (keys.shape[TOKENS] != both[0].shape[1] or keys.shape[-1] < both[0].shape[-1]):
        both = None
    if both is not None:
        plain, before = (_rest(keys, each, None) for each in (None, both))
        step = parts.rounded(plain, noise, keys.dtype, f"layer {index}, keys").step
        both = both if basis.bits(before, step) < basis.bits(plain, step) else None
    return {"turned": both is not None}, _rounded(index, layer, noise, both)


def _exact(tensor: Tensor) -> tuple[Part, Source]:
    tensor = parts.checked(tensor.detach().cpu())
    return parts.lossless(tensor), lambda: tensor


def _rounded(index: int, layer: Any, noise: float, both: Turns | None) -> Given:
    for kind in KINDS:
        name, whole = f"{index}.{kind}", getattr(layer, kind).detach()
        yield f"{name}.sink", _exact(whole[:, :, :SINKS])
        turned = both if kind == "keys" else None
        part = parts.rounded(_rest(whole, turned, None), noise, whole.dtype, f"layer {index}, {kind}")
        vectors = basis.fitted(_rest(whole, turned, None), part.step)
        if vectors is not None:
            yield f"{name}.basis", (Part("raw", tuple(vectors.shape), vectors.dtype), partial(torch.clone, vectors))
        yield name, (part, partial(_rest, whole, turned, vectors))


def _rest(whole: Tensor, both: Turns | None, vectors: Tensor | None) -> Tensor:
    """Return the tokens after the sinks in float32 on the CPU: turned back by cos and sin, in the basis `vectors`."""
    rest = whole[:, :, SINKS:].cpu().float()
    if both is not None:
        rest = unrotate(rest, both[0][:, SINKS:], both[1][:, SINKS:])
    return rest if vectors is None else basis.into(rest, vectors)


def check(saved: SavedFile, index: int, fact: Mapping[str, Any], both: Turns | None) -> None:
    """Raise ValueError unless the parts of a layer belong to each other and to the tokens."""
    batch, tokens = saved.parts["tokens"].shape
    found = []
    for kind in KINDS:
        part, count = saved.parts[f"{index}.{kind}"], 0
        if len(part.shape) != 4 or not part.dtype.is_floating_point:
            raise ValueError(f"its {kind} have the shape {list(part.shape)}")
        heads, width = part.shape[1], part.shape[3]
        if part.way == "grid":
            sink, vectors = saved.parts[f"{index}.{kind}.sink"], saved.parts.get(f"{index}.{kind}.basis")
            count = SINKS
            is_sink = sink == Part(sink.way, (part.shape[0], heads, count, width), part.dtype) and sink.way != "grid"
            if not is_sink or vectors not in (None, Part("raw", (heads, width, width), torch.int8)):
                raise ValueError(f"the sinks or the basis of its {kind} are not theirs")
        found.append((part.shape[0], heads, part.rows + count, width))
    (*sizes, width), (*others, _) = found
    if sizes != others or sizes[0] != batch or fact["seen"] != tokens or (fact["kind"] == FULL and sizes[2] != tokens):
        raise ValueError("its keys and values are not those of the tokens")
    if fact.get("turned") and (both is None or sizes[2] != tokens or width < both[0].shape[-1]):
        raise ValueError("its keys cannot have been turned back")


def tensors(saved: SavedFile, index: int, fact: Mapping[str, Any], both: Turns | None) -> dict[str, Tensor]:
    """Return keys and values of a layer, [B, h, tokens, width] in the type that they were saved from."""
    found = {}
    for kind in KINDS:
        name = f"{index}.{kind}"
        x = saved.tensor(name)
        if saved.parts[name].way == "grid":
            if f"{name}.basis" in saved.parts:
                x = basis.out_of(x, saved.tensor(f"{name}.basis"))
            if kind == "keys" and fact["turned"]:
                assert both is not None, "they were saved with it"
                x = rotate(x, both[0][:, SINKS:], both[1][:, SINKS:])
            x = torch.cat((saved.tensor(f"{name}.sink"), x.to(saved.parts[name].dtype)), TOKENS)
        found[kind] = x
    return found


def restore(layer: Any, fact: Mapping[str, Any], both: Mapping[str, Tensor], device: torch.device) -> None:
    """Fill a fresh layer of transformers. Raises CheckpointError where it is of another kind than the saved one."""
    if LAYERS.get(type(layer)) != fact["kind"]:
        raise CheckpointError(
            f"a layer of {fact['kind']} attention was saved, and the model's is a {type(layer).__name__}; load the "
            "cache with the release of transformers that saved it"
        )
    keys, values = (both[kind].to(device) for kind in KINDS)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if fact["kind"] == SLIDING:
        layer.cumulative_length = fact["seen"]


def fresh(config: Any, count: int) -> DynamicCache:
    """Return transformers' cache for a model, with as many layers as were saved. Raises CheckpointError."""
    cache = DynamicCache(config=config)
    if len(cache.layers) != count:
        raise CheckpointError(f"a cache of {count} layers was saved, and the model's has {len(cache.layers)}")
    return cache
