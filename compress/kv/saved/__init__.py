"""Save the cache of a prompt into a file, and load it in place of computing the prompt again.

    save_cache(cache, "prompt.kv", model, input_ids)           # DynamicCache or KVCache; quality="standard"
    cache = load_cache(model, "prompt.kv")                     # the same kind of cache
    model.generate(torch.cat((input_ids, question), 1), past_key_values=cache)

CacheGen (Liu et al., arXiv 2310.07240): differences between neighbouring tokens, fewer bits for later layers, and
entropy coding in chunks that are decoded alone. What is done otherwise, and why:

    plain.py     a share of the token before in place of differences to an anchor, keys before the rotary embedding,
                 principal components for each file: each takes fewer bits for the same error, where it is used
    parts.py     one step for all channels of a tensor: entropy coding gives large ones the bits they need
    columns.py   32 tables for a file in place of one for each channel and chunk; rANS in place of a range coder
    coded.py     caches that are codes already are stored without loss
    states.py    states of linear attention and Mamba, in int8 where they are no codes already
    file.py      hashes, the model's fingerprint, and the tokens that the cache is of

It does not choose between sending a cache and computing it, has no levels to switch between while it loads, and does
not send anything: it reads and writes a file. Levels, streaming and the controller are compress/papers/streaming.
Loading decodes layer after layer: beside the cache it needs memory for one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from compress import plugins
from compress.errors import CheckpointError, CompressError, RecipeError
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.saved import checked, coded, file, plain, states
from compress.kv.saved.file import SavedFile, fingerprint, hash_tokens
from compress.kv.saved.parts import TOKENS
from compress.version import __version__

LOSSLESS, STANDARD = "lossless", "standard"
# Squared error relative to the variance of a tensor. docs/kv_saved.md has what they cost.
NOISE: dict[str, float | None] = {"high": 1e-3, STANDARD: 3.4e-3, "small": 1.2e-2, LOSSLESS: None}
EARLY_SHARE = 1 / 3  # so many of the layers are early: their noise is EARLY_FACTOR times that of the others (CacheGen)
EARLY_FACTOR = 0.36
LATE_FACTOR = 1.4  # the others get more noise, so that the bits stay about the same


@torch.no_grad()
def save_cache(
    cache: Cache,
    path: str | Path,
    model: nn.Module,
    tokens: Tensor,
    quality: str = STANDARD,
    facts: Mapping[str, Any] | None = None,
) -> SavedFile:
    """Save a cache beside `path` and put it in place; return the file, opened and checked.

    cache: transformers' DynamicCache, or a `KVCache`, whose codes are stored without loss whatever the quality.
    tokens: int64 [B, tokens] of which it is the cache. quality: a key of NOISE; "lossless" keeps every bit. facts:
    plain data to keep beside it. Raises OutputError where the file cannot be written, UnsupportedModelError for layers
    that cannot be saved, NumericalError for numbers that are not finite.
    """
    if quality not in NOISE:
        raise RecipeError(plugins.unknown("quality", quality, tuple(NOISE)))
    counts = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    seen = counts[0] if counts else tokens.shape[-1]  # states do not tell
    if tokens.dim() != 2 or tokens.shape[1] != seen:
        raise CompressError(f"the cache is of {seen} tokens, and token ids of shape {list(tokens.shape)} were given")
    is_coded = isinstance(cache, KVCache)
    layers = coded.known_layers(cache) if isinstance(cache, KVCache) else plain.facts(cache)
    noise = None if is_coded else NOISE[quality]
    both = plain.turns(model, seen) if noise is not None else None
    parts_by_name = {"tokens": states.exact(tokens.to(torch.int32))}
    if isinstance(cache, KVCache):
        parts_by_name |= coded.shared_parts(cache)
    for index, (layer, fact) in enumerate(zip(cache.layers, layers, strict=True)):
        if fact is None:
            continue
        if is_coded:
            parts_by_name |= coded.layer_parts(index, layer)
        else:
            more_facts, layer_parts = plain.layer_parts(index, layer, _noise(noise, index, len(layers)), both)
            fact |= more_facts
            parts_by_name |= layer_parts
    about = {
        **(facts or {}),
        "compress": __version__,
        "quality": LOSSLESS if is_coded else quality,
        "model": fingerprint(model),
        "tokens_sha256": hash_tokens(tokens),
        "layers": layers,
        "codes": coded.facts(cache) if isinstance(cache, KVCache) else None,
        "turns": [float(x[0, -1].double().sum()) for x in both] if both is not None else None,
    }
    file.write(Path(path), parts_by_name, about)
    return SavedFile(Path(path))


def check_layers(cache: Cache) -> None:
    """Raise UnsupportedModelError for a cache, be it empty, with layers that cannot be saved."""
    for index, layer in enumerate(cache.layers):
        coded.check_kind(index, layer)


def load_cache(
    model: nn.Module,
    path: str | Path | SavedFile,
    tokens: Tensor | None = None,
    static: Mapping[str, Tensor] | None = None,
) -> Cache:
    """Load a cache that `generate` takes as `past_key_values`, on the model's device.

    tokens: int64 [B, tokens], if the file must be of these. static: calibrated tensors of a coded cache; None: those
    that the model's own cache uses. Raises CheckpointError for a file that is damaged, of another version, of another
    model, or of other tokens.
    """
    saved = path if isinstance(path, SavedFile) else SavedFile(Path(path))
    check_belongs(saved, model, tokens)
    with saved.damage("its layers"):
        return _load_layers(saved, model, static)


def _load_layers(saved: SavedFile, model: nn.Module, static: Mapping[str, Tensor] | None) -> Cache:
    """Return the cache; ValueError and its like for facts that no cache has."""
    facts, device = saved.facts, next(model.parameters()).device
    layers = facts["layers"]
    if facts["codes"] is not None:
        of_model = getattr(getattr(model, "kv_cache", None), "static", None)
        cache: Cache = coded.fresh(model.config, facts["codes"], of_model if static is None else static)
        coded.restore_shared(saved, cache, model)  # type: ignore[arg-type]
        heads = checked.heads_of(model, len(layers))
    else:
        cache = plain.fresh(model.config, len(layers))
    both = _turns(saved, model)
    for index, (layer, fact) in enumerate(zip(cache.layers, layers, strict=True)):
        if fact is None:
            continue
        if fact["kind"] == states.STATES:
            states.restore(saved, index, layer, fact, device)
        elif isinstance(layer, CodedLayer):
            checked.check_layer(fact, heads[index], saved.parts["tokens"].shape[1])
            coded.restore(saved, index, layer, fact, device)
        else:
            plain.check(saved, index, fact, both)
            plain.restore(layer, fact, plain.tensors(saved, index, fact, both), device)
    return cache


def check_belongs(saved: SavedFile, model: nn.Module, tokens: Tensor | None = None) -> None:
    """Raise CheckpointError for a file of another model, or of other tokens than those given."""
    if saved.facts["model"] != fingerprint(model):
        name = saved.facts.get("model_name")
        of = f" ({name})" if isinstance(name, str) else ""
        raise CheckpointError(
            f"{saved.path} is the cache of another model{of}; load it with the model that it was saved with, or save "
            "the prompt anew"
        )
    if tokens is not None and saved.facts["tokens_sha256"] != hash_tokens(tokens):
        raise CheckpointError(f"{saved.path} is the cache of another prompt; save this prompt anew")


def token_ids(saved: SavedFile) -> Tensor:
    """Return the token ids that a file is the cache of, int64 [B, tokens]."""
    return saved.tensor("tokens").long()


def raw_nbytes(saved: SavedFile) -> int:
    """Return the bytes of the keys and values that the model computed, as a cache holds them that is not compressed."""
    with saved.damage("its layers"):
        return _raw_nbytes(saved)


def _raw_nbytes(saved: SavedFile) -> int:
    total = 0
    for index, fact in enumerate(saved.facts["layers"]):
        if fact is not None and fact["kind"] == states.STATES:
            total += states.raw_nbytes(saved, index, fact)
            continue
        for kind in ("keys", "values") if fact is not None else ():
            if fact["kind"] == coded.CODES:
                batch, heads, _, width = fact[kind]["shape"]
                total += batch * heads * fact["seen"] * width * coded.parts.DTYPES[fact[kind]["dtype"]].itemsize
            else:
                described = saved.parts[f"{index}.{kind}"]
                sinks = saved.parts.get(f"{index}.{kind}.sink")
                rows = described.rows + (sinks.shape[TOKENS] if sinks is not None else 0)
                total += rows * described.shape[0] * described.shape[1] * described.shape[3] * described.dtype.itemsize
    return total


def _noise(noise: float | None, index: int, layers: int) -> float | None:
    """Return the noise of a layer: less in the first third."""
    if noise is None:
        return None
    return noise * (EARLY_FACTOR if index < EARLY_SHARE * layers else 1.0) * LATE_FACTOR


def _turns(saved: SavedFile, model: nn.Module) -> plain.Turns | None:
    """Return cos and sin that keys were turned back with. Raises CheckpointError where this model makes others."""
    sums = saved.facts["turns"]
    if sums is None:
        return None
    both = plain.turns(model, saved.parts["tokens"].shape[1])
    sums_here = [float(x[0, -1].double().sum()) for x in both or ()]
    if not sums_here or not all(abs(one - other) <= 1e-2 for one, other in zip(sums_here, sums, strict=True)):
        raise CheckpointError(
            f"{saved.path} was saved with another rotary embedding; load it with the release of transformers that "
            "saved it, or save the prompt anew"
        )
    return both
