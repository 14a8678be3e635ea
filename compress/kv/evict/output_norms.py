"""Measure what cached values can add to the output of attention, for CriticalKV (arXiv 2502.03805)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.errors import CompressError

NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # of the projection behind attention, in transformers' modules
PIECE = 1 << 22  # float32 numbers held at a time


def projection(attention: nn.Module) -> nn.Module:
    """Return the output projection of an attention module. CompressError where it has none by a known name."""
    for name in NAMES:
        found = getattr(attention, name, None)
        if isinstance(found, nn.Module):
            return found
    raise CompressError(
        f"kv_cache.evict: critical needs the output projection of attention, one of {', '.join(NAMES)}, and "
        f"{type(attention).__name__} has none; set critical: false"
    )


@torch.no_grad()
def matrix(module: nn.Module, width: int, like: Tensor) -> Tensor:
    """Return what a linear module multiplies with, float32 [width, out]: found by calling it, so packed ones work."""
    base = module(like.new_zeros(1, width))
    return (module(torch.eye(width, dtype=like.dtype, device=like.device)) - base).float()


def output_norms(values: Tensor, weight: Tensor) -> Tensor:
    """Return the norm1 of W_O value, mean over the query heads of a KV head, float32 [h, n].

    values [h, n, width], weight [H width, out].
    """
    heads, tokens, width = values.shape
    by_head = weight.view(heads, -1, width, weight.shape[1])  # h, H / h, width, out
    step = max(1, PIECE // (heads * by_head.shape[1] * weight.shape[1]))
    # h, H / h, step, out
    parts = [(part.float()[:, None] @ by_head).abs().sum(-1).mean(1) for part in values.split(step, 1)]
    return torch.cat(parts, 1) if tokens else values.new_zeros(heads, 0).float()
