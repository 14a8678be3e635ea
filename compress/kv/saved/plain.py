"""Save and restore the layers of transformers' own cache: keys and values as they are, or rounded to a grid.

A layer's first SINKS tokens are kept as they are: attention looks at them from everywhere, and their keys are unlike
all others. Keys are coded before the rotary embedding where that takes fewer bits, estimated for each layer: turns no
longer hide what tokens share. The same cos and sin turn them back and forth, so that a wrong guess costs bits, never
accuracy. Then the channels are turned to principal components, where that pays.

Keys and values of a text lie near a part of the channels' space. After a rotation to principal components the channels
differ more in size, and entropy coding gives small ones few bits (KVTC, arXiv 2511.01815, does so over all heads with a
basis that was calibrated for a model; here each file has its own, so that nothing is calibrated). A basis is int8
[h, width, width], 127 for 1: the matrix that it stands for is nearly orthogonal, and coding uses its inverse, so that
its rounding changes no value. It costs 8 h width^2 bits, 0.125 bits a number for heads of 64 and 4,096 tokens.
"""

from __future__ import annotations

import math
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
from compress.kv.saved import parts, states
from compress.kv.saved.file import SavedFile, Source
from compress.kv.saved.parts import TOKENS, SavedPart
from compress.kv.settings import KINDS

SINKS = 4  # tokens
FULL, SLIDING = "full", "sliding"
LAYERS: dict[Any, str] = {DynamicLayer: FULL, DynamicSlidingWindowLayer: SLIDING}
BASIS_UNIT = 127.0
DENSITY = 2 * math.pi * math.e  # a normal variable of variance v takes log2(DENSITY v / step^2) / 2 bits
MAX_PREDICTED_SHARE = 0.95  # the share of the value before that predicts, as in columns.py

PartsByName = Iterator[tuple[str, tuple[SavedPart, Source]]]
Turns = tuple[Tensor, Tensor]  # cos and sin [1, tokens, rotary width] float32


def facts(cache: Cache) -> list[dict[str, Any] | None]:
    """Return what is to be known of each layer, None for one that holds nothing.

    Raises UnsupportedModelError for layers of other kinds than full, sliding and linear attention.
    """
    return [layer_facts(index, layer) for index, layer in enumerate(cache.layers)]


def layer_facts(index: int, layer: Any) -> dict[str, Any] | None:
    """Return the facts of one layer of transformers."""
    if not getattr(layer, "is_initialized", False) and not exact_tensors(layer):
        return None
    check_kind(index, layer)
    if states.is_linear(layer):
        return states.layer_facts(layer)
    return {"kind": LAYERS[type(layer)], "seen": int(layer.get_seq_length())}


