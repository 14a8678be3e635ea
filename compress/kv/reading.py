"""Say how a cache is read: whether attention reads its codes, and whether compiled code does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compress.kernels import kv_contract
from compress.kv import fused
from compress.kv.cache import CachePath, KVCache
from compress.kv.codec import Codec
from compress.kv.settings import EXACT, KINDS, Codings

TOKENS = 4096  # of past, for which it is asked what would be read by compiled code


@dataclass(frozen=True)
class Reading:
    """How a cache is read in a decode step with much past."""

    path: CachePath
    compiled: Mapping[str, float]  # keys, values -> share of the layers that code them whose codes compiled code reads

    @property
    def text(self) -> str:
        """Return this in words."""
        how = "fused attention" if self.path == "fused" else "decoded before attention"
        if not self.compiled:
            return f"{how}, nothing coded"
        by = {kind: _by(share) for kind, share in self.compiled.items()}
        if len(set(by.values())) == 1:
            return f"{how}, {next(iter(by.values()))}"
        return f"{how}, " + ", ".join(f"{kind}: {name}" for kind, name in by.items())


def _by(share: float) -> str:
    if share in (0, 1):
        return "compiled code" if share else "PyTorch"
    return f"compiled code in {share:.0%} of layers, else PyTorch"


def of(cache: KVCache, device: torch.device) -> Reading:
    """Return how a cache is read that a token or more has gone through."""
    return of_codecs(cache.codecs.values(), cache.codings, cache.path, device)


def of_codecs(codecs: Iterable[Codec], codings: Codings, path: CachePath, device: torch.device) -> Reading:
    """Return how a cache with these codecs is read; codings: those of the model's layers."""
    coded = [codec for codec in codecs if codings[codec.spec.layer][codec.spec.kind].method != EXACT]
    compiled = {}
    for kind in KINDS:
        own = [_is_compiled(codec, path, device) for codec in coded if codec.spec.kind == kind]
        if own:
            compiled[kind] = sum(own) / len(own)
    return Reading(path, compiled)


def of_model(model: Any) -> Reading | None:
    """Return how the cache is read that `generate` of a model has just used; None without a compressed one."""
    use = getattr(model, "kv_cache", None)
    if use is None:
        return None
    codings = use.settings.by_layer(max((spec.layers for spec in use.codecs), default=1))
    return of_codecs(use.codecs.values(), codings, use.path, model.device)


def _is_compiled(codec: Codec, path: CachePath, device: torch.device) -> bool:
    """Return whether compiled code reads what a codec has stored of a long past."""
    spec = codec.spec
    if path == "decode":
        count = max(TOKENS, kv_contract.SMALL // max(1, spec.heads * spec.width) + 1)
        out = torch.empty(1, spec.heads, count, spec.width, dtype=spec.dtype, device=device)
        return codec.write_at_once(out) > codec.block
    if device.type == "cuda" and fused.kernel_for(device, spec.dtype) is not None and fused.layout(codec) is not None:
        return True
    rows = torch.empty(1, spec.heads, spec.queries, spec.width, dtype=torch.float32, device=device)
    return codec.at_once(rows) > codec.block
