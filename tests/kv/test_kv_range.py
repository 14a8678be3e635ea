"""Keys and values whose scales 16 bits do not hold are refused with their layer; those they hold are coded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.kv.cache import make_cache
from helpers.pico import build

STATIC_FREE: dict[str, dict[str, Any]] = {
    "kivi": {"bits": 4, "group_size": 16},
    "fp8": {},
    "lloyd": {"bits": 4, "rope": "post"},
    "gear": {"bits": 4, "group_size": 16, "block_tokens": 16},
}
CONFIG = build("llama").config


def stored(method: str, factor: float) -> tuple[Tensor, Tensor]:
    """Return what a cache gives back of keys of this size, and the keys."""
    settings = {"method": method, **STATIC_FREE[method], "sink": 0, "residual_length": 0, "flush": 16}
    cache = make_cache(CONFIG, settings)
    cache.exact_prefill = False
    keys = factor * torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(0))
    return cache.layers[0].update(keys, keys)[0], keys


@pytest.mark.parametrize("method", STATIC_FREE)
def test_scales_that_leave_16_bits_are_refused(method: str) -> None:
    for factor in (1e-2, 1.0, 1e3):
        found, keys = stored(method, factor)
        assert float((found - keys).square().sum() / keys.square().sum()) < 0.05
    with pytest.raises(NumericalError, match=r"layer 0.*beyond the 16-bit scales.*skip_layers.*identity"):
        stored(method, 1e12)
