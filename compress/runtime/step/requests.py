"""Tell whether a forward pass may be run by a program, and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.kernels.cpu import attention
from compress.runtime.step.caches import layers_of

MOST_ROWS = 16
TYPES = (torch.bfloat16, torch.float16, torch.float32)
USED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache"}
FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass
class StepRequest:
    """A forward pass of a few new tokens of each sequence."""

    given: Tensor  # token ids [batch, new], or embeddings
    cache: Any
    layers: list[Any]
    seen: int  # tokens in the cache
    positions: Tensor | None  # [1 or batch, new]
    pads: Tensor | None  # padding at the left [batch], None for none

    @property
    def new(self) -> int:
        """Return the new tokens of each sequence."""
        return self.given.shape[1]


def read_request(body: nn.Module, count: int, kwargs: dict[str, Any]) -> StepRequest | None:
    """Return what a pass of a body of `count` blocks is asked for if a program may run it."""
    given = _new_tokens(kwargs)
    if given is None or not _is_usual(body, kwargs):
        return None
    cache: Any = kwargs.get("past_key_values")
    layers = layers_of(cache, count)
    if layers is None:
        return None
    seen, first = layers[0].get_seq_length(), layers[0].keys
    if len(first) != len(given) or first.dtype not in TYPES or not first.is_cpu:
        return None
    if given.is_floating_point() and given.dtype != first.dtype:
        return None
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != given.shape[1]):
        return None
    request = StepRequest(given, cache, layers, seen, positions, None)
    if mask is None or (isinstance(mask, dict) and all(value is None for value in mask.values())):
        return request
    pads = _padding(mask, len(given), seen + given.shape[1])
    if pads is None or int(pads.max()) > seen:
        return None
    request.pads = pads if bool(pads.any()) else None
    return request


def _new_tokens(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the new tokens [batch, new], or their embeddings, where they are few."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = ids if embeds is None else embeds
    if (ids is None) == (embeds is None) or type(given) is not Tensor or not given.is_cpu:
        return None
    if given.dim() != (2 if embeds is None else 3) or given.shape[1] > attention.MOST:
        return None
    return given if 0 < given.shape[0] * given.shape[1] <= MOST_ROWS else None


def _is_usual(body: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a pass has no gradient, and is asked for hidden states and a cache alone."""
    if body.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.jit.is_tracing():
        return False
    if any(value is not None and value is not False for name, value in kwargs.items() if name not in USED):
        return False
    config: Any = body.config
    uses_cache = kwargs.get("use_cache")
    uses_cache = getattr(config, "use_cache", True) if uses_cache is None else uses_cache
    is_asked_more = not uses_cache or any(getattr(config, flag, False) for flag in FLAGS)
    return not is_asked_more and getattr(config, "return_dict", True) and kwargs.get("return_dict") is not False


def _padding(mask: Any, batch: int, tokens: int) -> Tensor | None:
    """Return how many zeros a mask [batch, tokens] begins with in each row; None if it has others."""
    if not isinstance(mask, Tensor) or mask.shape != (batch, tokens):
        return None
    counted = mask.bool()
    if bool(counted.all()):
        return torch.zeros(batch, dtype=torch.int64, device="cpu")
    pads = (counted.cumsum(-1) == 0).sum(-1)
    is_left = torch.equal(counted.sum(-1) + pads, torch.full_like(pads, tokens))
    return pads if is_left and bool(counted[:, -1].all()) else None