def check_kind(index: int, layer: Any) -> None:
    """Raise UnsupportedModelError for a layer of transformers that cannot be saved."""
    if type(layer) not in LAYERS and not states.is_linear(layer):
        raise UnsupportedModelError(
            f"layer {index} of the cache is a {type(layer).__name__}, which cannot be saved; layers of full, sliding "
            "and linear attention can"
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


def layer_parts(index: int, layer: Any, noise: float | None, both: Turns | None) -> tuple[dict[str, Any], PartsByName]:
    """Return facts and parts of a layer; noise: of the grid, None: without loss.

    A prompt that is no longer than the sinks is kept as it is.
    """
    if states.is_linear(layer):
        return {}, states.layer_parts(index, layer, noise is not None)
    if noise is None or layer.keys.shape[TOKENS] <= SINKS:
        return {}, iter([(f"{index}.{kind}", states.exact(getattr(layer, kind))) for kind in KINDS])
    keys = layer.keys
    if both is not None and (keys.shape[TOKENS] != both[0].shape[1] or keys.shape[-1] < both[0].shape[-1]):
        both = None
    if both is not None:
        plain, before = (_rest(keys, each, None) for each in (None, both))
        step = parts.round_part(plain, noise, keys.dtype, f"layer {index}, keys").step
        both = both if estimate_bits(before, step) < estimate_bits(plain, step) else None
    return {"turned": both is not None}, _rounded_parts(index, layer, noise, both)


def _rounded_parts(index: int, layer: Any, noise: float, both: Turns | None) -> PartsByName:
    for kind in KINDS:
        name, whole = f"{index}.{kind}", getattr(layer, kind).detach()
        yield f"{name}.sink", states.exact(whole[:, :, :SINKS])
        turned = both if kind == "keys" else None
        part = parts.round_part(_rest(whole, turned, None), noise, whole.dtype, f"layer {index}, {kind}")
        vectors = fit_basis(_rest(whole, turned, None), part.step)
        if vectors is not None:
            yield (
                f"{name}.basis",
                (SavedPart("raw", tuple(vectors.shape), vectors.dtype), partial(torch.clone, vectors)),
            )
        yield name, (part, partial(_rest, whole, turned, vectors))


def _rest(whole: Tensor, both: Turns | None, vectors: Tensor | None) -> Tensor:
    """Return the tokens after the sinks in float32 on the CPU: turned back by cos and sin, in the basis `vectors`."""
    rest = whole[:, :, SINKS:].cpu().float()
    if both is not None:
        rest = unrotate(rest, both[0][:, SINKS:], both[1][:, SINKS:])
    return rest if vectors is None else to_basis(rest, vectors)


def check(saved: SavedFile, index: int, fact: Mapping[str, Any], both: Turns | None) -> None:
    """Raise ValueError unless the parts of a layer belong to each other and to the tokens."""
    batch, tokens = saved.parts["tokens"].shape
    sizes_of = []
    for kind in KINDS:
        part, count = saved.parts[f"{index}.{kind}"], 0
        if len(part.shape) != 4 or not part.dtype.is_floating_point:
            raise ValueError(f"its {kind} have the shape {list(part.shape)}")
        heads, width = part.shape[1], part.shape[3]
        if part.way == "grid":
            sink, vectors = saved.parts[f"{index}.{kind}.sink"], saved.parts.get(f"{index}.{kind}.basis")
            count = SINKS
            is_sink = (
                sink == SavedPart(sink.way, (part.shape[0], heads, count, width), part.dtype) and sink.way != "grid"
            )
            if not is_sink or vectors not in (None, SavedPart("raw", (heads, width, width), torch.int8)):
                raise ValueError(f"the sinks or the basis of its {kind} are not theirs")
        sizes_of.append((part.shape[0], heads, part.rows + count, width))
    (*sizes, width), (*others, _) = sizes_of
    if sizes != others or sizes[0] != batch or fact["seen"] != tokens or (fact["kind"] == FULL and sizes[2] != tokens):
        raise ValueError("its keys and values are not those of the tokens")
    if fact.get("turned") and (both is None or sizes[2] != tokens or width < both[0].shape[-1]):
        raise ValueError("its keys cannot have been turned back")


def tensors(saved: SavedFile, index: int, fact: Mapping[str, Any], both: Turns | None) -> dict[str, Tensor]:
    """Return keys and values of a layer, [B, h, tokens, width] in the type that they were saved from."""
    both_kinds = {}
    for kind in KINDS:
        name = f"{index}.{kind}"
        x = saved.tensor(name)
        if saved.parts[name].way == "grid":
            if f"{name}.basis" in saved.parts:
                x = from_basis(x, saved.tensor(f"{name}.basis"))
            if kind == "keys" and fact["turned"]:
                assert both is not None, "they were saved with it"
                x = rotate(x, both[0][:, SINKS:], both[1][:, SINKS:])
            x = torch.cat((saved.tensor(f"{name}.sink"), x.to(saved.parts[name].dtype)), TOKENS)
        both_kinds[kind] = x
    return both_kinds


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


def estimate_bits(x: Tensor, step: float) -> float:
    """Return about how many bits x [B, h, tokens, width] takes, rounded to multiples of step and coded by columns."""
    rows = x.movedim(2, 0).flatten(1).double()
    rows = rows - rows.mean(0)
    energy = rows.square().sum(0)
    share = ((rows[1:] * rows[:-1]).sum(0) / energy.clamp(min=1e-30)).clamp(0, MAX_PREDICTED_SHARE)
    variance = energy * (1 - share.square()) / max(1, len(rows))
    return float((1 + DENSITY * variance / step**2).log2().sum()) / 2 * len(rows)


def fit_basis(x: Tensor, step: float) -> Tensor | None:
    """Return the basis int8 [h, width, width] of x [B, h, tokens, width] float32; None where it costs more bits."""
    heads, width = x.shape[1], x.shape[3]
    flat = x.transpose(0, 1).reshape(heads, -1, width).double()
    flat = flat - flat.mean(1, keepdim=True)
    vectors = torch.linalg.eigh(flat.transpose(1, 2) @ flat)[1]
    basis = (vectors * BASIS_UNIT).round().to(torch.int8)
    if bool((torch.linalg.cond(basis.double()) > 2).any()):  # so coarse that errors would grow
        return None
    return basis if estimate_bits(to_basis(x, basis), step) + 8 * basis.numel() < estimate_bits(x, step) else None


def to_basis(x: Tensor, basis: Tensor) -> Tensor:
    """Return x [B, h, tokens, width] float32 in the components of a basis."""
    inverse = torch.linalg.inv(basis.double() / BASIS_UNIT).float()
    return x @ inverse.transpose(1, 2)


def from_basis(y: Tensor, basis: Tensor) -> Tensor:
    """Undo `to_basis`."""
    return y @ (basis.float() / BASIS_UNIT).transpose(1, 2)
