"""Tell which tokens of a prompt stand for images: those with a placeholder id of the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import CompressError

KINDS = ("image", "video")
FIELDS = tuple(f"{kind}_token_{what}" for kind in KINDS for what in ("id", "index"))  # of configurations


def placeholder_ids(config: Any) -> list[int]:
    """Return the ids that stand where states of images and videos go, ascending; none for a model of text alone."""
    found = {getattr(config, name, None) for name in FIELDS}
    return sorted(x for x in found if isinstance(x, int))


def vision_tokens(model: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return which tokens of a forward pass stand for images, bool [B, n].

    CompressError where the model has no such tokens, or its ids are not among the arguments.
    """
    ids = placeholder_ids(model.config)
    if not ids:
        raise CompressError(
            "kv_cache.evict: the configuration of this model names no tokens that stand for images (image_token_id); "
            "choose another method, such as snapkv"
        )
    given = kwargs.get("input_ids")
    if not isinstance(given, Tensor):
        raise CompressError(
            "kv_cache.evict: vision tokens are found by their ids, which this forward pass was not given; pass "
            "input_ids=... by name"
        )
    return torch.isin(given, given.new_tensor(ids))
